"""The guard: a RAG pipeline with defenses, and the state that the defenses keep."""
