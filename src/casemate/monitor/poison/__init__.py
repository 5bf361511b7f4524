"""Poison: signs of it in new documents, whom they would be shown to, and the quarantine."""
