"""Evaluation with real language models; see ``__main__``."""
