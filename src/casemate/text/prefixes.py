"""Unique prefixes of long identifiers, and the identifier that a prefix means."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from os.path import commonprefix

from casemate.errors import ConfigError

SHORTEST = 16
"""Shortest prefix that is shown: the id of a key. So it stays unique while more identifiers come."""
LEAST = 4
"""Minimum number of characters of a prefix. A short word, such as *ace*, may be the name of something else."""
MOST_LISTED = 10
"""Identifiers that an error lists."""


def unique_prefixes(names: Iterable[str], least: int = SHORTEST) -> dict[str, str]:
    """Returns the shortest prefix of each name that no other name has, at least ``least`` characters long.

    A name that is the beginning of another one stays whole.

    >>> unique_prefixes(["0a1b2c3d4e5f", "0a1b2c3d9999", "bob"], least=4)
    {'0a1b2c3d4e5f': '0a1b2c3d4', '0a1b2c3d9999': '0a1b2c3d9', 'bob': 'bob'}
    """
    ordered = sorted(set(names))
    neighbors = zip(["", *ordered], ordered, [*ordered[1:], ""], strict=False)
    shared = {name: max(len(commonprefix([name, other])) for other in (a, b)) for a, name, b in neighbors}
    return {name: name[: max(least, length + 1)] for name, length in shared.items()}


def find_by_prefix(text: str, names: Collection[str], what: str) -> str | None:
    """Returns the name that a text is, or the only name that begins with it; None if there is none.

    Only a text of at least ``LEAST`` characters is taken as a beginning.

    >>> [find_by_prefix(text, ["ace41f", "bob"], "keys") for text in ("ace", "ace4", "bob")]
    [None, 'ace41f', 'bob']

    Raises:
        ConfigError: If several names begin with the text, none of which it is. The message lists them.
    """
    if text in names:
        return text
    found = sorted(name for name in set(names) if len(text) >= LEAST and name.startswith(text))
    if len(found) > 1:
        listed = ", ".join(found[:MOST_LISTED]) + f" and {len(found) - MOST_LISTED} more" * (len(found) > MOST_LISTED)
        raise ConfigError(f"{len(found)} {what} begin with {text[:120]!r}: {listed}; give more characters")
    return found[0] if found else None
