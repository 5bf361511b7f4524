"""Poisoning: screening of new documents, quarantine, and drills with planted documents."""
