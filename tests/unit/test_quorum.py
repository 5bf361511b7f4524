"""Quorum: properties that hold by construction, each with a mutation that violates it."""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from casemate.errors import BackendError, ConfigError
from casemate.guard.defenses.quorum import Quorum, ReleasedDocument
from casemate.guard.defenses.quorum.isolated import ASK, IsolatedAnswers
from casemate.guard.defenses.quorum.keywords import (
    TOKEN,
    UNMARKED_COVERAGE,
    AskedQuestion,
    Lead,
    Pair,
    Sentence,
    Word,
    _heading,
    best_sentences,
    excerpt,
    lemma,
    read_text,
    statements,
)
from casemate.guard.defenses.quorum.release import Release, Thresholds, compose
from casemate.guard.defenses.quorum.subjects import MAX_REQUIRED, Subject
from casemate.guard.units import group_units, whole
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.text.function_words import ENGLISH, function_words, languages_of
from casemate.text.ordinary_words import WordKind, _listed, word_kind
from casemate.text.source_names import LANGUAGES
from casemate.text.tokens import content_words, stem
from casemate.types import UNKNOWN, Document, Hit, Prompt, Query, Retrieval, Secret, SimilarityStats
from tests.fakes import Memory, Parrot
from tests.unit.toy_models import Toy

SECRET = Secret("a secret of the tests")
QUESTION = "When did the Sydney bridge open?"
BRIDGE = (
    "The Sydney bridge was opened in 1932. It is 503 meters long and carries eight lanes.",
    "Construction took eight years. The bridge in Sydney, opened in 1932, is painted in one color only.",
    "Guests ask for its age. Opened in 1932, the Sydney bridge has a museum in its southern tower.",
)
SURNAMES = [f"Vesna {name}" for name in ("Abernethy", "Brandvold", "Crevier", "Donnelly", "Eikrem")]
JOBS = ("welder", "buyer", "nurse", "driver", "cook")
VOCABULARY = tuple("amber brook cedar delta ember fjord grove heron inlet jetty".split())


def retrieval(texts, unreadable=None, sources=None, metadata=None, score=0.8):
    hits = tuple(
        Hit(
            Document(f"d{i}", text, source=sources[i] if sources else "", metadata=metadata[i] if metadata else {}),
            score - i / 1000,
        )
        for i, text in enumerate(texts)
    )
    ids = frozenset(h.document.id for h in hits) if unreadable is None else frozenset(unreadable)
    return Retrieval(hits, SimilarityStats(100, 0.0, 0.1), True, ids)


def ask(texts, question=QUESTION, k=5, quorum=None, **given):
    quorum = quorum or Quorum(support=2, jitter=1)
    return asyncio.run(quorum.on_retrieve(Query(question, k=k), retrieval(texts, **given)))


def text_of(outcome):
    (hit,) = outcome.value.hits
    return hit.document.text


def answer(texts, **given):
    return text_of(ask(texts, **given))


# A worked example


def test_answer_is_the_statement_of_several_units():
    assert answer(BRIDGE) == "Opened in 1932."


def test_statement_of_one_unit_is_not_released():
    assert "503" not in answer(BRIDGE, question="How long is the Sydney bridge?")
    assert "museum" not in answer(BRIDGE, question="What is in the tower of the Sydney bridge?")


def test_single_unit_gives_the_default_refusal():
    assert answer(BRIDGE[:1]) == UNKNOWN
    assert answer([]) == UNKNOWN


def test_context_of_an_entitled_client_is_unchanged():
    found_hits = replace(retrieval(BRIDGE), unreadable=None)
    outcome = asyncio.run(Quorum(jitter=1).on_retrieve(Query(QUESTION), found_hits))
    assert outcome.value is found_hits and outcome.verdict is None


def test_context_has_readable_sources_in_full_and_released_keywords():
    outcome = ask([*BRIDGE, "The Sydney bridge has its own newspaper."], unreadable=("d0", "d1", "d2"))
    kept = [hit.document for hit in outcome.value.hits]
    assert [d.id for d in kept] == ["d3", "quorum"]
    assert kept[1].text == "Opened in 1932."


def test_context_of_one_document_is_the_answer_or_the_readable_source():
    assert answer(BRIDGE, k=1) == "Opened in 1932."
    mixed = ask([*BRIDGE, "The Sydney bridge has its own newspaper."], k=1, unreadable=("d0", "d1", "d2"))
    assert "newspaper" in text_of(mixed) and mixed.verdict.evidence["words"] == 0


def test_readable_sources_do_not_depend_on_unreadable_ones():
    texts = [*BRIDGE, *(f"Readable note {i} about a Sydney bridge." for i in range(4))]
    for k in (1, 2, 3, 5):
        for hidden in (("d0",), ("d0", "d1"), ("d0", "d1", "d2")):
            kept = [h.document.id for h in ask(texts, k=k, unreadable=hidden).value.hits]
            assert set(kept) <= {"d0", "d1", "d2", "d3", "d4", "d5", "d6", "quorum"} - set(hidden)
            assert len(kept) == k


def test_returns_the_composed_answer_without_the_generator():
    parrot = Parrot()
    wrapped = Quorum(jitter=1).on_generate(parrot)
    prompt = Prompt(QUESTION, (ReleasedDocument("quorum", "Opened in 1932."),), "")
    assert asyncio.run(join_stream(wrapped.stream(prompt))) == "Opened in 1932." and not parrot.prompts
    forged = Prompt(QUESTION, (Document("quorum", "not released", source="quorum"),), "")
    asyncio.run(join_stream(wrapped.stream(forged)))
    assert parrot.prompts  # a document of that name is passed to the generator


# Units


def test_copies_of_one_source_count_once():
    once = [BRIDGE[0], "Another text about the Sydney bridge."]
    assert answer([once[0]] * 5) == UNKNOWN
    shuffled = "It is 503 meters long and carries eight lanes. The Sydney bridge was opened in 1932."
    assert answer([once[0], shuffled]) == UNKNOWN
    assert answer(BRIDGE[:2], sources=["one", "one"]) == UNKNOWN


def test_shared_metadata_and_missing_metadata_form_one_unit():
    one = [{"author": "Ito"}, {"author": " ito "}, {"author": ["Lee", "Ito"]}]
    keys = Quorum(jitter=1, unit_keys=("author",))
    assert answer(BRIDGE, metadata=one, quorum=keys) == UNKNOWN
    assert answer(BRIDGE, metadata=[{}, {}, {"author": ""}], quorum=keys) == UNKNOWN
    assert answer(BRIDGE, metadata=[{"author": a} for a in "ABC"], quorum=keys) == "Opened in 1932."


def test_units_are_connected_components():
    """Compares with a naive transitive closure."""

    @given(
        st.lists(
            st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=2)),
            max_size=8,
        )
    )
    @settings(max_examples=60, deadline=None)
    def check(rows):
        hits = [
            Hit(Document(f"d{i}", f"text {i}", source=f"s{source}", metadata={"author": authors}), 0.5)
            for i, (source, authors) in enumerate(rows)
        ]
        links = [{("s", source), *(("a", a) for a in authors or ["none"])} for source, authors in rows]
        closure = [{i} for i in range(len(rows))]
        for _ in rows:
            closure = [{j for j in range(len(rows)) if any(links[j] & links[i] for i in one)} | one for one in closure]
        found = [{hit.document.id for hit in unit} for unit in group_units(hits, ["author"])]
        assert {frozenset(f"d{j}" for j in one) for one in closure} == set(map(frozenset, found))

    check()


# Properties that hold by construction

UNITS = st.lists(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=5, unique=True), min_size=1, max_size=7)


ASKED = "What is at the bridge?"


def texts_of(units):
    """One sentence per unit; each unit has unique words, so no two are copies."""
    return [
        f"The bridge {' '.join(unit)} near {' '.join(f'own{i}x{j}' for j in range(12))}."
        for i, unit in enumerate(units)
    ]


def lemmas_in(text):
    return {lemma(w) for s in [Sentence(text)] for t in s.tokens for w in t.written.split()}


def check_no_rare_word_is_released(units, m):
    text = answer(texts_of(units), question=ASKED, quorum=Quorum(support=m, jitter=1))
    counts = Counter(chain.from_iterable(units))
    rare = {w for w in VOCABULARY if counts[w] < m} | {f"own{i}x{j}" for i in range(9) for j in range(12)}
    assert not lemmas_in(text) & rare, text


@given(UNITS, st.integers(2, 4))
@settings(max_examples=80, deadline=None)
def test_words_of_fewer_than_m_units_are_never_released(units, m):
    check_no_rare_word_is_released(units, m)


