"""What the documentation shows is run, and what it links to is there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


EXAMPLES = [(page, i) for page in PAGES for i, _ in enumerate(blocks(page, "python"))]


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=lambda v: getattr(v, "name", v))
def test_examples_run(page, number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks(page, "python")[number]
    exec(compile(code, f"{page.name}, example {number}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for expected in re.findall(r"^# -> (.*)$", code, re.M):
        assert expected in printed


def test_the_readme_has_a_short_example():
    (example,) = blocks(ROOT / "README.md", "python")
    assert len(example.strip().splitlines()) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_the_configuration_reference_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.FILE.read_text() == generate.page(), "run: python docs/generate.py"


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_scripts_run(script, tmp_path):
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
