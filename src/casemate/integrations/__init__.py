"""Guards for LangChain, LlamaIndex and Haystack: one module per framework. Import the one you use."""
