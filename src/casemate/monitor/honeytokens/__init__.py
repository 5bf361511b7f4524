"""Honeytokens: planted records in the corpus, unique strings for data sets, and the search for both elsewhere."""
