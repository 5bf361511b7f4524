"""Shared by attacks: reply parsing, seed words, anchors, a knowledge graph, and a writer about one candidate."""
