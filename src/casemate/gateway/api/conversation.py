"""Converts a conversation to a query.

The client sends the whole conversation, and may forge any of it. Only user messages are used:

* **System and developer messages are ignored.** The operator sets the model's instructions (``rag.instructions``). A
  client that could replace them could instruct the model to recite its context.
* **Assistant messages are ignored.** They may be forged, or quote an answer from before a document was hidden. Their
  use would disclose withheld content again. The context comes only from the retrieval of this request.
* **Earlier user messages** are prepended if the last one is a follow-up (``is_follow_up``). The guard judges the result
  as one query, as if the client had written it in one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from casemate.text.tokens import content_words, words

MAX_EARLIER = 3
"""Earlier user messages that may be prepended."""
MAX_CHARACTERS = 4000
"""Characters of the prepended messages together; a follow-up to a long text is rarely about the message before it."""

REFERRING = frozenset(
    """it its itself they them their theirs he him his she her hers this that these those there then one ones former
    latter same such else another others""".split()
)
OPENINGS = frozenset("and but or so also then otherwise instead too".split())
OPENING_PAIRS = frozenset({("what", "about"), ("how", "about"), ("what", "if"), ("why", "not")})


def to_query(messages: Sequence[str]) -> str:
    r"""Returns the query of a conversation: the last user message, behind the messages that it follows.

    >>> to_query(["Who runs the pharmacy?", "And when does she work?"])
    'Who runs the pharmacy?\nAnd when does she work?'
    >>> to_query(["Who runs the pharmacy?", "When does the library open?"])
    'When does the library open?'
    """
    used = [messages[-1]]
    for message in reversed(messages[:-1]):
        if len(used) > MAX_EARLIER or not is_follow_up(used[0]):
            break
        if sum(map(len, (message, *used[:-1]))) > MAX_CHARACTERS:
            break
        used.insert(0, message)
    return "\n".join(used)


def is_follow_up(message: str) -> bool:
    """Whether a message cannot be understood without the one before.

    It refers back (a pronoun and the like), starts as a continuation, has at most two words, or has no content word.
    The word lists are English; in other languages only the number of words counts.

    >>> [is_follow_up(t) for t in ("What does it cost?", "And on Sundays?", "Und sonntags?", "What does aspirin cost?")]
    [True, True, True, False]
    """
    found = words(message)
    opening = bool(found) and (found[0] in OPENINGS or tuple(found[:2]) in OPENING_PAIRS)
    return opening or len(found) <= 2 or not content_words(message) or not REFERRING.isdisjoint(found)
