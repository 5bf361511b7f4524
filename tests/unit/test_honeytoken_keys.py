"""The key file of the honey, and what follows from it."""

import json
import os
import stat
import threading

import pytest

from casemate.errors import BackendError, DataError
from casemate.marks import Marks, Text
from casemate.marks.honey import FORMS, HoneyKey, HoneyKeys, lines, token
from casemate.types import Document, Secret

KEY = HoneyKey(Secret("s" * 64), generation=3)


class TestTheFile:
    def test_is_made_when_first_needed_for_its_owner_only(self, tmp_path):
        keys = HoneyKeys(tmp_path / "deep" / "honey.json")
        assert keys.find() is None and not keys.path.exists()
        made = keys.get()
        assert made.generation == 1 and len(made.secret) == 64
        assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
        assert HoneyKeys(keys.path).get() == made

    def test_shows_its_secret_in_no_repr(self, tmp_path):
        made = HoneyKeys(tmp_path / "honey.json").get()
        assert str(made.secret) not in repr(made)

    def test_is_followed_when_somebody_else_rotates_it(self, tmp_path):
        here, there = HoneyKeys(tmp_path / "honey.json"), HoneyKeys(tmp_path / "honey.json")
        first = here.get()
        assert there.rotate().generation == 2
        assert here.find().generation == 2 and here.find().secret == first.secret
        here.path.unlink()
        assert here.find() is None

    def test_is_made_once_by_many_at_the_same_time(self, tmp_path):
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(HoneyKeys(tmp_path / "honey.json").get().secret))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1 and len(found) == 8
        assert os.listdir(tmp_path) == ["honey.json"]  # nothing half-made stays

    @pytest.mark.parametrize(
        "text",
        ["", "no json", "[1]", '{"format": 2}', '{"format": 1, "secret": "short", "generation": 1}',
         '{"format": 1, "secret": "' + "s" * 64 + '", "generation": 0}',
         '{"format": 1, "secret": "' + "s" * 64 + '", "generation": true}'],
    )  # fmt: skip
    def test_that_is_damaged_is_named_and_never_replaced(self, tmp_path, text):
        (tmp_path / "honey.json").write_text(text)
        for act in (HoneyKeys.get, HoneyKeys.find, HoneyKeys.rotate):
            with pytest.raises(DataError, match=r"honey\.json is no key"):
                act(HoneyKeys(tmp_path / "honey.json"))
        assert (tmp_path / "honey.json").read_text() == text

    def test_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(BackendError, match=r"file/honey\.json"):
            HoneyKeys(tmp_path / "file" / "honey.json").get()


class TestTokens:
    def test_differ_by_form_and_generation_and_all_are_told(self):
        marks = KEY.prompt_marks()
        assert len(marks) == 3 * len(FORMS)
        assert set(marks.values()) == {(form, g) for form in FORMS for g in (1, 2, 3)}

    @pytest.mark.parametrize("form", FORMS)
    def test_of_every_form_are_found_by_their_mark(self, form):
        mark = KEY.prompt_mark(form, 3)
        written = token(form, mark, "example.net")
        assert Marks(KEY.prompt_marks()).all(Text(f"See {written}, please")) == [mark]

    def test_stand_in_the_instructions_a_line_each(self):
        text = lines(KEY, ("email", "sentence"), "example.org")
        assert len(text.splitlines()) == 2
        assert Marks(KEY.prompt_marks()).all(Text(text)) == sorted(
            KEY.prompt_mark(form, 3) for form in ("email", "sentence")
        )
        assert "@example.org" in text
        assert lines(KEY, (), "example.org") == ""


class TestRecords:
    def test_are_told_by_their_seal(self):
        document = KEY.sealed(Document("a", "text", metadata={"kind": "note"}), "acme", 2, 7)
        found = KEY.record(document, "acme")
        assert (found.tenant, found.source, found.generation, found.number) == ("acme", "a", 2, 7)
        assert document.metadata["kind"] == "note"

    def test_are_not_told_elsewhere_or_with_another_key(self):
        document = KEY.sealed(Document("a", "text"), "acme", 2, 7)
        copy = Document("b", "text", metadata=document.metadata)
        assert KEY.record(copy, "acme") is None
        assert KEY.record(document, "other") is None
        assert HoneyKey(Secret("t" * 64)).record(document, "acme") is None

    @pytest.mark.parametrize(
        "held",
        [None, "x", 3, {}, {"generation": 2}, {"generation": "2", "number": 7, "seal": "é"},
         {"generation": 2, "number": 7, "seal": "\ud800"}, {"generation": 2, "number": 8, "seal": "same"}],
    )  # fmt: skip
    def test_whatever_the_metadata_says(self, held):
        seal = KEY.sealed(Document("a", ""), "acme", 2, 7).metadata["honey"]["seal"]
        held = {**held, "seal": seal} if isinstance(held, dict) and held.get("seal") == "same" else held
        assert KEY.record(Document("a", "", metadata={"honey": held}), "acme") is None

    def test_survive_a_passage_through_json(self):
        document = KEY.sealed(Document("a", "text"), "acme", 2, 7)
        back = Document("a", "text", metadata=json.loads(json.dumps(dict(document.metadata))))
        assert KEY.record(back, "acme") == KEY.record(document, "acme") is not None

    def test_have_marks_and_names_of_their_own(self):
        about = [(tenant, g, n) for tenant in ("a", "b") for g in (1, 2) for n in range(50)]
        assert len({KEY.record_mark(*a) for a in about}) == len({KEY.name(*a) for a in about}) == 200