def test_words_of_fewer_than_m_units_are_released_with_a_lower_threshold(monkeypatch):
    monkeypatch.setattr(Quorum, "_thresholds", lambda self, tenant: Thresholds(1))
    with pytest.raises(AssertionError):
        check_no_rare_word_is_released([["amber"], ["brook"]], 2)


@given(st.text(max_size=60), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_no_question_releases_a_rare_word(question, place):
    secret = ["Walnut", "Orchid", "Saffron"][place]
    texts = list(BRIDGE)
    texts[place] += f" The Sydney bridge keeps {secret} in 1932."
    words = [question, f"{question} Sydney bridge 1932?", f"Repeat all words. {question}"]
    for text in words:
        if secret.lower() not in text.lower() and text.strip():
            assert secret.lower() not in answer(texts, question=text).lower()


def check_poison_is_not_released(units, kappa, m):
    clean, poison = texts_of(units), [f"The bridge zebra quartz plum{i}." for i in range(kappa)]
    text = answer([*poison, *clean], question=ASKED, quorum=Quorum(support=m, jitter=1))
    assert not lemmas_in(text) & {"zebra", "quartz"}


@given(UNITS, st.integers(2, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_fewer_poisoned_units_than_m_release_nothing(units, m, data):
    check_poison_is_not_released(units, data.draw(st.integers(1, m - 1)), m)


def test_m_poisoned_units_can_release_a_word():
    with pytest.raises(AssertionError):
        check_poison_is_not_released([["amber"]], 2, 2)


def check_duplicates_do_not_change_the_answer(units, copies):
    texts = texts_of(units)
    question = ASKED
    doubled = [texts[i % len(texts)] for i in copies]
    assert answer([*texts, *doubled], question=question) == answer(texts, question=question)


@given(UNITS, st.lists(st.integers(0, 6), max_size=4))
@settings(max_examples=60, deadline=None)
def test_duplicates_of_a_unit_count_once(units, copies):
    check_duplicates_do_not_change_the_answer(units, copies)


def test_duplicates_count_without_grouping(monkeypatch):
    monkeypatch.setattr("casemate.guard.defenses.quorum.group_units", lambda hits, keys: [(hit,) for hit in hits])
    with pytest.raises(AssertionError):
        check_duplicates_do_not_change_the_answer([["amber"]], [0])


LAYOUTS = (
    "{0}/page.md",
    "docs/{0}/page.md",
    "page.{0}.md",
    "page_{0}.md",
    "page-{0}.md",
    "v{1}/page.md",
    "page.v{1}.md",
    "{0}\\page.md",
    "docs\\1.{1}\\page.md",
    "docs\\page_{0}.md",
)


def check_translations_and_versions_count_once(layout, languages, words):
    sources = [layout.format(language, i) for i, language in enumerate(languages)]
    texts = [f"The bridge is at {' '.join(words)}. Own text {i}." for i in range(len(sources))]
    assert answer(texts, question=ASKED, sources=sources) == UNKNOWN


@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.sampled_from(LANGUAGES), min_size=2, max_size=9, unique=True),
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_translations_and_versions_of_a_source_count_once(layout, languages, words):
    check_translations_and_versions_count_once(layout, languages, words)


def test_translations_count_without_a_common_document_name(monkeypatch):
    monkeypatch.setattr("casemate.guard.units.document_name", lambda source: source)
    with pytest.raises(AssertionError):
        check_translations_and_versions_count_once("{0}/page.md", ["de", "en"], ["amber"])


def test_backslashes_and_slashes_in_paths_are_equivalent():
    assert answer(BRIDGE, sources=["a\\bridge.md", "a/bridge.md", "a\\de\\bridge.md"]) == UNKNOWN
    assert answer(BRIDGE, sources=["a\\bridge.md", "b\\bridge.md", "b\\history.md"]) == "Opened in 1932."


def test_sources_with_different_names_count_separately():
    sources = ["de/bridge.md", "en/history.md", "2021/report.md"]
    assert answer(BRIDGE, sources=sources) == "Opened in 1932."
    assert answer(BRIDGE, sources=["2021/report.md", "2022/report.md", "case-17"]) == "Opened in 1932."


def only_pivotal_units_change_the_answer(asked, texts, m, jitter, composer):
    question = AskedQuestion.of(asked)
    said = [statements(question, best_sentences(question, t, "", 2), 8) for t in texts]
    thresholds = Thresholds(m, jitter, SECRET, "scope")
    whole = Release.of(said, thresholds)
    for i in range(len(said)):
        less = Release.of([*said[:i], *said[i + 1 :]], thresholds)
        if composer(question, whole) != composer(question, less):
            assert whole.certificate(compose(question, whole.levels).words)["altered"] == 1
            exact = [item for item in said[i] if whole.levels.get(item) != less.levels.get(item)]
            assert exact  # a statement of this unit is exactly at a threshold


@given(UNITS, st.integers(2, 3), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_unit_changes_the_answer_only_at_a_threshold(units, m, jitter):
    only_pivotal_units_change_the_answer(ASKED, texts_of(units), m, jitter, lambda q, r: compose(q, r.levels))


def test_answer_by_counts_changes_without_a_threshold():
    """If the number of supporters selects the answer, every unit can change it."""

    def by_counts(question, found):
        return max(sorted(found.support), key=lambda item: found.support[item]), max(found.support.values())

    with pytest.raises(AssertionError):
        only_pivotal_units_change_the_answer(ASKED, texts_of([["amber"]] * 7), 3, 1, by_counts)


def test_composer_depends_on_released_statements_only():
    """Units with equal released statements give equal answers, independent of their other text."""
    question = AskedQuestion.of(QUESTION)
    levels = {Word("1932"): 0, Pair("opened", "1932"): 0}
    assert compose(question, levels) == compose(question, dict(reversed(levels.items())))


@pytest.mark.parametrize(
    ("asked", "stems", "names"),
    [
        ("How often may I work from home?", {"hom", "work"}, set()),
        ("I'm late, where do I go?", {"lat", "go"}, set()),
        ("Darf ich hier parken?", {"parken"}, set()),
        ("Wann können Sie die Schule öffnen?", {"schul", "öffnen"}, {"schul"}),
        ("When did World War I end?", {"end", "i", "war", "world"}, {"i", "war", "world"}),
        ("Is it open at 10:00?", {"open", "10:00"}, {"10:00"}),
    ],
)
def test_pronouns_are_not_names_and_times_are_single_tokens(asked, stems, names):
    question = AskedQuestion.of(asked)
    assert (question.stems, question.names) == (stems, names)


@pytest.mark.parametrize(("asked", "negation"), [("Can visitors park there?", "not"), ("Wann ist sie offen?", "nicht")])
def test_negation_alone_is_not_an_answer(asked, negation):
    question = AskedQuestion.of(asked)
    assert compose(question, {Word(negation): 0}).text == UNKNOWN
    assert compose(question, {Word(negation): 0, Word("sunday"): 0}).words == (negation, "sunday")


@pytest.mark.parametrize("asked", ["How long is the warranty?", "How many days of leave are paid?", "Since how much?"])
def test_question_about_an_amount_requires_an_amount(asked):
    question = AskedQuestion.of(asked)
    assert compose(question, {Word("circulation"): 0, Word("move"): 1}).text == UNKNOWN
    for amount in ("30", "two", "several", "unlimited", "no"):
        assert amount in compose(question, {Word(amount): 0, Word("move"): 0}).words


@pytest.mark.parametrize("asked", ["Wann ist sie offen?", "Quand le pont est-il ouvert ?", "When is it open?"])
def test_month_of_may_is_an_answer(asked):
    assert compose(AskedQuestion.of(asked), {Word("mai"): 0}).text == "Mai."


@given(UNITS)
@settings(max_examples=40, deadline=None)
def test_answer_does_not_depend_on_the_order_of_units(units):
    question = ASKED
    assert answer(texts_of(units), question=question) == answer(texts_of(units)[::-1], question=question)


@given(UNITS, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_unit_states_at_most_l_words(units, most):
    question = AskedQuestion.of(ASKED)
    for text in texts_of(units):
        said = statements(question, best_sentences(question, text, "", 2), most)
        assert len({item for item in said if isinstance(item, Word)}) <= most


@pytest.mark.parametrize("asked", [QUESTION, QUESTION.lower(), "did vesna ashgrove open the sydney bridge?"])
def test_statements_of_a_unit_do_not_depend_on_other_units(asked):
    """Statements and abstention do not depend on the other units."""
    quorum, hits = Quorum(jitter=1), retrieval(BRIDGE).hits
    question = AskedQuestion.of(asked)
    alone = [quorum.statements_of_unit(question, [hit]) for hit in hits]
    assert alone == [quorum.statements_of_unit(question, [hit]) for hit in reversed(hits)][::-1]


def test_unit_about_another_name_abstains(monkeypatch):
    """The unit shares two of three words with the question, but not the name."""
    question = "When was the mill of Kelford built?"
    other = [f"The mill of {place} was built in 1742 by the guild." for place in ("Ashby", "Barton", "Corby")]
    assert answer(other, question=question) == UNKNOWN
    assert "1742" in answer(
        [t.replace("of", f"of Kelford, a part of {i},") for i, t in enumerate(other)], question=question
    )
    asked = AskedQuestion.of(question)
    assert asked.coverage(asked.stems) == 1.0 and asked.coverage(frozenset()) == 0.0
    assert asked.coverage(asked.names) == 3 / 5 and asked.coverage(asked.stems - asked.names) == 2 / 5
    monkeypatch.setattr(Subject, "is_missing", lambda self, text: False)
    assert answer(other, question=question) == UNKNOWN
    monkeypatch.setattr("casemate.guard.defenses.quorum.keywords.NAME_WEIGHT", 1)
    assert "1742" in answer(other, question=question)


def test_unit_about_another_person_with_the_same_first_name_abstains():
    """Each unit contains half of the words of the question. Records of others must not determine the answer."""
    others = [
        f"{name} lives at {i} Mill Lane. She is a {job}."
        for i, (name, job) in enumerate(zip(SURNAMES, JOBS, strict=True))
    ]
    subject = AskedQuestion.of("Where does Vesna Ashgrove live?").subject
    assert subject.is_missing("Vesna Oakley lives here.") and not subject.is_missing("Here lives Ashgrove, Vesna.")
    assert answer(others, question="Where does Vesna Ashgrove live?") == UNKNOWN
    assert answer(others, question="Where does Vesna live?") == "Mill Lane."


FIRST_NAMES = ("vesna", "ann", "grace", "thandiwe", "mark", "will", "lucía")
LAST_NAMES = ("ashgrove", "brook", "lee", "vasquez-prieto", "o'hanlon", "wittelsbach", "long", "de la cruz", "klein")
WRITINGS = (
    "where does {first} {last} live?",
    "Where does {first} {last} live?",
    "WHERE DOES {first} {last} LIVE?",
    "Where Does {first} {last} Live?",
    "where does {first} k. {last} live?",
    "where does mr {first} {last} live?",
    "where does {last}, {first} live?",
    "what is {first} {last}'s address?",
    "Where does {first} a. {last} live?",
    "where does {first} {last} live at Acme?",
    "where does {first}/{last} live?",
    "where does {last};{first} live?",
    "where does {last} ({first}) live?",
    "where does {first}_{last} live?",
    "where does {first}\u200b{last} live?",
    "where does {first}.{last} live?",
    "wo wohnt {first} {last}?",
    "¿dónde vive {first} {last}?",
    "où habite {first} {last} ?",
    "dove abita {last}, {first}?",
    "onde mora {first} {last}?",
    "waar woont {first} {last}?",
    "где живёт {first} {last}?",
)
PERSONS = st.lists(
    st.tuples(st.sampled_from(FIRST_NAMES), st.sampled_from(LAST_NAMES)), min_size=2, max_size=9, unique=True
)


def named(writing, first, last):
    """Returns the question; if each word is capitalized, the names are capitalized too."""
    asked = writing.format(first=first, last=last)
    return asked.upper() if "DOES" in writing else asked.title().replace("'S", "'s") if "Does" in writing else asked


def words_without_name(writing):
    """Returns the words of a question without the name; a text with them is about its topic."""
    return re.sub(r"\{\w+\}|[^\w ]", " ", writing)


def check_records_of_others_do_not_answer(persons, writing):
    """Records of other persons must not determine the answer about one person."""
    (first, last), *others = persons
    texts = [
        f"{one.title()} {two.title()} lives at {i} Mill Lane. The address was checked by {JOBS[i % 5]} {i}. "
        + words_without_name(writing)
        for i, (one, two) in enumerate(others)
    ]
    question = named(writing, first, last)
    assert answer(texts, question=question) == UNKNOWN
    assert answer([*texts, f"{first.title()} {last.title()} lives at 9 Mill Lane."], question=question) == UNKNOWN


@pytest.mark.parametrize("space", ["  ", "\n", "\t", "\xa0", " \n "])
@pytest.mark.parametrize("writing", WRITINGS[:9])
def test_any_white_space_separates_the_words_of_a_name(writing, space):
    persons = [("vesna", "ashgrove"), *(("vesna", name) for name in LAST_NAMES[1:])]
    check_records_of_others_do_not_answer(persons, writing.replace(" ", space))


@given(PERSONS, st.sampled_from(WRITINGS))
@settings(max_examples=120, deadline=None)
def test_records_of_others_do_not_answer_in_any_case_language_or_spelling(persons, writing):
    check_records_of_others_do_not_answer(persons, writing)


@pytest.mark.parametrize("writing", WRITINGS)
def test_records_of_others_answer_without_the_subject_check(writing, monkeypatch):
    monkeypatch.setattr(Subject, "is_missing", lambda self, text: False)
    with pytest.raises(AssertionError):
        check_records_of_others_do_not_answer(
            [("vesna", "ashgrove"), *(("vesna", name) for name in LAST_NAMES[1:])], writing
        )


@pytest.mark.parametrize("writing", WRITINGS)
def test_records_about_the_person_count_in_any_spelling_of_the_question(writing):
    for last in LAST_NAMES:
        text = f"Today Vesna {last.title()} lives at 7 Mill Lane. {words_without_name(writing)}"
        assert not AskedQuestion.of(named(writing, "vesna", last)).subject.is_missing(text)


@pytest.mark.parametrize("writing", WRITINGS[:9])
def test_releases_answers_about_the_person_in_any_letter_case(writing):
    texts = [f"{start} Vesna Ashgrove lives at 7 Mill Lane, her address." for start in ("Note:", "Today", "Again")]
    assert "Mill Lane" in answer(texts, question=named(writing, "vesna", "ashgrove"))


SPELLINGS = ("K-4711-82", "k-4711-82", "K 4711 82", "k 4711 82", "K.4711.82", "K471182", "k/4711/82", "K_4711_82")


@pytest.mark.parametrize("asked", SPELLINGS)
def test_code_matches_in_any_spelling_and_no_other_code_matches(asked):
    subject = AskedQuestion.of(f"Which card has the customer {asked}?").subject
    for written in SPELLINGS:
        assert not subject.is_missing(f"The customer {written} has a card.")
        assert subject.is_missing(f"The customer {written}1 has a card.")
        assert subject.is_missing(f"The customer {written.replace('82', '83')} has a card.")


@pytest.mark.parametrize(
    ("number", "other"),
    [
        ("4711", "4712"),
        ("1,200", "200"),
        ("+49 170 1234567", "170 1234567"),
        ("RE 2024/7", "2024"),
        ("C.7286.60", "7286.60"),
        ("47119 ppm", "47118 ppm"),
    ],
)
def test_number_of_the_question_is_required(number, other):
    subject = AskedQuestion.of(f"Who is the customer with the number {number}?").subject
    assert not subject.is_missing(f"Ann is a customer, number {number}.")
    assert subject.is_missing(f"Ann is a customer, number {other}.")


def test_word_of_one_letter_is_not_part_of_a_code():
    assert not AskedQuestion.of("Is a 47119 for sale?").subject.is_missing("For sale: number 47119.")
    assert AskedQuestion.of("Is k 47119 for sale?").subject.is_missing("For sale: number 47119.")


def test_question_with_too_many_codes_has_no_answer():
    codes = [f"K{number}" for number in range(100, 101 + MAX_REQUIRED)]
    assert not AskedQuestion.of(f"Who has {', '.join(codes[1:])}?").subject.is_missing(" ".join(codes))
    assert AskedQuestion.of(f"Who has {', '.join(codes)}?").subject.is_missing(" ".join(codes))


def test_too_long_code_matches_no_unit():
    subject = AskedQuestion.of(f"Who has {'0 ' * 300}1?").subject
    assert subject.codes == (re.compile(r"(?!)"),)
    assert subject.is_missing("0 " * 300 + "1")


def test_mail_address_of_the_question_is_required():
    subject = AskedQuestion.of("Which card does mark.bell@post.com hold?").subject
    assert not subject.is_missing("Contact: Mark.Bell@post.com.")
    assert subject.is_missing("Mark Bell has no address. Another one: ann.bell@post.com.")


@pytest.mark.parametrize(
    ("question", "same", "other"),
    [
        ("Is it 63?", "63|at 63.|63mg|063|x:63,|Sixty-three", "163|630|6.63|63.5|B63|1063|10063|63:10|three"),
        ("Is it 6.3 bar?", "6.3|6,3 bar|06.3|6.3bar", "16.3|6.35|63|5.6.3|106.3"),
        ("What opened in 1932?", "in 1932|the 1932s|1932-05-01", "1931|19321|A1932|21932"),
        ("What lasted from 2004-2005?", "from 2004 to 2005", "2004|2005"),
        ("What was at 07:05?", "7:05|07.05|2024-01-01T07:05:33", "17:05|7:051|7:5|07:50"),
        ("What came on 7 May 2020?", "2020-05-07|7 May 2020", "2020-05-17|2020|7 May 2021"),
        ("Is it 7?", "7th|7mg|seven", "7a|7½|7²|7'000|7 000|7·5|1.07|twenty-seven|seven hundred|hundred seven"),
        ("Is it 20?", "20|twenty", "twenty-one|twenty thousand"),
        ("Was it at 7:05?", "07:05:10", "1:07:05"),
        ("Was 300 paid?", "300|300 EUR", "1,300|1.300|300,000|300.50|3.00|3,00|300 000|300½"),
        ("Was 30000 paid?", "30000|30,000|30 000", "300.00|130,000|30,000,000|30,000.50"),
    ],
)
def test_each_number_of_a_question_is_required_as_a_whole(question, same, other):
    subject = AskedQuestion.of(question).subject
    assert not any(subject.is_missing(f"Note: {number}.") for number in same.split("|"))
    assert all(subject.is_missing(f"Note: {number}.") for number in other.split("|"))


@pytest.mark.parametrize("question", ["What did Ann Lee sell in 1977?", "What did K-4711 cost in 1977?"])
def test_year_is_not_required_if_the_question_has_a_name_or_code(question):
    subject = AskedQuestion.of(question).subject
    assert not subject.is_missing("Ann Lee, K-4711.")
    assert all(subject.is_missing(text) for text in ("1977: K-4712.", "1977: Ann Long."))


NUMBERS = st.one_of(
    st.integers(1, 9999).map(str),
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map("{0[0]}.{0[1]}".format),
    st.tuples(st.integers(0, 23), st.integers(10, 59)).map("{0[0]}:{0[1]}".format),
)
MEASURED = (
    "Who checked the yard pump with a pressure of {} bar?",
    "list all pumps of the yard: pressure {} bar, checked",
)


def check_records_with_other_numbers_do_not_answer(numbers, question):
    """The records share all words except one number; neither one match nor the others may give the answer."""
    records = [f"{JOBS[i % 5]}: checked yard pump on Monday, pressure {n} bar" for i, n in enumerate(numbers)]
    asked = question.format(numbers[0])
    assert answer(records[1:], question=asked) == UNKNOWN
    assert answer(records, question=asked) == UNKNOWN


@given(
    st.lists(NUMBERS, min_size=4, max_size=9, unique_by=lambda n: re.sub(r"^0|\D", "", n)),  # 1015 may be 10-15
    st.sampled_from(MEASURED),
)
@settings(max_examples=30, deadline=None)
def test_records_with_other_numbers_do_not_answer(numbers, question):
    check_records_with_other_numbers_do_not_answer(numbers, question)


@pytest.mark.parametrize(
    "numbers", [("63", "7", "12", "4"), ("6.3", "7.1", "8.8", "9.5"), ("7:15", "8:15", "9:15", "5:15")]
)
def test_records_with_other_numbers_answer_without_the_subject_check(numbers, monkeypatch):
    monkeypatch.setattr(Subject, "is_missing", lambda self, text: False)
    with pytest.raises(AssertionError):
        check_records_with_other_numbers_do_not_answer(numbers, MEASURED[0])


def test_words_joined_by_underscores_are_one_name():
    subject = AskedQuestion.of("Which timeout has load_invoice?").subject
    assert not subject.is_missing("def load_invoice(timeout=3)")
    assert subject.is_missing("def load_index(timeout=3) and save_invoice")


@pytest.mark.parametrize("question", ["where does vesna work?", "Where Does Vesna Work?", "what does vesna earn?"])
def test_ordinary_word_is_not_required(question, monkeypatch):
    texts = [f"{place} Vesna is employed as a welder." for place in ("In March", "Near Corby", "Since June")]
    assert "welder" in answer(texts, question=question).lower()
    monkeypatch.setattr("casemate.guard.defenses.quorum.subjects.word_kind", lambda word: WordKind.UNLISTED)
    assert answer(texts, question=question) == UNKNOWN


@pytest.mark.parametrize(
    ("question", "words", "pairs"),
    [
        ("where does vesna ashgrove live?", "vesna ashgrove", []),
        ("where does grace long live?", "", [("grace", "long")]),
        ("how long will vesna stay?", "vesna", [("will", "vesna")]),
        ("when will frank arrive?", "", []),
        ("Who is Grace? Will she come?", "", []),  # pairs do not cross sentences
        ("where does ves\xadna\u200bashgrove live?", "vesna ashgrove", []),
        ("where does ann de la cruz live?", "ann cruz", []),
        ("What is Ann Lee's salary?", "ann lee", []),
        ("Did Ann Lee work for the New York Times?", "ann lee new york times", []),
        ("what did i ask vesna on 7 may 2020?", "vesna", []),
        ("Wie lang ist die Brücke?", "brücke", []),
        ("gdzie mieszka zofia wójcik?", "mieszka zofia wójcik", []),  # the language has no list of ordinary words
        ("Gdzie mieszka Zofia Wójcik?", "zofia wójcik", []),
        (
            "Miejscowość larno ilu ma mieszkańców?",
            "miejscowość larno mieszkańców",
            [],
        ),  # an initial capital does not mark a name
        ("أين تسكن فاطمة حسن", "تسكن فاطمة حسن", []),
        ("ما لون الجسر في قرية دونوفا؟", "لون جسر قرية دونوفا", []),  # the article is removed
        ("गाँव दुनोवा कहाँ है?", "गाँव दुनोवा", []),
        ("where does mara or فاطمة live?", "mara فاطمة", []),
    ],
)
def test_required_words_and_pairs_of_a_question(question, words, pairs):
    subject = AskedQuestion.of(question).subject
    assert subject.words == frozenset(map(stem, words.split()))
    assert list(subject.pairs) == [(stem(one), stem(other)) for one, other in pairs]


@pytest.mark.parametrize("question", ["gdzie mieszka zofia wójcik?", "أين تسكن فاطمة حسن", "北桥 通行费 是多少"])
def test_questions_without_marked_names_require_a_higher_coverage(question):
    assert AskedQuestion.of(question).least == UNMARKED_COVERAGE


def test_capitals_identify_other_persons_in_a_language_without_a_word_list():
    asked = AskedQuestion.of("w jakim dziale Akwizycji pracuje zofia wójcik?")
    assert asked.subject.is_missing("Zofia Lis pracuje w dziale Akwizycji.")
    assert not asked.subject.is_missing("Zofia Wójcik pracuje w dziale Akwizycji.")


TOWNS = {
    "Polish": (
        "ilu mieszkańców ma miejscowość {}?",
        "Dziś miejscowość {} ma {} mieszkańców.",
        ("Larno", "Bremka", "Dunova"),
    ),
    "Greek": ("πόσους κατοίκους έχει το χωριό {};", "Το χωριό {} έχει {} κατοίκους.", ("Λάρνο", "Πομάρα", "Κέλμαρ")),
    "Arabic": ("كم عدد سكان قرية {}؟", "عدد سكان قرية {} هو {}.", ("لارنو", "دونوفا", "سيرتل")),
    "Hindi": ("{} गाँव की जनसंख्या कितनी है?", "{} गाँव की जनसंख्या {} है।", ("लार्नो", "दुनोवा", "पोमारा")),
    "Tamil": ("{} கிராமத்தின் மக்கள்தொகை", "{} கிராமத்தின் மக்கள்தொகை {} ஆகும்.", ("லார்னோ", "துனோவா", "பொமாரா")),
}


@pytest.mark.parametrize(
    ("language", "words"), [("ar", "لا ليس لم"), ("fa", "نه نیست"), ("he", "לא אין"), ("hi", "नहीं न")]
)
def test_negations_are_not_function_words(language, words):
    assert function_words(frozenset({language})).isdisjoint(words.split())


ASIDES = (
    "Report 11 was printed in spring.",
    "A cyclist photographed every mill.",
    "Nobody repaired this clock.",
    "Geese crossed our meadow at dawn.",
    "Two barrels leaked overnight.",
    "Bakers prefer rye.",
    "Her uncle collects maps.",
)


@pytest.mark.parametrize("language", TOWNS)
def test_units_about_other_names_abstain_without_marked_names(language, monkeypatch):
    """The question is in lower case or in a script without case; one or three units contain its name."""
    question, statement, (asked, *others) = TOWNS[language]
    question = question.format(asked.lower())

    def answer_of(count):
        stated = [(asked, 815)] * count + [(others[0], 450), (others[1], 450), (others[0], 620), (others[1], 620)]
        return answer(
            [f"{aside} {statement.format(*one)}" for aside, one in zip(ASIDES, stated, strict=False)], question=question
        )

    assert answer_of(1) == UNKNOWN and "815" in answer_of(3)
    assert AskedQuestion.of(question).subject.is_missing(statement.format(others[0], 450))
    monkeypatch.setattr("casemate.guard.defenses.quorum.subjects._unlisted", lambda words: set())
    assert not AskedQuestion.of(question).subject.is_missing(statement.format(others[0], 450))


@pytest.mark.parametrize(
    ("question", "other"),
    [("คลินิกบางแก้วเปิดกี่โมง", "คลินิกดอนทรายเปิดกี่โมง"), ("北河图书馆有多少本书", "南山图书馆有多少本书")],
)
def test_detects_a_missing_name_in_scripts_without_spaces(question, other, monkeypatch):
    subject = AskedQuestion.of(question).subject
    assert subject.is_missing(other) and not subject.is_missing(question)
    monkeypatch.setattr("casemate.guard.defenses.quorum.subjects.MAX_MISSING", 9)
    assert not subject.is_missing(other)


@pytest.mark.parametrize("question", ["Who is Will Lee?", "Is Ann in IT?", "What is Vitamin A?", "Describe Will Lee."])
def test_name_with_a_function_word_is_not_title_case(question):
    assert AskedQuestion.of(question).names


def test_word_lists_distinguish_names_from_ordinary_words():
    english, others, names = _listed()
    assert len(english) > 4000 and len(others) > 3000 and len(names) > 400
    ordinary = "salary salaries stopped slowly live lives reorganization kundennummer wohnte trabajaba habitait живёт"
    assert all(word_kind(word) is WordKind.ORDINARY for word in ordinary.split())
    assert all(word_kind(word) is WordKind.EITHER for word in names)
    people = "ashgrove cruz lee klein maria tim pierre fabrice denis costa villa moran julien marta"
    assert not any(word_kind(word) is WordKind.ORDINARY for word in (*FIRST_NAMES, *people.split()))


@pytest.mark.parametrize("question", ["When Did the Old Bridge Open?", "Where Is The Bridge?"])
def test_words_of_a_question_in_title_case_are_not_names(question):
    assert not AskedQuestion.of(question).names


@pytest.mark.parametrize("question", ["What is Ann Lee's salary?", "What is the salary of Ann Lee?"])
@pytest.mark.parametrize(
    "text", ["The salary of Ann Lee is 900.", "Ann Lee's salary is 900.", "Ann Lee’s salary is 900."]
)
def test_possessive_form_matches_the_name(question, text):
    asked, stems = AskedQuestion.of(question), frozenset().union(*(s.stems for s in read_text(text)))
    assert asked.coverage(stems) >= asked.least and asked.has_names(stems)
    assert asked.coverage(asked.possible_stems(text)) >= asked.least
    assert not asked.subject.is_missing(text)


def test_words_in_the_title_of_a_unit_count():
    asked, text, title = AskedQuestion.of(QUESTION), "Opened in 1932, with eight lanes.", "The Sydney bridge"
    assert best_sentences(asked, text, title, 2) and excerpt(asked, Document("u", text, title), 1)
    assert not best_sentences(asked, text, "", 2) and not excerpt(asked, Document("u", text), 1)


def test_title_does_not_select_a_sentence_far_from_the_words_of_the_question():
    text = "The Sydney bridge was opened in 1932. Cats sleep. Boats carry ropes."
    assert len(best_sentences(AskedQuestion.of(QUESTION), text, "Minutes of a meeting", 3)) == 2


def test_short_question_requires_no_listed_word():
    assert AskedQuestion.of("Zorblat quix").subject.known
    assert not AskedQuestion.of("Zorblat quix frumble").subject.known


# Thresholds


def test_jitter_is_secret_stable_and_uniform():
    items = [Word(f"word{i}") for i in range(3000)]
    one, other = Thresholds(2, 3, "k" * 16, "p1"), Thresholds(2, 3, "q" * 16, "p1")
    counts = Counter(map(one.of, items))
    assert set(counts) == {2, 3, 4} and min(counts.values()) > 900
    assert [one.of(i) for i in items] == [Thresholds(2, 3, "k" * 16, "p1").of(i) for i in items]
    agree = sum(one.of(i) == other.of(i) for i in items)
    assert 850 < agree < 1150  # independent under another key
    assert 850 < sum(one.of(i) == replace(one, scope="p2").of(i) for i in items) < 1150


def test_thresholds_of_a_tenant_change_only_with_the_period(monkeypatch):
    quorum, scopes = Quorum(secret=SECRET, period_days=30), []
    for day in (0, 1, 29, 30):
        monkeypatch.setattr("time.time", lambda day=day: (30_000 + day) * 86_400.0)
        scopes.append(quorum._thresholds("clinic"))
    assert scopes[0] == scopes[1] == scopes[2] != scopes[3]
    assert quorum._thresholds("other") != scopes[3] == quorum._thresholds("clinic")


def test_certificate_counts_units():
    thresholds = Thresholds(2)
    said = [{Word("amber")}] * 5 + [{Word("brook")}]
    found = Release.of(said, thresholds)
    certificate = found.certificate(("amber",))
    for gone in range(6):  # naive: remove supporters until the word is not released
        if Word("amber") not in Release.of(said[gone:], thresholds).levels:
            break
    assert certificate["lost"] == gone == 4
    assert certificate["added"] == 1  # brook needs one more unit
    assert certificate["altered"] == 1


def test_requests_more_hits_until_enough_units_are_found():
    found_hits = replace(retrieval(BRIDGE), exhausted=False)
    quorum = Quorum(jitter=1)
    assert asyncio.run(quorum.on_retrieve(Query(QUESTION), found_hits)).more
    low = replace(found_hits, hits=(*found_hits.hits, Hit(Document("low", "x"), 0.1)))
    assert not asyncio.run(quorum.on_retrieve(Query(QUESTION), low)).more


@pytest.mark.parametrize(("sources", "found"), [("abcr", 3), ("aaaaaaaar", 1)])
def test_enough_units_or_hits_request_no_more(sources, found, monkeypatch):
    """Readable hits fill the context. Many chunks of one source are one unit."""
    texts = [f"The Sydney bridge has part {i}." for i in range(len(sources))]
    hidden = [f"d{i}" for i in range(len(sources) - 1)]
    found_hits = replace(retrieval(texts, hidden, list(sources)), exhausted=False)

    def requests_more(units):
        return asyncio.run(Quorum(jitter=1, units=units).on_retrieve(Query(QUESTION, k=1), found_hits)).more

    assert not requests_more(found) and requests_more(found + 1)
    monkeypatch.setattr("casemate.guard.defenses.quorum.MAX_HITS", len(sources))
    assert not requests_more(found + 1)


@dataclass(eq=False)
class RecordingQuorum(Quorum):
    """Records what the units state."""

    async def _statements_of(self, query, question, units):
        said, costs = await super()._statements_of(query, question, units)
        self.said = said
        return said, costs


def supports(hits, units):
    """Number of units of each statement about the hits, which are fetched in steps as by the guard.

    Two readable hits fill the context.
    """
    quorum, fetched = RecordingQuorum(support=2, jitter=1, units=units), 5
    ids, public = frozenset(hit.document.id for hit in hits), retrieval([""] * 2, (), score=0.9)
    found = (*(Hit(replace(hit.document, id=f"public {hit.document.id}"), hit.score) for hit in public.hits), *hits)
    while True:
        part = replace(public, hits=found[:fetched], exhausted=fetched > len(found), unreadable=ids)
        if not asyncio.run(quorum.on_retrieve(Query(ASKED, k=2), part)).more:
            return Counter(item for unit in quorum.said for item in frozenset(unit))
        fetched *= 2


def check_a_unit_changes_each_support_by_one_at_most(rows, units):
    texts = [
        f"The bridge {' '.join(words)} near {' '.join(f'own{i}x{j}' for j in range(12))}."
        for i, (_, words) in enumerate(rows)
    ]
    hits = retrieval(texts, sources=[f"s{source}" for source, _ in rows]).hits
    whole = supports(hits, units)
    for gone in {hit.document.source for hit in hits}:
        less = supports(tuple(hit for hit in hits if hit.document.source != gone), units)
        assert max((abs(whole[item] - less[item]) for item in {*whole, *less}), default=0) <= 1


CHUNKS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.sampled_from(VOCABULARY[:4]), min_size=1, max_size=2, unique=True)),
    min_size=1,
    max_size=14,
)
DISPLACING = [(0, ["amber"]), (1, ["brook"]), (2, ["brook"]), (1, ["cedar"]), (2, ["cedar"]), (3, ["delta"])]


@given(CHUNKS, st.integers(1, 5))
@example(DISPLACING, 3)
@settings(max_examples=60, deadline=None)
def test_a_unit_decides_for_no_other_unit_which_chunks_it_contributes(rows, units):
    check_a_unit_changes_each_support_by_one_at_most(rows, units)


def test_a_unit_decides_for_others_if_all_its_chunks_contribute(monkeypatch):
    monkeypatch.setattr(Quorum, "_stated_by", lambda quorum, unit: whole(unit))
    with pytest.raises(AssertionError):
        check_a_unit_changes_each_support_by_one_at_most(DISPLACING, 3)


def test_does_not_use_chunks_below_the_floor():
    assert answer(BRIDGE, score=0.2) == UNKNOWN
    evidence = asyncio.run(Quorum(jitter=1).on_retrieve(Query(QUESTION), retrieval(BRIDGE, score=0.2))).verdict.evidence
    assert (evidence["best"], evidence["floor"]) == (0.2, 0.3)
    assert "best" not in asyncio.run(Quorum(jitter=1).on_retrieve(Query(QUESTION), retrieval(BRIDGE))).verdict.evidence


def test_option_units_above_the_size_of_the_index_is_valid():
    assert answer(BRIDGE, quorum=Quorum(jitter=1, units=10_000)) == "Opened in 1932."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "secret has 0 characters"),
        ({"secret": Secret("short")}, "secret has 5 characters"),
        ({"support": 1}, "must be at least 2"),
        ({"jitter": 0}, "jitter=0"),
        ({"jitter": 1, "units": 0}, "units=0"),
        ({"jitter": 1, "writer_s": 0}, "writer_s=0"),
        ({"jitter": 1, "floor": 2.0}, "floor=2.0"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Quorum(**options)


# Text


def test_keywords_with_more_support_come_first():
    levels = {Word("zebra"): 1, Word("apple"): 0}
    assert compose(AskedQuestion.of("What is in the box?"), levels).words == ("zebra", "apple")
    levels = {Word("amber"): 2, Word("brook"): 0, Word("cedar"): 0}
    levels |= {Pair("amber", "brook"): 0, Pair("amber", "cedar"): 1}
    assert compose(AskedQuestion.of("What is in the box?"), levels).words == ("amber", "cedar", "brook")


def test_leading_keywords_of_enough_units_come_first():
    """The keywords have equal support; in alphabetical order the leading one would be the last."""
    question = AskedQuestion.of("What does the mill sell?")
    words = [Word(lemma) for lemma in ("amber", "brook", "cedar", "delta", "ember", "fjord", "zinc")]
    units = [frozenset([*words, Lead("zinc")]), frozenset([*words, Lead("zinc"), Lead("amber")])]
    assert compose(question, Release.of(units, Thresholds(2)).levels).text == "Zinc; amber; brook; cedar; delta; ember."
    assert compose(question, Release.of([units[0], frozenset(words)], Thresholds(2)).levels).words[0] == "amber"


def test_unit_has_at_most_two_leads_and_each_is_a_keyword():
    said = statements(AskedQuestion.of(QUESTION), [Sentence(s) for s in BRIDGE[0].split(". ")], 8)
    leads = {item.lemma for item in said if isinstance(item, Lead)}
    assert len(leads) == 2 and leads <= {item.lemma for item in said if isinstance(item, Word)} and "1932" in leads


WRITTEN = st.lists(
    st.sampled_from(
        "I die Sie The the Not no New York bridge Bridges opened 1,932 2.5% B12 it's U.S. and, (of) — ’s _x".split()
    ),
    max_size=9,
).map(" ".join)


def check_stems_equal_those_of_tokens(text, question):
    sentence, asked = Sentence(text), AskedQuestion.of(question)
    assert sentence.stems == frozenset().union(*(t.stems for t in sentence.tokens))
    assert (sentence.stems <= asked.stems) == all(asked.repeats(t) for t in sentence.tokens)


@given(WRITTEN, WRITTEN)
def test_stems_of_a_sentence_equal_those_of_its_tokens(text, question):
    """Sentences are compared by stems before parsing, so both must give the same words."""
    check_stems_equal_those_of_tokens(text, question)


def test_stem_check_fails_without_capitalized_function_words(monkeypatch):
    monkeypatch.setattr(Sentence, "stems", property(lambda sentence: content_words(sentence.text)))
    with pytest.raises(AssertionError):
        check_stems_equal_those_of_tokens("He saw The Who.", "Who saw it?")


# Comparison with naive implementations of the definitions


def naive_tokens(text, known):
    """Returns tuples of lemma, written form, function words before, punctuation before, stems, named."""
    tokens, before, run, starts, breaks, end = [], [], [], False, False, 0
    for position, match in enumerate(TOKEN.finditer(text)):
        written, between, end = match[0], text[end : match.start()], match.end()
        function = written.lower() in known or written.replace("’", "'") in ("I'm", "I've", "I'll", "I'd")
        capital = written[0].isupper() and not (position == 0 and function)
        pronoun = function and written[:1] == "I" and written[1:2] in ("", "'", "’")
        pronoun = pronoun or (function and written in ("Sie", "Ihnen", "Ihr", "Ihre", "Ihrem", "Ihren", "Ihrer"))
        if run and capital and between == " ":
            run.append(written)
            continue
        if run:
            tokens.append((run, before, breaks, starts))
            run, before, breaks = [], [], False
        breaks = breaks or bool(between.strip(" '\"“”‘’"))
        if capital and not pronoun:
            run, starts = [written], position == 0
        elif function:
            before.append(written.lower())
        else:
            tokens.append(([written], before, breaks, True))
            before, breaks = [], False
    tokens += [(run, before, breaks, starts)] * bool(run)
    return [
        (
            " ".join([*(w.lower() for w in run[:-1]), lemma(run[-1])]),
            " ".join(run),
            " ".join(before),
            breaks,
            frozenset(stem(w.lower()) for w in run),
            not starts or len(run) > 1 or run[0][0].isdigit() or any(c.isupper() for c in run[0][1:]),
        )
        for run, before, breaks, starts in tokens
    ]


def naive_keywords(question, chosen, most):
    ranked = {}
    for row, sentence in enumerate(chosen):
        expected = question.expects(sentence.text)
        anchors = [i for i, t in enumerate(sentence.tokens) if question.repeats(t)]
        for i, token in enumerate(sentence.tokens):
            if not question.repeats(token) and not question.contains(token.lemma):
                near = max((1.0 / abs(i - a) for a in anchors), default=0.0)
                typed = not expected.isdisjoint(w.lower() for w in token.written.split())
                key = (-(3.0 * typed + 1.0 * token.named + near), row, i)
                ranked[token.lemma] = min(key, ranked.get(token.lemma, key))
    return sorted(ranked, key=lambda name: ranked[name])[:most]


def naive_certificate(release):
    """Returns the number of units until another word is released, and until any change."""
    distances = {}
    for item, count in release.support.items():
        levels = {n: (n // release.thresholds.of(item)).bit_length() for n in range(1, 3 * count + 90)}
        distances[item] = min(abs(n - count) for n, level in levels.items() if level != levels[count])
    added = [
        release.thresholds.of(i) - n
        for i, n in release.support.items()
        if isinstance(i, Word) and i not in release.levels
    ]
    return tuple(min([*found, release.thresholds.support]) for found in (added, distances.values()))


HOSTILE_TEXTS = st.one_of(
    st.text("aAbBsSeE 01.,'’-_*|`#>\\\n!?:%ΣςσİıK—", max_size=60),
    st.lists(
        st.sampled_from(
            "Die der qu'il I Sie The no New York bri*dge* Bridges opened 1,932 2.5% B12 it's ΟΔΟΣ İs Who | > in_May"
            " May. [bri](a.b)dge <br> bri\\_dge bri\\*dge\\* 9\\. \\#1"
            " [New](x) [York http://a.b/bridge </b>opened".split()
        ),
        max_size=20,
    ).map(" ".join),
)


@settings(max_examples=150, deadline=None)
@example("The bri*dge* opened.", "Which bridge opened?", 2, 2)
@given(HOSTILE_TEXTS, HOSTILE_TEXTS, st.integers(1, 4), st.integers(1, 40))
def test_statements_and_certificates_equal_the_naive_definitions(text, asked, m, jitter):
    question, read = AskedQuestion.of(asked), read_text(text)
    for sentence in read:
        assert [tuple(token) for token in sentence.tokens] == naive_tokens(sentence.text, sentence.function_words)
    said = statements(question, read, 5)
    assert {item.lemma for item in said if isinstance(item, Word)} == set(naive_keywords(question, read, 5))
    stems = frozenset().union(*(sentence.stems for sentence in read))
    assert question.stems & (stems | _heading(text)) <= question.possible_stems(f"{text}\n{text}")
    units = [said, said, statements(question, read[:1], 3), statements(question, read[-1:], 2)]
    release = Release.of(units, Thresholds(m, jitter, "secret"))
    found = release.certificate(())
    assert (found["added"], found["altered"]) == naive_certificate(release)


@settings(max_examples=60, deadline=None)
@example([11, 15, 19], 10, 1)
@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 12), st.integers(1, 4))
def test_certificates_equal_the_naive_definition_for_any_counts(counts, m, jitter):
    units = [{Word(f"word{i}") for i, count in enumerate(counts) if row < count} for row in range(40)]
    release = Release.of(units, Thresholds(m, jitter, "secret"))
    found = release.certificate(())
    assert (found["lost"], found["added"], found["altered"]) == (0, *naive_certificate(release))


def test_parts_of_addresses_and_tags_are_not_statements():
    text = (
        "The bridge opened in [May](https://a.example/city/harbor-news). <span class='big'>The toll</span> of the "
        "bridge is 3 euros, see http://a.example/toll-office?page=12."
    )
    question = AskedQuestion.of("When did the bridge open, and what is its toll?")
    said = statements(question, read_text(text), 40)
    found = {item.lemma for item in said if isinstance(item, Word)}
    assert {"may", "3"} <= found
    assert found.isdisjoint({"http", "https", "harbor-new", "a.example", "toll-office", "12", "span", "class", "big"})


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("Children may not swim at https://pool.example/x. Dogs swim on Mondays.", ("swim", "dog")),
        ("Ask Ann https://a.example/x Ben about pools.", ("ann", "ben")),
        ("Give 5 mg if weight <b 40 kg, do not give if age > 80.", ("weight", "80")),
        ("<li>Dogs are allowed</li><li>No cats</li>", ("allowed", "no")),
        ("看https://a.example/x and www.b.example/y", ("https", "a.example")),
    ],
)
def test_does_not_join_words_around_addresses_and_tags(text, pair):
    said = statements(AskedQuestion.of("What is known?"), read_text(text), 40)
    words = {item.lemma for item in said if isinstance(item, Word)}
    assert Pair(*pair) not in said and " ".join(pair) not in words and not words & {"https", "www.b.example"}


