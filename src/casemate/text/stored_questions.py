"""Questions that documents contain: forum posts, collections of problems, lists of frequently asked questions.

A user may ask such a question word for word. So an equal question is not evidence that the client has the document;
only words of the rest are. Questions are found by rules, without a language model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from casemate.text.sentences import sentences

MIN_SHARE = 0.2
"""Share of documents with the same form above which a collection contains questions."""
MIN_ASKING = 0.5
"""Share of the blocks with a label that must ask something."""
HEADING = ""
"""Label of questions without a label: the first line of a document."""
ASKS = re.compile(
    r"\W*(?:and |but |so |or |please,? )?(?:who(?:m|se)?|what|which|when|where|why|how|is|are|was|were|do|does|did|can|"
    r"could|will|would|shall|should|may|must|has|have|had|tell|explain|describe|list|name|give|show|find)\b",
    re.I,
)
"""Beginning of a sentence that asks, also without a question mark."""
_LABEL = re.compile(r"^[ \t]*(?:[#>*-]+[ \t]+)?\**([A-Z][^\W_]*(?: [^\W_]+){0,2})\**:\**(?=\s)", re.M)
"""A label such as ``Patient:`` at the beginning of a line."""


def question_labels(texts: Iterable[str]) -> tuple[str, ...]:
    r"""Labels of the questions that the documents of a collection contain, sorted.

    A document counts if a labeled block begins it and another one follows, or if its first line is a question before
    further text. A title may precede the label.

    Args:
        texts: Whole documents, with their titles.

    Returns:
        Labels that begin at least ``MIN_SHARE`` of the documents, and whose blocks usually ask; ``HEADING`` for first
        lines. Empty: the documents contain no questions.

    >>> question_labels(["Patient: May I swim?\nDoctor: Yes.", "Patient: It itches. Why?\nDoctor: It heals."])
    ('Patient',)
    >>> question_labels(["METHODS: We measured.\nRESULTS: None."])
    ()
    """
    count, found, asking = 0, Counter[str](), Counter[str]()
    for text in texts:
        count += 1
        heading, _, rest = text.strip().partition("\n")
        if block := _first_block(text):
            label, start, end = block
            found[label] += 1
            asking[label] += _asks(text[start:end])
        elif heading.rstrip().endswith("?") and rest.strip():
            found[HEADING] += 1
            asking[HEADING] += 1
    return tuple(sorted(n for n, c in found.items() if c >= MIN_SHARE * count and asking[n] >= MIN_ASKING * c))


def stored_question(text: str, labels: Collection[str]) -> str:
    r"""The question in a document, without its label; empty if it contains none.

    >>> stored_question("Patient: May I swim?\nDoctor: Yes.", ["Patient"])
    'May I swim?'
    """
    start, end = _span(text, labels)
    return _LABEL.sub("", text[start:end].lstrip(), count=1).strip()


def without_question(text: str, labels: Collection[str]) -> str:
    r"""A document without its question. A labeled block ends at the next label, or at the end of the text.

    >>> without_question("Patient: May I swim?\nDoctor: Yes.", ["Patient"])
    'Doctor: Yes.'
    """
    start, end = _span(text, labels)
    return text[:start] + text[end:]


def _span(text: str, labels: Collection[str]) -> tuple[int, int]:
    """Start and end of the question; equal if there is none."""
    found = list(_LABEL.finditer(text))
    for number, here in enumerate(found, 1):
        if here[1] in labels:
            return here.start(), found[number].start() if number < len(found) else len(text)
    begin = len(text) - len(text.lstrip())
    line, separator, _ = text[begin:].partition("\n")
    if HEADING in labels and line.rstrip().endswith("?"):
        return begin, begin + len(line) + len(separator)
    return 0, 0


def _first_block(text: str) -> tuple[str, int, int] | None:
    """Label, start and end of the first labeled block, if at most a title precedes it and another label follows."""
    here, following = [*_LABEL.finditer(text), None, None][:2]
    if here is None or following is None or text[: here.start()].strip().count("\n"):
        return None
    return (here[1], here.end(), following.start()) if here[1] != following[1] else None


def _asks(text: str) -> bool:
    return "?" in text or any(ASKS.match(s) for s in sentences(text))
