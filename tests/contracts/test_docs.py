"""Examples, links, options and paths in the documentation are valid."""

import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from casemate import config as configuration
from casemate import plugins

ROOT = Path(__file__).parents[2]
PAGES = [
    *(path for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY") if (path := ROOT / f"{name}.md").exists()),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "models/MODEL_CARD.md",
]


RENAMES = "## Renames of the architecture redesign"
"""From this heading on, the changelog lists old names."""


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
def test_relative_links_have_existing_targets(page):
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_names_make_demo_and_make_test():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_the_configuration_reference_equals_the_generated_one():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.FILE.read_text() == generate.page(), "run: python docs/generate.py"


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
QUICK = ("own_defense.py",)


def test_five_examples_have_fewer_than_40_lines():
    assert sum(len(script.read_text().splitlines()) < 40 for script in EXAMPLES) >= 5


@pytest.mark.parametrize(
    "script",
    [pytest.param(p, marks=() if p.name in QUICK else pytest.mark.slow) for p in EXAMPLES],
    ids=lambda p: p.name,
)
def test_example_scripts_run(script, tmp_path):
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_site_builds_and_its_links_work(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").is_file()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_examples_of_contributing_add_each_kind_of_plug_in_in_few_lines():
    examples = blocks(ROOT / "CONTRIBUTING.md", "python")
    assert [re.search(r"check_(\w+)\(", example)[1] for example in examples] == [
        "defense",
        "membership_attack",
        "index",
    ]
    assert all(len(example.strip().splitlines()) <= 30 for example in examples)


OPTION_PAGES = [
    (role, path.stem)
    for role, folder in {
        "defense": "defenses",
        "attack": "attacks",
        "crawler": "attacks",
        "poisoner": "attacks",
        "injector": "attacks",
    }.items()
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if path.stem in plugins.names(role)
]


@pytest.mark.parametrize(("role", "name"), OPTION_PAGES)
def test_documented_options_exist(role, name):
    folder = "defenses" if role == "defense" else "attacks"
    section = re.search(r"^## Options\n(.*?)(?=^## |\Z)", (ROOT / f"docs/{folder}/{name}.md").read_text(), re.M | re.S)
    if section is None:
        return
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section[1], re.M)
    documented = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert documented <= {field.name for field in dataclasses.fields(plugins.load(role, name))}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configuration_keys_exist(page):
    sections = "rag guard calibrate redteam monitor gateway privacy".split()
    text = page.read_text().split(RENAMES)[0]
    for key in re.findall(rf"`((?:{'|'.join(sections)})(?:\.\w+)+)(?:`|:)", text):
        section = configuration.Config
        for step in key.split("."):
            assert step in section.model_fields, key
            section = section.model_fields[step].annotation
            if not (inspect.isclass(section) and issubclass(section, BaseModel)):
                break


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configuration_examples_are_valid(page, monkeypatch):
    for block in blocks(page, "yaml"):
        for name in configuration.VARIABLE.findall(block):
            monkeypatch.setenv(name, "x")
        found = yaml.safe_load(block)
        if isinstance(found, dict) and found.keys() <= configuration.Config.model_fields.keys():
            configuration.parse(found)


def test_the_sequence_diagrams_name_existing_functions():
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    diagrams = re.findall(r"^```mermaid\nsequenceDiagram\n(.*?)^```", text, re.M | re.S)
    assert len(diagrams) == 4
    source = "\n".join(path.read_text() for path in (ROOT / "src/casemate").rglob("*.py"))
    for diagram in diagrams:
        called = set(re.findall(r"\b([a-z_]+)\(", diagram))
        assert len(called) <= 8
        assert not [name for name in called if f"def {name}(" not in source]


EXAMPLE_FILES = {"audited.py", "embargo.py", "first_sentence.py"}
"""Files that a contributor would add after the examples of CONTRIBUTING.md."""
AREAS = "|".join(sorted(p.name for p in (ROOT / "src/casemate").iterdir() if p.is_dir()))


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "adr"], ids=lambda p: p.name)
def test_code_paths_exist(page):
    text = page.read_text().split(RENAMES)[0]
    named = re.findall(rf"(?<![\w/])(?:src/casemate/)?((?:{AREAS})/[\w/]+\.py)", text)
    assert not [f for f in named if not (ROOT / "src/casemate" / f).is_file() and Path(f).name not in EXAMPLE_FILES]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_measurements_name_existing_benchmarks_and_results(page):
    text = " ".join(page.read_text().split(RENAMES)[0].split())
    modules = {ROOT / name.replace(".", "/") for name in re.findall(r"-m ((?:benchmarks|tests)(?:\.\w+)+)", text)}
    assert not [m for m in modules if not (m.with_suffix(".py").is_file() or (m / "__main__.py").is_file())]
    assert not [f for f in re.findall(r"benchmarks/results/\w+\.json", text) if not (ROOT / f).is_file()]


def test_the_changelog_renames_modules_to_existing_ones():
    _, text = (ROOT / "CHANGELOG.md").read_text().split("### Modules")
    modules = re.findall(r"→\s+`([\w.]+)`", text.split("### Classes")[0])
    assert len(modules) > 100
    paths = [ROOT / "src/casemate" / module.replace(".", "/") for module in modules]
    assert not [p for p in paths if not (p.with_suffix(".py").is_file() or (p / "__init__.py").is_file())]


def test_the_changelog_renames_classes_to_existing_ones():
    _, text = (ROOT / "CHANGELOG.md").read_text().split("### Classes")
    classes = set(re.findall(r"→\s+(\w+)", text))
    assert len(classes) > 150
    source = "\n".join(path.read_text() for path in (ROOT / "src/casemate").rglob("*.py"))
    assert not classes.difference(re.findall(r"(?m)^(?:class )?(\w+)(?:\[.*\])?[(:]", source))
