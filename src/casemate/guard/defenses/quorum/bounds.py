"""What the budgets of units allow an attacker, in one sentence each, for the operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.privacy import PrivateHistogram
from casemate.guard.defenses.quorum.release import MAX_WORDS
from casemate.protocols import Defense


def break_glass_advantage(opened: int, sources: int) -> float:
    """Largest advantage (true minus false positives) of an attacker who receives all single-unit answers.

    D / n: the share of units that gave one. A unit that gave an answer is known; of the others the attacker guesses.

    Assumptions: the candidate is a unit drawn at random, or a text outside the collection; quorum answers reveal
    nothing; a unit is one source.

    Args:
        opened: D: number of units that gave a single-unit answer.
        sources: n: number of units.
    """
    return min(1.0, opened / sources) if sources else float(opened > 0)


def describe_bounds(defenses: Iterable[Defense], sources: int) -> Iterator[str]:
    """Describes the bounds of every quorum with budgets, and what is spent in the present period.

    Args:
        defenses: The defenses of a guard.
        sources: Number of sources in the index.

    Raises:
        BackendError: If the budgets cannot be read.
    """
    for quorum in defenses:
        if isinstance(quorum, Quorum) and quorum.private is not None:
            yield _describe_privacy(
                quorum.private.histogram, quorum.private.ledger.spent(), quorum.period_days, sources
            )
        if isinstance(quorum, Quorum) and quorum.break_glass:
            yield _describe_break_glass(quorum, len(quorum.single_unit_answers.spent()), sources)


def _describe_privacy(found: PrivateHistogram, spent: list[int], days: int, sources: int) -> str:
    used_up = sum(amount >= found.most for amount in spent)
    return (
        f"differential privacy with epsilon {found.epsilon:g}, delta {found.delta:g} for each unit and {days} days, "
        f"over all unentitled clients: any attacker's advantage on a unit is at most {found.advantage:.2f}, its AUC at "
        f"most {found.auc:.2f}; a keyword needs {found.threshold:.1f} units for an even chance; {len(spent):,} of "
        f"{sources:,} sources have spent some of their {found.most} keywords, {used_up:,} all"
    )


def _describe_break_glass(quorum: Quorum, opened: int, sources: int) -> str:
    keywords = quorum.break_glass * min(quorum.words, MAX_WORDS)
    return (
        f"break-glass allows {quorum.break_glass} single-unit answers for each unit and {quorum.period_days} days, "
        f"over all unentitled clients, so at most {keywords} keywords of a unit leave; {opened:,} of {sources:,} "
        "sources have given one: the attacker's advantage (true minus false positives) is at most "
        f"{break_glass_advantage(opened, sources):.2f} now for a unit drawn at random, up to 1.00 while answers are "
        "left, and 1.00 for a unit that it aims at"
    )
