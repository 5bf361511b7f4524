"""Removes links, tags and escapes of a text, because they are not words of the text."""

from __future__ import annotations

import re

_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\([^()\s]{1,2000}(?:[ \t]+\x22[^\x22\n]{0,200}\x22)?\)")
_ADDRESS = re.compile(r"(?<![A-Za-z0-9])(?:https?://|www\.)[!#-'*-;=?-Z\\^-~]*(?<![.,;:!?'*_])", re.IGNORECASE)
"""A web address: printable ASCII characters except quotes and brackets, without trailing punctuation."""
_END = r"(?:[ \t]+[\w:-]{1,50}[ \t]*=[^<>\n]{0,1000}|[ \t]*/?)>"
"""The rest of a tag after its name: attributes, or nothing."""
_BLOCKS = (
    "blockquote|br|dd|details|div|dl|dt|figcaption|figure|h[1-6]|hr|img|li|ol|p|pre|summary|table|tbody|td|th|thead"
    "|tr|ul"
)
_BLOCK_TAG = re.compile(rf"</?(?:{_BLOCKS}){_END}", re.IGNORECASE)
_TEMPLATE_TAG = re.compile(r"\{%[^%{}\n]{0,300}%\}")
"""A tag of Liquid, Jinja or Django."""
_INLINE_TAG = re.compile(rf"</?(?:a|b|code|em|i|span|strong|sub|sup){_END}", re.IGNORECASE)

_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
"""A punctuation character that Markdown takes literally (CommonMark 0.31, 2.4)."""


def without_escapes(text: str) -> str:
    r"""Removes the backslashes of Markdown before punctuation. A backslash before a letter stays.

    >>> print(without_escapes(r"Am 9\. Juli: tls\_cert, C:\temp"))
    Am 9. Juli: tls_cert, C:\temp
    """
    return _ESCAPE.sub(r"\1", text) if "\\" in text else text


def without_links(text: str) -> str:
    """Removes links, HTML tags and template tags; a Markdown link is replaced by its label.

    A web address or template tag becomes a semicolon, so that the words around it do not become adjacent. An HTML tag
    that ends a block of text ends the paragraph.

    >>> without_links('Use [the form](https://a.example/forms "Forms"), or www.a.example. Call <b>ext. 7</b>.')
    'Use the form, or  ; . Call ext. 7.'
    >>> without_links("<td>Ann</td><td>Ben, if weight <b 40 kg</td>").split()
    ['Ann', 'Ben,', 'if', 'weight', '<b', '40', 'kg']
    >>> without_links('Ask in {% slack_channel "travel" %}.').split()
    ['Ask', 'in', ';', '.']
    """
    if "{%" in text:
        text = _TEMPLATE_TAG.sub(" ; ", text)
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if "://" in text or "www." in text.lower():
        text = _ADDRESS.sub(" ; ", text)
    return _INLINE_TAG.sub("", _BLOCK_TAG.sub("\n\n", text)) if "<" in text else text
