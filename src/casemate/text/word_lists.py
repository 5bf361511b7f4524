"""Reads word lists of the package: text files with sections, each below a line such as ``== names``."""

from __future__ import annotations

from importlib.resources import files


def read_sections(package: str, file: str) -> dict[str, str]:
    """Returns the text of each section of a file in a package, by title. Text above the first title is ignored.

    >>> sorted(read_sections("casemate.text", "ordinary_words.txt"))
    ['de', 'en', 'es', 'fr', 'it', 'names', 'nl', 'pt', 'ru']
    """
    text = files(package).joinpath(file).read_text("utf-8")
    parts = (part.partition("\n") for part in text.split("== ")[1:])
    return {title: words for title, _, words in parts}
