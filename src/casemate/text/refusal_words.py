"""Word classes of refusals in six languages: the role of a word in a sentence that declines or answers.

``refusal_words.txt`` has a list for each language. A line contains a class and its words, in lower case without
accents. An accent is kept if it separates two words ("é" is a form of "to be", "e" means "and"). A star matches any
ending. A line with two classes contains verb forms that include their subject ("puedo": I can). A word belongs to its
first class. Words without a class are subject matter.

=========  =====================================================================================================
NEG, NONE  negation; UN: words that include it
I, YOU     the assistant, the reader; IT, HE: things referred to, third persons; AI: "assistant", "model"
SRC        documents; GIVEN: "provided", "above"; INFO: "information", "detail"; ANSWER; REQ: "question"
CAN, WILL  modal verbs; BE, DO, HAVE: auxiliary verbs; CONTAIN, STATE, FIND, KNOW, DET, ACT, REFUSE: what is declined
SORRY      apologies; THANKS: courtesies; POLICY: rules, privacy; ACCESS; CONTACT: "please", "contact"
LACK       missing, outside; ENOUGH, ONLY, WITHOUT: quantity and restriction
BUT, SO    conjunctions, with BECAUSE, IF, AND, QUE; WH: question words; SAID: reported speech
IN, ABOUT  prepositions; THE, NE: dropped
=========  =====================================================================================================
"""

from __future__ import annotations

from casemate.text.word_lists import read_sections

DROPPED = frozenset({"THE", "NE"})
"""Classes that carry no information."""

Lexicon = tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]
"""Classes by word, and classes by prefix of a word."""


def _parsed(lines: str) -> Lexicon:
    """Parses lines of a class and its words. A line without a class continues the previous one."""
    words: dict[str, tuple[str, ...]] = {}
    beginnings: dict[str, tuple[str, ...]] = {}
    classes: tuple[str, ...] = ()
    for line in lines.strip().splitlines():
        head, colon, rest = line.partition(":")
        classes = tuple(head.split()) if colon else classes
        for word in (rest if colon else line).split():
            (beginnings if word.endswith("*") else words).setdefault(word.rstrip("*"), classes)
    return words, beginnings


def _read() -> dict[str, Lexicon]:
    """Reads the lexicon of each language; ``== en`` begins the English one."""
    return {language: _parsed(lines) for language, lines in read_sections("casemate.text", "refusal_words.txt").items()}


LEXICONS = _read()
"""Lexicons by language."""


def classes(word: str, plain: str, lexicon: Lexicon) -> tuple[str, ...]:
    """Returns the classes of a word, or none.

    Args:
        word: The word in lower case.
        plain: The same without accents.
        lexicon: The lexicon of its language.

    >>> classes("können", "konnen", LEXICONS["de"]), classes("documents", "documents", LEXICONS["en"])
    (('CAN',), ('SRC',))
    """
    words, beginnings = lexicon
    found = words.get(word) or words.get(plain)
    if found is None:
        found = next((beginnings[plain[:n]] for n in range(min(len(plain), 16), 2, -1) if plain[:n] in beginnings), ())
    return found
