"""Infrastructure without domain terms: HTTP, retries, rate limits, batching, executors, files, SQLite, ONNX files."""
