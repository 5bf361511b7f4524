"""Report sentences: status, headline, descriptions of attacks and checks, and redaction of questions and replies."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from casemate.maths.stats import Estimate
from casemate.redteam.lab.capabilities import ANSWERS_FROM_COLLECTION, ATTACK_WORKS
from casemate.redteam.lab.judge import EVERY_DEFENSE_DECIDES, worst_status
from casemate.redteam.lab.results import (
    AttackResult,
    CampaignResult,
    Check,
    CheckStatus,
    Crawl,
    PersonalDataResult,
    ProbeResult,
    TwoWorldAudit,
    Utility,
)
from casemate.reports.format import measured, number, plural
from casemate.text.tokens import REPLACEMENT_CHARACTER, STOP_WORDS, UNSAFE_CHARACTERS, WORD, words

AUC_LEVELS = ((0.6, "weak"), (0.75, "moderate"), (0.9, "strong"))
"""Upper bounds of an AUC above chance, and their names."""
CAMPAIGN_CHECK = "The campaign as a whole"

FUNCTION_WORDS = STOP_WORDS - {"no", "not"}
NOT_PUNCTUATION = re.compile(r"""[^\s.,:;!?()\[\]"'-]+""")
HAS_DIGIT = re.compile(r"\d")


def redact(text: str, own_words: Collection[str]) -> str:
    """Replaces all words of a text but an attack's own by their number.

    Function words alone between two redacted blocks are redacted too, and so is every word with a digit: a number of
    the corpus must not show because a template contains the same one. Symbols other than punctuation are dropped.

    ``own_words`` are those of the attack's template and of the target's fixed sentences, never those of the candidate,
    even where the question quotes it.

    >>> redact("Yes. The patient Ada Byron takes 20 mg.", ["yes", "no", "patient", "the"])
    'Yes. The patient ▇×5.'
    """
    phrases = (own_words,) if isinstance(own_words, str) else own_words
    own = {word for phrase in phrases for word in words(phrase) if not HAS_DIGIT.search(word)}
    found = list(WORD.finditer(text))
    kept = _without_islands([words(m.group()) for m in found], own)
    parts, end, hidden = [], 0, 0
    for keep, match in zip(kept, found, strict=True):
        if keep or not hidden:
            parts += [_block(hidden), _punctuation(text[end : match.start()])]
        if keep:
            parts.append(match.group())
        hidden = 0 if keep else hidden + 1
        end = match.end()
    return UNSAFE_CHARACTERS.sub(REPLACEMENT_CHARACTER, "".join([*parts, _block(hidden), _punctuation(text[end:])]))


def _without_islands(found: list[list[str]], own: set[str]) -> list[bool]:
    """Whether each word is shown. Function words between two redacted blocks are not: they reveal the grammar."""
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


def overall_status(campaign: CampaignResult) -> CheckStatus:
    """The worst of the recorded status and all checks; INCONCLUSIVE without checks or with an attack without metrics.

    A renderer must not show a better status than the record supports, whatever wrote the record.
    """
    incomplete = not campaign.checks or any(a.off is None and a.on is None for a in campaign.attacks)
    found = [campaign.status, *(check.status for check in campaign.checks)]
    return worst_status([*found, CheckStatus.INCONCLUSIVE] if incomplete else found)


def is_one_system(campaign: CampaignResult) -> bool:
    """Whether the target was asked as its users see it only, and may have no guard."""
    return campaign.evidence.get("target", "own") != "own" and "target_off" not in campaign.evidence


def undecided_note(campaign: CampaignResult) -> str:
    """Says which defense decided nothing, and what to do; empty if all decided."""
    return " ".join(with_full_stop(check.reason) for check in campaign.checks if check.name == EVERY_DEFENSE_DECIDES)


def reported_checks(campaign: CampaignResult) -> tuple[Check, ...]:
    """The checks, plus one for the whole campaign if none of them has its status."""
    status = overall_status(campaign)
    if any(check.status is status for check in campaign.checks):
        return campaign.checks
    missing = [f"{a.name} has no metrics: {a.error or 'not run'}" for a in campaign.attacks if not (a.off or a.on)]
    reason = "; ".join(missing) or ("A part failed or was skipped." if campaign.checks else "No check was made.")
    return (*campaign.checks, Check(CAMPAIGN_CHECK, status, None, None, reason))


