"""Creates the leases table, and an index on the kind of events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Creates table and index. Building the index of a large store takes a while.

    ``until`` is in seconds since 1970 by the database's clock, so SQLite and Postgres share the arithmetic.
    """
    op.create_table(
        "casemate_leases",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
    )
    op.create_index("ix_casemate_events_kind_seq", "casemate_events", ["kind", "seq"])
