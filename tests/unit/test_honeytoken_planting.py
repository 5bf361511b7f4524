"""Honeytoken records: planting, rotation, removal, crashes; and the search for planted strings."""

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
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.cli import honeytokens as command
from casemate.errors import BackendError, ConfigError, DataError
from casemate.guard.guard import Guard
from casemate.guard.watermarks.detection import WatermarkDetector
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile
from casemate.monitor.honeytokens.planting import (
    FIRST_RECORDS,
    PlantingResult,
    PlantingSettings,
    find_records,
    plant_records,
    remove_records,
    rotate_records,
)
from casemate.monitor.honeytokens.records import BAITS, TEXTS, CorpusSample, draft_records
from casemate.monitor.honeytokens.search import planted_strings, search_files, search_texts, training_strings
from casemate.rag.pipeline import Rag
from casemate.text.disguises import DecodedText
from casemate.types import Document
from tests.fakes import WORDS, BagOfWords, Memory, Parrot, documents


class World:
    """A guard over 60 documents of two tenants, in one folder."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack, store=None) -> None:
        self.index = opened.enter_context(contextlib.closing(SqliteIndex(folder / "i.db")))
        self.store = store or Memory()
        self.keys = HoneytokenKeyFile(folder / "honeytokens.json")
        if not self.keys.path.exists():  # all random choices depend on the key
            self.keys.path.write_text(
                json.dumps({"format": 1, "secret": "a key that the tests know" * 2, "generation": 1})
            )
        self.guard = Guard(Rag(BagOfWords(), self.index, Parrot()), [], store=self.store)

    def filled(self):
        for tenant in ("default", "acme"):
            held = documents(60, seed=len(tenant))
            self.index.add(held, BagOfWords().embed([d.content for d in held]), tenant)
        return self

    def plant(self, count=None, **settings):
        return asyncio.run(plant_records(self.guard, self.keys, PlantingSettings(**settings), count))

    def rotate(self, **settings):
        return asyncio.run(rotate_records(self.guard, self.keys, PlantingSettings(**settings)))

    def clean(self, **options):
        return asyncio.run(remove_records(self.guard, self.keys, **options))

    def records(self, tenant="default"):
        return find_records(self.index, self.keys.load(), tenant).records

    def texts(self, tenant="default"):
        return {d.id: d for piece, _ in self.index.scan(tenant) for d in piece}


@pytest.fixture
def world(tmp_path):
    with contextlib.ExitStack() as opened:
        yield World(tmp_path, opened).filled()


class TestPlanting:
    @pytest.mark.parametrize("style", TEXTS)
    def test_plants_records_with_unique_strings(self, world, style):
        done = world.plant(8, style=style)
        assert len(done.added) == done.held == 8 and done.generation == 1
        key, held = world.keys.load(), world.texts()
        for record in world.records():
            document = held[record.source]
            mark = key.record_token("default", 1, record.number)
            assert WatermarkDetector([mark]).tokens(DecodedText(document.text)) == [mark]
            assert record.source.startswith("archive/") and len(document.text.split()) > 20
        assert len({held[s].text for s in done.added}) == 8
        assert len(world.texts()) == 68 and len(world.texts("acme")) == 60

    def test_planting_is_idempotent_and_adds_missing_records(self, world):
        first = world.plant(4)
        before = world.texts()
        assert world.plant(4).added == () and world.texts() == before
        more = world.plant(6)
        assert len(more.added) == 2 and more.held == 6 and not set(more.added) & set(first.added)

    def test_progress_has_a_total_counts_skipped_records_and_excludes_existing_ones(self, world):
        world.plant(2)
        counts, totals = [], []

        def steps(title, total):
            totals.append(total)
            return contextlib.nullcontext(counts.append)

        asyncio.run(plant_records(world.guard, world.keys, PlantingSettings(), 5, steps))
        questions = ["survey society collection parish study register project minutes founded kept"]
        settings = PlantingSettings(questions=questions, k=200)  # no record can be planted
        asyncio.run(plant_records(world.guard, world.keys, settings, 7, steps))
        assert counts == [1] * 5
        assert totals == [3, 2]

    def test_default_number_of_records(self, world):
        assert world.plant().held == 20

    def test_records_use_terms_of_their_neighborhood(self, world):
        world.plant(6)
        said = " ".join(world.texts()[r.source].text for r in world.records()).lower()
        assert sum(word in said for word in WORDS) >= 6

    def test_skips_records_that_benign_questions_would_retrieve(self, world):
        words = "survey society collection parish study register project minutes founded kept"
        none = world.plant(5, questions=[words], k=200)  # a question with k = 200 retrieves all documents
        assert none.added == () and none.skipped == none.wanted == 5 and none.benign is None
        some = world.plant(5, questions=["amber birch"] * 3, k=1)
        assert len(some.added) == 5 and some.benign.value == 0

    def test_planting_in_a_small_collection_stops_and_reports_the_documents_needed(self, world):
        """Every question retrieves every record; the limit is one question in 1,000."""
        counts = []
        words = "survey society collection parish study register project minutes founded kept"
        settings = PlantingSettings(questions=[words, *WORDS[:9]], k=200)
        done = asyncio.run(
            plant_records(world.guard, world.keys, settings, 20, lambda *_: contextlib.nullcontext(counts.append))
        )
        assert (done.added, done.skipped, done.rejected) == ((), 20, 1.0)
        assert done.needed == 60_000 and counts == [1] * FIRST_RECORDS

    def test_unconfirmed_list_of_records_is_an_error_and_repeating_completes_it(self, world):
        world.store.flush = lambda timeout_s=10.0: False
        with pytest.raises(BackendError, match="did not confirm the list of planted records; .* run the same again"):
            world.plant(3)
        del world.store.flush
        assert world.plant(3).added == () and len(world.records()) == 3

    def test_each_record_is_logged_once(self, world):
        world.plant(3)
        world.plant(3)
        planted = [e for e in world.store.events if e.kind == "honeytoken" and e.body["what"] == "planted"]
        assert len({e.id for e in planted}) == 3
        assert {e.body["source"] for e in planted} == {r.source for r in world.records()}
        mark = world.keys.load().record_token("default", 1, 0)
        assert not any(word in str(e.body) for e in planted for word in mark.split())  # no planted string in the store

    def test_needs_a_corpus_and_valid_settings(self, world):
        with pytest.raises(DataError, match="no documents to plant"):
            world.plant(3, tenant="nobody")
        with pytest.raises(ConfigError, match="honeytoken records"):
            PlantingSettings(folder="/")


class TestRotation:
    def test_replaces_old_records(self, world):
        old = world.plant(5).added
        planted, cleaned = world.rotate()
        assert len(planted.added) == 5 and planted.generation == 2
        assert set(cleaned.removed["default"]) == set(old) and not cleaned.left
        assert {r.generation for r in world.records()} == {2} and len(world.texts()) == 65

    def test_old_records_stay_if_no_new_record_can_be_planted(self, world):
        old = world.plant(2).added
        questions = ["survey society collection parish study register project minutes founded kept"]
        planted, cleaned = world.rotate(questions=questions, k=200)
        assert (planted.held, planted.wanted, cleaned.removed) == (0, 2, {})
        assert {r.source for r in world.records()} == set(old)
        assert len(world.rotate()[0].added) == 2 and not {r.source for r in world.records()} & set(old)

    def test_old_strings_are_still_recognized(self, world):
        world.plant(2)
        old = {world.keys.load().record_token("default", 1, i) for i in range(2)}
        world.rotate()
        found = search_texts([("dump", f"... {' '.join(old)} ...")], world.keys, world.store)
        assert {s.string.details["generation"] for s in found} == {1} and len(found) == 2

    def test_other_tenants_are_unchanged(self, world):
        world.plant(2)
        world.plant(3, tenant="acme")
        world.rotate()
        assert [r.generation for r in world.records("acme")] == [1, 1, 1]
        world.rotate(tenant="acme")
        assert {r.generation for r in world.records("acme")} == {3}

    def test_rotation_without_records_starts_a_generation(self, world):
        planted, cleaned = world.rotate()
        assert (planted.added, planted.generation, cleaned.removed) == ((), 2, {"default": ()})


class TestRemoval:
    def test_removes_all_records_of_all_tenants_and_nothing_else(self, world):
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

    def test_keeps_documents_that_only_resemble_a_record(self, world):
        world.plant(2)
        record = world.texts()[world.records()[0].source]
        forged = Document("mine", "An honest text.", source="honeytoken/12345678", metadata=record.metadata)
        asyncio.run(world.guard.add([forged, Document("honeytoken/plain", "Another honest text.")]))
        done = world.clean()
        assert len(done.removed["default"]) == 2
        assert [line.split()[0] for line in done.left] == ["honeytoken/12345678"]
        assert {"mine", "honeytoken/plain"} <= world.texts().keys()
        assert world.clean(force=True).removed["default"] == ("honeytoken/12345678",)
        assert "honeytoken/plain" in world.texts()

    def test_keeps_a_source_with_other_documents(self, world):
        world.plant(1)
        record = world.texts()[world.records()[0].source]
        asyncio.run(world.guard.add([record, Document("guest", "An honest text.", source=record.source)]))
        done = world.clean()
        assert done.removed["default"] == () and record.source in done.left[0] and "guest" in world.texts()

    def test_without_the_key_file_no_record_is_removed(self, world):
        world.plant(2)
        world.keys.path.unlink()
        done = world.clean()
        assert done.removed["default"] == () and len(done.left) == 2 and "no key file" in done.left[0]

    def test_reports_records_that_reappear(self, world):
        world.plant(1)

        async def remove_nothing(sources, tenant):
            return 0

        world.guard.remove = remove_nothing
        assert "reappears" in world.clean(tenant="default").left[0]


KILLED = """
    import asyncio, contextlib, os, signal, sys
    from pathlib import Path
    from tests.unit.test_honeytoken_planting import World
    from casemate.backends.event_stores.sql import SqlEventStore
    folder, act, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    steps = 0

    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps > when:
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.ExitStack() as opened:
        world = World(folder, opened, opened.enter_context(contextlib.closing(SqlEventStore(path=folder / "e.db"))))
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