def format_value_and_limit(value: float | None, limit: float | None) -> tuple[str, str]:
    """Formats a value and its limit with enough digits to distinguish them; two integers are counts.

    >>> format_value_and_limit(0.0504, 0.05), format_value_and_limit(0.3, 0.05), format_value_and_limit(12.0, 0.0)
    (('.0504', '.0500'), ('.30', '.05'), ('12', '0'))
    >>> format_value_and_limit(0.1 + 0.2, 0.3)  # not equal as floating-point numbers
    ('.30', '.30')
    """
    if value is not None and limit is not None and value.is_integer() and limit.is_integer():
        return f"{value:.0f}", f"{limit:.0f}"
    digits = 2
    differ = value is not None and limit is not None and not math.isclose(value, limit, abs_tol=1e-6)
    while differ and number(value, digits) == number(limit, digits) != "–" and digits < 6:
        digits += 1
    return number(value, digits), number(limit, digits)


def measured_and_limit(check: Check) -> str:
    """Measured value and limit of a check in parentheses; empty if it has neither.

    A limit that the value must reach or exceed is *at least*.
    """
    value, limit = format_value_and_limit(check.value, check.limit)
    bound = "at least" if check.name.endswith((ATTACK_WORKS, ANSWERS_FROM_COLLECTION)) else "limit"
    parts = [f"{label} {text}" for label, text in (("measured", value), (bound, limit)) if text != "–"]
    return f" ({', '.join(parts)})" if parts else ""


def with_full_stop(text: str) -> str:
    """Ends a sentence with a full stop.

    >>> with_full_stop("The check passed"), with_full_stop("The check passed."), with_full_stop("")
    ('The check passed.', 'The check passed.', '')
    """
    return text if not text or text[-1] in ".!?" else f"{text}."


def auc_in_words(auc: Estimate) -> str:
    """The strength of an attack with this area under the ROC curve.

    >>> auc_in_words(Estimate(0.51, 0.48, 0.54)), auc_in_words(Estimate(0.98, 0.97, 0.99))
    ('no better than chance', 'near-perfect')
    """
    if auc.low <= 0.5 <= auc.high:
        return "no better than chance" if auc.high - auc.low <= 0.2 else "too uncertain to distinguish from chance"
    if auc.value < 0.5:
        return f"below chance, {number(1 - auc.value)} with inverted answers"
    return next((text for limit, text in AUC_LEVELS if auc.value < limit), "near-perfect")


def describe_checks(checks: Iterable[Check], separator: str = "; ", start_of_list: str = " ") -> list[str]:
    """The checks in lines: those of several attacks with the same name in one, what their reasons share stated once."""
    by_name: dict[str, list[Check]] = {}
    for check in checks:
        by_name.setdefault(check.name, []).append(check)
    lines = []
    for name, made in by_name.items():
        shared, own = common_reason([check.reason for check in made])
        parts = [": ".join(filter(None, (check.attack, rest))) for check, rest in zip(made, own, strict=True)]
        if any(own):
            start = ": ".join(filter(None, (name, shared)))
            lines.append(f"{start}:{start_of_list if len(parts) > 1 else ' '}{separator.join(parts)}")
        else:
            attacks = ", ".join(filter(None, parts))
            lines.append(f"{name}: {shared}{f' ({attacks})' if attacks else ''}")
    return lines


def common_reason(reasons: Sequence[str]) -> tuple[str, list[str]]:
    """What all reasons start with, up to a full stop or colon, and the rest of each.

    >>> common_reason(["Accuracy, limit 0.1: 0.3 to 0.4", "Accuracy, limit 0.1: 0.2 to 0.4"])
    ('Accuracy, limit 0.1', ['0.3 to 0.4', '0.2 to 0.4'])
    >>> common_reason(["Too few trials", "Too few trials"])
    ('Too few trials', ['', ''])
    """
    if len(set(reasons)) == 1:
        return reasons[0], [""] * len(reasons)
    start = os.path.commonprefix(list(reasons))
    at = max(start.rfind(mark) for mark in (": ", ". "))
    return ("", list(reasons)) if at < 0 else (start[:at], [reason[at + 2 :] for reason in reasons])


