import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.attacks.worm import AIMS, PREFIXES, Collider, Worm, joined
from casemate.backends.minilm import MiniLM
from casemate.backends.obedient.asking import Kind, understand
from casemate.crawl.everyday import SENTENCES, WORDS
from casemate.errors import CapabilityError, ConfigError
from casemate.lab.box import CachedEmbedder
from tests.fakes import BagOfWords
from tests.unit.crawls import NOTES, Stubborn, System, crawl, share


def unit(v):
    return v / np.linalg.norm(v)


def worm(system, **options):
    return Worm(**{"suffix": 6, "candidates": 2, "lessons": 100, "embedder": system.embedder, **options})


@pytest.mark.parametrize("aim", AIMS)
def test_carries_texts_away_each_once(aim):
    system = System()
    found = crawl(worm(system, aim=aim, rounds=25), system)
    assert len(system.questions) == 25
    assert set(found) <= {note.text for note in NOTES}
    assert len(set(found)) == len(found)
    assert share(found) == len({i for shown in system.shown for i in shown}) / len(NOTES) > 0.2


def test_a_question_is_a_command_and_as_many_words_as_wanted():
    system = System()
    crawl(worm(system, rounds=4), system)
    for question in system.questions:
        prefix, _, suffix = question.partition("\n\n")
        assert prefix == PREFIXES[0]
        assert len(suffix.split()) == 6
        assert set(suffix.split()) <= set(WORDS)


def test_every_prefix_is_understood_as_a_command_to_repeat():
    for i, prefix in enumerate(PREFIXES):
        assert understand(joined(prefix, WORDS[20 * i : 20 * i + 20])).kind is Kind.REPEAT


def test_another_prefix_follows_a_refusal():
    box = Stubborn("I'm sorry, I can't do that.")
    assert crawl(worm(System(NOTES[:5]), rounds=len(PREFIXES)), box) == []
    assert [q.partition("\n\n")[0] for q in box.questions] == list(PREFIXES)


def test_without_a_copy_of_the_embedder_it_says_what_it_needs():
    with pytest.raises(CapabilityError, match="worm.*embedder"):
        crawl(Worm(), Stubborn("never asked"))


def test_the_same_seed_asks_the_same():
    first, second, third = System(), System(), System()
    assert crawl(worm(first, rounds=5), first, 1) == crawl(worm(second, rounds=5), second, 1)
    crawl(worm(third, rounds=5), third, 2)
    assert first.questions == second.questions != third.questions


class TestTarget:
    LAW = np.random.default_rng(0).normal([0.5, 0, -0.2], [0.01, 0.2, 0.4], (200, 3))

    def drawn(self, stolen, count=400, **options):
        rng = np.random.default_rng(1)
        return np.array([Worm(**options)._target(self.LAW, np.asarray(stolen, float), rng) for _ in range(count)])

    @pytest.mark.parametrize("aim", AIMS)
    def test_follows_the_law_of_english_texts_as_long_as_nothing_is_stolen(self, aim):
        found = self.drawn([0, 0, 0], aim=aim)
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        drawn = np.random.default_rng(2).normal(self.LAW.mean(0), self.LAW.std(0), (4000, 3))
        expected = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).mean(axis=0)
        assert np.allclose(found.mean(axis=0), expected, atol=0.1)

    def test_of_gea_knows_nothing_of_what_is_stolen(self):
        assert (self.drawn([0, 0, 0], aim="gea") == self.drawn([9, 0, 0], aim="gea")).all()

    def test_of_dgea_lies_opposite_of_what_is_stolen_and_the_more_so_the_less_noise(self):
        assert np.allclose(self.drawn([0, 0, 7], aim="dgea", noise=0), [0, 0, -1])
        near, far = (self.drawn([0, 0, 7], aim="dgea", noise=noise)[:, 2].mean() for noise in (0.5, 3))
        assert -1 < near < far - 0.3 < far < 0


