"""The honeytoken key file, and the tokens and records derived from it."""

import json
import os
import stat
import threading

import pytest

from casemate.errors import BackendError, DataError
from casemate.guard.watermarks.detection import WatermarkDetector
from casemate.guard.watermarks.honeytoken_keys import (
    FORMS,
    HoneytokenKey,
    HoneytokenKeyFile,
    format_credential,
    instruction_lines,
)
from casemate.text.disguises import DecodedText
from casemate.types import Document, Secret

KEY = HoneytokenKey(Secret("s" * 64), generation=3)


class TestKeyFile:
    def test_is_created_on_first_use_with_mode_0600(self, tmp_path):
        keys = HoneytokenKeyFile(tmp_path / "deep" / "honeytokens.json")
        assert keys.load() is None and not keys.path.exists()
        made = keys.load_or_create()
        assert made.generation == 1 and len(made.secret) == 64
        assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
        assert HoneytokenKeyFile(keys.path).load_or_create() == made

    def test_repr_hides_the_secret(self, tmp_path):
        made = HoneytokenKeyFile(tmp_path / "honeytokens.json").load_or_create()
        assert str(made.secret) not in repr(made)

    def test_rotation_by_another_process_applies(self, tmp_path):
        here, there = HoneytokenKeyFile(tmp_path / "honeytokens.json"), HoneytokenKeyFile(tmp_path / "honeytokens.json")
        first = here.load_or_create()
        assert there.rotate().generation == 2
        assert here.load().generation == 2 and here.load().secret == first.secret
        here.path.unlink()
        assert here.load() is None

    def test_concurrent_creation_gives_one_key(self, tmp_path):
        found = []
        threads = [
            threading.Thread(
                target=lambda: found.append(HoneytokenKeyFile(tmp_path / "honeytokens.json").load_or_create().secret)
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1 and len(found) == 8
        assert os.listdir(tmp_path) == ["honeytokens.json"]  # no temporary files remain

    @pytest.mark.parametrize(
        "text",
        ["", "no json", "[1]", '{"format": 2}', '{"format": 1, "secret": "short", "generation": 1}',
         '{"format": 1, "secret": "' + "s" * 64 + '", "generation": 0}',
         '{"format": 1, "secret": "' + "s" * 64 + '", "generation": true}'],
    )  # fmt: skip
    def test_damaged_file_is_reported_and_not_replaced(self, tmp_path, text):
        (tmp_path / "honeytokens.json").write_text(text)
        for act in (HoneytokenKeyFile.load_or_create, HoneytokenKeyFile.load, HoneytokenKeyFile.rotate):
            with pytest.raises(DataError, match=r"honeytokens\.json is damaged or not a honeytoken key"):
                act(HoneytokenKeyFile(tmp_path / "honeytokens.json"))
        assert (tmp_path / "honeytokens.json").read_text() == text

    def test_unwritable_file_is_reported(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(BackendError, match=r"file/honeytokens\.json"):
            HoneytokenKeyFile(tmp_path / "file" / "honeytokens.json").load_or_create()


class TestTokens:
    def test_differ_by_form_and_generation(self):
        marks = KEY.prompt_tokens()
        assert len(marks) == 3 * len(FORMS)
        assert set(marks.values()) == {(form, g) for form in FORMS for g in (1, 2, 3)}

    @pytest.mark.parametrize("form", FORMS)
    def test_credentials_of_every_form_are_detected(self, form):
        mark = KEY.prompt_token(form, 3)
        written = format_credential(form, mark, "example.net")
        assert WatermarkDetector(KEY.prompt_tokens()).tokens(DecodedText(f"See {written}, please")) == [mark]

    def test_instructions_have_one_line_per_form(self):
        text = instruction_lines(KEY, ("email", "sentence"), "example.org")
        assert len(text.splitlines()) == 2
        assert WatermarkDetector(KEY.prompt_tokens()).tokens(DecodedText(text)) == sorted(
            KEY.prompt_token(form, 3) for form in ("email", "sentence")
        )
        assert "@example.org" in text
        assert instruction_lines(KEY, (), "example.org") == ""


class TestRecords:
    def test_are_identified_by_their_seal(self):
        document = KEY.seal(Document("a", "text", metadata={"kind": "note"}), "acme", 2, 7)
        found = KEY.identify(document, "acme")
        assert (found.tenant, found.source, found.generation, found.number) == ("acme", "a", 2, 7)
        assert document.metadata["kind"] == "note"

    def test_are_not_identified_in_a_copy_another_tenant_or_with_another_key(self):
        document = KEY.seal(Document("a", "text"), "acme", 2, 7)
        copy = Document("b", "text", metadata=document.metadata)
        assert KEY.identify(copy, "acme") is None
        assert KEY.identify(document, "other") is None
        assert HoneytokenKey(Secret("t" * 64)).identify(document, "acme") is None

    @pytest.mark.parametrize(
        "held",
        [None, "x", 3, {}, {"generation": 2}, {"generation": "2", "number": 7, "seal": "é"},
         {"generation": 2, "number": 7, "seal": "\ud800"}, {"generation": 2, "number": 8, "seal": "same"}],
    )  # fmt: skip
    def test_documents_with_invalid_metadata_are_not_records(self, held):
        seal = KEY.seal(Document("a", ""), "acme", 2, 7).metadata["honeytoken"]["seal"]
        held = {**held, "seal": seal} if isinstance(held, dict) and held.get("seal") == "same" else held
        assert KEY.identify(Document("a", "", metadata={"honeytoken": held}), "acme") is None

    def test_seal_is_unchanged_by_json(self):
        document = KEY.seal(Document("a", "text"), "acme", 2, 7)
        back = Document("a", "text", metadata=json.loads(json.dumps(dict(document.metadata))))
        assert KEY.identify(back, "acme") == KEY.identify(document, "acme") is not None

    def test_tokens_and_names_are_unique(self):
        about = [(tenant, g, n) for tenant in ("a", "b") for g in (1, 2) for n in range(50)]
        assert len({KEY.record_token(*a) for a in about}) == len({KEY.record_name(*a) for a in about}) == 200
