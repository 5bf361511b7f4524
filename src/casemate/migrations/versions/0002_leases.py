"""Leases, and an index by which the events of one kind are found beside millions of another."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Makes the table of leases, and the index. In a large store the index takes a while, once.

    ``until`` is in seconds since 1970 by the database's clock: one arithmetic for SQLite and Postgres.
    """
    op.create_table(
        "casemate_leases",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
    )
    op.create_index("ix_casemate_events_kind_seq", "casemate_events", ["kind", "seq"])
