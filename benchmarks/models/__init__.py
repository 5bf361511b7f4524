"""The offline pair of language models: its data, its tokenizer, its training, and what it can do."""
