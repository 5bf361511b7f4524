"""Routes of the HTTP API: OpenAI-compatible chat, retrieval, documents, and operation."""
