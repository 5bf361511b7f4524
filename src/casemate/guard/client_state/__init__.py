"""State about clients, shared by all processes on one event store."""
