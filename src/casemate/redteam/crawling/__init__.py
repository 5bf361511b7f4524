"""Shared by extraction attacks: reply parsing, seed words, anchors, and a knowledge graph."""
