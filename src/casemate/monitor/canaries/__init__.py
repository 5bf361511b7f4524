"""Canaries: the set, how it is drafted and asked, and what an answer lacks."""
