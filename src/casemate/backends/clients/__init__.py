"""Connections to vendor servers, with timeouts and error messages."""
