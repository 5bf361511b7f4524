"""Migrations in order of their numbers. Never change a published one: add the next."""
