from casemate.runtime.files import write_atomically


def test_file_that_replaces_a_world_readable_file_is_readable_by_its_owner_only(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("old")
    page.chmod(0o644)
    write_atomically(page, b"new")
    assert page.read_text() == "new"
    assert page.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [page]
