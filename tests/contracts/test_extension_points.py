"""The page of extension points covers every role and interface, with the current signature and an example."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from casemate import plugins, protocols, testing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/extension-points.md"
TEXT = PAGE.read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
HELPERS = {"EventStoreProxy", "EmbedderProxy", "CollectionPage", "TransactionalCollection"}
"""Public classes of protocols.py that support an interface; the page mentions them beside it."""


def test_the_page_has_exactly_one_section_per_role():
    assert SECTIONS.keys() == plugins.ROLES.keys()


@pytest.mark.parametrize("role", plugins.ROLES)
def test_a_section_names_base_class_and_suite_and_runs_an_example(role):
    section = SECTIONS[role]
    base = plugins.ROLES[role].base
    assert base.__name__ in section
    assert f"casemate.testing.{testing.CHECKS[role].__name__}" in section
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)  # test_docs.py runs it
    assert f"{testing.CHECKS[role].__name__}(" in example


def test_every_interface_of_protocols_is_on_the_page():
    public = {n for n, v in vars(protocols).items() if inspect.isclass(v) and v.__module__ == protocols.__name__}
    assert not {n for n in public - HELPERS if f"class {n}:" not in TEXT}


def test_signatures_equal_those_of_the_code():
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "docs/signatures.py")
    signatures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signatures)
    assert signatures.page(TEXT) == TEXT, "run: python docs/signatures.py"