def describe_attack(result: AttackResult) -> str:
    """One membership attack in a sentence."""
    name, off, on = result.name, result.off, result.on
    if off is None and on is None:
        return f"{name} has no metrics ({result.error or 'not run'}); its result is unknown."
    sides = [f"{measured(f.auc)} with the guard {side} ({auc_in_words(f.auc)})" for side, f in result.sides.items()]
    text = f"{name}: AUC {', '.join(sides)}."
    if off is None:
        return f"{text} Not run with the guard off, so the guard's effect is unknown."
    effect = guard_effect(result)
    return f"{text} Not run with the guard on." if on is None else f"{text} {effect}".rstrip()


def guard_effect(result: AttackResult) -> str:
    """A warning where the difference between guard off and on is not an effect of the guard; else empty."""
    if result.off and result.off.auc.low <= 0.5 <= result.off.auc.high:
        return "The attack fails even with the guard off, so this is not evidence about the guard."
    drop = result.auc_drop
    if drop and drop.high < 0:
        return "The attack is stronger with the guard."
    if drop and drop.low <= 0:
        return "The guard has no measurable effect."
    return ""


def describe_crawl(crawl: Crawl) -> str:
    """One extraction attack in a sentence."""
    sides = [f"with the guard {side} {measured(result.crr, share=True)}" for side, result in crawl.by_target.items()]
    asked = max((result.questions for result in crawl.by_target.values()), default=0)
    ratio = f"; ratio {measured(crawl.ratio)}" if crawl.ratio else ""
    return f"{crawl.attack}: texts recovered after {asked:,} questions: {', '.join(sides)}{ratio}."


def describe_probe(result: ProbeResult) -> str:
    """One effect of an injection attack in a sentence."""
    sides = [
        f"with the guard {side} {measured(share, share=True)}"
        for side, share in (("off", result.off), ("on", result.on))
        if share is not None
    ]
    shares = ", ".join(sides) or "unknown"
    return f"{result.name}: instruction followed in {plural(result.questions, 'question')}: {shares}."


def describe_personal_data(result: PersonalDataResult) -> str:
    """Personal data in answers, in a sentence."""
    sides = ", ".join(
        f"with the guard {side} {measured(share, share=True)} ({_kinds(result.kinds.get(side, {}))})"
        for side, share in (("off", result.off), ("on", result.on))
    )
    return f"Personal data ({result.finder}) in answers to {plural(result.questions, 'question')}: {sides}."


def describe_utility(result: Utility) -> str:
    """The guard's cost for benign questions, in a sentence."""
    changed = measured(result.answer_changed, share=True)
    if result.flagged is None:  # an external target
        effect = f"{changed} lost their answer"
    else:
        effect = f"{measured(result.flagged, share=True)} had a document withheld, and {changed} got another answer"
    asked = "" if result.source.startswith(f"{result.questions} ") else f" ({result.questions:,} of them asked)"
    lost = result.unentitled_lost
    unentitled = f" A client without entitlement lost {measured(lost, share=True)} of the answers." if lost else ""
    return f"Of {result.source}{asked}, {effect}.{unentitled}"


def describe_audit(result: TwoWorldAudit) -> str:
    """The two-world audit, in a sentence."""
    if not result.pairs:
        return "Two-world audit: nothing was compared."
    return f"Two-world audit: {result.differing} of {result.pairs} contexts revealed a withheld document."


def _kinds(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind}: {count:,}" for kind, count in kinds.items()) or "no values"


def mean_ratio(crawls: Sequence[Crawl]) -> str:
    """The mean of the ratios of all crawlers, in a sentence; empty for fewer than two. It hides the worst of them."""
    ratios = [crawl.ratio.value for crawl in crawls if crawl.ratio]
    if len(ratios) < 2:
        return ""
    return f"Mean of the ratios of {len(ratios)} crawlers: {number(sum(ratios) / len(ratios))}."


