"""Multi-version concurrency control for vector stores without transactions over several rows."""
