"""Generators and language models: one file per product."""
