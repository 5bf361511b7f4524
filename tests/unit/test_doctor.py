"""``casemate doctor`` on small installations."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.app import open_app
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.doctor import FEW, examine
from casemate.errors import ConfigError, DataError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.guard.calibration.file import write_calibration
from casemate.guard.calibration.log_review import log_warnings, weak_attacks_note
from casemate.guard.watermarks.honeytoken_keys import METADATA
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import ScreeningResult
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.types import Document, Event
from tests.fakes import BAG, BagOfWords, documents, entry_points
from tests.unit.listener import Listener
from tests.unit.test_calibration_file import MADE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A configuration with the test embedder, and a corpus of 40 records."""
    monkeypatch.setattr(plugins, "entry_points", entry_points(BAG))
    write(tmp_path / "corpus.jsonl", documents(40))
    (tmp_path / "casemate.yaml").write_text("rag: {corpus: corpus.jsonl, embedder: bag}\nguard: {mode: 'off'}\n")
    return tmp_path


def write(path, records):
    path.write_text("\n".join(json.dumps({"_id": d.id, "text": d.text}) for d in records))


def index(folder, corpus):
    with open_app(folder / "casemate.yaml") as app:
        work = Ingest(app.guard, Corpus(corpus))
        asyncio.run(work.run(work.plan()))


def details(folder):
    return {f.name: (f.ok, f.detail) for f in examine(folder / "casemate.yaml")}


def test_valid_installation_has_no_failure(folder):
    index(folder, folder / "corpus.jsonl")
    found = details(folder)
    assert not [name for name, (ok, _) in found.items() if ok is False]
    assert found["index"] == (True, "vectors and corpus moments agree")
    assert found["documents"] == (True, "tenant 'default': 40 chunks of 40 sources")
    assert found["corpus"] == (True, "40 sources up to date")


def test_an_empty_index_and_a_new_corpus_are_notes(folder):
    found = details(folder)
    assert found["documents"] == (None, "the index is empty; run 'casemate index'")
    assert found["corpus"][0] is None and found["corpus"][1].startswith("0 sources up to date; 40 new, changed or")


