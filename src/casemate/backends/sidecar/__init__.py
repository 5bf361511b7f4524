"""The sidecar database of an attached collection, and the scan that fills it."""
