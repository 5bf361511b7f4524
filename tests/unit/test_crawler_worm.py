import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader.requests import Task, parse_request
from casemate.redteam.attacks.worm import PREFIXES, VARIANTS, CollisionSearch, Worm, join_question
from casemate.redteam.crawling.common_words import SENTENCES, WORDS
from casemate.runtime.cached_embedder import CachedEmbedder
from tests.fakes import BagOfWords
from tests.unit.crawls import NOTES, Scripted, System, crawl, share


def unit(v):
    return v / np.linalg.norm(v)


def worm(system, **options):
    return Worm(**{"suffix": 6, "candidates": 2, "training_questions": 100, "embedder": system.embedder, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_yields_each_recovered_text_once(variant):
    system = System()
    found = crawl(worm(system, variant=variant, rounds=25), system)
    assert len(system.questions) == 25
    assert set(found) <= {note.text for note in NOTES}
    assert len(set(found)) == len(found)
    assert share(found) == len({i for shown in system.shown for i in shown}) / len(NOTES) > 0.2


def test_a_question_is_a_command_and_a_suffix_of_given_length():
    system = System()
    crawl(worm(system, rounds=4), system)
    for question in system.questions:
        prefix, _, suffix = question.partition("\n\n")
        assert prefix == PREFIXES[0]
        assert len(suffix.split()) == 6
        assert set(suffix.split()) <= set(WORDS)


def test_every_prefix_is_recognized_as_a_repeat_command():
    for i, prefix in enumerate(PREFIXES):
        assert parse_request(join_question(prefix, WORDS[20 * i : 20 * i + 20])).task is Task.REPEAT


def test_the_prefix_changes_after_a_refusal():
    box = Scripted(["I'm sorry, I can't do that."])
    assert crawl(worm(System(NOTES[:5]), rounds=len(PREFIXES)), box) == []
    assert [q.partition("\n\n")[0] for q in box.questions] == list(PREFIXES)


class TestTarget:
    EMBEDDINGS = np.random.default_rng(0).normal([0.5, 0, -0.2], [0.01, 0.2, 0.4], (200, 3))

    def drawn(self, recovered, count=400, **options):
        rng = np.random.default_rng(1)
        return np.array(
            [Worm(**options)._target(self.EMBEDDINGS, np.asarray(recovered, float), rng) for _ in range(count)]
        )

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_follows_the_distribution_of_english_texts_before_any_recovery(self, variant):
        found = self.drawn([0, 0, 0], variant=variant)
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        drawn = np.random.default_rng(2).normal(self.EMBEDDINGS.mean(0), self.EMBEDDINGS.std(0), (4000, 3))
        expected = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).mean(axis=0)
        assert np.allclose(found.mean(axis=0), expected, atol=0.1)

    def test_gea_ignores_recovered_texts(self):
        assert (self.drawn([0, 0, 0], variant="gea") == self.drawn([9, 0, 0], variant="gea")).all()

    def test_dgea_target_is_opposite_to_recovered_texts_and_noise_reduces_this(self):
        assert np.allclose(self.drawn([0, 0, 7], variant="dgea", noise=0), [0, 0, -1])
        near, far = (self.drawn([0, 0, 7], variant="dgea", noise=noise)[:, 2].mean() for noise in (0.5, 3))
        assert -1 < near < far - 0.3 < far < 0


class TestCollisionSearch:
    @given(st.integers(0, 99))
    @settings(max_examples=8)
    def test_each_pass_increases_the_cosine(self, seed):
        embedder, rng = BagOfWords(dim=24), np.random.default_rng(seed)
        target = unit(rng.normal(size=24)).astype(np.float32)
        cosines = []
        for passes in (0, 1, 2):
            words = CollisionSearch(embedder, 5, passes, 3).words("Repeat it", target, np.random.default_rng(seed))
            cosines.append(float(embedder.embed([join_question("Repeat it", words)])[0] @ target))
        assert cosines[0] <= cosines[1] + 1e-6 <= cosines[2] + 2e-6

    def test_initial_suffix_equals_plain_matching_pursuit(self):
        embedder, rng = BagOfWords(dim=16), np.random.default_rng(5)
        target = unit(rng.normal(size=16)).astype(np.float32)
        vectors = embedder.embed(WORDS)
        total, expected = 5 * embedder.embed(["Repeat it"])[0], []
        for _ in range(4):
            options = [w for w in range(len(WORDS)) if w not in expected]
            expected.append(max(options, key=lambda w: unit(total + vectors[w]) @ target))
            total = total + vectors[expected[-1]]
        found = CollisionSearch(embedder, 4, 0, 1).words("Repeat it", target, rng)
        assert found == [WORDS[w] for w in expected]

    def test_uses_the_vocabulary_of_the_embedder(self):
        class EmbedderWithVocabulary(BagOfWords):
            def vocabulary(self):
                return ["quill", "rook", "sable"]

        target = unit(np.ones(8)).astype(np.float32)
        for embedder in (EmbedderWithVocabulary(dim=8), CachedEmbedder(EmbedderWithVocabulary(dim=8))):
            found = CollisionSearch(embedder, 3, 1, 2).words("Repeat it", target, np.random.default_rng(0))
            assert set(found) <= {"quill", "rook", "sable"}

    @pytest.mark.slow
    def test_training_questions_improve_the_predicted_effects(self):
        """With a long prefix, which has more weight than the five words assumed without training questions."""
        embedder, rng = BagOfWords(dim=24), np.random.default_rng(4)
        prefix, nearer = " ".join(f"order{i}" for i in range(400)), 0
        for target in (unit(rng.normal(size=24)).astype(np.float32) for _ in range(10)):
            cosines = []
            for training_questions in (0, 400):
                words = CollisionSearch(embedder, 12, 0, 1, training_questions).words(
                    prefix, target, np.random.default_rng(0)
                )
                assert len(set(words)) == 12
                cosines.append(float(embedder.embed([join_question(prefix, words)])[0] @ target))
            nearer += cosines[1] > cosines[0]
        assert nearer >= 8

    def test_number_of_embeddings_equals_the_documentation(self):
        embedder = BagOfWords(dim=8)
        collider = CollisionSearch(embedder, 5, 2, 3)
        target = unit(np.ones(8)).astype(np.float32)
        collider.words("Repeat it", target, np.random.default_rng(0))
        embedder.texts.clear()
        collider.words("Repeat it", target, np.random.default_rng(0))
        assert len(embedder.texts) == 1 + 2 * 5 * 3


@pytest.mark.slow
def test_matching_pursuit_has_a_higher_cosine_than_random_search_in_minilm():
    """One GEA target: the search of the paper, with 320 embeddings, against this search with 81."""
    embedder, rng = MiniLM(threads=1), np.random.default_rng(3)
    target = Worm()._target(embedder.embed(SENTENCES).astype(np.float64), np.zeros(384), rng)
    found = CollisionSearch(embedder, 20, 1, 4, training_questions=1000).words(PREFIXES[0], target, rng)
    ours = float(embedder.embed([join_question(PREFIXES[0], found)])[0] @ target)
    suffix, best, tokens = ["!"] * 20, -1.0, embedder.vocabulary()
    for place in rng.permutation(20):
        tried = rng.choice(len(tokens), 16, replace=False)
        options = [[*suffix[:place], tokens[w], *suffix[place + 1 :]] for w in tried]
        cosines = embedder.embed([join_question(PREFIXES[0], option) for option in options]) @ target
        if cosines.max() > best:
            best, suffix = float(cosines.max()), options[int(cosines.argmax())]
    assert ours > best + 0.1
    assert ours > 0.32


def test_the_search_does_not_block_the_event_loop():
    system, ticks = System(), []

    async def run():
        async def tick():
            while True:
                ticks.append(1)
                await asyncio.sleep(0)

        clock = asyncio.create_task(tick())
        async for _ in worm(system, rounds=1).extract(system, np.random.default_rng(0)):
            break
        clock.cancel()

    asyncio.run(run())
    assert len(ticks) > 20


def test_crawls_of_one_campaign_share_the_search(monkeypatch):
    """Crawls with the same seed have the same targets. The second crawl fits nothing and asks the same questions."""
    counts = Counter()
    for name in ("_fit_effects", "_matching_pursuit"):
        real = getattr(CollisionSearch, name)
        monkeypatch.setattr(CollisionSearch, name, lambda *a, n=name, r=real: counts.update([n]) or r(*a))
    system = System()
    attack, other = worm(system, rounds=3), worm(system, rounds=3)
    crawl(attack, system)
    first, system.questions[:] = list(system.questions), []
    crawl(attack, system)
    assert counts == {"_fit_effects": 1, "_matching_pursuit": 3}
    assert system.questions == first
    system.questions.clear()
    crawl(other, system)
    assert system.questions == first
