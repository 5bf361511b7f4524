"""Trends: what is normal, and whether failures mean something."""
