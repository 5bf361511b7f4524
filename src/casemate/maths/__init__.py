"""Statistics, metrics and vector search on arrays. No I/O apart from saved search graphs, and no global state."""
