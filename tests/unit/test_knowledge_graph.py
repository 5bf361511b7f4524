from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.redteam.crawling.knowledge_graph import (
    OTHER,
    RELATIONS,
    KnowledgeGraph,
    Triple,
    entity_type,
    extract_triples,
)
from tests.unit.crawls import PARAGRAPHS

NAMES = ["Heron", "Weir", "porter", "mender", "crossing", "rain", "mud", "pier"]
KINDS = ["cause", "use", "part", OTHER]
triple_lists = st.lists(
    st.builds(Triple, st.sampled_from(NAMES), st.sampled_from([*KINDS, "unheard of"]), st.sampled_from(["", *NAMES])),
    max_size=30,
)


def graph(triples=(), relations=KINDS, entity_similarity=0.85):
    made = KnowledgeGraph(HashingEmbedder(), relations, entity_similarity)
    made.add(triples)
    return made


@given(triple_lists)
def test_degrees_and_deficits_equal_direct_counts(triples):
    made = graph(triples)
    edges = {(h, r if r in KINDS else OTHER, t) for h, r, t in triples if t and h != t}
    expected_entities = list(dict.fromkeys(name for t in triples for name in (t.head, t.tail) if name))
    assert made.entities.texts == expected_entities

    def count(name, relation):
        return sum(relation == r and name in (h, t) for h, r, t in edges)

    assert made.degree.tolist() == [sum(count(n, r) for r in KINDS) for n in expected_entities]
    for i, name in enumerate(expected_entities):
        same = [n for n in expected_entities if entity_type(n) == entity_type(name)]
        for j, relation in enumerate(KINDS):
            mean = sum(count(n, relation) for n in same) / len(same)
            assert made.deficits()[i, j] == pytest.approx(0 if count(name, relation) else mean)
        assert {expected_entities[n] for n in made.neighbors(i)} == {
            n for h, _, t in edges if name in (h, t) for n in (h, t)
        } - {name}


@given(triple_lists, triple_lists)
def test_new_entities_and_edges_are_counted(first, second):
    made = graph(first)
    before = len(made)
    entities, edges = made.add(second)
    assert entities == len(made) - before
    assert made.add(second) == (0, 0)
    assert entities <= 8 and edges <= len(second)


def test_similar_entities_are_merged():
    made = graph([Triple("north tolls", "part", "bridge"), Triple("north toll", "use", "pier")])
    assert made.entities.texts == ["north tolls", "bridge", "pier"]
    assert made.degree.tolist() == [2, 1, 1]
    assert len(graph([Triple("north tolls"), Triple("south tolls")])) == 2
    assert len(graph([Triple("north tolls"), Triple("south tolls")], entity_similarity=0.4)) == 1


def test_grows_beyond_its_initial_capacity():
    made = graph([Triple(f"pier{i}x", "part", f"pier{i + 1}x") for i in range(300)])
    assert len(made) == 301
    assert made.degree.sum() == 600
    assert np.isfinite(made.deficits()).all()


@pytest.mark.parametrize(
    ("sentence", "relation"),
    [
        ("Frost causes cracks", "cause"),
        ("The warden treats mildew", "remedy"),
        ("The lantern is for fishermen", "use"),
        ("The chapel floods during storms", "time"),
        ("The chapel stands near a weir", "place"),
        ("The chapel was restored by volunteers", "person"),
        ("The keel of the ferry", "part"),
        ("The mayor (Ottilie Brandt)", OTHER),
    ],
)
def test_relation_is_determined_by_the_words_between_the_phrases(sentence, relation):
    (first,) = extract_triples(sentence)
    assert first.relation == relation


def test_a_single_phrase_is_an_entity_without_edges():
    assert extract_triples("The ferry sank.") == [Triple("ferry sank")]
    assert extract_triples("It was so.") == []


@given(st.text(max_size=200))
def test_triples_of_any_text_contain_only_words_of_the_text(text):
    for triple in extract_triples(text):
        for name in (triple.head, triple.tail):
            assert name.lower() in " ".join(text.lower().split())
        assert bool(triple.relation) == bool(triple.tail)
        assert triple.relation in {*RELATIONS, OTHER, ""}


def test_phrases_of_a_clause_form_a_chain():
    for note in PARAGRAPHS[:5]:
        chained = [a.tail == b.head for a, b in pairwise(extract_triples(note.text))]
        assert sum(chained) > len(chained) / 4