@pytest.mark.parametrize(("label", "notes"), [("hr", 0), ("hrr", 2)])
def test_sources_with_access_labels_are_counted_and_compared_with_the_keys(label, notes, folder):
    lines = [{"_id": f"n{i}", "text": f"note {i} is long enough", "acl": ["hr"] if i < 3 else None} for i in range(9)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    index(folder, folder / "corpus.jsonl")
    assert "labels" in details(folder)
    with open_app(folder / "casemate.yaml") as app:
        ApiKeyStore(app.store).create(Grant("ann", labels=(label,)))
    found = [(f.ok, f.detail) for f in examine(folder / "casemate.yaml") if f.name == "labels"]
    counted = "tenant 'default': 3 of 9 sources are restricted to keys with a label (acl): hr 3 sources"
    assert found[0] == (True, counted)
    assert len(found[1:]) == notes and all(ok is None for ok, _ in found[1:])


def test_the_texts_and_vectors_are_not_read_to_count_labels_and_metadata(folder, monkeypatch):
    rule = "{sources: [n*], metadata: {department: [x]}}"
    guard = f"guard: {{defenses: [], audience: {{unentitled: nothing, entitled: [{rule}]}}}}"
    (folder / "casemate.yaml").write_text(f"rag: {{corpus: corpus.jsonl, embedder: bag}}\n{guard}\n")
    lines = [{"_id": f"n{i}", "text": f"note {i} is long enough", "acl": ["hr"], "department": "x"} for i in range(9)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    index(folder, folder / "corpus.jsonl")
    monkeypatch.setattr(SqliteIndex, "scan", None)
    found = {f.detail for f in examine(folder / "casemate.yaml") if f.name in {"labels", "audience"}}
    counted = [
        "9 of 9 sources are restricted",
        "9 of 9 sources match 'n*'",
        "0 of 9 sources lack the metadata 'department'",
    ]
    assert all(any(part in detail for detail in found) for part in counted)


def test_few_documents_cause_a_note(folder):
    write(folder / "corpus.jsonl", documents(FEW - 1))
    index(folder, folder / "corpus.jsonl")
    ok, detail = details(folder)["documents"]
    assert ok is None and "too few for statistical defenses" in detail


@pytest.mark.parametrize("gate", ["true", "observe", "false"])
def test_screening_that_is_off_for_lack_of_documents_is_a_note(gate, folder, monkeypatch):
    with (folder / "casemate.yaml").open("a") as file:
        file.write(f"monitor: {{gate: {gate}}}\n")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli, ["index"], catch_exceptions=False)
    missing = "off until the index has 500 chunks (now 40); new documents are indexed unscreened"
    assert (f"screening: {missing}" in done.stderr) == (gate != "false")
    assert details(folder).get("screening") == (None if gate == "false" else (None, f"tenant 'default': {missing}"))


def test_many_flagged_questions_are_a_note(folder):
    with open_app(folder / "casemate.yaml") as app:
        for number in range(20):
            flags = {"mirabel": number % 2 == 0, "crawl_limit": False, "similarity_floor": number == 0}
            for defense, flagged in flags.items():
                why = {"reasons": ["before"]} if defense == "mirabel" and number > 9 else {}
                body = {"defense": defense, "flagged": flagged, "client": "ann", "evidence": why}
                app.store.append(Event(f"{defense}-{number}", datetime.now(UTC), "verdict", body))
    found = details(folder)
    ok, detail = found["event store"]
    assert (
        ok and detail.count("of them new") == 1 and "crawl_limit flagged 0 of 20 questions: 0.00 [0.00, 0.17]" in detail
    )
    assert "], 5 of them new, the others repeat an earlier decision" in detail
    assert detail.endswith("similarity_floor flagged 1 of 20 questions: 0.05 [0.00, 0.25]")
    ok, detail = found["flagged"]
    assert ok is None and detail.startswith("mirabel flagged more than 20 % of the questions: an attack, or")


@pytest.mark.parametrize(("recall", "close"), [(0.9, 0.0), (0.03, 0.0), (0.9, 0.2)])
def test_calibration_warnings_of_indexing_are_repeated(recall, close, folder):
    index(folder, folder / "corpus.jsonl")
    (folder / "casemate.yaml").write_text("rag: {corpus: corpus.jsonl, embedder: bag}\nguard: {defenses: [mirabel]}\n")
    by_attack = {"mba": {"0.01": {"question": [recall, 0.0, 1.0]}}}
    notes = {"recall": by_attack, "log": {"as_close": {"mba": [close, close, close]}, "unfamiliar": None}}
    made = replace(MADE, fingerprint=BagOfWords().fingerprint, documents=40, notes=notes)
    write_calibration(folder / ".casemate/calibration.json", "default", made)
    found = details(folder)
    assert found["guard"][0] is True
    expected = [weak_attacks_note(made, 0.01)] * (recall < 0.5) or log_warnings(made, 0.01)
    said = (None, f"mirabel, tenant 'default': {expected[0]}") if expected else None
    assert found.get("calibration") == said and bool(expected) == (recall < 0.5 or close > 0.1)


def test_few_long_files_give_no_calibration_and_advice_until_they_are_split(folder, monkeypatch):
    records, corpus = documents(40), folder / "corpus"
    corpus.mkdir()
    for part in range(4):
        (corpus / f"part{part}.md").write_text("\n\n".join(d.text for d in records[10 * part : 10 * part + 10]))
    rag = "rag: {corpus: corpus, embedder: bag, chunk: {tokens: 16, overlap: 0}}"
    (folder / "casemate.yaml").write_text(f"{rag}\nguard: {{defenses: [mirabel]}}\n")
    monkeypatch.chdir(folder)
    why = "too few sources (4; a calibration needs at least 20); split long files into one file per record, or add"
    done = CliRunner().invoke(cli, ["index"], catch_exceptions=False)
    assert f"note: mirabel is not calibrated and withholds nothing: {why}" in done.stderr
    ok, detail = details(folder)["guard"]
    assert ok is None and f"not calibrated, withholds nothing: {why}" in detail
    assert why in CliRunner().invoke(cli, ["ask", "--explain", records[0].text], catch_exceptions=False).stdout
    for file in corpus.iterdir():
        for number, text in enumerate(file.read_text().split("\n\n")):
            (corpus / f"{file.stem}-{number}.md").write_text(text)
        file.unlink()
    done = CliRunner().invoke(cli, ["index", "--missing", "remove"], catch_exceptions=False)
    assert "the calibration of tenant 'default' had too few sources (4)" in done.stderr
    assert details(folder)["guard"][0] is True


def test_failures_are_a_note_and_are_excluded_from_the_shares(folder):
    with open_app(folder / "casemate.yaml") as app:
        for number, evidence in enumerate([{}, {}, {"error": "DataError", "message": "stale"}, {"undecided": "few"}]):
            body = {"defense": "mirabel", "flagged": number == 0, "client": "ann", "evidence": evidence}
            app.store.append(Event(f"v{number}", datetime.now(UTC), "verdict", body))
    found = details(folder)
    said = found["event store"][1]
    assert "mirabel flagged 1 of 2 questions" in said and "mirabel did not decide 2 of 4 questions" in said
    assert found["failures"] == (
        None,
        "guard.on_error decided where a defense failed: mirabel in 1 of 4 questions, last: stale",
    )


@pytest.mark.parametrize("grades", [("full",), ("full", "extracts", "quorum")])
def test_clients_limited_by_crawl_limit_are_counted(grades, folder):
    index(folder, folder / "corpus.jsonl")
    with (folder / "casemate.yaml").open("w") as file:
        file.write("rag: {corpus: corpus.jsonl, embedder: bag}\nguard: {defenses: [crawl_limit]}\n")
    with open_app(folder / "casemate.yaml") as app:
        for number, (grade, hours) in enumerate([*((grade, 1) for grade in grades), ("quorum", 25)]):
            body = {"tenant": "default", "client": f"c{number}", "defense": "crawl_limit", "flagged": False}
            at = datetime.now(UTC) - timedelta(hours=hours)
            app.store.append(Event(f"e{number}", at, "verdict", body | {"hidden": [], "evidence": {"grade": grade}}))
        until = datetime.now(UTC).timestamp() + 3600 * (len(grades) > 1)
        evidence = {"grade": "full", "tenant_since": until - 3600, "tenant_until": until}
        app.store.append(Event("new", datetime.now(UTC), "verdict", body | {"hidden": [], "evidence": evidence}))
    said = [f.detail for f in examine(folder / "casemate.yaml") if "all clients of tenant" in f.detail]
    assert len(said) == (len(grades) > 1)
    ok, detail = details(folder)["crawl limit"]
    count = len(grades) - 1
    assert ok is (None if count else True)
    assert detail.startswith(f"crawl_limit limited the context or the answers of {count} clients in the last 24 hours")


def test_an_index_that_cannot_be_read_is_not_reported_as_the_event_store(folder, monkeypatch):
    def fail(_):
        raise DataError("the index is damaged")

    monkeypatch.setattr(SqliteIndex, "tenants", fail)
    with (folder / "casemate.yaml").open("w") as file:
        file.write("rag: {corpus: corpus.jsonl, embedder: bag}\nguard: {defenses: [mirabel, reindex, crawl_limit]}\n")
    found = details(folder)
    failed = {name for name, (_, detail) in found.items() if detail == "the index is damaged"}
    assert failed == {"index", "guard", "budgets", "reindex", "daily share", "labels"}
    assert found["event store"] == (True, "0 verdicts") and found["crawl limit"][0] is True


@pytest.mark.parametrize(
    ("defenses", "late"), [("mirabel, crawl_limit, canary_token", None), ("crawl_limit, similarity_floor", "floor")]
)
def test_a_defense_that_withholds_after_crawl_limit_is_a_note(defenses, late, folder):
    with (folder / "casemate.yaml").open("w") as file:
        file.write(f"rag: {{corpus: corpus.jsonl, embedder: bag}}\nguard: {{defenses: [{defenses}]}}\n")
    said = "similarity_floor withholds chunks that crawl_limit, before it, has counted as shown; place similarity_floor"
    assert details(folder).get("order of defenses") == ((None, f"{said} before crawl_limit") if late else None)


@pytest.mark.parametrize(("questions", "small"), [(2, False), (4, False), (7, True)])
def test_a_daily_share_of_most_of_the_collection_is_a_note(questions, small, folder, monkeypatch):
    defense = f"{{use: crawl_limit, questions: {questions}}}"
    with (folder / "casemate.yaml").open("w") as file:
        file.write(f"rag: {{corpus: corpus.jsonl, embedder: bag, k: 5}}\nguard: {{defenses: [{defense}]}}\n")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli, ["index"], catch_exceptions=False)
    detail = "one client may be shown 35 of 40 chunks (88 %) in 24 hours. To show it at most 10 (25 %), set questions: "
    detail += "2 for crawl_limit in guard.defenses: further questions are then answered from the chunks that the "
    detail += "client was shown before."
    assert (f"note: {detail}" in done.stderr) == small
    again = CliRunner().invoke(cli, ["index"], catch_exceptions=False)
    assert "one client may be shown" not in again.stderr
    assert details(folder).get("daily share") == ((None, f"tenant 'default': {detail}") if small else None)


