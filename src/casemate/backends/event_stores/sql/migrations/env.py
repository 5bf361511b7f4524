"""Executed by alembic under another module name. Importing it as part of the package does nothing."""

from __future__ import annotations

from alembic import context

if not __name__.startswith("casemate."):
    # Not alembic's default version table: other programs that use alembic may share the database.
    context.configure(connection=context.config.attributes["connection"], version_table="casemate_schema")
    with context.begin_transaction():
        context.run_migrations()
