"""A guard in front of the retrieval that somebody already has, one file a framework. Import the one you use."""
