"""Creates the quotas table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Creates the table.

    ``used`` is the amount granted in ``period`` and not yet replenished at time ``at``, in seconds since 1970 by the
    database's clock. ``granted`` is the amount that the last statement granted.
    """
    op.create_table(
        "casemate_quotas",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("used", sa.Double(), nullable=False),
        sa.Column("granted", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
