"""Text analysis without a language model: pure functions on strings."""
