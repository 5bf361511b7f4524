"""Published attacks, one per file; the file's name is the attack's."""
