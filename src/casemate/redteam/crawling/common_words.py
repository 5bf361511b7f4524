"""Common English words and sentences, for attackers without knowledge of a collection. Written for this project.

The texts are in ``common_words.txt``. ``WORDS`` are common words of many fields, without stop words. ``SENTENCES`` are
plain statements from different fields. As questions they reach different regions of a collection; together they show
the region of English texts.
"""

from __future__ import annotations

from casemate.text.word_lists import read_sections

_PARTS = read_sections("casemate.redteam.crawling", "common_words.txt")
WORDS: tuple[str, ...] = tuple(dict.fromkeys(_PARTS["words"].split()))
SENTENCES: tuple[str, ...] = tuple(_PARTS["sentences"].splitlines())
GENERAL_WORDS: tuple[str, ...] = tuple(_PARTS["general"].split())
"""Initial words for an unknown subject."""
NON_ANCHOR_WORDS = frozenset(_PARTS["non-anchor"].split())
"""Words that are never anchors: they name nothing, or are verbs without a verb ending."""
ILLNESSES: tuple[str, ...] = tuple(" ".join(_PARTS["illnesses"].split()).split(", "))
NAMES: tuple[str, ...] = tuple(_PARTS["names"].split())
"""First names."""
MAIL_SUBJECTS: tuple[str, ...] = tuple(" ".join(_PARTS["mail subjects"].split()).split(", "))
