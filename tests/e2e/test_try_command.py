"""`casemate try` from the command line."""

import re

import pytest

from tests import external_system
from tests.e2e.test_redteam_command import casemate
from tests.fake_openai import FakeOpenAI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.smoke
def test_an_empty_folder_is_an_error_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    done = casemate(tmp_path, "try", "empty", code=2)
    assert "contains no file of a known type" in done.stderr


def test_an_existing_system_is_attacked_from_the_command_line(tmp_path):
    external_system.write_known(tmp_path)
    with FakeOpenAI(always="answer", answer=external_system.bare) as server:
        at = ("--endpoint", server.url, "--model", "m", "--documents", "known/in", "--nonmembers", "known/out")
        done = casemate(tmp_path, "try", *at, "--queries", "60")
    assert 40 <= len(server.received) <= 60
    assert "At most 60 requests to 127.0.0.1" in done.stderr
    auc = re.search(r"Is this record in the collection\? \(AUC\): (\S+)", done.stdout)
    assert float(auc[1]) > 0.9
    assert "report: .casemate/try/report.html" in done.stdout
    assert list((tmp_path / ".casemate/try").iterdir()) == [tmp_path / ".casemate/try/report.html"]
