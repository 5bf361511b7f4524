"""Properties of all crawlers: registered, repeatable, strict about options, and finite in any collection."""

import math
import re

import pytest

from casemate import plugins
from casemate.errors import CapabilityError, ConfigError
from casemate.text.refusals import is_refusal
from casemate.types import Document
from tests.unit.crawls import PARAGRAPHS, Scripted, System, crawl, world

CRAWLERS = ["composite", "rag_thief", "worm", "pirates", "ikea", "rag_crawler", "mextra"]
COMMANDS = re.compile(r"\b(?:repeat|copy|print|context|documents?|verbatim|ignore)\b", re.IGNORECASE)
TEXT = "The north bridge is closed for repairs since May. Boats go every hour from the old pier."
COLLECTIONS = {
    "one": [Document("d0", TEXT)],
    "five": [Document(f"d{i}", f"{TEXT} Note {i} says so.") for i in range(5)],
    "identical": [Document(f"d{i}", TEXT) for i in range(30)],
    "one word": [Document("d0", "bridge")],
}


def made(name, system, **options):
    """A crawler with the embedder of the system, if it has that option. ``worm`` uses a small search."""
    cls = plugins.load("crawler", name)
    fast_options = {"suffix": 4, "training_questions": 20} if name == "worm" else {}
    embedder_option = {"embedder": system.embedder} if "embedder" in cls.__dataclass_fields__ else {}
    return cls(**{**embedder_option, **fast_options, **options})


@pytest.mark.parametrize("name", CRAWLERS)
@pytest.mark.parametrize("documents", COLLECTIONS.values(), ids=COLLECTIONS)
def test_recovered_texts_share_words_with_the_collection(name, documents):
    system = System(documents, budget=12)
    found = crawl(made(name, system), system)
    assert len(system.questions) <= 12
    assert len(set(found)) == len(found)
    collection_text = " ".join(d.text for d in documents)
    for text in found:
        assert set(text.lower().replace(".", "").split()) & set(collection_text.lower().replace(".", "").split())


@pytest.mark.parametrize(
    ("name", "options", "systems"),
    [
        ("composite", {"information": "mail", "questions": 20}, System),
        ("rag_thief", {}, lambda: System(budget=30)),
        ("worm", {"rounds": 5}, System),
        ("ikea", {"min_question_similarity": 0.5}, lambda: world(budget=25)),
        ("rag_crawler", {}, lambda: world(budget=25)),
        pytest.param("pirates", {}, lambda: world(budget=15), marks=pytest.mark.slow),
    ],
)
def test_questions_depend_only_on_seed_and_replies(name, options, systems):
    first, again, other = systems(), systems(), systems()
    crawler = made(name, first, **options)
    assert crawl(crawler, first, 1) == crawl(crawler, again, 1)  # no state of the first run remains
    crawl(crawler, other, 2)
    assert first.questions == again.questions != other.questions


@pytest.mark.parametrize(
    ("name", "options", "least"), [("ikea", {"min_question_similarity": 0.5}, 0.5), ("rag_crawler", {}, 0.6)]
)
def test_benign_looking_questions_cover_half_of_a_small_collection(name, options, least):
    system = world(budget=120)
    found = crawl(made(name, system, **options), system)
    assert len(system.reached) >= least * len(PARAGRAPHS)
    assert all(question.endswith("?") and not COMMANDS.search(question) for question in system.questions)
    assert len(found) > 10 and len(set(found)) == len(found)
    assert not [text for text in found if is_refusal(text)]


@pytest.mark.parametrize("name", ["pirates", "ikea", "worm"])
def test_a_missing_embedder_is_an_error(name):
    with pytest.raises(CapabilityError, match=f"{name}.*embedder"):
        crawl(plugins.load("crawler", name)(), Scripted(["never asked"]))


@pytest.mark.parametrize("name", ["pirates", "ikea", "rag_crawler"])
def test_embedder_and_writer_are_injected(name):
    assert {"writer", "embedder"} <= set(plugins.injected(plugins.load("crawler", name)))


OUT_OF_RANGE = {
    "composite": [{"questions": 0}, {"tokens": 0}, {"tokens": 10**6}, {"information": "songs"}],
    "rag_thief": [
        {"forward": 0, "backward": 0},
        {"backward": -1},
        {"window_words": 3},
        {"rouge_threshold": 0},
        {"rouge_threshold": 1.1},
        {"rouge_threshold": math.nan},
        {"recent": -1},
        {"patience": 0},
        {"order": "random"},
    ],
    "worm": [
        {"variant": "far"},
        {"rounds": 0},
        {"suffix": 0},
        {"suffix": 10**6},
        {"iterations": -1},
        {"candidates": 0},
        {"training_questions": -1},
        {"noise": -1},
        {"noise": math.nan},
        {"texts": ("one",)},
    ],
    "pirates": [
        {"anchors": 0},
        {"anchors_per_chunk": 0},
        {"temperature": 0},
        {"min_relevance": 1},
        {"min_relevance": -0.1},
        {"chunk_similarity": 0},
        {"anchor_similarity": 1.2},
    ],
    "ikea": [
        {"min_topic_similarity": 1.1},
        {"max_anchor_similarity": 0},
        {"min_question_similarity": -2},
        {"refusal_penalty": -1},
        {"unrelated_penalty": math.inf},
        {"penalty_similarity": 2},
        {"min_answer_similarity": -1.5},
        {"trust_region": 1.5},
        {"max_repeat_similarity": 0},
        {"concepts": 0},
    ],
    "rag_crawler": [
        {"exploration": -1},
        {"deficit_weight": math.nan},
        {"novelty": math.inf},
        {"salience": -0.1},
        {"top_entities": 0},
        {"max_attempts": 0},
        {"window": 0},
        {"question_similarity": 0},
        {"entity_similarity": 1.1},
    ],
    "mextra": [{"variant": "all"}, {"questions": 0}],
}


@pytest.mark.parametrize(("name", "options"), [(n, options) for n, bad in OUT_OF_RANGE.items() for options in bad])
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(ConfigError, match=f"{name}.*{next(iter(options))}"):
        plugins.load("crawler", name)(**options)
