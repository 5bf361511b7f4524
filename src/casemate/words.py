"""Words and sentences, as far as one can tell them without a language model.

For what matches texts by their words: the quoting generator, the lexical tests of the guard, and the attacks.
"""

from __future__ import annotations

import re

STOP_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but
    by can could did do does doing done down during each else ever few for from further get give got had has have
    having he her here hers him his how i if in into is it its itself just let like long many may me might mine more
    most much must my need no nor not now of off often on once only or other our ours out over own please same say
    she should so some such take tell than that the their them then there these they this those to too under until
    up us use very was we were what when where which while who whom whose why will with without would you your
    yours""".split()
)
WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+#•|>]|\d+[.)]\s))")
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|No|vs)\.)(?<!\b(?:Mrs|e\.g|i\.e)\.)\s+(?=[^\sa-z])"
)


def sentences(text: str) -> list[str]:
    """The text cut where sentences, paragraphs and list items end; nothing is lost but the space between them.

    >>> sentences("Dr. Ito came at 8. She left.")
    ['Dr. Ito came at 8.', 'She left.']
    """
    return [s for block in BLOCK_END.split(text) for s in SENTENCE_END.split(block) if s.strip()]


def words(text: str) -> list[str]:
    """Lower-case words in order, numbers among them, without punctuation.

    >>> words("It's 2.5 mg, twice.")
    ["it's", '2.5', 'mg', 'twice']
    """
    return WORD.findall(text.lower().replace("’", "'"))


def content_words(text: str) -> frozenset[str]:
    """Stems of the words that carry meaning."""
    return frozenset(stem(w) for w in words(text) if w not in STOP_WORDS)


def stem(word: str) -> str:
    """Plural and verb endings off, roughly: both sides are treated alike.

    >>> [stem(w) for w in ("tests", "tested", "testing", "policies", "glass")]
    ['test', 'test', 'test', 'polic', 'glass']
    """
    for ending in ("ies", "ing", "ed", "es", "y", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)]
    return word
