"""Schema migrations of the event store, one file each. A store runs ``upgrade`` when it opens; no alembic.ini."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Engine

LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(7307203)"}
"""Statements that lock out other migrating processes until the transaction ends."""
VERSION_TABLE = "casemate_schema"  # not alembic's default: other programs that use alembic may share the database
_one_thread = threading.Lock()  # alembic has one context per process


class MigrationError(Exception):
    """The database has a schema that is not known here."""


def upgrade(engine: Engine) -> None:
    """Migrates a database to the newest schema, in one transaction and one process at a time.

    A database that has it already is left before alembic is imported, which takes a third of a second.

    Raises:
        MigrationError: If the database has a schema that is not known here.
    """
    found = _revision(engine)
    newest = max(file.stem[:4] for file in (Path(__file__).parent / "versions").glob("[0-9]*.py"))
    if found == newest:
        return
    if found.isdecimal() and found > newest:
        raise MigrationError(f"it was written by a newer Casemate (schema {found}, and this one knows {newest})")
    # alembic lists its own settings at INFO: no news for an application that logs at this level
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with _one_thread, engine.begin() as connection:
        connection.exec_driver_sql(LOCKS[engine.dialect.name])
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise MigrationError(str(error)) from error


def _revision(engine: Engine) -> str:
    """Revision of a database; empty if it has none."""
    from sqlalchemy import inspect

    with engine.connect() as connection:
        if not inspect(connection).has_table(VERSION_TABLE):
            return ""
        return str(connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar())