class TestKill:
    @pytest.mark.slow
    @pytest.mark.parametrize("act", ["plant", "rotate", "clean"])
    def test_at_any_step_is_repaired_by_repeating_the_command(self, tmp_path, act):
        """Kills the process before and after each call that changes something."""
        script = tmp_path / "killed.py"
        script.write_text(textwrap.dedent(KILLED))
        root = Path(__file__).parents[2]
        for when in range(40):
            folder = tmp_path / f"{act}{when}"
            folder.mkdir()
            with contextlib.ExitStack() as opened:
                store = opened.enter_context(contextlib.closing(SqlEventStore(path=folder / "e.db")))
                world = World(folder, opened, store).filled()
                if act != "plant":
                    world.plant(3)
            done = subprocess.run(
                [sys.executable, str(script), str(folder), act, str(when)],
                env=os.environ | {"PYTHONPATH": f"{root}:{root}/src"}, capture_output=True, text=True, check=False,
                timeout=60,
            )  # fmt: skip
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            with contextlib.ExitStack() as opened:
                store = opened.enter_context(contextlib.closing(SqlEventStore(path=folder / "e.db")))
                self.check_repaired(World(folder, opened, store), act)
            if done.returncode == 0:
                assert when > 3  # the number of kills
                return
        raise AssertionError("more steps than tries")

    def check_repaired(self, world, act):
        {"plant": lambda: world.plant(3), "rotate": world.rotate, "clean": world.clean}[act]()
        records = world.records()
        assert len(records) == (0 if act == "clean" else 3)
        assert len({r.generation for r in records}) <= 1
        strings_ = planted_strings(world.keys.load(), world.store).values()
        assert {r.source for r in records} <= {p.details.get("source") for p in strings_}
        assert len(world.clean(tenant="default").removed["default"]) == len(records)
        assert len(world.texts()) == 60