def test_differences_between_corpus_and_index_are_listed(folder):
    index(folder, folder / "corpus.jsonl")
    kept, changed = documents(40)[:38], documents(1, seed=2)
    write(folder / "corpus.jsonl", [*changed, *kept[1:]])
    ok, detail = details(folder)["corpus"]
    assert ok is None
    assert detail == (
        "37 sources up to date; 1 new, changed or without text: d0; 2 in the index only: d38, d39; run 'casemate index'"
    )


@pytest.mark.parametrize("name", ["scan.pdf", "bad.jsonl"])
def test_advice_for_unreadable_files_is_repair_instead_of_indexing(name, folder):
    """Indexing would skip the unreadable files again."""
    (folder / "corpus").mkdir()
    (folder / "corpus/fee.md").write_text("The fee is 90 crowns.")
    (folder / "corpus" / name).write_bytes(b"no pdf and no json")
    (folder / "casemate.yaml").write_text("rag: {corpus: corpus, embedder: bag}\nguard: {mode: 'off'}\n")
    index(folder, folder / "corpus")
    where = name + ":1" * (name == "bad.jsonl")
    advice = "repair or remove what cannot be read; 'casemate index' says why"
    assert details(folder)["corpus"] == (None, f"1 sources up to date; 1 cannot be read: {where}; {advice}")


