"""What a report says, in words: numbers, sentences, the verdict, and what must be taken out before anything is said."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any, TypeVar

from casemate.lab.crawl_results import Crawl
from casemate.lab.results import AttackResult, Campaign, Check, Status
from casemate.stats import Rate
from casemate.words import STOP_WORDS, UNREADABLE, UNSAFE, WORD, words

T = TypeVar("T")

SEVERITY = (Status.ERROR, Status.FAIL, Status.INCONCLUSIVE, Status.PASS)
"""The worst first."""
TOO_FEW = "too few to say"
AUC_STEPS = (
    (0.6, "a little better than a coin toss"),
    (0.75, "clearly better than a coin toss"),
    (0.9, "mostly right"),
)
WHOLE = "The campaign as a whole"

FUNCTION_WORDS = STOP_WORDS - {"no", "not"}
NOT_PUNCTUATION = re.compile(r"""[^\s.,:;!?()\[\]"'-]+""")
HAS_DIGIT = re.compile(r"\d")


def scrub(value: T) -> T:
    r"""The same records with every character replaced that would harm a terminal, an XML parser or an encoder.

    >>> scrub({"a": ("b\x1b[31m", 1.5)})
    {'a': ('b�[31m', 1.5)}
    """
    return _scrubbed(value)  # type: ignore[no-any-return]


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, StrEnum) else UNSAFE.sub(UNREADABLE, value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _scrubbed(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, Mapping):
        return {_scrubbed(k): _scrubbed(v) for k, v in value.items()}
    if isinstance(value, Rate):
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(_scrubbed, value))
    return value


def redact(text: str, own_words: Collection[str]) -> str:
    """What of a text an attack may show: its own words; of all others only how many they were.

    Function words that stand alone between two blocks go with them, and so does every word with a digit in it: a
    number of the corpus must not show because a template has the same one. A symbol that is no punctuation is left out.

    Args:
        text: A question or a reply.
        own_words: Words or phrases of the attack's template and of the target's fixed sentences. Never those of the
            candidate, even where the question quotes it.

    >>> redact("Yes. The patient Ada Byron takes 20 mg.", ["yes", "no", "patient", "the"])
    'Yes. The patient ▇×5.'
    """
    phrases = (own_words,) if isinstance(own_words, str) else own_words
    own = {word for phrase in phrases for word in words(phrase) if not HAS_DIGIT.search(word)}
    found = list(WORD.finditer(text))
    kept = _without_islands([words(m.group()) for m in found], own)
    pieces, end, hidden = [], 0, 0
    for keep, match in zip(kept, found, strict=True):
        if keep or not hidden:
            pieces += [_block(hidden), _punctuation(text[end : match.start()])]
        if keep:
            pieces.append(match.group())
        hidden = 0 if keep else hidden + 1
        end = match.end()
    return UNSAFE.sub(UNREADABLE, "".join([*pieces, _block(hidden), _punctuation(text[end:])]))


def _without_islands(found: list[list[str]], own: set[str]) -> list[bool]:
    """Which words are shown. Function words between two blocks are not: they would tell the corpus' grammar."""
    kept = [bool(word) and own.issuperset(word) for word in found]
    runs = [list(run) for _, run in groupby(range(len(kept)), key=kept.__getitem__)]
    for run in runs[1:-1]:
        if all(FUNCTION_WORDS.issuperset(found[i]) for i in run):
            for i in run:
                kept[i] = False
    return kept


def _block(length: int) -> str:
    return f"▇×{length}" if length else ""


def _punctuation(text: str) -> str:
    return NOT_PUNCTUATION.sub("", text)


def overall(campaign: Campaign) -> Status:
    """The worst of the campaign's own status, its checks, and INCONCLUSIVE where nothing was checked or attacked.

    A renderer must not be the place where a green word covers a gap, whoever made the record.
    """
    seen = {campaign.status, *(check.status for check in campaign.checks)}
    if not campaign.checks or any(a.off is None and a.on is None for a in campaign.attacks):
        seen.add(Status.INCONCLUSIVE)
    return next(status for status in SEVERITY if status in seen)


