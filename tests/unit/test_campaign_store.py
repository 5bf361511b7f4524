import multiprocessing
import sqlite3
import stat

import pytest

from casemate.errors import BackendError, DataError
from casemate.redteam.lab.results import Trial
from casemate.redteam.lab.store import CampaignStore, Exchange

TRIAL = Trial("d1", True, (0.1 + 0.2, -3.0), 2, 1, 2)
SESSION = (
    Exchange("why?", "Because.", ("d1", "d2"), (), False, False, False),
    Exchange("ż\ud800", "", (), ("d1#1",), True, True, True, ("mirabel",)),
)


@pytest.fixture
def store(tmp_path):
    with CampaignStore(tmp_path / "lab" / "campaigns.db") as opened:
        yield opened


def test_trials_and_exchanges_survive_a_round_trip(store):
    store.record_trial("c", "off", TRIAL, SESSION)
    assert store.trials("c", "off") == {"d1": TRIAL}
    assert store.exchanges("c", "off", "d1") == SESSION
    assert store.failure_counts("c", "off") == (1, 1)


def test_campaigns_and_targets_are_separate(store):
    store.record_trial("c", "off", TRIAL, SESSION)
    assert not store.trials("c", "on")
    assert not store.trials("other", "off")
    assert store.exchanges("c", "on", "d1") == ()
    assert store.failure_counts("c", "on") == (0, 0)


def test_later_writes_do_not_replace_the_first(store):
    store.record_trial("c", "off", TRIAL, SESSION)
    store.record_trial("c", "off", Trial("d1", True, (9.0, 9.0), 0), ())
    assert store.trials("c", "off") == {"d1": TRIAL}
    assert store.put_reply("k", "first") == "first"
    assert store.put_reply("k", "second") == "first"


def test_an_empty_reply_is_stored(store):
    assert store.get_reply("k") is None
    assert store.put_reply("k", "") == ""
    assert store.get_reply("k") == ""


def test_trials_and_replies_persist_after_reopening(store):
    store.record_trial("c", "off", TRIAL, SESSION)
    store.put_reply("k", "text")
    with CampaignStore(store.path) as again:
        assert again.trials("c", "off") == {"d1": TRIAL}
        assert again.get_reply("k") == "text"


def test_only_the_owner_can_read_the_file(store):
    store.put_reply("k", "text")
    files = [*store.path.parent.iterdir()]
    assert len(files) >= 2  # includes the write-ahead log
    for path in (store.path.parent, *files):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "text").write_text("this is a text, and it is long enough to be read as a header of a file" * 20)
    with pytest.raises(DataError, match="no campaign store"):
        CampaignStore(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(DataError, match="another program"):
        CampaignStore(tmp_path / "other")
    assert sqlite3.connect(tmp_path / "other").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_unknown_format_version_is_refused(store):
    store._db.execute("PRAGMA user_version = 99")
    with pytest.raises(DataError, match="format 99"):
        CampaignStore(store.path)


def test_database_errors_are_reported_with_context(tmp_path, store):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot create the campaign store"):
        CampaignStore(tmp_path / "file" / "campaigns.db")
    store._db.execute("DROP TABLE reply")
    with pytest.raises(BackendError, match="finished work is kept"):
        store.get_reply("k")


def write(path, start, number):
    """The work of one of several processes that start simultaneously."""
    start.wait()
    with CampaignStore(path) as store:
        for i in range(150):
            store.record_trial("c", "off", Trial(f"d{i}", True, (float(number),), 1), SESSION[:1])
            store.record_trial("c", f"own{number}", Trial(f"d{i}", True, (float(i),), 1), SESSION[:1])
            store.put_reply(f"k{i}", f"reply of {number}")


def test_no_write_of_concurrent_processes_is_lost(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    writers = [context.Process(target=write, args=(tmp_path / "campaigns.db", start, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with CampaignStore(tmp_path / "campaigns.db") as store:
        assert len(store.trials("c", "off")) == 150
        for number in range(4):
            assert {t.features for t in store.trials("c", f"own{number}").values()} == {(float(i),) for i in range(150)}
        assert all(store.get_reply(f"k{i}").startswith("reply of ") for i in range(150))
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