def test_quarantined_sources_are_counted_separately(folder, monkeypatch):
    index(folder, folder / "corpus.jsonl")
    write(folder / "corpus.jsonl", documents(42))
    monkeypatch.chdir(folder)
    with open_app(folder / "casemate.yaml") as app:
        quarantine = Quarantine(app.store)
        work = Ingest(app.guard, Corpus(folder / "corpus.jsonl"))
        for name, digest in work.plan().todo.items():
            result = ScreeningResult(Document(name, "a text", digest=f"{digest}@here"), 9.0, 0.001, ("odd",))
            quarantine.add([result], "default")
    listed = CliRunner().invoke(cli, ["quarantine", "list"], catch_exceptions=False)
    assert listed.stdout.endswith("next: casemate quarantine show|release|drop KEY\n")
    detail = "40 sources up to date; 2 in quarantine: d40, d41; run 'casemate quarantine list'"
    assert details(folder)["corpus"] == (None, detail)
    for name in ("d40", "d41"):
        done = CliRunner().invoke(cli, ["quarantine", "drop", name], catch_exceptions=False)
        assert done.stdout == f"dropped: {name}\n"
    detail = "40 sources up to date; 2 rejected in quarantine: d40, d41"
    assert details(folder)["corpus"] == (True, detail)


