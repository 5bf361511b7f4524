"""The offline pair of language models: training data, tokenizer, training, and evaluation."""
