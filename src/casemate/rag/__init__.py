"""The RAG pipeline under protection: corpus, parsing, chunking, ingest, retrieval and generation."""
