"""Attack sessions, candidate by candidate or question by question: redacted, worst first, bounded in number.

Documents appear under an alias, such as `document 12`, because a name may identify a person.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import NamedTuple

from casemate.redteam.lab.experiment import Experiment
from casemate.redteam.lab.extraction_experiment import CrawlTrace
from casemate.redteam.lab.fitting import cross_fit
from casemate.redteam.lab.judge import OFF, ON, missing_trials
from casemate.redteam.lab.results import AttackSession, Crawl, RedactedExchange, SessionSide
from casemate.redteam.lab.store import Exchange
from casemate.redteam.reporting.text import redact
from casemate.text.tokens import STOP_WORDS, words
from casemate.types import UNKNOWN, Document

MAX_SESSIONS = 5000  # Sessions in a report. The others are counted.
MAX_EXCHANGES = 4000  # questions in a report, shared equally by the attacks
MAX_HIDDEN = 10  # sources that an exchange lists as withheld, as recovered, and as in the context
OUTCOMES: Mapping[str, str] = {
    "identified": "Member identified",
    "recovered": "New text recovered",
    "undecided": "Not decided",
    "named": "Wrong guess",
    "protected": "Protected by the guard",
    "bare": "Recovered only with the guard off",
    "missed": "Member not identified",
    "cleared": "Non-member cleared",
    "nothing": "Nothing new recovered",
}
"""Outcomes of a session, worst first for the operator, and their labels."""
_RANKS = {name: rank for rank, name in enumerate(OUTCOMES)}


class ReportedSessions(NamedTuple):
    """The worst sessions, some with their exchanges; the number of all; sources by alias."""

    sessions: tuple[AttackSession, ...]
    total: int
    names: Mapping[str, str]


def attack_sessions(experiment: Experiment) -> ReportedSessions:
    """The finished sessions of all attacks, worst first; the experiment's store holds the exchanges."""
    documents = {document.source: document for document, _ in experiment.split.candidates}
    found = sorted(_without_exchanges(experiment), key=_badness)
    own = {name: template_words(experiment, name) for name in experiment.attacks}
    aliases = _Aliases({i: source for source, chunks in experiment.indexed.items() for i in chunks.ids})
    for document, _ in experiment.split.candidates:
        aliases.of(document.source)  # first, in their random order
    left, kept = MAX_EXCHANGES, {}
    for session in _by_turns(found):
        count = max(side.questions for side in session.sides.values())
        if count <= left:
            left -= count
            exchanges = _exchanges(experiment, session, documents[session.candidate], own[session.attack], aliases)
            kept[session.attack, session.candidate] = tuple(exchanges)
    sessions = tuple(
        replace(s, candidate=aliases.of(s.candidate), exchanges=kept.get((s.attack, s.candidate), ()))
        for s in found[:MAX_SESSIONS]
    )
    return ReportedSessions(sessions, len(found), aliases.names)


class _Aliases:
    """Numbers sources, which are given by chunk id, as they appear."""

    def __init__(self, source_of: Mapping[str, str]) -> None:
        self._source_of = source_of
        self._aliases: dict[str, str] = {}

    @property
    def names(self) -> dict[str, str]:
        return {alias: source for source, alias in self._aliases.items()}

    def of(self, source: str) -> str:
        """The alias of a source, or of the source of a chunk id."""
        source = self._source_of.get(source, source)
        return self._aliases.setdefault(source, f"document {len(self._aliases) + 1}")

    def of_all(self, names: Iterable[str]) -> tuple[str, ...]:
        """The aliases of several sources, each once."""
        return tuple(dict.fromkeys(map(self.of, names)))


def crawl_sessions(
    traces: Mapping[str, Mapping[str, CrawlTrace]], crawls: Mapping[str, Crawl], chunks: Sequence[Document]
) -> ReportedSessions:
    """The questions of all crawls, those first that recovered most with the guard on.

    Question n with the guard off and question n with the guard on are one session. They may differ, because a crawler
    writes its questions from earlier replies. Without a known collection, there are no measured crawls and no chunks.
    """
    aliases = _Aliases({chunk.id: chunk.source for chunk in chunks})
    made = list[tuple[tuple[int, int, int, str], AttackSession]]()
    for attack, sides in traces.items():
        own = crawl_template_words(sides.values(), chunks)
        new = {side: _recovered_by_question(crawls.get(attack), side) for side in sides}
        for number, turn in enumerate(zip_longest(*(trace.exchanges for trace in sides.values())), 1):
            asked = {side: e for side, e in zip(sides, turn, strict=True) if e is not None}
            found = {side: known.get(number, ()) if (known := new[side]) is not None else None for side in asked}
            results = {s: SessionSide(None if (n := found[s]) is None else bool(n), 1, len(e.hidden), int(e.withheld))
                       for s, e in asked.items()}  # fmt: skip
            exchange = {side: _redacted_crawl(e, own, found[side] or (), aliases) for side, e in asked.items()}
            session = AttackSession(attack, f"question {number}", None, results, (exchange,))
            count = -len(found.get(ON) or found.get(OFF) or ())
            made.append(((_RANKS[outcome(session)], count, number, attack), session))
    made.sort(key=lambda pair: pair[0])
    ordered = [session for _, session in made]
    complete = {id(session) for session in islice(_by_turns(ordered), MAX_EXCHANGES)}
    kept = tuple(s if id(s) in complete else replace(s, exchanges=()) for s in ordered[:MAX_SESSIONS])
    return ReportedSessions(kept, len(made), aliases.names)


