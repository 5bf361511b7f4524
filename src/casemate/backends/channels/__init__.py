"""Notification channels, one module per product."""