def cases(campaign: Campaign) -> tuple[Check, ...]:
    """The checks, and one on the whole where none of them has the campaign's status: so no rendering can be green."""
    status = overall(campaign)
    if any(check.status is status for check in campaign.checks):
        return campaign.checks
    silent = [
        f"{a.name} has no figures: {a.error or 'it was not run'}" for a in campaign.attacks if not (a.off or a.on)
    ]
    why = "; ".join(silent) or ("A part failed or was left out." if campaign.checks else "No check was made.")
    return (*campaign.checks, Check(WHOLE, status, None, None, why))


def number(x: float | None, digits: int = 2) -> str:
    """A figure as papers print it.

    >>> [number(x) for x in (0.984, 1.0, -0.031, 0.0, None)]
    ['.98', '1.00', '-.03', '.00', '–']
    """
    if x is None or not math.isfinite(x):
        return "–"
    text = f"{x:.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text if float(text) else text.lstrip("-"))


def percent(x: float | None) -> str:
    """A share; never rounded to nothing or to all.

    >>> [percent(x) for x in (0.5, 0.041, 0.0, 0.9996, 0.0002, 1.0)]
    ['50 %', '4.1 %', '0 %', '>99.9 %', '<0.1 %', '100 %']
    """
    return "–" if x is None or not math.isfinite(x) else f"{_hundredths(x)} %"


def _hundredths(x: float) -> str:
    if not math.isfinite(x):
        return "–"
    if 0 < x < 0.0005 or 0.9995 < x < 1:
        return "<0.1" if x < 0.5 else ">99.9"
    tight = 0 < x < 0.0995 or 0.99 < x < 1
    return f"{100 * x:.1f}" if tight else f"{100 * x:.0f}"


def interval(rate: Rate, share: bool = False) -> str:
    """Both ends of the 95 % interval.

    >>> interval(Rate(0.512, 0.481, 0.543)), interval(Rate(0.02, 0.0, 0.05), share=True)
    ('[.48, .54]', '[0, 5.0]')
    """
    form = _hundredths if share else number
    return f"[{form(rate.low)}, {form(rate.high)}]"


def measured(rate: Rate | None, share: bool = False) -> str:
    """A figure with its interval, or that there is none.

    >>> measured(Rate(0.512, 0.481, 0.543)), measured(None)
    ('.51 [.48, .54]', 'too few to say')
    """
    if rate is None:
        return TOO_FEW
    return f"{percent(rate.value) if share else number(rate.value)} {interval(rate, share)}"


def against(value: float | None, limit: float | None) -> tuple[str, str]:
    """What was measured and its limit, with as many digits as it takes to tell them apart.

    >>> against(0.0504, 0.05), against(0.3, 0.05)
    (('.0504', '.0500'), ('.30', '.05'))

    Two whole numbers are counts.

    >>> against(12.0, 0.0)
    ('12', '0')
    """
    if value is not None and limit is not None and value.is_integer() and limit.is_integer():
        return f"{value:.0f}", f"{limit:.0f}"
    digits = 2
    while value != limit and number(value, digits) == number(limit, digits) != "–" and digits < 6:
        digits += 1
    return number(value, digits), number(limit, digits)


def in_figures(check: Check) -> str:
    """What a check measured and its limit, in brackets; empty if it has neither."""
    value, limit = against(check.value, check.limit)
    told = [f"{label} {text}" for label, text in (("measured", value), ("limit", limit)) if text != "–"]
    return f" ({', '.join(told)})" if told else ""


def ended(text: str) -> str:
    """A sentence with its full stop."""
    return text if not text or text[-1] in ".!?" else f"{text}."


def auc_in_words(auc: Rate) -> str:
    """What an area under the ROC curve means for the owner.

    >>> auc_in_words(Rate(0.51, 0.48, 0.54)), auc_in_words(Rate(0.98, 0.97, 0.99))
    ('about a coin toss', 'nearly always right')
    """
    if auc.low <= 0.5 <= auc.high:
        return "about a coin toss" if auc.high - auc.low <= 0.2 else "too uncertain to tell from a coin toss"
    if auc.value < 0.5:
        return f"below chance, and whoever turns the answers round gets {number(1 - auc.value)}"
    return next((text for limit, text in AUC_STEPS if auc.value < limit), "nearly always right")


