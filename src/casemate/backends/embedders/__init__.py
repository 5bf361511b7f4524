"""Embedders, one module per product."""
