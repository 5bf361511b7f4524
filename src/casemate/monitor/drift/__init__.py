"""Drift: whether a system, its traffic or its corpus has changed, and whether one system is better than another."""
