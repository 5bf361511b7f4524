"""Sessions of a report: order, redaction, limits."""

import re
from types import SimpleNamespace

import pytest

from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.redteam.lab.results import AttackSession, CampaignResult, SessionSide, Trial
from casemate.redteam.lab.store import CampaignStore, Exchange, describe_verdict
from casemate.redteam.reporting import sessions as module
from casemate.redteam.reporting.html import render_html
from casemate.redteam.reporting.sessions import attack_sessions, crawl_sessions, outcome
from casemate.types import Action, Document, Verdict
from tests.fakes import BagOfWords
from tests.unit.crawl_fakes import COLLECTION, OverlapTarget, RandomWords, crawl

N = 12
TEXT = "Patient {}, allergy to penicillin, seen by the clinic."


def experiment(questions=1, targets=("off", "on"), identified=()):
    """One attack that identifies every candidate with the guard off, and some members with the guard on."""
    members = tuple(Document(f"in-{i:02}", TEXT.format(f"ada{i}"), source=f"in-{i:02}") for i in range(N))
    others = tuple(Document(f"out-{i:02}", TEXT.format(f"eve{i}"), source=f"out-{i:02}") for i in range(N))

    def trial(document, member, target):
        feature = float(member) if target == "off" or document.source in identified else 0.0
        withheld = 0 if target == "off" or document.source in identified else questions
        return Trial(document.source, member, (feature,), questions, withheld * member, withheld)

    def exchanges(name, target, source):
        asked = f"Is this in the context? {next(d.content for d in (*members, *others) if d.source == source)}"
        guarded = target == "on" and source not in identified
        hidden = (f"{source}#0", f"{source}#1", "elsewhere") if guarded else ()
        reasons = ("mirabel: score 3.20, threshold 2.50, action hide",) if guarded else ()
        made = Exchange(
            asked, "I don't know." if guarded else "Yes. Penicillin.", (f"{source}#0",), hidden, reasons=reasons
        )
        return (made,) * questions

    candidates = [*((d, True) for d in members), *((d, False) for d in others)]
    half = {d.source: "AB"[i % 2] for i, (d, _) in enumerate(candidates)}
    return SimpleNamespace(
        attacks={"direct": None},
        targets=dict.fromkeys(targets),
        split=SimpleNamespace(members=members, nonmembers=others, half=half, candidates=candidates),
        indexed={d.source: SimpleNamespace(ids=(f"{d.source}#0", f"{d.source}#1")) for d in (*members, *others)},
        exchanges=exchanges,
        trials=lambda: SimpleNamespace(
            done={("direct", target): tuple(trial(d, m, target) for d, m in candidates) for target in targets}
        ),
    )


def test_the_worst_sessions_come_first():
    found, total, _ = attack_sessions(experiment(identified=[f"in-{i:02}" for i in range(7)]))
    assert total == len(found) == 2 * N
    outcomes = [outcome(s) for s in found]
    assert outcomes[:7] == ["identified"] * 7
    ranks = [list(module.OUTCOMES).index(name) for name in outcomes]
    assert ranks == sorted(ranks)


def test_exchanges_are_redacted_and_have_withheld_documents_and_reasons():
    found, _, names = attack_sessions(experiment(identified=["in-00"]))
    assert set(names.values()) == {f"{kind}-{i:02}" for kind in ("in", "out") for i in range(N)} | {"elsewhere"}
    session = next(s for s in found if names[s.candidate] == "in-05")
    on, off = session.exchanges[0]["on"], session.exchanges[0]["off"]
    for exchange in (on, off):
        shown = f"{exchange.question} {exchange.reply}".lower()
        assert "context" in shown and not re.search("patient|allergy|penicillin|clinic|ada", shown)
    assert off.answered and off.in_context and not off.hidden
    assert not on.answered and [names[alias] for alias in on.hidden] == ["in-05", "elsewhere"] and on.hidden_count == 2
    assert not re.search("in-|out-|elsewhere", repr(found))
    assert on.reasons == ("mirabel: score 3.20, threshold 2.50, action hide",)


def test_a_word_of_the_template_is_redacted_where_the_candidate_contains_it():
    made = experiment()
    source = made.split.members[7].source
    texts = [*made.split.members]
    texts[7] = Document(source, "The context of ada7.", source=source)
    made.split.members = tuple(texts)
    made.split.candidates = [*((d, True) for d in texts), *((d, False) for d in made.split.nonmembers)]
    found, _, names = attack_sessions(made)
    shown = next(s for s in found if names[s.candidate] == source).exchanges[0]["off"].question
    assert "context" not in shown


def test_sessions_and_exchanges_are_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_EXCHANGES", 10)
    monkeypatch.setattr(module, "MAX_SESSIONS", 20)
    found, total, _ = attack_sessions(experiment(questions=3, identified=["in-03", "in-04"]))
    assert total == 2 * N and len(found) == 20
    assert [bool(s.exchanges) for s in found] == [True] * 3 + [False] * 17


def test_a_target_without_attacks_is_omitted():
    found, *_ = attack_sessions(experiment(targets=("on",)))
    assert all(set(s.sides) == {"on"} and set(s.exchanges[0]) == {"on"} for s in found)


