"""Attacks on a system of the owner's that stands elsewhere: it is asked from outside, and nothing of it is copied."""
