"""Event stores: append-only logs shared by processes."""
