"""Alerts: opened once per cause, stored as events, and delivered to notification channels."""