class TestTrainingStrings:
    def test_are_unique_and_found_with_recipient_time_and_purpose(self, world):
        given = training_strings(world.keys, world.store, 6, purpose="support tickets 2031", who="vendor A")
        other = training_strings(world.keys, world.store, 6, purpose="support tickets 2031", who="vendor B")
        assert len({*given, *other}) == 12
        found = search_texts([("model output", f"I recall: {other[3].upper()}")], world.keys, world.store)
        (seen,) = found
        assert (seen.where, seen.string.kind, seen.string.details["who"]) == ("model output", "training", "vendor B")
        assert seen.string.details["number"] == 3 and seen.string.details["at"] > "20"

    def test_are_not_returned_without_a_log_entry(self, world):
        world.store.flush = lambda timeout_s=10.0: False
        with pytest.raises(BackendError, match="no strings are given out"):
            training_strings(world.keys, world.store, 1, purpose="p", who="w")

    @pytest.mark.parametrize("wrong", [{"count": 0}, {"count": 10**6}, {"purpose": " "}, {"who": ""}])
    def test_arguments_out_of_range(self, world, wrong):
        options = {"count": 1, "purpose": "p", "who": "w"} | wrong
        with pytest.raises(ConfigError):
            training_strings(world.keys, world.store, options.pop("count"), **options)


