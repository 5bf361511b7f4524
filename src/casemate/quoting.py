"""Which words of the context an answer repeats, counted while it is being written.

A word counts as quoted when it stands in a run of ``RUN`` words or more that a text of the context has in the same
order, whatever the case, the punctuation and invisible characters between them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Sequence

RUN = 4
"""Words in a row from which on an answer quotes: three are a turn of speech."""
_WORD = re.compile(r"[^\W_]+")


def spoken(text: str) -> list[str]:
    """The words of a text as they are compared.

    >>> spoken("Twice\u200b a Day, naïve-ly")
    ['twice', 'a', 'day', 'naive', 'ly']
    """
    plain = unicodedata.normalize("NFKD", text).casefold()
    return _WORD.findall("".join(c for c in plain if unicodedata.category(c) not in ("Mn", "Cf", "Cc") or c.isspace()))


class Quotes:
    """Follows one answer over the texts it may be made from.

    Args:
        texts: What may be quoted.
        known: What the asker said himself: to tell him that again is no quotation.

    Attributes:
        words: How many words of the answer were quoted so far.
        covered: For each text, its words that were quoted, a bit for each.
        lengths: For each text, its number of words.

    >>> quotes = Quotes(["Take it twice a day, after meals."])
    >>> quotes.take("You take it twice a day, and rest")
    >>> quotes.words, quotes.covered, quotes.lengths
    (5, [31], [7])
    """

    def __init__(self, texts: Sequence[str], known: str = "") -> None:
        self.words = 0
        found = [spoken(text) for text in texts]
        self.lengths = [len(words) for words in found]
        self.covered = [0] * len(found)
        self._places: defaultdict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, words in enumerate(found):
            for at in range(len(words) - RUN + 1):
                self._places[tuple(words[at : at + RUN])].append((number, at))
        own = spoken(known)
        for at in range(len(own) - RUN + 1):
            self._places.pop(tuple(own[at : at + RUN]), None)
        self._last: deque[str] = deque(maxlen=RUN)
        self._run = 0  # words at the end of the answer that are counted already

    def take(self, text: str) -> None:
        """Goes on with the next whole words of the answer."""
        for word in spoken(text):
            self._last.append(word)
            places = self._places.get(tuple(self._last), ()) if len(self._last) == RUN else ()
            for number, at in places:
                self.covered[number] |= ((1 << RUN) - 1) << at
            if places:
                self.words += RUN - self._run
                self._run = RUN - 1
            else:
                self._run = max(self._run - 1, 0)