def sentence(result: AttackResult) -> str:
    """One attack in plain words."""
    name, off, on = result.name, result.off, result.on
    if off is None and on is None:
        return f"{name} gave no figures ({result.error or 'it was not run'}), so nothing is known about it."
    tells = f"whoever runs {name} tells members from others with AUC"
    if off is None:
        assert on is not None
        return (
            f"With the guard on, {tells} {measured(on.auc)}, {auc_in_words(on.auc)}. It was not run with the guard "
            "off, so what the guard contributes is not known."
        )
    before = f"With the guard off, {tells} {measured(off.auc)}, {auc_in_words(off.auc)}"
    if on is None:
        return f"{before}. It was not run with the guard on."
    return f"{before}; with the guard on {measured(on.auc)}, {auc_in_words(on.auc)}.{_share_of_the_guard(result)}"


def _share_of_the_guard(result: AttackResult) -> str:
    """What must be added so that the pair of figures is not taken for the guard's work where it is not."""
    if result.off and result.off.auc.low <= 0.5 <= result.off.auc.high:
        return " The attack does not work here even with the guard off, so this says nothing about the guard."
    drop = result.auc_drop
    if drop and drop.high < 0:
        return " With the guard the attack does better."
    if drop and drop.low <= 0:
        return " The guard makes no difference that could be measured."
    return ""


def carried(crawl: Crawl) -> str:
    """One crawl in plain words."""
    told = [f"guard {side} {measured(haul.crr, share=True)}" for side, haul in crawl.hauls.items()]
    asked = max((haul.questions for haul in crawl.hauls.values()), default=0)
    return f"{crawl.attack} recovers of the texts, by {asked} questions: {'; '.join(told)}."


def headline(campaign: Campaign) -> str:
    """The verdict in one sentence."""
    made = cases(campaign)
    count = {status: sum(c.status is status for c in made) for status in Status}
    many = f"{len(made)} checks" if len(made) != 1 else "1 check"
    open_ones = f"{count[Status.INCONCLUSIVE] + count[Status.ERROR]} could not be decided"
    match overall(campaign):
        case Status.PASS:
            return f"All {many} hold, for what was tested." if len(made) > 1 else "The one check made holds."
        case Status.FAIL:
            more = f"; {open_ones}" if count[Status.INCONCLUSIVE] else ""
            return f"{count[Status.FAIL]} of {many} failed{more}."
        case Status.INCONCLUSIVE:
            return f"Nothing failed, but {count[Status.INCONCLUSIVE]} of {many} could not be decided. This is no pass."
        case _:
            failed = f"; {count[Status.FAIL]} failed" if count[Status.FAIL] else ""
            return f"The campaign met an error: {open_ones} of {many}{failed}. Figures are incomplete."


def strongest(campaign: Campaign) -> str:
    """The attack that gets farthest from chance against the guarded system, or the bare one where that is all."""
    guarded = any(a.on for a in campaign.attacks)
    aucs = [(a.name, f.auc) for a in campaign.attacks if (f := a.on if guarded else a.off)]
    if not aucs and campaign.crawls:
        return strongest_crawl(campaign.crawls)
    if not aucs:
        return "No attack gave any figures."
    name, auc = max(aucs, key=lambda pair: abs(pair[1].value - 0.5))
    where = f"with the guard {'on' if guarded else 'off'}"
    return f"Strongest attack {where}: {name}, AUC {measured(auc)}, {auc_in_words(auc)}."


def strongest_crawl(crawls: Sequence[Crawl]) -> str:
    """The crawler that carries away most of the guarded system, or of the bare one where that is all."""
    found = [(haul.crr, crawl.attack, side) for crawl in crawls for side, haul in crawl.hauls.items()]
    guarded = [one for one in found if one[2] == "on"] or found
    crr, name, side = max(guarded, key=lambda one: one[0].value)
    return f"Strongest crawler with the guard {side}: {name}, which recovers {measured(crr, share=True)} of the texts."
