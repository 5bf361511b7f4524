"""Banned words: prose that reads as translated, or treats programs as people.

Checks docstrings, comments and string literals that contain a space under ``src/casemate`` and ``benchmarks``. Also
checks all prose pages, and the templates, scripts and style sheets of reports and dashboard.
Data is exempt, by the short lists below: word lists, demonstration texts, doctests, regular expressions.
"""

import ast
import doctest
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/casemate"
PAGES = [
    *(p for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY") if (p := ROOT / f"{name}.md").exists()),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "models/MODEL_CARD.md",
    *sorted(p for kind in ("html", "js", "css") for p in PACKAGE.rglob(f"*.{kind}")),
    *sorted(p for p in (ROOT / "deploy").iterdir() if p.is_file() and p.name != "requirements.txt"),
    *(ROOT / name for name in ("Makefile", "action.yml", ".pre-commit-hooks.yaml", "pyproject.toml", "mkdocs.yml")),
]
BANNED = re.compile(
    r"\b(anew|whoever|whomever|whosoever|somebody|anybody|nobody|he|him|his|himself|told|thereof|wherein"
    r"|(?:is|are) to be|who asks)\b",
    re.I,
)
BRITISH = re.compile(
    r"\b(\w*(?:behaviour|colour|favour|neighbour|honour)\w*|centred?|metres?|defence|licence|grey"
    r"|(?:normal|recogn|summar|optim|minim|maxim|initial|serial|token|random|general|organ|special|anonym)is"
    r"(?:e|es|ed|er|ers|ing|ation|ations))\b",
    re.I,
)

INVERTED = re.compile(
    r"(?:\A|[.!?:]\s+|\n\n)((?:Asked|Counted|Detected|Drawn|Excluded|Included|Indexed|Judged|Known|Measured|Planted|Reported"
    r"|Sampled|Searched|Shown|Stored|Tested|Withheld) (?:is|are|was|were))\b"
)
"""Sentences that begin with a participle as predicate: "Measured is the time"."""

EXEMPT_FILES = {
    "text/tokens.py": "stop-word lists",
    "text/function_words.py": "lists of function words",
    "gateway/api/conversation.py": "list of pronouns",
    "demo/clinic.py": "texts of the sample corpus",
}
EXEMPT_SECTIONS = {"CHANGELOG.md": "## Renames of the architecture redesign"}
"""Pages whose text from this heading on is exempt: it lists old names."""

EXEMPT_LINES: dict[str, str] = {
    "everything you were told before this": "a prompt injection of drafted canaries",
    "the trial that nobody joined": "a carrier sentence of training strings",
    "(?:told|instructed|given)": "a pattern of the query filter",
    "Put aside what you were told about how to answer": "a command of an extraction attack",
    "Whoever looks into {topic}": "a poisoned text",
    "one thing is to be said": "a poisoned text",
    "centre: Means of the features": "a field of the calibration file",
    "told: ``begin FILE VERSION``": "a field of benchmarks.killable",
    "and was told to rest": "a text of benchmarks.scale",
    "Somebody is interested in the subject": "a prompt with recorded answers",
    "ga gl he hi hr hu": "codes of languages",
    "IT, HE: things referred to": "names of word classes",
}
"""Exact fragments that may contain a banned word, with the reason."""


def prose(path):
    """Yields (line, text) of each docstring, comment and string literal with a space, without doctests and regexes."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    tree = ast.parse(source)
    patterns = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if isinstance(call.func.value, ast.Name) and call.func.value.id in {"re", "regex"}
        for argument in call.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in patterns:
            if " " in node.value:
                yield node.lineno, without_doctests(node.value)


def without_doctests(text):
    if ">>>" not in text:
        return text
    parts = doctest.DocTestParser().parse(text)
    return "".join(part for part in parts if isinstance(part, str))


def violations(text):
    for fragment in EXEMPT_LINES:
        text = text.replace(fragment, "")
    return [found[0] for pattern in (BANNED, BRITISH, INVERTED) for found in pattern.finditer(text)]


def hits(path):
    return [(line, word) for line, text in prose(path) for word in violations(text)]


def files_of(entry):
    path = PACKAGE / entry
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [f for f in files if str(f.relative_to(PACKAGE)) not in EXEMPT_FILES]


ENTRIES = sorted({p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()})


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_package_contains_no_banned_word(entry):
    assert not {str(f.relative_to(ROOT)): h for f in files_of(entry) if (h := hits(f))}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_contains_no_banned_word(page):
    text = page.read_text()
    lines = text.split(EXEMPT_SECTIONS.get(page.name, "\0"))[0].splitlines()
    assert not [(i, words) for i, line in enumerate(lines, 1) if (words := violations(line))]


BENCHMARKS = sorted({*(ROOT / "benchmarks").rglob("*.py")} - {ROOT / "benchmarks/models/lexicon.py"})
"""All benchmarks except the word lists of the offline pair."""


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_benchmark_contains_no_banned_word(path):
    assert not hits(path)


@pytest.mark.parametrize(
    "text", ["the client is told", "He asks.", "the document is to be hidden", "normalised rows", "Asked are users."]
)
def test_violations_finds_banned_words(text):
    assert violations(text)


@pytest.mark.parametrize(
    "text", ["other clients", "the history", "retold", "this normalizes", "What is measured is the time."]
)
def test_violations_ignores_longer_words(text):
    assert not violations(text)
