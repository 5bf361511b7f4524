"""The package has one refusal detector: no other module contains a list of refusal phrases."""

from __future__ import annotations

import ast
from pathlib import Path

import casemate
from casemate.text.refusals import is_refusal

SRC = Path(casemate.__file__).parent
DETECTOR = {"text/refusals.py", "text/refusal_words.py"}
MOST = 1
"""Refusals that a string collection may contain, such as a message of the package itself."""
WRITTEN = {
    "monitor/canaries/drafts.py",  # phrases that an answer must not contain, and questions
}
"""Modules that write refusals, for tests of other systems."""


def collections(path: Path) -> list[tuple[int, list[str]]]:
    """Collections of string literals of a module, by line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            texts = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            found.append((node.lineno, texts))
    return found


def test_no_other_module_lists_refusal_phrases():
    wrong = [
        f"{name}:{line}: {[text for text in texts if is_refusal(text)]}"
        for path in sorted(SRC.rglob("*.py"))
        if (name := path.relative_to(SRC).as_posix()) not in DETECTOR | WRITTEN
        for line, texts in collections(path)
        if sum(is_refusal(text) for text in texts if len(text.split()) > 1) > MOST
    ]
    assert not wrong, "use casemate.text.refusals.is_refusal:\n" + "\n".join(wrong)


def test_the_check_finds_a_list_of_refusal_phrases(tmp_path):
    module = tmp_path / "other.py"
    module.write_text('PHRASES = ("I cannot help with that", "I don\'t know")\n')
    ((_, texts),) = collections(module)
    assert sum(map(is_refusal, texts)) > MOST