def crawl_template_words(traces: Iterable[CrawlTrace], chunks: Sequence[Document]) -> list[str]:
    """Words of a crawler's commands, which a redacted text may show.

    These are words in at least half of its questions that, apart from stop words, occur neither in the collection nor
    in a reply.
    """
    exchanges = [e for trace in traces for e in trace.exchanges]
    counts = Counter(word for e in exchanges for word in set(words(e.question)))
    frequent = {word for word, count in counts.items() if 2 * count >= len(exchanges) > 1}
    for text in (*(e.reply for e in exchanges), *(chunk.content for chunk in chunks)):
        frequent -= set(words(text)) - STOP_WORDS
    return [*frequent, UNKNOWN]


def _recovered_by_question(crawl: Crawl | None, side: str) -> Mapping[int, Sequence[str]] | None:
    """Ids of the chunks that each question was the first to recover; None: unknown."""
    if crawl is None or side not in crawl.by_target:
        return None
    found: defaultdict[int, list[str]] = defaultdict(list)
    for chunk, number in crawl.by_target[side].first_recovered.items():
        found[number].append(chunk)
    return found


def _redacted_crawl(
    exchange: Exchange, own: Collection[str], recovered: Sequence[str], aliases: _Aliases
) -> RedactedExchange:
    return replace(
        _redacted(exchange, own, frozenset(), aliases),
        in_context=None,
        recovered=aliases.of_all(recovered)[:MAX_HIDDEN],
        recovered_count=len(recovered),
        context=aliases.of_all(exchange.context)[:MAX_HIDDEN],
    )


def outcome(session: AttackSession) -> str:
    """The outcome of a session with the guard on, or off if it was not run with the guard: a key of `OUTCOMES`."""
    judged = session.sides.get(ON) or session.sides.get(OFF)
    if judged is None or judged.guess is None:
        return "undecided"
    if session.member is None:
        bare = session.sides.get(OFF)
        return "recovered" if judged.guess else "bare" if bare is not None and bare.guess else "nothing"
    if not session.member:
        return "named" if judged.guess else "cleared"
    if judged.guess:
        return "identified"
    bare = session.sides.get(OFF)
    return "protected" if bare is not None and bare.guess else "missed"


def template_words(experiment: Experiment, attack: str) -> list[str]:
    """Words of an attack's template, which a redacted text may show.

    These are words in its questions about each of several candidates that, apart from stop words, occur in the text of
    none of them. Words that all records share belong to the collection.
    """
    groups = (experiment.split.members[:3], experiment.split.nonmembers[:3])
    collection = {word for group in groups for d in group for word in words(d.content)} - STOP_WORDS
    target = next(iter(experiment.targets))
    sessions = [experiment.exchanges(attack, target, d.source) for group in groups for d in group]
    asked = [set(words(s[0].question)) for s in sessions if s]
    return [*(set.intersection(*asked) - collection if len(asked) > 1 else ()), "yes", "no", UNKNOWN]


def _without_exchanges(experiment: Experiment) -> Iterator[AttackSession]:
    done, half = experiment.trials().done, experiment.split.half
    sides: defaultdict[tuple[str, str, bool], dict[str, SessionSide]] = defaultdict(dict)
    for (attack, target), trials in done.items():
        fitted = None if missing_trials(trials, half) else cross_fit(trials, half)
        nothing: list[None] = [None] * len(trials)
        guesses = fitted.predicted.tolist() if fitted else nothing
        scores = fitted.score.tolist() if fitted else nothing
        for trial, guess, score in zip(trials, guesses, scores, strict=True):
            side = SessionSide(guess, trial.questions, trial.hidden, trial.flagged, score)
            sides[attack, trial.candidate, trial.member][target] = side
    for (attack, candidate, member), by_target in sides.items():
        yield AttackSession(attack, candidate, member, by_target)


def _badness(session: AttackSession) -> tuple[int, float, str, str]:
    """Sort key: outcome, then the share of questions in which the guard did nothing."""
    guarded = session.sides.get(ON)
    share = guarded.flagged / guarded.questions if guarded and guarded.questions else 0.0
    return _RANKS[outcome(session)], share, session.candidate, session.attack


def _by_turns(sessions: Sequence[AttackSession]) -> Iterator[AttackSession]:
    """The worst session of each attack, then the second worst, and so on."""
    by_attack: defaultdict[str, list[AttackSession]] = defaultdict(list)
    for session in sessions:
        by_attack[session.attack].append(session)
    for turn in zip_longest(*by_attack.values()):
        yield from (session for session in turn if session is not None)


def _exchanges(
    experiment: Experiment,
    session: AttackSession,
    candidate: Document,
    template: Collection[str],
    aliases: _Aliases,
) -> Iterator[Mapping[str, RedactedExchange]]:
    """The redacted exchanges of a session by target, question by question."""
    own = set(template) - (set(words(candidate.content)) - STOP_WORDS)
    indexed = experiment.indexed.get(session.candidate)
    ids = frozenset(indexed.ids if indexed else ())
    recorded = {side: experiment.exchanges(session.attack, side, session.candidate) for side in session.sides}
    for turn in zip_longest(*recorded.values()):
        yield {side: _redacted(e, own, ids, aliases) for side, e in zip(recorded, turn, strict=True) if e is not None}


def _redacted(
    exchange: Exchange, own: Collection[str], candidate: frozenset[str], aliases: _Aliases
) -> RedactedExchange:
    hidden = aliases.of_all(exchange.hidden)
    return RedactedExchange(
        question=redact(exchange.question, own),
        reply=redact(exchange.reply, own),
        answered=exchange.answered,
        in_context=not candidate.isdisjoint(exchange.context) if exchange.context else None,
        hidden=hidden[:MAX_HIDDEN],
        hidden_count=len(hidden),
        reasons=exchange.reasons or exchange.alarms,
        failed=exchange.failed,
        refused=exchange.refused,
    )
