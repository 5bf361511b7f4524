"""Watermarks: tokens generated from a secret key, their detection in disguised text, and planted honeytokens."""
