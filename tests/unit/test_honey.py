"""Records: planted, rotated, cleaned, whatever happens in between; and strings that turn up elsewhere."""

import asyncio
import base64
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from casemate.backends.sql_events import SqlEvents
from casemate.backends.sqlite import SqliteIndex
from casemate.errors import ConfigError, DataError
from casemate.guard import Guard
from casemate.marks import Marks, Text
from casemate.marks.honey import HoneyKeys
from casemate.monitor.honey.planting import Bed, clean, find, plant, rotate
from casemate.monitor.honey.records import BAITS, STYLES, Sample, drafts
from casemate.monitor.honey.search import plantings, search, search_files, training_strings
from casemate.rag import Rag
from casemate.types import Document
from tests.fakes import WORDS, BagOfWords, Memory, Parrot, documents


class World:
    """A guard over 60 documents of two tenants, with everything in one folder."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack, store=None) -> None:
        self.index = opened.enter_context(contextlib.closing(SqliteIndex(folder / "i.db")))
        self.store = store or Memory()
        self.keys = HoneyKeys(folder / "honey.json")
        if not self.keys.path.exists():  # what is drawn follows from the key
            self.keys.path.write_text(
                json.dumps({"format": 1, "secret": "a key that the tests know" * 2, "generation": 1})
            )
        self.guard = Guard(Rag(BagOfWords(), self.index, Parrot()), [], store=self.store)

    def filled(self):
        for tenant in ("default", "acme"):
            held = documents(60, seed=len(tenant))
            self.index.add(held, BagOfWords().embed([d.content for d in held]), tenant)
        return self

    def plant(self, count=None, **bed):
        return asyncio.run(plant(self.guard, self.keys, Bed(**bed), count))

    def rotate(self, **bed):
        return asyncio.run(rotate(self.guard, self.keys, Bed(**bed)))

    def clean(self, **options):
        return asyncio.run(clean(self.guard, self.keys, **options))

    def records(self, tenant="default"):
        return find(self.index, self.keys.find(), tenant).records

    def texts(self, tenant="default"):
        return {d.id: d for piece, _ in self.index.scan(tenant) for d in piece}


@pytest.fixture
def world(tmp_path):
    with contextlib.ExitStack() as opened:
        yield World(tmp_path, opened).filled()


class TestPlanting:
    @pytest.mark.parametrize("style", STYLES)
    def test_puts_in_records_with_a_unique_string_each(self, world, style):
        done = world.plant(8, style=style)
        assert len(done.added) == done.held == 8 and done.generation == 1
        key, held = world.keys.find(), world.texts()
        for record in world.records():
            document = held[record.source]
            mark = key.record_mark("default", 1, record.number)
            assert Marks([mark]).all(Text(document.text)) == [mark]
            assert record.source.startswith("honey/") and len(document.text.split()) > 20
        assert len({held[s].text for s in done.added}) == 8
        assert len(world.texts()) == 68 and len(world.texts("acme")) == 60

    def test_again_adds_nothing_and_more_adds_what_is_missing(self, world):
        first = world.plant(4)
        before = world.texts()
        assert world.plant(4).added == () and world.texts() == before
        more = world.plant(6)
        assert len(more.added) == 2 and more.held == 6 and not set(more.added) & set(first.added)

    def test_of_no_number_takes_the_usual_one(self, world):
        assert world.plant().held == 20

    def test_records_speak_in_terms_of_their_neighbourhood(self, world):
        world.plant(6)
        said = " ".join(world.texts()[r.source].text for r in world.records()).lower()
        assert sum(word in said for word in WORDS) >= 6

    def test_gives_up_what_harmless_questions_would_find(self, world):
        words = "survey society collection parish study register project minutes founded kept"
        none = world.plant(5, questions=[words], k=200)  # everything is found by a question that reads 200 documents
        assert none.added == () and none.given_up == 5 and none.benign is None
        some = world.plant(5, questions=["amber birch"] * 3, k=1)
        assert len(some.added) == 5 and some.benign.value == 0

    def test_is_written_down_once_for_each_record(self, world):
        world.plant(3)
        world.plant(3)
        planted = [e for e in world.store.events if e.kind == "honey" and e.body["what"] == "planted"]
        assert len({e.id for e in planted}) == 3
        assert {e.body["source"] for e in planted} == {r.source for r in world.records()}
        mark = world.keys.find().record_mark("default", 1, 0)
        assert not any(word in str(e.body) for e in planted for word in mark.split())  # no strings in the store

    def test_needs_a_corpus_and_sound_options(self, world):
        with pytest.raises(DataError, match="no documents to hide"):
            world.plant(3, tenant="nobody")
        for wrong in ({"style": "poem"}, {"folder": "/"}, {"k": 0}):
            with pytest.raises(ConfigError, match="honey"):
                Bed(**wrong)


class TestRotation:
    def test_puts_new_ones_in_the_place_of_the_old(self, world):
        old = world.plant(5).added
        planted, cleaned = world.rotate()
        assert len(planted.added) == 5 and planted.generation == 2
        assert set(cleaned.removed["default"]) == set(old) and not cleaned.left
        assert {r.generation for r in world.records()} == {2} and len(world.texts()) == 65

    def test_still_tells_the_old_strings(self, world):
        world.plant(2)
        old = {world.keys.find().record_mark("default", 1, i) for i in range(2)}
        world.rotate()
        found = search([("dump", f"... {' '.join(old)} ...")], world.keys, world.store)
        assert {s.planting.about["generation"] for s in found} == {1} and len(found) == 2

    def test_leaves_other_tenants_as_they_are(self, world):
        world.plant(2)
        world.plant(3, tenant="acme")
        world.rotate()
        assert [r.generation for r in world.records("acme")] == [1, 1, 1]
        world.rotate(tenant="acme")
        assert {r.generation for r in world.records("acme")} == {3}

    def test_of_nothing_only_makes_a_generation(self, world):
        planted, cleaned = world.rotate()
        assert (planted.added, planted.generation, cleaned.removed) == ((), 2, {"default": ()})


class TestCleaning:
    def test_takes_all_of_all_tenants_and_nothing_else(self, world):
        before = {t: world.texts(t) for t in ("default", "acme")}
        world.plant(4)
        world.plant(4, tenant="acme")
        done = world.clean()
        assert {t: len(s) for t, s in done.removed.items()} == {"default": 4, "acme": 4} and not done.left
        assert {t: world.texts(t) for t in ("default", "acme")} == before
        assert world.clean().removed == {"default": (), "acme": ()}

    def test_needs_no_event_store(self, world):
        world.plant(4)
        world.guard.store = None
        world.store.events.clear()
        assert len(world.clean(tenant="default").removed["default"]) == 4

    def test_finds_records_under_any_name(self, world):
        world.plant(4, folder="records/2031")
        assert len(world.clean().removed["default"]) == 4

    def test_removes_no_document_that_only_looks_like_one(self, world):
        world.plant(2)
        record = world.texts()[world.records()[0].source]
        forged = Document("mine", "An honest text.", source="honey/12345678", metadata=record.metadata)
        asyncio.run(world.guard.add([forged, Document("honey/plain", "Another honest text.")]))
        done = world.clean()
        assert len(done.removed["default"]) == 2
        assert [line.split()[0] for line in done.left] == ["honey/12345678"]
        assert {"mine", "honey/plain"} <= world.texts().keys()
        assert world.clean(force=True).removed["default"] == ("honey/12345678",)
        assert "honey/plain" in world.texts()

    def test_leaves_a_source_that_somebody_else_has_filled_too(self, world):
        world.plant(1)
        record = world.texts()[world.records()[0].source]
        asyncio.run(world.guard.add([record, Document("guest", "An honest text.", source=record.source)]))
        done = world.clean()
        assert done.removed["default"] == () and record.source in done.left[0] and "guest" in world.texts()

    def test_without_the_key_says_what_is_left(self, world):
        world.plant(2)
        world.keys.path.unlink()
        done = world.clean()
        assert done.removed["default"] == () and len(done.left) == 2 and "no key file" in done.left[0]

    def test_says_when_it_cannot_win(self, world):
        world.plant(1)

        async def refuses(sources, tenant):
            return 0

        world.guard.remove = refuses
        assert "comes back" in world.clean(tenant="default").left[0]


KILLED = """
    import asyncio, contextlib, os, signal, sys
    from pathlib import Path
    from tests.unit.test_honey import World
    from casemate.backends.sql_events import SqlEvents
    folder, act, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    steps = 0

    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps > when:
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.ExitStack() as opened:
        world = World(folder, opened, opened.enter_context(contextlib.closing(SqlEvents(path=folder / "e.db"))))
        for thing, names in ((world.index, ("add", "remove")), (world.store, ("append",)), (world.keys, ("rotate",))):
            for name in names:
                def stepped(*args, does=getattr(thing, name), **kwargs):
                    step()
                    result = does(*args, **kwargs)
                    step()
                    return result
                setattr(thing, name, stepped)
        {"plant": lambda: world.plant(3), "rotate": world.rotate, "clean": world.clean}[act]()
