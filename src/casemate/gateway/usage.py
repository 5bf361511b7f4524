"""Charges answers: tokens are paid for, and events written, before the answer is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from casemate.gateway.auth.rate_limits import TokenBudget, seconds_until_midnight
from casemate.gateway.errors import budget_exhausted
from casemate.gateway.metrics import Metrics


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Charges one answer, and waits until its events are written (``EventStore.receipt``)."""

    budget: TokenBudget
    receipt: Callable[[], Callable[[], bool]]
    wait_written: Callable[[Callable[[], bool]], Awaitable[None]]
    metrics: Metrics

    async def charge(self, tokens: int, *, last: bool = False) -> None:
        """Charges tokens before they are sent; raises ``ApiError`` if the budget does not cover them."""
        if not await self.budget.use(tokens, last=last):
            raise budget_exhausted(seconds_until_midnight())
        self.metrics.count_tokens(tokens)

    async def charge_and_write(self, tokens: int, *, last: bool = False) -> None:
        """Charges tokens, and waits until the events of the answer are written; the charge often writes them as well.

        Raises ``BackendError`` if they cannot be written.
        """
        receipt = self.receipt()
        await self.charge(tokens, last=last)
        await self.wait_written(receipt)