class TestSearch:
    def test_distinguishes_tokens_records_and_strings(self, world):
        world.plant(1)
        (string,) = training_strings(world.keys, world.store, 1, purpose="p", who="w")
        key = world.keys.load()
        text = f"{key.prompt_token('url', 1)} and {key.record_token('default', 1, 0)} and {string}"
        assert {s.string.kind for s in search_texts([("x", text)], world.keys, world.store)} == {
            "prompt", "record", "training"
        }  # fmt: skip

    def test_without_the_store_records_come_from_the_index_and_others_are_unknown(self, world):
        world.plant(1)
        (string,) = training_strings(world.keys, world.store, 1, purpose="p", who="w")
        text = f"{world.keys.load().record_token('default', 1, 0)}. {string}"
        found = search_texts([("x", text)], world.keys, None, world.index)
        assert {s.string.kind for s in found} == {"record", "unknown"}

    def test_finds_nothing_in_ordinary_texts(self, world):
        world.plant(5)
        texts = [(d.id, d.text) for d in documents(200)] + [("syllables", "banana tomato potato " * 3000)]
        assert search_texts(texts, world.keys, world.store, world.index) == []

    def test_reads_files_and_folders_of_any_size_and_encoding(self, world, tmp_path):
        world.plant(3)
        marks = [world.keys.load().record_token("default", 1, i) for i in range(3)]
        folder = tmp_path / "loot"
        (folder / "deep").mkdir(parents=True)
        for at in (0, 57_995, 59_990, 120_000):  # also across the border of a block
            (folder / "long.txt").write_text("x" * at + f" {marks[0]} " + "y" * 1000)
            assert [s.string.kind for s in search_files([folder / "long.txt"], world.keys, world.store)] == ["record"]
        (folder / "deep" / "wide.txt").write_text(marks[1], encoding="utf-16")
        with gzip.open(folder / "deep" / "packed.gz", "wt") as file:
            file.write(base64.b64encode(marks[2].encode()).decode())
        (folder / "binary").write_bytes(bytes(range(256)) * 50)
        found = search_files([folder], world.keys, world.store)
        assert {Path(s.where).name: s.form for s in found} == {
            "long.txt": "letters", "wide.txt": "letters", "packed.gz": "base64"
        }  # fmt: skip

    def test_unreadable_paths_are_errors(self, world, tmp_path):
        world.plant(1)
        (tmp_path / "bad.gz").write_bytes(b"no gzip")
        for path in (tmp_path / "absent", tmp_path / "bad.gz"):
            with pytest.raises(DataError, match=path.name):
                search_files([path], world.keys)

    def test_needs_the_key_file(self, world):
        world.keys.path.unlink()
        with pytest.raises(DataError, match="no key file"):
            search_texts([("x", "y")], world.keys)


