"""Contrastive re-indexing: topics, the map that parts them, how it is trained, and where what was learnt is kept."""