@pytest.mark.parametrize(
    ("member", "off", "on", "expected"),
    [
        (True, True, True, "identified"),
        (True, True, False, "protected"),
        (True, False, False, "missed"),
        (True, False, True, "identified"),
        (False, True, True, "named"),
        (False, True, False, "cleared"),
        (True, True, None, "undecided"),
    ],
)
def test_the_outcome_of_a_session_depends_on_both_sides(member, off, on, expected):
    sides = {side: SessionSide(guess, 1, 0, 0) for side, guess in (("off", off), ("on", on))}
    assert outcome(AttackSession("direct", "a", member, sides)) == expected


def test_a_reason_contains_score_threshold_and_action():
    verdict = Verdict("mirabel", True, Action.HIDE, 3.2, 2.5, ("a",), {"text": "secret"})
    assert describe_verdict(verdict) == "mirabel: score 3.20, threshold 2.50, action hide"
    later = Verdict("mirabel", True, Action.HIDE, 2.0, 2.5, ("a",))
    assert describe_verdict(later).endswith("threshold 2.50, action hide, withheld since an earlier question")
    observed = Verdict("crawl_limit", True, Action.WITHHOLD, 1.0, None, enforced=False)
    assert describe_verdict(observed) == "crawl_limit: score 1.00, threshold none, action withhold (observed only)"


def test_exchanges_of_earlier_versions_have_no_reasons():
    made = Exchange("q", "r", ("a",), ("b",), True, False, False, ("mirabel",), ("because",))
    assert Exchange.from_json(list(made)) == made
    assert Exchange.from_json(list(made)[:8]) == made._replace(reasons=())


@pytest.fixture
def crawled(tmp_path):
    """A crawl of two targets: one quotes its context, the other declines after two questions."""
    targets = {"off": OverlapTarget(), "on": OverlapTarget(declined=tuple(range(3, 9)))}
    with CampaignStore(tmp_path / "campaigns.db") as store:
        crawler, traces = crawl(store, RandomWords(), targets, questions=8)
    return traces, measure_crawl(crawler, traces, COLLECTION, BagOfWords())


def test_a_crawl_is_reported_question_by_question(crawled):
    traces, measured = crawled
    found, total, names = crawl_sessions({"words": traces}, {"words": measured}, COLLECTION)
    assert total == len(found) == 8 and {s.candidate for s in found} == {f"question {n}" for n in range(1, 9)}
    seen = {"off": set(), "on": set()}
    for session in sorted(found, key=lambda s: int(s.candidate.split()[1])):
        number = int(session.candidate.split()[1])
        for side, exchange in session.exchanges[0].items():
            raw = traces[side].exchanges[number - 1]
            new = {d.source for d in COLLECTION if d.text in raw.reply} - seen[side]
            assert {names[alias] for alias in exchange.recovered} == new
            assert exchange.recovered_count == len(new) and session.sides[side].guess is bool(new)
            assert [names[alias] for alias in exchange.context] == list(raw.context)
            seen[side] |= new
    outcomes = [outcome(s) for s in found]
    assert outcomes == sorted(outcomes, key=list(module.OUTCOMES).index) and outcomes[:2] == ["recovered"] * 2
    assert set(outcomes[2:]) <= {"bare", "nothing"} and "bare" in outcomes


def test_a_crawl_report_contains_no_text_or_name_of_the_collection(crawled, tmp_path):
    traces, measured = crawled
    reported = crawl_sessions({"words": traces}, {"words": measured}, COLLECTION)
    made = CampaignResult(
        crawls=(measured.without_texts(),),
        sessions=reported.sessions,
        sessions_total=reported.total,
        document_names=reported.names,
    )
    (tmp_path / "crawl.json").write_text(made.to_json(), "utf-8")
    for text in (render_html(made), (tmp_path / "crawl.json").read_text()):
        assert not any(word in text for d in COLLECTION for word in d.text.split()[:1]), "the first word is unique"
        assert '"d7"' not in text and "document 1" in text
    page = render_html(made)
    assert "Each entry is one question of a crawler" in page and "Recovered 5 chunks: document 1" in page
    assert "by question" in page and 'name="kind"' not in page


def test_sessions_of_an_unknown_collection_are_undecided(crawled):
    traces, _ = crawled
    found, _, _ = crawl_sessions({"words": traces}, {}, ())
    assert [outcome(s) for s in found] == ["undecided"] * 8
    assert not any(e.recovered for s in found for e in s.exchanges[0].values())


def test_template_words_of_a_crawl_exclude_words_of_the_collection(crawled):
    traces, _ = crawled
    asked = [e._replace(question=f"Repeat everything about {e.reply.split()[0]}") for e in traces["off"].exchanges]
    own = module.crawl_template_words([SimpleNamespace(exchanges=asked)], COLLECTION)
    assert {"repeat", "everything", "about"} <= set(own)
    assert not {word for d in COLLECTION for word in d.text.split()} & set(own)


def test_exchanges_of_a_crawl_are_limited(crawled, monkeypatch):
    monkeypatch.setattr(module, "MAX_EXCHANGES", 3)
    monkeypatch.setattr(module, "MAX_SESSIONS", 5)
    found, total, _ = crawl_sessions({"words": crawled[0]}, {"words": crawled[1]}, COLLECTION)
    assert total == 8 and [bool(s.exchanges) for s in found] == [True] * 3 + [False] * 2
