"""The connection to Postgres: its address, its patience, and what its refusals mean."""

from __future__ import annotations

import re
from typing import Any

from casemate import indexing
from casemate.errors import ConfigError, needs

STATES = {  # what an SQLSTATE means to the operator
    "42501": "the role may not do this: grant it the schema and its tables, or let their owner index",
    "53100": "the server's disk is full: nothing of this step was kept, earlier steps are; free space and run again",
    "57014": "a step took longer than timeout_s, or waited so long for another writer",
}
HOPELESS = re.compile("authentication failed|no password|pg_hba|does not exist|denied|certificate|does not support SSL")
"""What a server says that it will say the next time, too."""


def address(url: str) -> tuple[str, str]:
    """Host and database, and the password. No message repeats what may be a part of a password, written wrongly."""
    with needs("casemate[postgres]"):
        import psycopg.conninfo
    try:
        parts = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(url).items()}
    except psycopg.Error:
        parts = {"port": "none"}
    host, port, database = (parts.get(name, "") for name in ("host", "port", "dbname"))
    if "@" in host + database or not re.fullmatch("[0-9,]*", port):
        form = "postgresql://user:password@host:port/database; in a password, @ is %40, / is %2F, : is %3A, % is %25"
        raise ConfigError(f"pgvector.url is not of the form {form}")
    return f"{host or 'localhost'}{port and ':' + port}/{database}", parts.get("password", "")


def patient_connection(seconds: float) -> Any:
    """The class of connections that give a server up which says nothing for so long: it may be frozen."""
    import psycopg

    class Patient(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            try:
                return super().wait(indexing.within(gen, seconds), *args, **options)
            except TimeoutError as error:
                self.close()
                raise psycopg.OperationalError(f"the server is silent: {error}") from None

    return Patient
