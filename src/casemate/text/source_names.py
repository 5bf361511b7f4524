"""Names of sources: which names belong to translations or versions of one document."""

from __future__ import annotations

import re

LANGUAGES = (
    "ar bg bn bs ca cs cy da de el en es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka kk ko lt lv mk ms nb nl nn "
    "no pl pt ro ru sk sl sq sr sv sw ta te th tr uk ur uz vi zh"
).split()
"""ISO 639-1 codes of languages into which documents are often translated."""
_LANGUAGE = rf"(?:{'|'.join(LANGUAGES)})(?:[-_](?:[a-z]{{2}}|hans|hant|latn|cyrl))?"
_PART = r"(?:\.(?:\d{1,9}|x))"
_VERSION = rf"(?:version-)?(?:v\d{{1,9}}{_PART}{{0,4}}|\d{{1,9}}{_PART}{{1,4}}(?=/))"
_MARK = re.compile(rf"(?:^|[/._-])(?:{_LANGUAGE}|{_VERSION})(?![^/._-])", re.IGNORECASE)


def document_name(source: str) -> str:
    r"""Returns the name of a source without codes of languages and versions, which all its translations share.

    A code stands between slashes, periods, underscores or hyphens. A code of a language may have a region or
    script (``pt-BR``). A version begins with ``v``, or is a folder of numbers with periods. A name that consists of
    codes only stays as it is. Backslashes count as slashes.

    >>> [document_name(n) for n in ("de/leave.md", "pt_BR/leave.md", "leave.fr.md", "leave.md", "v1.2/leave.md")]
    ['leave.md', 'leave.md', 'leave.md', 'leave.md', 'leave.md']
    >>> [document_name(n) for n in (r"de\leave.md", r"1.2\leave.md", r"docs\leave.fr.md")]
    ['leave.md', 'leave.md', 'docs/leave.md']
    >>> [document_name(n) for n in ("2021/report.md", "federal.md", "what is new.md", "de")]
    ['2021/report.md', 'federal.md', 'what is new.md', 'de']
    """
    return _MARK.sub("", source.replace("\\", "/")).lstrip("/._-") or source
