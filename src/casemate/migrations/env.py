"""Run by alembic, under a name of its own; imported as a part of the package it does nothing."""

from __future__ import annotations

from alembic import context

if not __name__.startswith("casemate."):
    # A version table of our own name: a Postgres database may be shared with other programs that use alembic.
    context.configure(connection=context.config.attributes["connection"], version_table="casemate_schema")
    with context.begin_transaction():
        context.run_migrations()
