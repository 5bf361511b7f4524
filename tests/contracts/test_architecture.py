"""Rules for the whole package: light imports, short functions, documented plug-ins, no local imports."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import casemate
from casemate import plugins

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src/casemate").rglob("*.py"))
HEAVY = {
    "torch",
    "transformers",
    "sentence_transformers",
    "onnxruntime",
    "onnx",
    "openai",
    "psycopg",
    "sqlalchemy",
    "alembic",
    "scipy",
    "sklearn",
    "usearch",
    "typer",
    "rich",
    "pypdf",
    "bs4",
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PLUG_INS = [(role, name) for role in plugins.ROLES for name in plugins.names(role)]


def test_import_casemate_is_light_and_fast():
    code = (
        "import time,sys; t=time.process_time(); import casemate; t=time.process_time()-t; import json;"
        "print(json.dumps([t, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    costs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        cost, modules = json.loads(done.stdout)
        costs.append(cost)
        assert not HEAVY & set(modules)
    assert min(costs) < 0.3  # CPU-seconds, as required


def test_at_most_25_classes_are_public():
    names = [n for n in dir(casemate) if not n.startswith("_") and isinstance(getattr(casemate, n), type)]
    assert 10 < len(names) <= 25


@pytest.mark.parametrize(("role", "name"), PLUG_INS)
def test_every_plug_in_is_a_documented_dataclass(role, name):
    cls = plugins.load(role, name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__doc__
    for option in (f.name for f in dataclasses.fields(cls) if f.init):
        assert re.search(rf"^\s+{option}: ", cls.__doc__, re.M), f"{name}: the option {option} is not described"


@pytest.mark.parametrize("name", plugins.names("defense"))
def test_every_defense_names_its_paper_and_has_a_page(name):
    assert plugins.load("defense", name).paper
    assert (ROOT / f"docs/defenses/{name}.md").is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT / "src/casemate")))
def test_functions_are_short_and_free_of_local_imports_and_methods_are_documented(path):
    tree = ast.parse(path.read_text())
    for node in [n for n in ast.walk(tree) if isinstance(n, FUNCTION)]:
        docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
        assert node.end_lineno - node.lineno + 1 - docstring <= 40, node.name
        imports = [n.module or "" for n in ast.walk(node) if isinstance(n, ast.ImportFrom)]
        assert not [m for m in imports if m.startswith("casemate")], node.name
    assert not list(methods_without_docstring(tree, path))


def methods_without_docstring(tree, path):
    """Public methods of public classes that have no docstring, not even an inherited one."""
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    methods = [(c.name, f) for c in classes for f in c.body if isinstance(f, FUNCTION) and not f.name.startswith("_")]
    for name, method in methods:
        is_setter = any(isinstance(d, ast.Attribute) for d in method.decorator_list)
        if ast.get_docstring(method) is None and not is_setter:
            cls = getattr(importlib.import_module(module), name)
            if not inspect.getdoc(getattr(cls, method.name)):
                yield f"{name}.{method.name}"


def test_the_architecture_page_lists_the_top_level_modules():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    listed = set(re.findall(r"^  (\w+)(?:\.py|/)", page, re.M))
    there = {p.stem for p in (ROOT / "src/casemate").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert listed == there - {"__init__", "__main__"}