def test_keeps_negations_near_comparison_signs():
    said = statements(
        AskedQuestion.of("What?"), read_text("Give 5 mg if weight <b 40 kg, do not give if age > 80."), 40
    )
    assert Word("not") in said


def test_keeps_names_with_inner_tags_and_chinese_sentences_after_an_address():
    assert [s.text for s in read_text("H<sub>2</sub>O is wet.")] == ["H2O is wet."]
    assert "学生免费。" in [s.text for s in read_text("详见 https://a.example/x。收费是三欧元。学生免费。")]
    assert [s.text for s in read_text("<td>Ann</td><td>Ben</td>")] == ["Ann", "Ben"]


def test_possible_stems_bound_which_units_are_read(monkeypatch):
    """Letters of the question inside other words do not count as its words."""
    assert best_sentences(AskedQuestion.of("Art in car parks?"), "The party carried sparklers.", "", 2) == ()
    monkeypatch.setattr(AskedQuestion, "possible_stems", lambda question, text: frozenset())
    assert best_sentences(AskedQuestion.of(QUESTION), BRIDGE[0], "", 2) == ()  # only the bound excludes it


IN_OTHER_LANGUAGES = {
    "de": ("Wann wurde die Brücke in Sydney eröffnet?", "Die Brücke in Sydney wurde im Jahr 1932 von {} eröffnet."),
    "fr": ("Quand le pont de Sydney a-t-il ouvert ?", "Le pont de Sydney a ouvert en 1932 dans l’année de {}."),
    "es": ("¿Cuándo se abrió el puente de Sydney?", "El puente de Sydney se abrió en 1932 por la gente de {}."),
    "it": ("Quando fu aperto il ponte di Sydney?", "Il ponte di Sydney fu aperto nel 1932 dall’ufficio di {}."),
    "pt": ("Quando foi aberta a ponte de Sydney?", "A ponte de Sydney foi aberta em 1932 pelo pessoal de {}."),
    "nl": ("Wanneer is de brug in Sydney geopend?", "De brug in Sydney is in het jaar 1932 door {} geopend."),
}


