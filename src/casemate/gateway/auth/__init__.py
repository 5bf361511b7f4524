"""API keys, rate limits and token budgets."""
