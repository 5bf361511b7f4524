"""Fingerprints of code that is not part of Casemate, such as that of another package's plug-in.

The version of Casemate identifies its own code. The version of another package need not change with its code: authors
install it in editable mode and change it between two runs.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def package_code(part: object) -> dict[str, str]:
    """The package of a class, function or object, with a fingerprint of all its Python files, or of its zip file.

    Empty for Casemate's own code, and for code without a file.
    """
    package = (getattr(part, "__module__", None) or "").partition(".")[0]
    code = "" if package == "casemate" else _fingerprint(package)
    return {package: code} if code else {}


@cache
def _fingerprint(package: str) -> str:
    """Of the files as they are when it is first called: they have just been imported."""
    found = hashlib.blake2b(digest_size=8)
    files = list(_files(package))
    for name, path in files:
        content = _content(path)
        found.update(f"{name}\0{len(content)}\0".encode(errors="surrogatepass") + content)
    return found.hexdigest() if files else ""


def _content(path: Path) -> bytes:
    """Of a file. One that cannot be read counts by its name: no code of this process is from it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _files(package: str) -> Iterator[tuple[str, Path]]:
    module = sys.modules.get(package)
    if archive := getattr(getattr(module, "__loader__", None), "archive", None):  # imported from a zip file
        yield Path(archive).name, Path(archive)
        return
    folders = sorted({Path(folder).resolve() for folder in getattr(module, "__path__", ())})  # may list one twice
    for folder in folders:
        paths = sorted(path for path in folder.rglob("*.py") if path.is_file())  # an editor's lock is a broken link
        yield from ((str(path.relative_to(folder)), path) for path in paths)
    file = Path(getattr(module, "__file__", None) or "")
    if not folders and file.is_file():
        yield file.name, file