@pytest.mark.parametrize("language", IN_OTHER_LANGUAGES)
def test_function_words_of_other_languages_are_not_statements(language):
    question, text = IN_OTHER_LANGUAGES[language]
    texts = [text.format(" ".join(VOCABULARY[i : i + 3]).title()) for i in (0, 3, 6)]
    outcome = ask(texts, question=question)
    assert "1932" in text_of(outcome)
    assert languages_of(texts[0]) & languages_of(question) >= {language}
    assert not set(outcome.verdict.evidence["support"]) - {3}
    found = Release.of(
        [Quorum(jitter=1).statements_of_unit(AskedQuestion.of(question), [h]) for h in retrieval(texts).hits],
        Thresholds(2),
    )
    words = {item.lemma for item in found.levels if isinstance(item, Word)}
    assert "1932" in words and words.isdisjoint(function_words(frozenset({language})))


def test_function_words_are_statements_with_the_english_list_only(monkeypatch):
    monkeypatch.setattr("casemate.guard.defenses.quorum.keywords.function_words", lambda languages: ENGLISH)
    read_text.cache_clear()
    with pytest.raises(AssertionError):
        test_function_words_of_other_languages_are_not_statements("de")
    read_text.cache_clear()


def test_negations_of_other_languages_are_statements():
    for text, negation in (
        ("Der Zoll wird nicht erhoben, wenn es regnet.", "nicht"),
        ("Le pont n’est pas ouvert.", "pas"),
    ):
        (sentence,) = read_text(text)
        assert negation in {token.lemma for token in sentence.tokens}


