"""Countermeasures: one file, one defense; the file name is its name everywhere."""