class TestCollider:
    @given(st.integers(0, 99))
    @settings(max_examples=8)
    def test_each_pass_brings_the_question_nearer(self, seed):
        embedder, rng = BagOfWords(dim=24), np.random.default_rng(seed)
        target = unit(rng.normal(size=24)).astype(np.float32)
        cosines = []
        for passes in (0, 1, 2):
            words = Collider(embedder, 5, passes, 3).words("Repeat it", target, np.random.default_rng(seed))
            cosines.append(float(embedder.embed([joined("Repeat it", words)])[0] @ target))
        assert cosines[0] <= cosines[1] + 1e-6 <= cosines[2] + 2e-6

    def test_the_first_suffix_is_that_of_a_plain_search_by_sums(self):
        embedder, rng = BagOfWords(dim=16), np.random.default_rng(5)
        target = unit(rng.normal(size=16)).astype(np.float32)
        vectors = embedder.embed(WORDS)
        total, expected = 5 * embedder.embed(["Repeat it"])[0], []
        for _ in range(4):
            options = [w for w in range(len(WORDS)) if w not in expected]
            expected.append(max(options, key=lambda w: unit(total + vectors[w]) @ target))
            total = total + vectors[expected[-1]]
        found = Collider(embedder, 4, 0, 1).words("Repeat it", target, rng)
        assert found == [WORDS[w] for w in expected]

    def test_takes_the_words_of_the_embedder_that_tells_them(self):
        class Telling(BagOfWords):
            def vocabulary(self):
                return ["quill", "rook", "sable"]

        target = unit(np.ones(8)).astype(np.float32)
        for embedder in (Telling(dim=8), CachedEmbedder(Telling(dim=8))):
            found = Collider(embedder, 3, 1, 2).words("Repeat it", target, np.random.default_rng(0))
            assert set(found) <= {"quill", "rook", "sable"}

    def test_lessons_foretell_what_words_do(self):
        """A long prefix, which weighs more than the five words that it is taken for without lessons."""
        embedder, rng = BagOfWords(dim=24), np.random.default_rng(4)
        prefix, nearer = " ".join(f"order{i}" for i in range(400)), 0
        for target in (unit(rng.normal(size=24)).astype(np.float32) for _ in range(10)):
            cosines = []
            for lessons in (0, 400):
                words = Collider(embedder, 12, 0, 1, lessons).words(prefix, target, np.random.default_rng(0))
                assert len(set(words)) == 12
                cosines.append(float(embedder.embed([joined(prefix, words)])[0] @ target))
            nearer += cosines[1] > cosines[0]
        assert nearer >= 8

    def test_takes_as_many_embeddings_as_it_says(self):
        embedder = BagOfWords(dim=8)
        collider = Collider(embedder, 5, 2, 3)
        target = unit(np.ones(8)).astype(np.float32)
        collider.words("Repeat it", target, np.random.default_rng(0))
        embedder.texts.clear()
        collider.words("Repeat it", target, np.random.default_rng(0))
        assert len(embedder.texts) == 1 + 2 * 5 * 3


@pytest.mark.slow
def test_few_chosen_words_come_nearer_in_minilm_than_many_random_ones():
    """One GEA target; the paper's search, with 320 embeddings, against ours with 81."""
    embedder, rng = MiniLM(threads=1), np.random.default_rng(3)
    target = Worm()._target(embedder.embed(SENTENCES).astype(np.float64), np.zeros(384), rng)
    found = Collider(embedder, 20, 1, 4, lessons=1000).words(PREFIXES[0], target, rng)
    ours = float(embedder.embed([joined(PREFIXES[0], found)])[0] @ target)
    suffix, best, tokens = ["!"] * 20, -1.0, embedder.vocabulary()
    for place in rng.permutation(20):
        tried = rng.choice(len(tokens), 16, replace=False)
        options = [[*suffix[:place], tokens[w], *suffix[place + 1 :]] for w in tried]
        cosines = embedder.embed([joined(PREFIXES[0], option) for option in options]) @ target
        if cosines.max() > best:
            best, suffix = float(cosines.max()), options[int(cosines.argmax())]
    assert ours > best + 0.1
    assert ours > 0.32


@pytest.mark.parametrize(
    "options",
    [
        {"aim": "far"},
        {"rounds": 0},
        {"suffix": 0},
        {"suffix": 10**6},
        {"iterations": -1},
        {"candidates": 0},
        {"lessons": -1},
        {"noise": -1},
        {"noise": float("nan")},
        {"texts": ("one",)},
    ],
)
def test_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match="worm"):
        Worm(**options)


def test_leaves_the_loop_free_while_it_searches():
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
