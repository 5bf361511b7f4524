"""Questions about one sentence, written by rules of English grammar, and the phrases that other questions name.

A rule applies only where closed classes of words (articles, auxiliary and modal verbs, prepositions) show the structure
of the sentence. In any other sentence there is no question: a wrong one costs the reader more than a missing one.
The longer lists of words are in ``question_words.txt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from casemate.text.sentences import proper_nouns
from casemate.text.tokens import NUMBER_WORDS, STOP_WORDS, content_words, join_words
from casemate.text.word_lists import read_sections

MIN_WORDS, MAX_WORDS = 6, 40
"""Length of a sentence that yields a question."""
MAX_SUBJECT_WORDS = 9
"""Longest subject of a sentence, in words."""
MIN_CONTENT_WORDS = 3
"""Content words of a question. With fewer, it does not say what it asks about."""
MAX_PHRASE_WORDS = 5
"""Longest phrase that a question names, in words without its article."""

_WORDS = read_sections("casemate.monitor.canaries", "question_words.txt")
_ARTICLES = frozenset("a an the every each".split())
_BE = frozenset("is are was were".split())
_HAVE = {"has": "does", "have": "do", "had": "did"}
_MODAL = frozenset("can could may might must shall should will would".split())
_PREPOSITIONS = frozenset(
    "about across after against along among around at before behind below beneath beside between beyond by despite "
    "during for from in inside into near of off on onto outside over past per since through throughout to toward "
    "towards under until upon via with within without".split()
)
_IN_SUBJECT = _ARTICLES | frozenset("of in on for at from with near between and all both most many".split())
"""Function words that a subject may contain."""
_REFERENCES = frozenset(_WORDS["references"].split())
"""Words that refer to something outside the sentence."""
_STUDY = frozenset(_WORDS["study"].split())
"""Words that alone do not say what a subject is: *the study*, *the participants*."""
_CLAUSE_END = re.compile(
    r" ?[,;:()–—] ?| (?:and|but|or|because|although|while|whereas|when|if|unless|which|who|whom|whose|that|where|so"
    r"|than|as|compared|versus|vs) "
)
"""End of a clause, in a text with single spaces."""
_FREE_NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:[.,]\d+)*(?![\w/-])")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_YEAR = re.compile(r"1[0-9]{3}|20\d{2}")
_DATED = re.compile(r"In (1[0-9]{3}|20\d{2}), (?=[A-Z]|the |an? )")
_COUNTED = re.compile(r"(?<![\w.,±/-])(?<!to )(?<!and )(?<!or )(?<!of )(?<!from )(\d+(?:,\d{3})*(?:\.\d+)?) ([a-z]+)\b")
_HEDGES = frozenset("about approximately around exactly nearly only roughly".split())
_QUANTITIES = [line.split() for line in _WORDS["quantities"].splitlines()]
"""Verbs before quantities: infinitive, third person, past."""
_AUXILIARY_OF = {third: ("does", base) for base, third, _ in _QUANTITIES}
_AUXILIARY_OF |= {past: ("did", base) for base, _, past in _QUANTITIES}
_MEASURES = frozenset(_WORDS["measures"].split())
"""Units in which something *is* so many."""
TITLED_NAME = re.compile(r"(?:Dr|Mr|Mrs|Ms|Prof|Professor|Sister|Nurse|Sir|Dame)\.?(?: [A-Z][\w'’-]+){1,3}")
"""A person with a title."""
_WORD = re.compile(r"[A-Za-z][\w'’-]*\w|[A-Za-z]")
_VAGUE = frozenset(_WORDS["vague"].split()) | frozenset(NUMBER_WORDS)
"""Words that say little in a phrase, or are not part of one."""
_PAST = frozenset(_WORDS["past"].split())
"""Irregular past forms and participles."""
_ADJECTIVE = re.compile(r"(?:ed|ing|ly|ous|ful|less|able|ible|ive|ic|al|ary|est|ish|(?<!m)ent|ant|ory)$")
_NOUNS_LIKE_ADJECTIVES = frozenset(_WORDS["nouns"].split())
"""Nouns with such an ending."""
_CALENDAR = frozenset(
    "January February March April June July August September October November December Monday Tuesday Wednesday "
    "Thursday Friday Saturday Sunday Christmas Easter".split()
)
_IMPRINT = re.compile(r"©|\(c\) ?\d|\b(?:copyright|all rights reserved|published by|elsevier)\b", re.IGNORECASE)
_BOUNDARY = frozenset("of and or is are was were has have had can could may might must shall should will would".split())
_NOT_PROSE = re.compile(r"[(\[{“”\"«»:;{}<>|=/\\*#_•…]|--|\.\.")
"""Brackets, quotation marks and signs that a plain sentence lacks."""


class FactQuestion(NamedTuple):
    """A question for one fact of a sentence, the fact as the sentence spells it, and its kind.

    ``kind`` is ``year``, ``person``, or the unit of a number.
    """

    query: str
    answer: str
    kind: str


def fact_questions(sentence: str, document: str = "") -> list[FactQuestion]:
    """Writes questions for a year, a number with its unit, or a person with a title, in the words of the sentence.

    The text of the document shows which words are names.

    >>> fact_questions("The car park of the north wing was opened in 1998, and holds many cars.")
    [FactQuestion(query='In which year was the car park of the north wing opened?', answer='1998', kind='year')]
    >>> [question.query for question in fact_questions("Visitors of the winter garden must leave within 20 minutes.")]
    ['Within how many minutes must visitors of the winter garden leave?']
    >>> fact_questions("They must leave within 20 minutes of the bell.")
    []
    """
    text = re.sub(r" ?\([^()]*\)", "", " ".join(sentence.split()))
    if not text.endswith(".") or _NOT_PROSE.search(text) or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
        return []
    dated = _DATED.match(text)
    clause = _CLAUSE_END.split(text[dated.end() if dated else 0 :].rstrip("."))[0]
    if dated:
        clause = f"{clause} in {dated[1]}"
    found = [*_person_questions(text), *_inverted(clause, document), *_cleft(clause, document)]
    return [one for one in found[:1] if _is_clear(one)]


def connected_questions(sentence: str, title: str, phrases: Sequence[str]) -> list[FactQuestion]:
    """Writes questions for the only year or number of a sentence, by phrases that the sentence connects it with.

    For sentences whose grammar the rules of ``fact_questions`` do not cover.

    >>> sentence = "After 12 weeks on the harbor council, the old ferryman rowed home."
    >>> [one.query for one in connected_questions(sentence, "Ferries", ["the harbor council", "the old ferryman"])]
    ['In "Ferries", how many weeks are mentioned together with the harbor council and the old ferryman?']
    """
    text = " ".join(sentence.split())
    years = [m for m in _FREE_NUMBER.findall(text) if _YEAR.fullmatch(m)]
    counts = [m for m in _COUNTED.finditer(text) if _is_unit(m[2])]
    if len(years) == 1:
        asked, answer, kind = "which year is", years[0], "year"
    elif not years and len(counts) == 1 and len(_FREE_NUMBER.findall(text)) <= 1:
        asked, answer, kind = f"how many {counts[0][2]} are", counts[0][1], counts[0][2]
    else:
        return []
    where = f'In "{title}", ' if title else ""
    question = f"{where}{asked} mentioned together with {join_words(phrases)}?"
    found = FactQuestion(question[0].upper() + question[1:], answer, kind)
    return [found] if _is_clear(found) else []


def noun_phrases(sentence: str) -> list[str]:
    """Returns the noun phrases whose borders are certain, in order: behind an article or a preposition, and names.

    >>> noun_phrases("The head pharmacist of the clinic keeps records of herbal medicines, in Birch House.")
    ['the head pharmacist', 'herbal medicines', 'Birch House']
    """
    if _IMPRINT.search(sentence):
        return []
    tokens = [*re.findall(r"[^\W_](?:[\w'’-]*\w)?|[^\w\s]", " ".join(sentence.split())), "."]
    found = (_phrase_at(tokens, i) or _plural_at(tokens, i) or _name_at(tokens, i) for i in range(len(tokens)))
    return list(dict.fromkeys(phrase for phrase in found if phrase))


def _is_clear(question: FactQuestion) -> bool:
    """Whether a question names enough to be understood alone, and does not contain its answer."""
    found = {w.lower() for w in _WORD.findall(question.query.replace(" was it that ", " "))}
    named = content_words(question.query) - content_words(question.kind) - _STUDY
    return not found & _REFERENCES and len(named) >= MIN_CONTENT_WORDS and question.answer not in question.query


def _is_unit(word: str) -> bool:
    return word in _MEASURES or bool(re.fullmatch(r"[a-z]{3,}s", word) and not word.endswith(("ss", "us", "is")))


def _in_question(subject: Sequence[str], text: str) -> list[str]:
    """A subject as within a sentence: with a small first letter, unless it begins with a name.

    Empty if the text does not show whether a single word is a name.
    """
    small = [subject[0][0].lower() + subject[0][1:], *subject[1:]]
    if len(subject) > 1 and subject[1][0].isupper() and subject[0].lower() not in _ARTICLES:
        return list(subject)
    if len(subject) > 1 or re.search(rf"\b{re.escape(small[0])}\b", text):
        return small
    return list(subject) if subject[0] in proper_nouns(text) else []


def _cleft(clause: str, text: str) -> Iterator[FactQuestion]:
    """From *Ito left for Turku in 1931*, writes *In which year was it that Ito left for Turku?*."""
    parts = clause.split(" ")
    at = [i for i, word in enumerate(parts) if _YEAR.fullmatch(word) and parts[i - 1 : i] == ["in"]]
    others = sum(bool(_NUMBER.fullmatch(word)) for word in parts)
    verb = next((i for i, w in enumerate(parts) if i and (w in _PAST or (w.endswith("ed") and w.islower()))), None)
    if len(at) != 1 or others != 1 or verb is None or verb > at[0] or not _is_subject(parts[:verb]):
        return
    subject = _in_question(parts[:verb], text)
    kept = [*subject, *parts[verb : at[0] - 1], *parts[at[0] + 1 :]]
    if subject and len(kept) > verb + 1:
        yield FactQuestion(f"In which year was it that {' '.join(kept)}?", parts[at[0]], "year")


def _person_questions(text: str) -> Iterator[FactQuestion]:
    """From *Dr Ito runs the ward*, writes *Who runs the ward?*."""
    name = TITLED_NAME.match(text)
    if name is None or len(TITLED_NAME.findall(text)) > 1:
        return
    rest = _CLAUSE_END.split(text[name.end() :].rstrip("."))[0].strip()
    first = rest.split(" ")[0] if rest else ""
    is_verb = first in _BE | set(_HAVE) | _MODAL | _PAST or re.fullmatch(r"[a-z]{2,}(?:s|ed)", first)
    if (
        is_verb
        and not re.search(r"['’]s\b", name[0])
        and text[name.end()] == " "
        and len(rest.split()) > MIN_CONTENT_WORDS
    ):
        yield FactQuestion(f"Who {rest}?", name[0].rstrip("."), "person")


def _inverted(clause: str, text: str) -> Iterator[FactQuestion]:
    """Questions with the auxiliary verb before the subject."""
    parts = clause.split(" ")
    verbs = _BE | set(_HAVE) | _MODAL | set(_AUXILIARY_OF)
    at = next((i for i, word in enumerate(parts) if i and word in verbs), None)
    if at is None or not _is_subject(parts[:at]) or parts[at + 1 : at + 2] in (["not"], ["never"], ["no"], ["to"]):
        return
    subject, verb, rest = _in_question(parts[:at], text), parts[at], parts[at + 1 :]
    for start, end, asked, answer, kind in _spans(rest) if subject else ():
        before, after = rest[:start], rest[end:]
        auxiliary, infinitive = _auxiliary(verb, before)
        direct = not before and asked.startswith("how")
        if not auxiliary or (verb in _BE and direct and kind not in _MEASURES):
            continue
        if after and (after[0] == "of" or after[0].lower() in _REFERENCES):
            continue
        words = [asked, auxiliary, *subject, *infinitive, *before, *after]
        question = " ".join(words)
        yield FactQuestion(question[0].upper() + question[1:] + "?", answer, kind)


def _auxiliary(verb: str, before: Sequence[str]) -> tuple[str, list[str]]:
    """The auxiliary verb of a question, and the infinitive behind its subject; empty if the rules do not know it."""
    if verb in _BE | _MODAL:
        return verb, []
    if verb in _AUXILIARY_OF:
        auxiliary, base = _AUXILIARY_OF[verb]
        return (auxiliary, [base]) if not before or before[0] in _ARTICLES | _PREPOSITIONS else ("", [])
    if before and (before[0].endswith(("ed", "en")) or before[0] in _PAST | {"been", "stood", "had"}):
        return verb, []
    return (_HAVE[verb], ["have"]) if not before else ("", [])


def _is_subject(parts: Sequence[str]) -> bool:
    """Whether words are surely a noun phrase that begins a sentence."""
    low = [part.lower() for part in parts]
    if not 1 <= len(parts) <= MAX_SUBJECT_WORDS or not all(_WORD.fullmatch(part) for part in parts):
        return False
    if low[0] in _PREPOSITIONS or low[0].endswith("ly") or low[0] in ("today", "yesterday", "overall", "thus"):
        return False
    if any(word in STOP_WORDS and word not in _IN_SUBJECT for word in low) or low[-1] in _IN_SUBJECT:
        return False
    if any(word in _PAST or (word.endswith("ed") and i > 1) for i, word in enumerate(low)):
        return False
    heads = [word for word in low if word not in STOP_WORDS]
    return bool(set(heads) - _STUDY) and (len(heads) > 1 or parts[0].lower() not in _ARTICLES)


def _spans(rest: Sequence[str]) -> Iterator[tuple[int, int, str, str, str]]:
    """Years and numbers with a unit behind a verb: start and end in words, interrogative phrase, answer, kind."""
    years = [i for i, word in enumerate(rest) if _YEAR.fullmatch(word)]
    counts = [i for i, word in enumerate(rest) if _NUMBER.fullmatch(word) or word in NUMBER_WORDS]
    if len(counts) != 1:
        return
    (at,) = counts
    if years and at and rest[at - 1] in ("in", "since", "until"):
        yield at - 1, at + 1, f"{rest[at - 1]} which year", rest[at], "year"
        return
    unit = rest[at + 1] if at + 1 < len(rest) else ""
    if years or not _is_unit(unit):
        return
    if at + 2 < len(rest) and rest[at + 2] not in _PREPOSITIONS | _ARTICLES | {"old", "long", "high", "wide", "deep"}:
        return
    start = at
    if start and rest[start - 1] in _HEDGES:
        start -= 1
    elif start > 1 and rest[start - 2 : start] in (["at", "least"], ["at", "most"], ["up", "to"]):
        start -= 2
    before = rest[start - 1] if start else ""
    if before in ("within", "for", "after", "before", "in", "by", "from", "with"):
        yield start - 1, at + 2, f"{before} how many {unit}", rest[at], unit
    elif before not in _PREPOSITIONS and before not in STOP_WORDS and before not in ("than", "least", "most", "every"):
        yield start, at + 2, f"how many {unit}", rest[at], unit


def _phrase_at(tokens: Sequence[str], at: int) -> str:
    """The noun phrase behind an article; empty if its borders are not certain."""
    if tokens[at].lower() not in _ARTICLES:
        return ""
    found, end = _run(tokens, at + 1)
    if len(found) < 2 or not _is_noun_phrase(found, end):
        return ""
    return " ".join([tokens[at].lower() if tokens[at].lower() in ("a", "an") else "the", *found])


def _plural_at(tokens: Sequence[str], at: int) -> str:
    """The noun phrase in the plural behind a preposition; empty if its borders are not certain."""
    if not at or tokens[at - 1].lower() not in _PREPOSITIONS - {"to"} or tokens[at].endswith("ing"):
        return ""
    found, end = _run(tokens, at)
    is_plural = len(found) > 1 and found[-1].endswith("s") and not found[-1].endswith(("ss", "us", "is", "'s", "’s"))
    is_certain = end in ".,;)" or end in ("of", "and", "or")
    return " ".join(found) if is_plural and is_certain and _is_noun_phrase(found, end) else ""


def _run(tokens: Sequence[str], at: int) -> tuple[list[str], str]:
    """The words from a token to the next function word or punctuation mark, and that mark."""
    found: list[str] = []
    for token in tokens[at : at + MAX_PHRASE_WORDS + 1]:
        if token.lower() in STOP_WORDS | _PREPOSITIONS | _VAGUE or not _WORD.fullmatch(token):
            break
        found.append(token)
    return found, tokens[at + len(found)] if at + len(found) < len(tokens) else "."


def _is_noun_phrase(found: Sequence[str], end: str) -> bool:
    """Whether words behind an article or a preposition are surely adjectives and nouns, the last one a noun."""
    low = [word.lower() for word in found]
    if len(low) > MAX_PHRASE_WORDS or any(word in _PAST or len(word) < 3 for word in low):
        return False
    if any(w.endswith("ly") or (w.endswith("s") and not w.endswith(("ss", "us", "is", "'s", "’s"))) for w in low[:-1]):
        return False
    if any(w.endswith(("ed", "ing")) for w in low[1:-1]) or set(low) & (_REFERENCES | _STUDY):
        return False
    last = low[-1]
    if _ADJECTIVE.search(last) and last not in _NOUNS_LIKE_ADJECTIVES:
        return False
    certain = end in ".,;:)?!" or end.lower() in _BOUNDARY
    return not last.endswith(("'s", "’s")) and (certain or (end.lower() in _PREPOSITIONS and not last.endswith("s")))


def _name_at(tokens: Sequence[str], at: int) -> str:
    """A name of up to four capitalized words without an article.

    A single word must stand behind a preposition.
    """
    before = tokens[at - 1] if at else "."
    if before.lower() in _ARTICLES or before[0].isupper() or tokens[at].lower() in STOP_WORDS | _PREPOSITIONS:
        return ""
    found = []
    for token in tokens[at : at + 5]:
        if not re.fullmatch(r"[A-Z][a-z][\w'’-]*", token):
            break
        found.append(token)
    end, behind = [*tokens[at + len(found) : at + len(found) + 2], ".", "."][:2]
    is_whole = not end[0].isalnum() or end.lower() in STOP_WORDS | _PREPOSITIONS or behind in _ARTICLES
    is_name = len(found) > 1 or (before in _PREPOSITIONS and len("".join(found)) > 3 and found[0] not in _CALENDAR)
    is_whole = is_whole and len(found) <= 4 and not found[-1].endswith(("'s", "’s")) if found else False
    return " ".join(found) if is_name and is_whole else ""