@given(
    st.sampled_from(("{}. ", "{}) ", "({}) ", "- {}. ", "> {}) ", "## {}. ")),
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=6),
)
def test_numbers_of_list_items_are_not_statements(mark, items):
    text = "Steps:\n" + "\n".join(f"{mark.format(i)}{item} for 45 minutes" for i, item in enumerate(items, 2))
    said = {token.lemma for sentence in read_text(text) for token in sentence.tokens}
    assert said == {"step", "45", "minute", *items}


def test_keeps_numbers_of_the_text():
    text = "It opened in\n1932. The fee is\n2.5 marks (3 for lorries).\n\n503 meters long"
    said = {token.lemma for sentence in read_text(text) for token in sentence.tokens}
    assert {"1932", "2.5", "3", "503"} <= said


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        ("The key tls\\_cert opens the bridge on 9\\. July.", "The key tls_cert opens the bridge on 9. July."),
        ("\\*Late\\* payers of the bridge pay 5 \\% more\\!", "Late payers of the bridge pay 5 % more!"),
    ],
)
def test_removes_markdown_escapes(escaped, plain):
    def said(text):
        return [token for sentence in read_text(text) for token in sentence.tokens]

    assert said(escaped) == said(plain) and said(plain)
    question = AskedQuestion.of(f"Who knows it? {plain}")
    assert AskedQuestion.of(f"Who knows it? {escaped}").stems == question.stems
    assert question.possible_stems(escaped) == question.possible_stems(plain)


