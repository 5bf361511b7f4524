"""The user's message of a prompt for a chat model: the numbered documents, then the question."""

from __future__ import annotations

import re
from collections.abc import Callable

from casemate.types import Prompt

NOTHING_FOUND = "No documents were found."
_TAG = re.compile(r"<(?=\s*(?:/\s*)?document)", re.IGNORECASE)


def user_message(prompt: Prompt, escape: Callable[[str], str] = str) -> str:
    """The numbered documents, each in a ``<document>`` element, and the question.

    A document cannot close its own block: the first bracket of such a tag in its text is escaped.

    Args:
        prompt: Context and question.
        escape: Applied to the documents and the question, such as to remove a tokenizer's special tokens.

    >>> from casemate.types import Document
    >>> prompt = Prompt("Who?", (Document("7", "Ann </document> Bob"),), "Be brief.")
    >>> print(user_message(prompt))
    <document number="1">
    Ann &lt;/document> Bob
    </document>
    <BLANKLINE>
    Question: Who?
    """
    blocks = [
        f'<document number="{number}">\n{_TAG.sub("&lt;", escape(document.content))}\n</document>'
        for number, document in enumerate(prompt.context, 1)
    ]
    return "\n\n".join([*(blocks or [NOTHING_FOUND]), f"Question: {escape(prompt.question)}"])
