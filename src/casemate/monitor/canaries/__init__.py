"""Canaries: what a canary is, drafting a set, asking it, and checking the answers."""