class TestLocations:
    def test_are_in_dense_regions_and_far_apart(self):
        rng = np.random.default_rng(3)
        centers = rng.standard_normal((4, 32))
        X = np.repeat(centers, 20, axis=0) + 0.1 * rng.standard_normal((80, 32))
        X = np.vstack([X, rng.standard_normal((20, 32))])  # 20 isolated points
        sample = CorpusSample(tuple(documents(100)), (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32))
        locations = sample.locations(4, np.random.default_rng(0))
        assert {p // 20 for p in locations} <= {0, 1, 2, 3} and len({p // 20 for p in locations}) >= 2
        assert len(sample.locations(200, np.random.default_rng(0))) == 200

    def test_the_sample_excludes_given_sources(self, world):
        sample = CorpusSample.of(world.index, "default", np.random.default_rng(0), {"d0"})
        assert len(sample.documents) == 59 and "d0" not in {d.id for d in sample.documents}

    def test_one_document_suffices(self):
        sample = CorpusSample((Document("a", "the toll"),), np.ones((1, 4), np.float32) / 2)
        assert sample.locations(3, np.random.default_rng(0)) == [0, 0, 0]
        found = draft_records("zakeno mirodo pilafe", "bido", sample.terms(0), BAITS, np.random.default_rng(0))
        assert all("Zakeno Mirodo Pilafe" in text and text.endswith("See also Bido.") for _, text in found)

    @pytest.mark.parametrize(
        ("text", "expected", "other", "english"),
        [
            (
                "Die Anträge sind in Emden bis Mai einzureichen. Sie werden dort geprüft.",
                "Emden",
                {"emden", "werden"},
                0,
            ),
            ("北桥的通行费是每次961元，收费时间由市政厅规定。", "通行费", {"通行费是每次961元"}, 0),
            ("sku;item;price EUR\nA7;washer;12.50\nA8;gasket;3.20", "washer", set(), 0),
            ("Thanks. What is the toll of the north bridge that Reyes asked about?", "Reyes", {"Thanks"}, 1),
        ],
    )
    def test_terms_keep_the_spelling_of_the_documents(self, text, expected, other, english):
        sample = CorpusSample((Document("a", text),), np.ones((1, 4), np.float32) / 2)
        assert expected in sample.terms(0) and other.isdisjoint(sample.terms(0))
        assert sample.english == english


@pytest.mark.parametrize(("count", "held", "code"), [(20, 20, 0), (20, 13, 3), (None, 13, 0), (None, 0, 3), (20, 0, 3)])
def test_command_reports_requested_and_planted_records_and_the_reason_for_missing_ones(monkeypatch, count, held, code):
    async def planted(*_):
        return PlantingResult(("honeytoken/a",) * held, held, 1, 20, 20 - held, english=False)

    for name in ("_settings", "key_file", "_warn_without_defense"):
        monkeypatch.setattr(command, name, lambda *_: None)
    monkeypatch.setattr(command, "open_app", lambda _: contextlib.nullcontext(SimpleNamespace(guard=None)))
    monkeypatch.setattr(command, "plant_records", planted)
    done = CliRunner().invoke(cli, ["canary", "plant", *(["--count", str(count)] if count else [])])
    assert done.exit_code == code
    assert f"20 records asked for, {held} planted; generation 1 has {held}\n" in done.stdout
    why = f"{20 - held} records not planted: more than 0.1 % of the benign questions would retrieve each draft."
    assert (why in done.stdout) == (held < 20)
    assert ("the records are English prose and most documents are not" in done.stdout) == (held > 0)


def test_command_reports_the_number_of_documents_needed(monkeypatch):
    async def planted(*_):
        return PlantingResult((), 0, 1, 20, 20, rejected=0.049, needed=1964, english=False)

    for name in ("_settings", "key_file", "_warn_without_defense"):
        monkeypatch.setattr(command, name, lambda *_: None)
    monkeypatch.setattr(command, "open_app", lambda _: contextlib.nullcontext(SimpleNamespace(guard=None)))
    monkeypatch.setattr(command, "plant_records", planted)
    done = CliRunner().invoke(cli, ["canary", "plant"])
    assert "at least 4.9 % of the benign questions would retrieve any draft; allowed is 0.1 %" in done.stdout
    assert "about 2,000 are needed" in done.stdout and done.exit_code == 3
    assert "the records are English prose and most documents are not" not in done.stdout  # no record was planted
