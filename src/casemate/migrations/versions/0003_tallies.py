"""Tallies: how much of each shared allowance is used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Makes the table.

    ``used`` is what was given in ``period`` and had not flowed back at ``at``, in seconds since 1970 by the database's
    clock; ``given`` is what the last statement gave.
    """
    op.create_table(
        "casemate_tallies",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("used", sa.Double(), nullable=False),
        sa.Column("given", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