def test_sources_that_a_program_added_are_a_note_but_honeytokens_are_not(folder):
    index(folder, folder / "corpus.jsonl")
    honeytoken = Document("h", "a record", metadata={METADATA: "seal"})
    with open_app(folder / "casemate.yaml") as app:
        asyncio.run(app.guard.add([honeytoken, *(Document(f"note-{n}", f"fictional note {n}") for n in range(3))]))
    ok, detail = details(folder)["other sources"]
    assert ok is None
    assert "3 sources in the index, not from rag.corpus but added by a program: note-0, note-1, ...;" in detail


def test_configuration_from_a_mapping_stores_its_index_in_the_given_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with open_app({"rag": {"embedder": "bag"}, "guard": {"mode": "off"}}, folder=folder / "other") as app:
        asyncio.run(app.guard.add(documents(2)))
    assert (folder / "other/.casemate/index.db").exists()
    assert not (folder / ".casemate").exists()


def test_name_clashes_with_another_corpus_are_listed(folder):
    index(folder, folder / "corpus.jsonl")
    other = folder / "other.jsonl"
    write(other, documents(5, seed=1))
    (folder / "casemate.yaml").write_text("rag: {corpus: other.jsonl, embedder: bag}\nguard: {mode: 'off'}\n")
    ok, detail = details(folder)["corpus"]
    assert ok is None
    assert "5 with the name of another source: d0, d1, d2, ..." in detail


def test_a_flipped_bit_in_a_stored_text_is_found(folder):
    index(folder, folder / "corpus.jsonl")
    file = folder / ".casemate/index.db"
    raw = bytearray(file.read_bytes())
    text = documents(40)[3].text.encode()
    raw[raw.index(text) + 2] ^= 1
    file.write_bytes(raw)
    ((ok, detail),) = [(f.ok, f.detail) for f in examine(folder / "casemate.yaml") if "checksum" in f.detail]
    assert ok is False and "text or metadata of document" in detail


def test_invalid_configuration_ends_the_examination(folder):
    (folder / "casemate.yaml").write_text("gaurd: {}")
    (finding,) = examine(folder / "casemate.yaml")
    assert (finding.name, finding.ok) == ("wiring", False)
    assert "did you mean 'guard'?" in finding.detail


def test_failed_channels_of_a_test_notification_are_reported_by_doctor(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"set monitor\.channels"):
        CliRunner().invoke(cli, ["canary", "alerts", "--test"], catch_exceptions=False)
    monkeypatch.setenv("KEY", "abc")
    with Listener() as working, Listener([500]) as failing:
        places = {"alive": working.url, "refused": "http://127.0.0.1:9", "failing": failing.url}
        for name, url in places.items():
            monkeypatch.setenv(name.upper(), f"{url}/SECRET")
        hooks = ", ".join(f"{{use: webhook, name: {n}, url: '${{{n.upper()}}}', secret: '${{KEY}}'}}" for n in places)
        with (folder / "casemate.yaml").open("a") as file:
            file.write(f"monitor: {{channels: [{hooks}]}}\n")
        assert [f.ok for f in examine(folder / "casemate.yaml") if f.name == "channel"] == [None] * 3
        done = CliRunner().invoke(cli, ["canary", "alerts", "--test"], catch_exceptions=False)
        (sent,) = working.bodies
    assert done.exit_code == 1 and "SECRET" not in done.output
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["alive"] == "delivered" and "retried" not in done.stdout
    assert "ConnectError" in lines["refused"] and "HTTP 500" in lines["failing"]
    assert sent["action"] == "test" and "no action is needed" in sent["text"]
    found = {f.detail.partition(":")[0]: f for f in examine(folder / "casemate.yaml") if f.name == "channel"}
    assert [(name, f.ok) for name, f in found.items()] == [("alive", True), ("refused", False), ("failing", False)]
    assert "ConnectError" in found["refused"].detail and "SECRET" not in found["refused"].detail
