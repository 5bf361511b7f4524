"""How canaries are watched, and people told: what a watch and the post share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from casemate.errors import ConfigError
from casemate.monitor.alerts.letters import Policy
from casemate.monitor.trends.gauges import Limits
from casemate.monitor.watch.leader import holder


@dataclass(frozen=True)
class Settings:
    """How a set is watched.

    Attributes:
        limits: When a trend becomes an alarm.
        policy: How notices are sent.
        lease_s: How long after a crash another process takes over.
        pause_s: Pause before failures are asked again within a run.
        poll_s: How often it is looked for notices to send; others may raise alerts, too.
        log_text: Whether the texts of answers are kept.
        holder: Who takes the lease; of two watches that lead the same set at once, never the same.
        clock: Seconds since 1970, of the schedule and of notices. The lease has the store's clock.
        sleep: Waits.
    """

    limits: Limits = Limits()
    policy: Policy = Policy()
    lease_s: float = 30.0
    pause_s: float = 2.0
    poll_s: float = 5.0
    log_text: bool = False
    holder: str = field(default_factory=holder)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        if not min(self.lease_s, self.poll_s) > 0 or not self.pause_s >= 0:
            raise ConfigError(
                f"lease_s={self.lease_s}, poll_s={self.poll_s}, pause_s={self.pause_s}: the first two must be above 0, "
                "the last not below"
            )
