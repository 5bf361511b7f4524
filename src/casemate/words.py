"""Words and sentences, as far as one can tell them without a language model.

For what matches texts by their words: the quoting generator, the lexical tests of the guard, and the attacks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

STOP_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but
    by can could did do does doing done down during each else ever few for from further get give got had has have
    having he her here hers him his how i if in into is it its itself just let like long many may me might mine more
    most much must my need no nor not now of off often on once only or other our ours out over own please same say
    she should so some such take tell than that the their them then there these they this those to too under until
    up us use very was we were what when where which while who whom whose why will with without would you your
    yours""".split()
)
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, lone surrogates, non-characters, and what turns the direction of writing: on a terminal they
command, or make a line read as something else than it is."""
UNREADABLE = "\ufffd"
"""Stands in their place."""
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


def whole_words(tokens: Iterable[str]) -> list[str]:
    """Those of a tokenizer's tokens that are a word by themselves, of ASCII letters, sorted.

    Tokenizers mark either what goes on a word (``##ing``) or what begins one (``▁run``, ``Ġrun``).

    >>> whole_words(["run", "##ing", "[SEP]", "7"]), whole_words(["▁run", "ing"])
    (['run'], ['run'])
    """
    found = list(tokens)
    marked = [t[1:] for t in found if t[:1] in ("▁", "Ġ")]
    return sorted({t for t in marked or found if t.isascii() and t.isalpha()})


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


NUMBER = re.compile(r"(?<![^\W_])(?<![A-Za-z]-)(?<!\d[.,])\d+(?:[.,]\d+)*")
_UNITS = "one two three four five six seven eight nine".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
COUNTS = {word: str(n) for n, word in enumerate([*_UNITS[1:], "ten", "eleven", "twelve"], 2)}
COUNTS |= {ten: str(10 * i) for i, ten in enumerate(_TENS, 2)}
COUNTS |= {f"{ten}-{unit}": str(10 * i + j) for i, ten in enumerate(_TENS, 2) for j, unit in enumerate(_UNITS, 1)}
LABEL = re.compile(r"^(?:[-*#•>|]\s*)*(?:[A-Z][A-Z ,/&-]+|[A-Z][\w/]*(?: [a-z]+){0,2}):\s+(?=\S)")
CLAUSE_END = re.compile(
    r";\s+|,\s+(?=(?:but|whereas|while|although|and (?:the|an?|this|these|that|it|they|we|he|she|was|were|is|are))\b)"
)
LINKS = frozenset(
    "additionally although cannot compared either finally furthermore however moreover neither since still than "
    "through throughout thus together toward towards upon versus via whereas whether yet".split()
)
VERBAL = re.compile(r"[a-z]{2}(?:ed|ly)$")
ABSTENTION = re.compile(
    r"\b(?:(?:do not|don't|did not|didn't) know|i (?:do not|don't)\W*$"
    r"|(?<!we )(?:cannot|can't|could not|couldn't|unable to) (?:find|answer|determine|confirm|verify|say|tell)"
    r"|(?:not|n't) (?:\w+ly )?(?:mention|specif|say\b|stated?\b|address|discuss)\w*"
    r"|(?:context|documents?|passages?|texts?|sources?)\b.*\b(?:not|n't) (?:\w+ly )?(?:provide|contain|include|cover)"
    r"|no (?:relevant )?(?:information|mention|answer)\b|(?:not enough|insufficient) (?:information|context|details?))"
)
YES_NO = re.compile(r"\byes\s*(?:or|/)\s*no\b|(?<![^\W_])(yes|no)(?![^\W_])", re.IGNORECASE)
"""A yes or a no that is a word of its own; "yes or no", which repeats the question, is neither."""
OPPOSITES: dict[str, str] = {
    a: b
    for pair in """increase-decrease increased-decreased increases-decreases increasing-decreasing higher-lower high-low
    highest-lowest more-less most-least greater-smaller large-small larger-smaller long-short longer-shorter
    strong-weak stronger-weaker early-late earlier-later old-young older-younger positive-negative
    positively-negatively improved-worsened best-worst before-after with-without always-never above-below
    significant-insignificant significantly-insignificantly left-right common-rare male-female men-women
    normal-abnormal present-absent safe-dangerous effective-ineffective beneficial-harmful first-last
    acute-chronic""".split()
    for a, b in (pair.split("-"), pair.split("-")[::-1])
}
"""Words that turn a statement into its contrary when one stands for the other."""


def numbers(text: str) -> frozenset[str]:
    """The numbers, in digits and without thousands' commas; also most of those below a hundred written as words.

    >>> sorted(numbers("Of 31,236 patients, 60.2% (eight farms, twenty-four pens) had HbA1c."))
    ['24', '31236', '60.2', '8']
    """
    digits = {re.sub(r",(?=\d{3}\b)", "", n) for n in NUMBER.findall(text)}
    return frozenset(digits | {COUNTS[w] for w in words(text) if w in COUNTS})


def names(text: str) -> list[str]:
    """Words that look like names: with a capital where no sentence begins, or with capitals or digits further on.

    >>> names("RESULTS: The IA trial in Turku gave HbA1c values. We saw none.")
    ['IA', 'Turku', 'HbA1c']
    """
    found = []
    for match in WORD.finditer(LABEL.sub("", text)):
        word, before = match[0], match.string[: match.start()].rstrip(" \"'“(")
        begins = not before or before[-1] in ".!?:\n"
        inner = len(word) > 1 and any(c.isupper() for c in word[1:])
        if inner or (word[0].isupper() and len(word) > 2 and not begins):
            found.append(word)
    return found


def extract(question: str, text: str, most: int) -> str:
    """The sentences of a text that share most content words with a question, in order of reading.

    Ties go to what stands first. A sentence that shares no word is never taken.

    >>> extract("What is the toll?", "It rained. The toll is 3 marks. Boats pay no toll. The toll rose.", 2)
    'The toll is 3 marks. Boats pay no toll.'
    >>> extract("What is the toll?", "It rained.", 2)
    ''
    """
    asked = content_words(question)
    options = sentences(text)
    shared = [len(content_words(sentence) & asked) for sentence in options]
    best = sorted((i for i, count in enumerate(shared) if count), key=lambda i: -shared[i])[:most]
    return " ".join(options[i].strip() for i in sorted(best))


def clauses(text: str) -> list[str]:
    """The statements of a text: its sentences without their labels, long ones cut where a new clause begins.

    >>> clauses("RESULTS: The dose was halved in May, but the fever of the first week came back again.")
    ['The dose was halved in May', 'but the fever of the first week came back again']
    """
    found = []
    for sentence in sentences(text):
        piece = LABEL.sub("", " ".join(sentence.split())).strip()
        parts = CLAUSE_END.split(piece)
        whole = len(piece.split()) < 12 or min(len(part.split()) for part in parts) < 5
        found += [part.strip(" .;") for part in ([piece] if whole else parts)]
    return [clause for clause in found if clause]


def terms(clause: str, known: Collection[str] = ()) -> list[str]:
    """What a clause speaks of: runs of words between stop words, verbs, numbers and punctuation, at most four each.

    Args:
        clause: A statement.
        known: Names, which keep their capital at its beginning.

    >>> terms("The mean prevalence of Yersinia in 12 herds increased slowly, as young pigs matured")
    ['mean prevalence', 'Yersinia', 'herds', 'young pigs']
    """
    found: list[list[str]] = [[]]
    end = 0
    for match in WORD.finditer(clause):
        word = match[0]
        if clause[end : match.start()].strip() or len(found[-1]) == 4:
            found.append([])
        end = match.end()
        if len(word) == 1 or word.lower() in STOP_WORDS | LINKS or VERBAL.search(word) or NUMBER.match(word):
            found.append([])
        else:
            found[-1].append(word.lower() if not match.start() and word.istitle() and word not in known else word)
    return list(dict.fromkeys(run for run in map(" ".join, found) if len(run) > 3))


def headline(text: str, title: str = "") -> str:
    """What a text is about: its title, else up to six terms whose words it repeats most, in order of reading.

    >>> headline("The north bridge is closed until May. From May the toll of the north bridge is doubled.")
    'north bridge, toll'
    """
    if title.strip():
        return " ".join(title.split()).rstrip(".")
    known = names(text)
    spread = Counter(stem(w) for w in words(text))
    options = {term: content_words(term) for clause in clauses(text) for term in terms(clause, known)}
    chosen: list[str] = []
    for term in sorted(options, key=lambda t: -sum(spread[w] for w in options[t])):
        if len(chosen) < 6 and not any(options[term] & options[other] for other in chosen):
            chosen.append(term)
    return ", ".join(sorted(chosen, key=list(options).index)) or " ".join(text.split()[:16])


def abstains(reply: str) -> bool:
    """Whether a reply begins by saying that it cannot answer; also one that was cut off after "I don't".

    >>> abstains("The context does not mention that."), abstains("It fell to 7. The year is not stated.")
    (True, False)
    """
    first = next(iter(sentences(reply.strip())), "")
    return ABSTENTION.search(first.lower().replace("’", "'").strip()) is not None


def says_yes(reply: str) -> bool:
    """Whether the first yes or no of a reply is a yes.

    >>> [says_yes(reply) for reply in (" Yes. ", "**No**, yes is wrong", "Yes or no? _Yes_!", "Nobody knows", "")]
    [True, False, True, False, False]
    """
    return next((m[1].lower() == "yes" for m in YES_NO.finditer(reply) if m[1]), False)


def keywords(text: str) -> list[str]:
    """The words that carry meaning, each once, as written and in order of reading; no numbers.

    >>> keywords("The tolls of the north bridge rose by 2.5 EUR: a toll too many.")
    ['tolls', 'north', 'bridge', 'rose', 'EUR']
    """
    found: dict[str, str] = {}
    for match in WORD.finditer(text):
        if len(match[0]) > 2 and match[0].lower() not in STOP_WORDS and not NUMBER.match(match[0]):
            found.setdefault(stem(match[0].lower()), match[0])
    return list(found.values())


def phrases(text: str, size: int = 4) -> frozenset[tuple[str, ...]]:
    """All runs of so many words, whatever stands between them.

    >>> sorted(phrases("Two-part tolls: none.", 3))
    [('part', 'tolls', 'none'), ('two', 'part', 'tolls')]
    """
    tokens = re.findall(r"[^\W_]+", text.lower())
    return frozenset(zip(*(tokens[i:] for i in range(size)), strict=False))


def listed(items: Sequence[str]) -> str:
    """Some words as one reads them out.

    >>> listed(["tolls", "bridges", "May"]), listed(["tolls"])
    ('tolls, bridges and May', 'tolls')
    """
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


NEW_WORDS = 6
"""New words from which on a clause of a reply counts in full."""


def told(text: str, question: str, reply: str) -> float:
    """How surely a reply was made from a text: whether it tells what the text says and the question did not.

    Each clause of the reply is judged by its new words, those that are not in the question: 2 s - 1, where s is the
    share of them that the text has, since texts on one subject share half of their words easily. A clause with fewer
    than ``NEW_WORDS`` counts less. The best clause decides: a reply may draw on several texts.

    Args:
        text: The text, with its title.
        question: What was asked.
        reply: What was answered.

    Returns:
        In [0, 1]; 0 for a reply that abstains or tells nothing new.

    >>> text = "The toll of the north bridge rose to 7 in May."
    >>> told(text, "What about the toll?", "In May it rose to 7 (north bridge).")
    0.6666666666666666
    """
    if abstains(reply):
        return 0.0
    there, known = content_words(text), content_words(question)
    new = [content_words(clause) - known for clause in clauses(reply)]
    return max(
        (max(2 * len(bag & there) / len(bag) - 1, 0.0) * min(len(bag) / NEW_WORDS, 1.0) for bag in new if bag),
        default=0.0,
    )


class Genre:
    """Texts of one kind, and how rare a word is in them.

    Args:
        texts: What an attacker has seen of the kind.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts = tuple(texts)
        self._spread = Counter(word for text in texts for word in content_words(text))

    def rarity(self, word: str) -> float:
        """From 0 for a word that all texts have, in any form, to 1 for one that none has; 1 if no text is known.

        >>> [Genre(["north bridge", "north gate"]).rarity(word) for word in ("north", "tolls")]
        [0.0, 1.0]
        """
        n = len(self.texts)
        return 1 - math.log1p(self._spread[stem(word.lower())]) / math.log1p(n) if n else 1.0

    def telling(self, text: str, title: str = "") -> list[str]:
        """The key words of a text, those first that tell it from others: rare ones that it repeats or has in its title.

        >>> Genre().telling("Herons nest late. Herons nest in reeds, near the weir.", "Reeds")
        ['Reeds', 'Herons', 'nest', 'late', 'near', 'weir']
        """
        counts = Counter(stem(w) for w in words(text))
        named = content_words(title)

        def weight(word: str) -> float:
            base = stem(word.lower())
            return (1 + math.log(max(counts[base], 1)) + (base in named)) * self.rarity(word)

        return sorted(keywords(f"{title}\n{text}"), key=lambda word: -weight(word))


def places(tokens: Sequence[str | int]) -> dict[str | int, int]:
    """Where each token stands, as the bits of an integer."""
    found: dict[str | int, int] = {}
    for i, token in enumerate(tokens):
        found[token] = found.get(token, 0) | 1 << i
    return found


def lcs(at: dict[str | int, int], length: int, tokens: Iterable[str | int]) -> int:
    """Length of the longest common subsequence, all places of one text at a time (Crochemore et al. 2001).

    Bit i of the row is 0 where the common subsequence grows with the i-th token of the first text. A token that the
    first text lacks changes nothing. Carries beyond its length never come back down, so they are cut off at the end.

    Args:
        at: The ``places`` of the first text.
        length: Of the first text.
        tokens: The other text.
    """
    row = (1 << length) - 1
    for token in tokens:
        here = at.get(token)
        if here is not None:
            both = row & here
            row = (row + both) | (row - both)
    return length - (row & ((1 << length) - 1)).bit_count()