def describe_extracted(campaign: CampaignResult) -> Iterator[tuple[str, str]]:
    """Crawler and target, and the volume of text that was returned."""
    for attack, sides in campaign.extracted.items():
        for target, side in sides.items():
            yield (
                f"{attack}, guard {target}",
                f"{side.texts:,} texts, {side.words:,} words ({side.vocabulary:,} distinct) from {side.questions:,} "
                f"questions, {measured(side.answered, share=True)} answered, {side.refused:,} refused",
            )


def headline(campaign: CampaignResult) -> str:
    """The status in one sentence."""
    made = reported_checks(campaign)
    count = {status: sum(c.status is status for c in made) for status in CheckStatus}
    total, failed = f"{len(made)} checks" if len(made) != 1 else "1 check", count[CheckStatus.FAIL]
    undecided = count[CheckStatus.INCONCLUSIVE] + count[CheckStatus.ERROR]
    match overall_status(campaign):
        case CheckStatus.PASS:
            return f"All {total} passed, for what was tested." if len(made) > 1 else "The only check passed."
        case CheckStatus.FAIL:
            return f"{failed} of {total} failed{f'; {undecided} undecided' if undecided else ''}."
        case CheckStatus.INCONCLUSIVE:
            return f"No check failed, but {undecided} of {total} are undecided. This is not a pass."
        case _:
            more = f"; {failed} failed" if failed else ""
            return f"The campaign had an error: {undecided} of {total} are undecided{more}. Metrics are incomplete."


def strongest_attack(campaign: CampaignResult) -> str:
    """The attack whose AUC is farthest from chance on the guarded system, or else on the bare one."""
    guarded = any(a.on for a in campaign.attacks)
    aucs = [(a.name, f.auc) for a in campaign.attacks if (f := a.on if guarded else a.off)]
    if not aucs:
        if campaign.probes:
            return strongest_probe(campaign.probes)
        return strongest_crawl(campaign.crawls) if campaign.crawls else "No attack has metrics."
    name, auc = max(aucs, key=lambda pair: abs(pair[1].value - 0.5))
    where = f"with the guard {'on' if guarded else 'off'}"
    return f"Strongest attack {where}: {name}, AUC {measured(auc)} ({auc_in_words(auc)})."


def strongest_crawl(crawls: Sequence[Crawl]) -> str:
    """The crawler that recovers most of the guarded system, or else of the bare one."""
    found = [(result.crr, crawl.attack, side) for crawl in crawls for side, result in crawl.by_target.items()]
    guarded = [one for one in found if one[2] == "on"] or found
    crr, name, side = max(guarded, key=lambda one: one[0].value)
    return f"Strongest crawler with the guard {side}: {name}, recovers {measured(crr, share=True)} of the texts."


def strongest_probe(probes: Sequence[ProbeResult]) -> str:
    """The injected instruction that is followed most with the guard on."""
    found = [(probe.on, probe.name) for probe in probes if probe.on]
    if not found:
        return "No question with an injected document was answered."
    share, name = max(found, key=lambda one: one[0].value)
    return f"Strongest injection with the guard on: {name}, followed in {measured(share, share=True)} of the questions."


def check_message(check: Check) -> str:
    """Status, name, values and reason of a check in one line."""
    return f"{check.status}: {check.name}{measured_and_limit(check)}. {with_full_stop(check.reason)}"


def summary_lines(campaign: CampaignResult) -> Iterator[str]:
    """The report as plain lines."""
    yield headline(campaign)
    yield from map(describe_attack, campaign.attacks)
    yield from map(describe_crawl, campaign.crawls)  # the worst first
    yield from map(describe_probe, campaign.probes)
    yield from map(describe_personal_data, filter(None, [campaign.personal_data]))
    yield from map(describe_utility, filter(None, [campaign.utility]))
    yield from map(describe_audit, filter(None, [campaign.audit]))
    yield from filter(None, [mean_ratio(campaign.crawls)])
    yield from (f"Not tested: {line}" for line in campaign.not_tested)
    yield from (f"Simulated: {line}" for line in campaign.simulated)
