"""Indexes: vector stores that Casemate owns, one file per product."""
