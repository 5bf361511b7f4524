"""Grounding score: how much of a reply comes from a given text."""

from __future__ import annotations

import math
from collections.abc import Iterable

from casemate.text.refusals import is_refusal
from casemate.text.sentences import clauses
from casemate.text.tokens import content_words

NEW_WORDS = 6
"""Number of new content words from which a clause has full weight."""
GROUNDED = 0.5
"""Score from which a reply counts as grounded in the text."""


def grounding_score(text: str, question: str, reply: str) -> float:
    """Scores the probability that a reply was generated from a text.

    The score of a clause uses its new words: content words that are not in the question. s is the share of new words
    that the text contains. The score is max(2 s - 1, 0), because texts on one subject share about half of their words.
    A clause with n < ``NEW_WORDS`` new words is weighted by n / ``NEW_WORDS``. The score of a reply is that of its best
    clause, because a reply may combine several texts.

    Args:
        text: The text, with its title.
        question: The question.
        reply: The reply to the question.

    Returns:
        A score in [0, 1]; 0 for a refusal and for a reply without new words.

    >>> text = "The toll of the north bridge rose to 7 in May."
    >>> grounding_score(text, "What about the toll?", "In May it rose to 7 (north bridge).")
    0.6666666666666666
    """
    if is_refusal(reply):
        return 0.0
    in_text, in_question = content_words(text), content_words(question)
    new = [content_words(clause) - in_question for clause in clauses(reply)]
    return max(
        (max(2 * len(bag & in_text) / len(bag) - 1, 0.0) * min(len(bag) / NEW_WORDS, 1.0) for bag in new if bag),
        default=0.0,
    )


def summarize_grounding(
    text: str, exchanges: Iterable[tuple[str, str]], best: int | None = None
) -> tuple[float, float]:
    """Summarizes the grounding scores of a session.

    Args:
        text: The text, with its title.
        exchanges: Questions, each with its reply.
        best: Number of highest scores to average; None: all.

    Returns:
        Mean of the best scores, and share of grounded replies; both in [0, 1], 0 without exchanges.

    >>> text = "The toll of the north bridge rose to 7 in May."
    >>> summarize_grounding(text, [("the toll?", "In May it rose to 7 (north bridge)."), ("why?", "I don't know.")], 1)
    (0.6666666666666666, 0.5)
    """
    scores = [grounding_score(text, question, reply) for question, reply in exchanges]
    if not scores:
        return (0.0, 0.0)
    top = sorted(scores, reverse=True)[:best]
    return math.fsum(top) / len(top), sum(s >= GROUNDED for s in scores) / len(scores)
