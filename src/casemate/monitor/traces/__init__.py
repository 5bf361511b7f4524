"""Production traces as input: what users ask, which documents answer them, and what the canaries do not watch."""
