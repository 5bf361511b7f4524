"""Finders of personal data in texts, one file per product."""
