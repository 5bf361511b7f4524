"""Answers with differential privacy: first the budgets are charged, then keywords are drawn."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import Any

from casemate.guard.defenses.quorum.keywords import AskedQuestion, Item, Word
from casemate.guard.defenses.quorum.ledger import Ledger
from casemate.guard.defenses.quorum.privacy import PrivateHistogram
from casemate.guard.defenses.quorum.release import MAX_WORDS, Composition, compose
from casemate.guard.units import UnitName
from casemate.runtime.bounded_dict import BoundedDict
from casemate.types import Query

CACHED_ANSWERS = 4096


class PrivateAnswers:
    """Answers from keywords with noise. Safe for threads.

    This process keeps the last ``CACHED_ANSWERS`` released answers, each for the period that its clock showed. In this
    period, the same question of a client with the same tenant, labels and groups gets the same answer again. That is
    processing of what was released already, so it costs no budget. A question is recognized by its words, never by the
    collection: otherwise a repeated or a new answer would reveal whether a document was added.

    Args:
        histogram: The noise.
        ledger: The budgets.
    """

    def __init__(self, histogram: PrivateHistogram, ledger: Ledger) -> None:
        self.histogram, self.ledger = histogram, ledger
        self._cache: BoundedDict[bytes, Composition] = BoundedDict(CACHED_ANSWERS)
        self._lock = threading.Lock()

    def cached(self, query: Query) -> Composition | None:
        """The answer that a client like this one received to this question in this period; None: there is none."""
        with self._lock:
            return self._cache.get(self._key(query))

    async def ask(
        self, query: Query, said: Sequence[Collection[Item]], names: Sequence[Collection[UnitName]]
    ) -> tuple[Composition, dict[str, Any]]:
        """Charges each unit for the keywords that it states, and answers from the released keywords.

        Args:
            query: The question.
            said: Statements of each unit. Keywords count; spellings and pairs are not released.
            names: Names of each unit, for the ledger.

        Returns:
            The answer, and figures for the operator, which are not private.

        Raises:
            CasemateError: If the budgets cannot be charged. Nothing is released then.
        """
        key = self._key(query)
        most = self.histogram.words
        keywords = [sorted(item.lemma for item in unit if isinstance(item, Word))[:most] for unit in said]
        stating = [i for i, words in enumerate(keywords) if words]
        granted = await self.ledger.spend(query.tenant, [(names[i], len(keywords[i])) for i in stating])
        used = [keywords[i][:amount] for i, amount in zip(stating, granted, strict=True)]
        levels: dict[Item, int] = {Word(word): level for word, level in self.histogram.release(used).items()}
        answer = compose(AskedQuestion.of(query.text), levels, MAX_WORDS)
        with self._lock:
            self._cache[key] = answer
        without_budget = sum(amount < len(keywords[i]) for i, amount in zip(stating, granted, strict=True))
        figures = {"stating": len(stating), "charged": sum(granted), "without_budget": without_budget, **self.noise()}
        return answer, figures

    def noise(self) -> dict[str, float]:
        """Figures of the noise."""
        return {name: getattr(self.histogram, name) for name in ("epsilon", "delta", "sigma", "threshold")}

    def _key(self, query: Query) -> bytes:
        question = " ".join(query.text.split()).casefold()
        client = [sorted(names) if names is not None else None for names in (query.labels, query.groups)]
        text = repr((self.ledger.period(), query.tenant, client, question))
        return hashlib.sha256(text.encode()).digest()
