"""Calibration of the guard on harmless questions."""
