"""Alerts: opened once for each cause, worded, and brought to people."""
