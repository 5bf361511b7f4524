"""Rule-based segmentation of English text into sentences, clauses and terms, without a language model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from casemate.text.tokens import NUMBER, STOP_WORDS, WORD, content_words, stem, words

BLOCK_END = re.compile(
    r"\n\s*\n|\n(?=\s*(?:[-*+#•|>]|\{\x22|\d+[.)]\s|\[\d{1,2}:\d\d|\d\d?:\d\d(?::\d\d)?\s[^\n:]{1,40}:\s))"
)
"""End of a paragraph, list item, object of JSON lines, or message.

A message begins with a time in brackets, or with a time and a name.
"""
_GERMAN_MONTH = "Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
_BEFORE_NUMBER = r"(?<=\b(?:Nr|Bd)\.\s)|(?<=\b(?:Abs|Art|Kap|Anm)\.\s)|(?<=\bZiff\.\s)"
"""German abbreviations that end no sentence before a number."""
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|No|vs)\.)(?<!\b(?:Mrs|e\.g|i\.e)\.)\s+(?=[^\sa-z])"
    rf"(?!(?:(?<=\b\d\.\s)|(?<=\b\d\d\.\s))(?:{_GERMAN_MONTH})\b)(?!(?:{_BEFORE_NUMBER})\d)"
)
"""Space between two sentences: after a period that ends no common abbreviation or German ordinal, before anything but a
small letter."""
_ANY_SENTENCE_END = re.compile(
    SENTENCE_END.pattern + r"|(?<=[。！？｡])(?![。！？｡」』”’）])\s*|(?<=[。！？｡][」』”’）])\s*|(?<=[।॥؟۔።။។])\s+"
)
"""The same, or the end of a sentence in other scripts; Chinese and Japanese have no space there."""
_CLAUSE_SPACE = re.compile(
    r"(?<=[\u0e01-\u0e2e\u0e30-\u0e45\u0e47-\u0eff])[ \xa0]+(?=[\u0e00-\u0eff])"
    r"|(?<=[\u1000-\u1049])[ \xa0]+(?=[\u1000-\u1049])|(?<=[\u1780-\u17d3])[ \xa0]+(?=[\u1780-\u17d3])"
)
"""Space between two clauses in Thai, Lao, Burmese and Khmer; not after the signs of repetition and abbreviation."""
_SENTENCE_MARK = re.compile(r"[\u104a\u104b\u17d4\u17d5]")
"""End of a sentence in Burmese and Khmer. In a text with such marks, a space does not end a sentence."""
MIN_CLAUSE = 20
"""Minimum length of a clause between spaces; a space beside a shorter one, such as in a name, does not split."""
_LABEL = re.compile(r"^(?:[-*#•>|]\s*)*(?:[A-Z][A-Z ,/&-]+|[A-Z][\w/]*(?: [a-z]+){0,2}):\s+(?=\S)")
_CLAUSE_END = re.compile(
    r";\s+|,\s+(?=(?:but|whereas|while|although|and (?:the|an?|this|these|that|it|they|we|he|she|was|were|is|are))\b)"
)
_CONNECTIVES = frozenset(
    "additionally although cannot compared either finally furthermore however moreover neither since still than "
    "through throughout thus together toward towards upon versus via whereas whether yet".split()
)
_BEFORE_CAPITAL = re.compile(r"\b[A-Z][a-z]+(?= [A-Z][a-z])")
_VERB_OR_ADVERB = re.compile(r"[a-z]{2}(?:ed|ly)$")


def sentences(text: str) -> list[str]:
    """Splits a text at the ends of sentences, paragraphs and list items, and removes only the space between them.

    >>> sentences("Dr. Ito came at 8. She left.")
    ['Dr. Ito came at 8.', 'She left.']
    >>> sentences("Es gilt § 5 Abs. 2 und tritt am 1. Mai in Kraft. Der Preis steigt.")
    ['Es gilt § 5 Abs. 2 und tritt am 1. Mai in Kraft.', 'Der Preis steigt.']
    >>> sentences("It opened in 1932. September was cold.")
    ['It opened in 1932.', 'September was cold.']
    >>> sentences("橋は八時に開く。料金は三元。")
    ['橋は八時に開く。', '料金は三元。']
    >>> sentences("พิพิธภัณฑ์เปิดเวลาแปดโมงเช้า ค่าเข้าชมสามสิบบาทต่อคน")
    ['พิพิธภัณฑ์เปิดเวลาแปดโมงเช้า', 'ค่าเข้าชมสามสิบบาทต่อคน']
    """
    if text.isascii():
        return [s for block in BLOCK_END.split(text) for s in SENTENCE_END.split(block) if s.strip()]
    parts = (s for block in BLOCK_END.split(text) for s in _ANY_SENTENCE_END.split(block) if s.strip())
    return [clause for part in parts for clause in _divided_at_spaces(part)]


def _divided_at_spaces(text: str) -> list[str]:
    """Splits a text at the spaces between clauses of ``MIN_CLAUSE`` characters, in scripts without other marks."""
    found, start = list[str](), 0
    for space in () if _SENTENCE_MARK.search(text) else _CLAUSE_SPACE.finditer(text):
        if space.start() - start >= MIN_CLAUSE and len(text) - space.end() >= MIN_CLAUSE:
            found.append(text[start : space.start()])
            start = space.end()
    return [*found, text[start:]]


def proper_nouns(text: str) -> list[str]:
    """Returns proper nouns and codes by their spelling, in order, with repetitions.

    A word counts if it is capitalized and does not begin a sentence, or if it has a capital letter after the first
    character. Sentence labels are skipped.

    >>> proper_nouns("RESULTS: The IA trial in Turku gave HbA1c values. We saw none.")
    ['IA', 'Turku', 'HbA1c']
    """
    found, end = list[str](), 0
    for match in WORD.finditer(_LABEL.sub("", text)):
        word, before = match[0], match.string[end : match.start()].rstrip(" \"'“(")
        begins, end = before[-1] in ".!?:\n" if before else not end, match.end()
        inner = len(word) > 1 and any(c.isupper() for c in word[1:])
        if inner or (word[0].isupper() and len(word) > 2 and not begins):
            found.append(word)
    return found


def restore_names(question: str, text: str) -> str:
    """Restores the capital letters of names in a question from a text.

    A name is a word that the text capitalizes within a sentence, or before a capitalized word, and never writes in
    lower case. Function words are not names.

    >>> restore_names("What do we have about priya Natarajan and bread?", "Priya Natarajan works. Bread is baked at 5.")
    'What do we have about Priya Natarajan and bread?'
    """
    small = STOP_WORDS | {word for word in WORD.findall(text) if word[0].islower()}
    capitalized = [*(name for name in proper_nouns(text) if name.istitle()), *_BEFORE_CAPITAL.findall(text)]
    names = {name.lower(): name for name in capitalized if name.lower() not in small}
    return WORD.sub(lambda match: names.get(match[0], match[0]), question)


def extract_sentences(question: str, text: str, most: int) -> str:
    """Extractive summary of a text for a question: the sentences with most content words of the question.

    Args:
        question: The question.
        text: The text.
        most: Maximum number of sentences. Of equal ones, earlier sentences are preferred.

    Returns:
        The sentences in their order in the text; empty if none shares a content word with the question.

    >>> extract_sentences("What is the toll?", "It rained. The toll is 3 marks. Boats pay no toll. The toll rose.", 2)
    'The toll is 3 marks. Boats pay no toll.'
    >>> extract_sentences("What is the toll?", "It rained.", 2)
    ''
    """
    return " ".join(nearest_sentences(question, text, most))


def nearest_sentences(question: str, text: str, most: int) -> list[str]:
    """Returns the sentences of ``extract_sentences`` as in the text, without surrounding space."""
    asked = content_words(question)
    options = sentences(text)
    shared = [len(content_words(sentence) & asked) for sentence in options]
    best = sorted((i for i, count in enumerate(shared) if count), key=lambda i: -shared[i])[:most]
    return [options[i].strip() for i in sorted(best)]


def clauses(text: str) -> list[str]:
    """Splits a text into clauses: sentences without their labels, long ones split at conjunctions and semicolons.

    A sentence is split if it has at least 12 words and each part has at least 5.

    >>> clauses("RESULTS: The dose was halved in May, but the fever of the first week came back again.")
    ['The dose was halved in May', 'but the fever of the first week came back again']
    """
    found = []
    for sentence in sentences(text):
        piece = _LABEL.sub("", " ".join(sentence.split())).strip()
        parts = _CLAUSE_END.split(piece)
        whole = len(piece.split()) < 12 or min(len(part.split()) for part in parts) < 5
        found += [part.strip(" .;") for part in ([piece] if whole else parts)]
    return [clause for clause in found if clause]


def terms(clause: str, known: Collection[str] = ()) -> list[str]:
    """Extracts candidate terms: runs of at most four words between stop words, verbs, numbers and punctuation.

    The candidates are those of RAKE (Rose et al. 2010), with a length limit. Only endings identify verbs and adverbs.

    Args:
        clause: A clause.
        known: Proper nouns, which stay capitalized at the beginning of the clause.

    Returns:
        Terms of more than three characters, in order, without repetitions.

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
        stops = word.lower() in STOP_WORDS | _CONNECTIVES or _VERB_OR_ADVERB.search(word) or NUMBER.match(word)
        if len(word) == 1 or stops:
            found.append([])
        else:
            found[-1].append(word.lower() if not match.start() and word.istitle() and word not in known else word)
    return list(dict.fromkeys(run for run in map(" ".join, found) if len(run) > 3))


def describe_topic(text: str, title: str = "") -> str:
    """Describes the topic of a text: its title, or up to six terms with the most frequent words of the text.

    The terms share no word and keep their order in the text. A text without terms is described by its first 16 words.

    >>> describe_topic("The north bridge is closed until May. From May the toll of the north bridge is doubled.")
    'north bridge, toll'
    """
    if title.strip():
        return " ".join(title.split()).rstrip(".")
    known = proper_nouns(text)
    frequency = Counter(stem(w) for w in words(text))
    options = {term: content_words(term) for clause in clauses(text) for term in terms(clause, known)}
    chosen: list[str] = []
    for term in sorted(options, key=lambda t: -sum(frequency[w] for w in options[t])):
        if len(chosen) < 6 and not any(options[term] & options[other] for other in chosen):
            chosen.append(term)
    return ", ".join(sorted(chosen, key=list(options).index)) or " ".join(text.split()[:16])
