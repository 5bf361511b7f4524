"""Clusters: executors that run work on many machines."""
