"""Calibration of the guard on benign questions."""
