"""Executed by alembic under another module name. Importing it as part of the package does nothing."""

from __future__ import annotations

from alembic import context

from casemate.backends.event_stores.sql.migrations import VERSION_TABLE

if not __name__.startswith("casemate."):
    context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()