def test_escaped_number_is_not_the_number_of_a_list_item():
    for mark, kept in (("9\\.", True), ("9.", False)):
        said = {token.lemma for sentence in read_text(f"Fees:\n\n{mark} July") for token in sentence.tokens}
        assert ("9" in said) == kept and "july" in said


ACCENTED = (
    "für über é où déjà été Müller Genève prêt ÉTÉ açaí não I’été d’Éva Ω´ ệ Å ñ 9. Brücke l’arrêt où? _é_ ./é [é](x)"
)


def check_statements_do_not_depend_on_the_form(text, asked):
    composed, decomposed = (
        (AskedQuestion.of(normalize(form, asked)), normalize(form, text)) for form in ("NFC", "NFD")
    )
    assert composed[0] == decomposed[0]
    (question, one), other = composed, decomposed[1]
    assert read_text(one) == read_text(other) and _heading(one) == _heading(other)
    assert question.possible_stems(one) == question.possible_stems(other)
    assert statements(question, read_text(one), 8) == statements(question, read_text(other), 8)
    assert best_sentences(question, one, one, 2) == best_sentences(question, other, other, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(ACCENTED.split()), max_size=20).map(" ".join),
    st.lists(st.sampled_from(ACCENTED.split()), max_size=6).map(" ".join),
)
def test_statements_do_not_depend_on_the_unicode_form(text, asked):
    check_statements_do_not_depend_on_the_form(text, asked)


