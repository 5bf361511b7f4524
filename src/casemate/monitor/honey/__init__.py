"""Honey: made-up records in the corpus, and where honey has turned up."""