"""


class TestAKillInTheMiddle:
    @pytest.mark.slow
    @pytest.mark.parametrize("act", ["plant", "rotate", "clean"])
    def test_of_any_step_is_made_good_by_doing_it_again(self, tmp_path, act):
        """Each of the calls that change something is killed before and after."""
        script = tmp_path / "killed.py"
        script.write_text(textwrap.dedent(KILLED))
        root = Path(__file__).parents[2]
        for when in range(40):
            folder = tmp_path / f"{act}{when}"
            folder.mkdir()
            with contextlib.ExitStack() as opened:
                store = opened.enter_context(contextlib.closing(SqlEvents(path=folder / "e.db")))
                world = World(folder, opened, store).filled()
                if act != "plant":
                    world.plant(3)
            done = subprocess.run(
                [sys.executable, str(script), str(folder), act, str(when)],
                env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            with contextlib.ExitStack() as opened:
                store = opened.enter_context(contextlib.closing(SqlEvents(path=folder / "e.db")))
                self.made_good(World(folder, opened, store), act)
            if done.returncode == 0:
                assert when > 3  # it was killed at least so often
                return
        raise AssertionError("the work has more steps than were tried")

    def made_good(self, world, act):
        {"plant": lambda: world.plant(3), "rotate": world.rotate, "clean": world.clean}[act]()
        records = world.records()
        assert len(records) == (0 if act == "clean" else 3)
        assert len({r.generation for r in records}) <= 1
        told = plantings(world.keys.find(), world.store).values()
        assert {r.source for r in records} <= {p.about.get("source") for p in told}
        assert len(world.clean(tenant="default").removed["default"]) == len(records)
        assert len(world.texts()) == 60


class TestTrainingStrings:
    def test_are_unique_and_told_with_who_when_and_what_for(self, world):
        given = training_strings(world.keys, world.store, 6, purpose="support tickets 2031", who="vendor A")
        other = training_strings(world.keys, world.store, 6, purpose="support tickets 2031", who="vendor B")
        assert len({*given, *other}) == 12
        found = search([("model output", f"I recall: {other[3].upper()}")], world.keys, world.store)
        (seen,) = found
        assert (seen.where, seen.planting.what, seen.planting.about["who"]) == ("model output", "training", "vendor B")
        assert seen.planting.about["number"] == 3 and seen.planting.about["at"] > "20"

    def test_may_be_bare_words(self, world):
        (bare,) = training_strings(world.keys, world.store, 1, purpose="p", who="w", carried=False)
        assert [len(w) for w in bare.split()] == [6, 6, 6]

    def test_are_not_given_out_unless_written_down(self, world):
        world.store.flush = lambda timeout_s=10.0: False
        with pytest.raises(DataError, match="not given out"):
            training_strings(world.keys, world.store, 1, purpose="p", who="w")

    @pytest.mark.parametrize("wrong", [{"count": 0}, {"count": 10**6}, {"purpose": " "}, {"who": ""}])
    def test_refuse_what_makes_no_sense(self, world, wrong):
        options = {"count": 1, "purpose": "p", "who": "w"} | wrong
        with pytest.raises(ConfigError):
            training_strings(world.keys, world.store, options.pop("count"), **options)


class TestSearching:
    def test_tells_tokens_records_and_strings_apart(self, world):
        world.plant(1)
        (string,) = training_strings(world.keys, world.store, 1, purpose="p", who="w")
        key = world.keys.find()
        text = f"{key.prompt_mark('url', 1)} and {key.record_mark('default', 1, 0)} and {string}"
        assert {s.planting.what for s in search([("x", text)], world.keys, world.store)} == {
            "prompt", "record", "training"
        }  # fmt: skip

    def test_without_the_store_tells_records_by_the_index_and_others_as_ours(self, world):
        world.plant(1)
        (string,) = training_strings(world.keys, world.store, 1, purpose="p", who="w")
        text = f"{world.keys.find().record_mark('default', 1, 0)}. {string}"
        found = search([("x", text)], world.keys, None, world.index)
        assert {s.planting.what for s in found} == {"record", "unknown"}

    def test_finds_nothing_in_honest_texts(self, world):
        world.plant(5)
        texts = [(d.id, d.text) for d in documents(200)] + [("syllables", "banana tomato potato " * 3000)]
        assert search(texts, world.keys, world.store, world.index) == []

    def test_reads_files_and_folders_of_any_size_and_coding(self, world, tmp_path):
        world.plant(3)
        marks = [world.keys.find().record_mark("default", 1, i) for i in range(3)]
        folder = tmp_path / "loot"
        (folder / "deep").mkdir(parents=True)
        for at in (0, 57_995, 59_990, 120_000):  # also over the border of a piece
            (folder / "long.txt").write_text("x" * at + f" {marks[0]} " + "y" * 1000)
            assert [s.planting.what for s in search_files([folder / "long.txt"], world.keys, world.store)] == ["record"]
        (folder / "deep" / "wide.txt").write_text(marks[1], encoding="utf-16")
        with gzip.open(folder / "deep" / "packed.gz", "wt") as file:
            file.write(base64.b64encode(marks[2].encode()).decode())
        (folder / "binary").write_bytes(bytes(range(256)) * 50)
        found = search_files([folder], world.keys, world.store)
        assert {Path(s.where).name: s.form for s in found} == {
            "long.txt": "letters", "wide.txt": "letters", "packed.gz": "base64"
        }  # fmt: skip

    def test_says_what_it_cannot_read(self, world, tmp_path):
        world.plant(1)
        (tmp_path / "bad.gz").write_bytes(b"no gzip")
        for path in (tmp_path / "absent", tmp_path / "bad.gz"):
            with pytest.raises(DataError, match=path.name):
                search_files([path], world.keys)

    def test_needs_the_key(self, world):
        world.keys.path.unlink()
        with pytest.raises(DataError, match="no key"):
            search([("x", "y")], world.keys)


class TestPlaces:
    def test_are_in_dense_parts_and_far_apart(self):
        rng = np.random.default_rng(3)
        centres = rng.standard_normal((4, 32))
        X = np.repeat(centres, 20, axis=0) + 0.1 * rng.standard_normal((80, 32))
        X = np.vstack([X, rng.standard_normal((20, 32))])  # and 20 that lie alone
        sample = Sample(tuple(documents(100)), (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32))
        places = sample.places(4, np.random.default_rng(0))
        assert {p // 20 for p in places} <= {0, 1, 2, 3} and len({p // 20 for p in places}) >= 2
        assert len(sample.places(200, np.random.default_rng(0))) == 200

    def test_of_a_sample_any_document_may_be(self, world):
        sample = Sample.of(world.index, "default", np.random.default_rng(0), {"d0"})
        assert len(sample.documents) == 59 and "d0" not in {d.id for d in sample.documents}

    def test_of_one_document_will_do(self):
        sample = Sample((Document("a", "the toll"),), np.ones((1, 4), np.float32) / 2)
        assert sample.places(3, np.random.default_rng(0)) == [0, 0, 0]
        found = drafts("zakeno mirodo pilafe", "bido", sample.terms(0), BAITS, np.random.default_rng(0))
        assert all("Zakeno Mirodo Pilafe" in text and text.endswith("See also Bido.") for _, text in found)
