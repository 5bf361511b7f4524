import multiprocessing
import sqlite3
import stat

import pytest

from casemate.errors import BackendError, DataError
from casemate.lab.ledger import Exchange, Ledger
from casemate.lab.results import Trial

TRIAL = Trial("d1", True, (0.1 + 0.2, -3.0), 2, 1, 2)
SESSION = (
    Exchange("why?", "Because.", ("d1", "d2"), (), False, False, False),
    Exchange("ż\ud800", "", (), ("d1#1",), True, True, True),
)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "lab" / "ledger.db") as opened:
        yield opened


def test_trials_and_sessions_come_back_as_they_were(ledger):
    ledger.note("c", "off", TRIAL, SESSION)
    assert ledger.trials("c", "off") == {"d1": TRIAL}
    assert ledger.session("c", "off", "d1") == SESSION
    assert ledger.troubles("c", "off") == (1, 1)


def test_campaigns_and_targets_are_kept_apart(ledger):
    ledger.note("c", "off", TRIAL, SESSION)
    assert not ledger.trials("c", "on")
    assert not ledger.trials("other", "off")
    assert ledger.session("c", "on", "d1") == ()
    assert ledger.troubles("c", "on") == (0, 0)


def test_what_was_noted_first_stays(ledger):
    ledger.note("c", "off", TRIAL, SESSION)
    ledger.note("c", "off", Trial("d1", True, (9.0, 9.0), 0), ())
    assert ledger.trials("c", "off") == {"d1": TRIAL}
    assert ledger.keep("k", "first") == "first"
    assert ledger.keep("k", "second") == "first"


def test_an_empty_reply_is_a_reply(ledger):
    assert ledger.reply("k") is None
    assert ledger.keep("k", "") == ""
    assert ledger.reply("k") == ""


def test_everything_is_there_when_it_is_opened_again(ledger):
    ledger.note("c", "off", TRIAL, SESSION)
    ledger.keep("k", "text")
    with Ledger(ledger.path) as again:
        assert again.trials("c", "off") == {"d1": TRIAL}
        assert again.reply("k") == "text"


def test_only_its_owner_may_read_it(ledger):
    ledger.keep("k", "text")
    files = [*ledger.path.parent.iterdir()]
    assert len(files) >= 2  # the write-ahead log is one of them
    for path in (ledger.path.parent, *files):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_refuses_what_is_no_ledger(tmp_path):
    (tmp_path / "text").write_text("this is a text, and it is long enough to be read as a header of a file" * 20)
    with pytest.raises(DataError, match="no ledger"):
        Ledger(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(DataError, match="another program"):
        Ledger(tmp_path / "other")
    assert sqlite3.connect(tmp_path / "other").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_refuses_another_version(ledger):
    ledger._db.execute("PRAGMA user_version = 99")
    with pytest.raises(DataError, match="format 99"):
        Ledger(ledger.path)


def test_says_what_hinders_it(tmp_path, ledger):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot make the ledger"):
        Ledger(tmp_path / "file" / "ledger.db")
    ledger._db.execute("DROP TABLE reply")
    with pytest.raises(BackendError, match="what was finished is kept"):
        ledger.reply("k")


def write(path, start, number):
    """What one of several processes does that begin at the same moment."""
    start.wait()
    with Ledger(path) as ledger:
        for i in range(150):
            ledger.note("c", "off", Trial(f"d{i}", True, (float(number),), 1), SESSION[:1])
            ledger.note("c", f"own{number}", Trial(f"d{i}", True, (float(i),), 1), SESSION[:1])
            ledger.keep(f"k{i}", f"reply of {number}")


def test_processes_that_share_a_file_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    writers = [context.Process(target=write, args=(tmp_path / "ledger.db", start, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with Ledger(tmp_path / "ledger.db") as ledger:
        assert len(ledger.trials("c", "off")) == 150
        for number in range(4):
            assert {t.features for t in ledger.trials("c", f"own{number}").values()} == {
                (float(i),) for i in range(150)
            }
        assert all(ledger.reply(f"k{i}").startswith("reply of ") for i in range(150))
        assert ledger._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
