"""Contrastive re-indexing: topics, the mapping that separates them, its training, and the stored versions."""