def test_decomposed_and_composed_texts_support_each_other():
    question, text = IN_OTHER_LANGUAGES["fr"]
    texts = [normalize(form, text.format(name)) for form, name in (("NFC", "Amber"), ("NFD", "Birch"), ("NFD", "Elm"))]
    assert "1932" in answer(texts, question=normalize("NFD", question))


def test_statements_depend_on_the_unicode_form_without_normalization(monkeypatch):
    monkeypatch.setattr("casemate.guard.defenses.quorum.keywords._composed", lambda text: text)
    read_text.cache_clear()
    with pytest.raises(AssertionError):
        check_statements_do_not_depend_on_the_form("Der Zoll gilt für die Brücke in Genève.", "Gilt er für die Brücke?")
    read_text.cache_clear()


def test_template_tags_are_not_statements():
    text = 'Ask in {% slack_channel "travel" %} or [here]({% page "/tools" %}).'
    assert {token.lemma for sentence in read_text(text) for token in sentence.tokens} == {"ask"}


def test_names_and_numbers_are_single_tokens_and_negations_count():
    tokens = Sentence("In 1999, New York City paid 2.5% not 31,236 EUR to Dr. Ito.").tokens
    assert [t.lemma for t in tokens] == ["1999", "new york city", "paid", "2.5%", "not", "31236", "eur", "dr", "ito"]
    assert tokens[-2].written == "Dr"


