"""Every regular expression of the package runs in linear time on adversarial input.

The expressions are found, not listed: literal arguments of ``re`` in the source, and expressions that modules build at
import. For each, the test repeats every character and every repeated part of the expression. So each repetition is
entered from each start and then fails. The limit is about a hundred times the CPU time of a linear search of the same
text; a quadratic search exceeds it. ``BOUNDED`` names the expressions that read a bounded text.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from re import _constants as codes
from re import _parser as parser
from typing import Any

import pytest

import casemate

SRC = Path(casemate.__file__).parent
SIZE = 40_000
LIMIT_S = 0.5
BOUNDED: dict[str, int] = {}
"""Maximum characters of the text that an expression reads."""
BUILT_AT_RUN_TIME = {
    "backends/generators/transformers/__init__.py": "alternatives of escaped words",
    "backends/indexes/milvus.py": "an escaped name, applied to names of the server",
    "backends/indexes/qdrant.py": "an escaped name, applied to names of the server",
    "backends/sidecar/row_inventory.py": "the operator's own, applied to ids",
    "demo/clinic.py": "tables of the generator, applied to generated notes",
    "guard/client_state/word_quotas.py": "an escaped number of seconds, applied to names of quotas",
    "guard/defenses/quorum/codes.py": "at most 100 escaped letters, with at most three other characters between two",
    "guard/watermarks/detection.py": "a word of letters in a lookahead",
    "monitor/canaries/matching.py": "escaped words; between them a fixed expression that begins with a space",
    "monitor/canaries/paraphrase.py": "alternatives of fixed words at the start of a question",
    "monitor/canaries/questions.py": "an escaped word",
    "monitor/poisoning/answer_change.py": "escaped names in a possessive repetition that begins with a line feed",
    "redteam/attacks/interrogation.py": "an escaped word",
    "text/wordpiece.py": "alternatives of escaped words",
}
"""Why an expression that a function builds needs no check, by file. All others are found."""
TRIED_AT_THE_START = {"casemate.redteam.crawling.knowledge_graph.TYPE_ENDINGS"}
"""Expressions in a collection, applied with ``match`` only."""
CHARACTERS = " \n\ta0_.,-:;@#<>&(){}[]*`'\"/\\!?|=+~é"
ANCHORED = {"match", "fullmatch"}
FUNCTIONS = {"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
FAILING = ("\0", "a", "\n", " ", "")


@dataclass(frozen=True)
class Use:
    """An expression and its use.

    Attributes: pattern: The expression. flags: Its flags. anchored: Whether it is only tried at the start of a text.
    where: Its module and name, or file and line.
    """

    pattern: str
    flags: int
    anchored: bool
    where: str


@cache
def uses() -> list[Use]:
    """All expressions of the package, in the order of files and lines."""
    found: dict[tuple[str, int, bool], Use] = {}
    methods = _methods_by_name()
    for where, pattern in _imported():
        applied = methods.get(where.rpartition(".")[2])
        anchored = where in TRIED_AT_THE_START or bool(applied and applied <= ANCHORED)
        key = _text(pattern.pattern), pattern.flags & ~re.UNICODE, anchored
        found.setdefault(key, Use(*key, where))
    for path in sorted(SRC.rglob("*.py")):
        for call in _calls(path):
            pattern, flags = call.args[0], _flags(call)
            function = call.func.attr  # type: ignore[attr-defined]
            if function != "compile" and isinstance(pattern, ast.Constant):  # all others consist of escaped words
                key = _text(pattern.value), flags, function in ANCHORED
                found.setdefault(key, Use(*key, f"{path.relative_to(SRC)}:{call.lineno}"))
    return list(found.values())


def _imported() -> Iterator[tuple[str, re.Pattern[Any]]]:
    for name in (
        m.name for m in pkgutil.walk_packages(casemate.__path__, "casemate.") if m.name != "casemate.__main__"
    ):
        try:
            members = vars(importlib.import_module(name))
        except ImportError:
            continue  # an extra that is not installed
        for key, value in sorted(members.items()):
            yield from ((f"{name}.{key}", pattern) for pattern in _patterns(value, 4))


def _text(pattern: str | bytes) -> str:
    return pattern if isinstance(pattern, str) else pattern.decode("latin-1")


def _patterns(value: Any, depth: int) -> Iterator[re.Pattern[Any]]:
    """Expressions in a value: nested collections, attributes of our classes and instances."""
    if isinstance(value, re.Pattern):
        yield value
    elif depth:
        for item in _contents(value):
            yield from _patterns(item, depth - 1)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    cls = value if isinstance(value, type) else type(value)
    if not cls.__module__.startswith("casemate."):
        return ()
    slots = [getattr(value, slot, None) for slot in getattr(cls, "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", {}).values()]


@dataclass
class Module:
    """Uses of ``re`` in one file.

    Attributes: calls: Calls of ``re``. methods: Functions of ``re`` and methods of expressions, by the name they are
    called on. renames: Whether ``re`` gets another name.
    """

    calls: list[ast.Call] = field(default_factory=list)
    methods: list[tuple[str, str]] = field(default_factory=list)
    renames: bool = False


@cache
def _module(path: Path) -> Module:
    found = Module()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in FUNCTIONS:
            found.methods.append((node.value.id, node.attr))
        elif isinstance(node, ast.Call) and _is_of_re(node.func):
            found.calls.append(node)
        elif isinstance(node, ast.ImportFrom):
            found.renames |= node.module == "re"
        elif isinstance(node, ast.Import):
            found.renames |= any(n.name in {"re", "regex"} and n.asname for n in node.names)
    return found


def _is_of_re(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in FUNCTIONS
        and isinstance(node.value, ast.Name)
        and node.value.id == "re"
    )


def _calls(path: Path) -> list[ast.Call]:
    return _module(path).calls


def _methods_by_name() -> dict[str, set[str]]:
    """Methods called on each name, over all modules."""
    methods: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        for name, method in _module(path).methods:
            methods.setdefault(name, set()).add(method)
    return methods


def _flags(call: ast.Call) -> int:
    names = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute) and hasattr(re, node.attr)}
    flags = re.NOFLAG
    for name in names:
        value = getattr(re, name)
        if isinstance(value, re.RegexFlag):
            flags |= value
    return int(flags)


def adversarial(pattern: str, flags: int, size: int = SIZE) -> list[str]:
    """Texts on which a repetition of the expression is entered often and fails late."""
    pumps = dict.fromkeys(CHARACTERS)
    prefixes = {"": None}
    for before, repeated in _repetitions(parser.parse(pattern, flags)):
        prefixes[before] = None
        pumps[repeated] = None
        pumps[before + repeated] = None
    texts = []
    for pump in filter(None, pumps):
        body = pump * (size // len(pump))
        texts += [body + end for end in FAILING]
        texts += [before + body + "\0" for before in prefixes if before]
    return list(dict.fromkeys(texts))


def _repetitions(parsed: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """A sample of what comes before each unbounded repetition, and of what it repeats."""
    before = ""
    for op, value in parsed:
        for inner in _parts(op, value):
            for inside_before, repeated in _repetitions(inner):
                yield before + inside_before, repeated
        if op in _REPEATS and value[1] > 20:
            yield before, _sample(value[2])
        before += _sample([(op, value)])


_REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT}


def _parts(op: Any, value: Any) -> list[Any]:
    if op in _REPEATS:
        return [value[2]]
    if op is codes.SUBPATTERN:
        return [value[3]]
    if op is codes.BRANCH:
        return list(value[1])
    if op in {codes.ASSERT, codes.ASSERT_NOT}:
        return [value[1]]
    if op is codes.ATOMIC_GROUP:
        return [value]
    return []


def _sample(parsed: Iterable[Any]) -> str:
    """A short text that the expression matches in most cases."""
    text = ""
    for op, value in parsed:
        if op is codes.LITERAL:
            text += chr(value)
        elif op in {codes.NOT_LITERAL, codes.ANY}:
            text += "a"
        elif op is codes.IN:
            text += _member(value)
        elif op in _REPEATS:
            text += _sample(value[2]) * min(max(value[0], 1), 20)
        elif op is codes.BRANCH:
            text += _sample(value[1][0])
        elif op is codes.SUBPATTERN:
            text += _sample(value[3])
        elif op is codes.ATOMIC_GROUP:
            text += _sample(value)
    return text


def _member(items: list[Any]) -> str:
    """A character of a set."""
    kinds = {codes.CATEGORY_DIGIT: "0", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a"}
    if items[0][0] is codes.NEGATE:
        excluded = re.compile("[" + "".join(_written(item) for item in items[1:]) + "]")
        return next(c for c in "a0 .-\0" if not excluded.match(c))
    op, value = items[0]
    if op is codes.RANGE:
        return chr(value[0])
    return kinds.get(value, "!") if op is codes.CATEGORY else chr(value)


def _written(item: tuple[Any, Any]) -> str:
    op, value = item
    names = {
        codes.CATEGORY_DIGIT: r"\d",
        codes.CATEGORY_SPACE: r"\s",
        codes.CATEGORY_WORD: r"\w",
        codes.CATEGORY_NOT_DIGIT: r"\D",
        codes.CATEGORY_NOT_SPACE: r"\S",
        codes.CATEGORY_NOT_WORD: r"\W",
    }
    if op is codes.CATEGORY:
        return names[value]
    if op is codes.RANGE:
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    return re.escape(chr(value))


class TooSlow(Exception):
    """A search exceeded its processor time."""


def slow_text(use: Use) -> str | None:
    """The start of the first text on which the expression exceeds the limit."""
    compiled = re.compile(use.pattern, use.flags)
    texts = adversarial(use.pattern, use.flags, BOUNDED.get(use.where, SIZE))
    previous = signal.signal(signal.SIGVTALRM, _stop)
    try:
        return next((text[:40] for text in texts if _is_slow(compiled, use.anchored, text)), None)
    finally:
        signal.signal(signal.SIGVTALRM, previous)


def _is_slow(pattern: re.Pattern[str], anchored: bool, text: str) -> bool:
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        if anchored:
            pattern.match(text)
        else:
            deque(pattern.finditer(text), maxlen=0)
    except TooSlow:
        return True
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return False


def _stop(*_: object) -> None:
    raise TooSlow


def test_the_check_finds_known_quadratic_expressions():
    for pattern in (r"\s+$", r"<a>.*?</a>", r"x\s*/?\s*y"):
        assert slow_text(Use(pattern, int(re.DOTALL), False, "here")) is not None, pattern


def test_the_check_accepts_linear_expressions():
    for pattern in (r"\w+", r"(?<!\s)\s+$", r"<a>[^<]*", r"\b[A-Z]\w*:"):
        assert slow_text(Use(pattern, 0, False, "here")) is None, pattern


def test_expressions_in_nested_collections_are_found():
    nested = {"a": [re.compile("b")], "c": ({"d": re.compile("e")},), "f": re.compile("g")}
    assert {pattern.pattern for pattern in _patterns(nested, 4)} == {"b", "e", "g"}


def test_every_expression_is_checked_or_has_a_documented_reason():
    """A ``re`` call with a literal is in the list; a function that builds an expression has a reason."""
    known, built = {use.pattern for use in uses()}, set()
    for path in sorted(SRC.rglob("*.py")):
        for call in _calls(path):
            if isinstance(call.args[0], ast.Constant):
                assert _text(call.args[0].value) in known, f"{path.name}:{call.lineno}"
        built |= {path.relative_to(SRC).as_posix()} if _built_in_functions(path) else set()
    assert built == BUILT_AT_RUN_TIME.keys()


def _built_in_functions(path: Path) -> bool:
    """Whether a function of a file applies or compiles an expression that is not a literal."""
    calls = [call for call in _calls(path) if not isinstance(call.args[0], ast.Constant)]
    if not calls:
        return False
    tree = ast.parse(path.read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {node.lineno for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)}
    return any(call.lineno in lines for call in calls)


def test_no_module_renames_re():
    assert not [path.name for path in SRC.rglob("*.py") if _module(path).renames]


def test_every_bounded_expression_exists():
    known = {use.where for use in uses()}
    assert BOUNDED.keys() | TRIED_AT_THE_START <= known


@pytest.mark.slow
def test_every_expression_is_linear():
    """One test, because parameters would import the whole package in each test process."""
    assert not [f"{use.where}: {use.pattern[:80]!r}" for use in uses() if slow_text(use) is not None]
