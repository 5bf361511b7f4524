"""Targets: external systems that answer questions, one module per protocol."""