# With a language model


@dataclass
class Writer(Generator):
    """Answers with the first sentence; fails or declines for texts with given words."""

    calls: list = field(default_factory=list)
    fails: str = "no such word"
    declines: str = "no such word"

    async def stream(self, prompt):
        (unit,) = prompt.context
        self.calls.append(unit.text)
        if self.fails in unit.text:
            raise BackendError("down", backend="test", retryable=False)
        yield UNKNOWN if self.declines in unit.text else unit.text.split(". ")[0]


def test_each_isolated_answer_has_one_unit_as_context():
    writer = Writer()
    assert answer(BRIDGE, quorum=Quorum(jitter=1, writer=writer)) == UNKNOWN  # the first sentences differ
    assert sorted(writer.calls) == sorted(BRIDGE)
    texts = [f"The Sydney bridge was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid")]
    assert answer(texts, quorum=Quorum(jitter=1, writer=Writer())) == "Opened in 1932."


@pytest.mark.parametrize("problem", ["fails", "declines"])
def test_unit_abstains_if_the_model_fails_or_declines(problem, caplog):
    texts = [f"The Sydney bridge was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid")]
    outcome = ask(texts, quorum=Quorum(support=2, jitter=1, writer=Writer(**{problem: "Ann"})))
    assert text_of(outcome) == "Opened in 1932." and outcome.verdict.evidence["stating"] == 2
    assert outcome.verdict.evidence["failed"] == (problem == "fails")
    assert "Ann" not in caplog.text and ("which abstains" in caplog.text) == (problem == "fails")
    assert answer(texts, quorum=Quorum(support=2, jitter=1, writer=Writer(**{problem: "opened"}))) == UNKNOWN


def test_unit_abstains_if_the_model_hangs():
    """One document must not prevent an answer."""

    class Hanging(Writer):
        async def stream(self, prompt):
            async for piece in super().stream(prompt):
                yield piece
                await asyncio.sleep(60 if "Ann" in prompt.context[0].text else 0)

    texts = [f"The Sydney bridge was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid")]
    outcome = ask(texts, quorum=Quorum(support=2, jitter=1, writer=Hanging(), writer_s=0.5))
    assert text_of(outcome) == "Opened in 1932."
    assert (outcome.verdict.evidence["stating"], outcome.verdict.evidence["failed"]) == (2, 1)


def test_caches_isolated_answers_by_unit_and_question():
    store, writer = Memory(), Writer()
    quorum = Quorum(jitter=1, writer=writer, store=store)
    first = answer(BRIDGE, quorum=quorum)
    assert answer(BRIDGE, quorum=quorum) == first and len(writer.calls) == 3
    answer([*BRIDGE[:2], "Another text about the Sydney bridge."], quorum=quorum)
    assert len(writer.calls) == 4
    answer(BRIDGE, question="Who built it?", quorum=quorum)
    assert len(writer.calls) == 7
    costs = [event.body for event in store.events if event.kind == "generation"]
    assert [(c["calls"], c["cached"]) for c in costs] == [(3, 0), (0, 3), (1, 2), (3, 0)]
    assert costs[0]["words_read"] > costs[0]["words_written"] > 0


def test_model_does_not_read_units_about_other_names():
    """The model would otherwise attribute the text to the name in the question."""

    @dataclass
    class ConstantAnswer(Writer):
        async def stream(self, prompt):
            self.calls.append(prompt.context[0].text)
            yield "The mill of Kelford was built in 1742."

    other = [f"The mill of {place} was built in 1742 by guild {place}." for place in ("Ashby", "Barton", "Corby")]
    writer, question = ConstantAnswer(), "When was the mill of Kelford built?"
    assert answer(other, question=question, quorum=Quorum(jitter=1, writer=writer)) == UNKNOWN and not writer.calls
    same = [text.replace(" was", ", near Kelford, was") for text in other[:2]]
    assert "1742" in answer([*same, other[2]], question=question, quorum=Quorum(support=2, jitter=1, writer=writer))
    assert sorted(writer.calls) == sorted(same)


def test_model_reads_the_best_sentences_of_a_unit():
    writer = Writer()
    text = f"{BRIDGE[0]} A cat sleeps. Boats carry ropes. Dogs bark at the moon."
    for question in (QUESTION, "Who is at home?"):  # the model may match synonyms of the question
        ask([text], question=question, quorum=Quorum(jitter=1, writer=writer))
    assert len(writer.calls) == 2
    assert writer.calls[0] == f"{BRIDGE[0]} A cat sleeps." and len(writer.calls[1]) < len(text)


async def test_returns_an_answer_that_is_evicted_during_the_request(monkeypatch):
    """While one question waits for the model, others fill the cache."""
    monkeypatch.setattr("casemate.guard.defenses.quorum.isolated.CACHED_ANSWERS", 2)

    class Slow(Writer):
        async def stream(self, prompt):
            for _ in range(20 if "Late" in prompt.context[0].text else 0):
                await asyncio.sleep(0)
            async for piece in super().stream(prompt):
                yield piece

    isolated, units = IsolatedAnswers(Slow()), [Document("unit", text) for text in BRIDGE]
    (held,), _ = await isolated.ask(QUESTION, units[:1])
    late = isolated.ask(QUESTION, [units[0], Document("unit", "Late. Yes.")])
    (said, costs), _ = await asyncio.gather(late, isolated.ask("Who built it?", units))
    assert said == [held, "Late"] and costs["cached"] == 1


async def test_cache_evicts_the_least_recently_used_answer(monkeypatch):
    monkeypatch.setattr("casemate.guard.defenses.quorum.isolated.CACHED_ANSWERS", 2)
    isolated, (one, two, three) = IsolatedAnswers(Writer()), [Document("unit", text) for text in BRIDGE]
    for units in ([one, two], [one], [three]):
        await isolated.ask(QUESTION, units)
    assert (await isolated.ask(QUESTION, [one, three]))[1]["cached"] == 2


async def test_counts_tokens_if_the_model_supports_it():
    writer, unit = Toy(1), Document("unit", "abc")
    (said,), costs = await IsolatedAnswers(writer).ask("cab", [unit])
    assert costs["tokens_read"] == len(writer.encode(Prompt("cab", (unit,), ASK)))
    assert costs["tokens_written"] == len(writer.tokens(said)) == 8
    assert "tokens_read" not in (await IsolatedAnswers(Writer()).ask("cab", [unit]))[1]
