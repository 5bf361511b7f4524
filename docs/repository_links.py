"""Hook of mkdocs: copies files of the repository that pages link to, so that every link works on the site.

Pages link to files outside ``docs/`` by relative paths, which GitHub resolves. On the site these files lie under
``repository/``. A link to a file that does not exist stays as it is, and fails the strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
COPIES = "repository/"


def on_files(files: Files, config: Any) -> Files:
    """Adds each file outside ``docs/`` that a page links to, directly or through another such file."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for _, link in LINK.findall(page.content_string):
            path = _path(page.src_uri, link)
            if path is None or path.startswith("docs/") or files.get_file_from_path(COPIES + path):
                continue
            copy = File.generated(config, COPIES + path, content=(ROOT / path).read_bytes())
            files.append(copy)
            if copy.is_documentation_page():
                waiting.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links to copied files, and links from copied files to pages."""
    here = page.file.src_uri

    def rewritten(match: re.Match[str]) -> str:
        path = _path(here, match[2])
        if path is None:
            return match[0]
        there = path.removeprefix("docs/") if path.startswith("docs/") else COPIES + path
        return match[1] + posixpath.relpath(there, posixpath.dirname(here) or ".")

    return LINK.sub(rewritten, markdown)


def _path(page: str, link: str) -> str | None:
    """Path of the linked file from the root of the repository; None if there is no such file."""
    original = page.removeprefix(COPIES) if page.startswith(COPIES) else f"docs/{page}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(original), link))
    return path if (ROOT / path).is_file() else None
