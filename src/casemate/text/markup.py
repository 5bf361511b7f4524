"""Removes links and tags from text, so that parts of addresses are not read as words of its author."""

from __future__ import annotations

import re

_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\([^()\s]{1,2000}(?:\s+\x22[^\x22\n]{0,200}\x22)?\)")
_ADDRESS = re.compile(r"\b(?:https?://|www\.)[^\s<>()\[\]\x22]*")
_TAG = re.compile(
    r"</?(?:a|b|blockquote|br|code|dd|details|div|dl|dt|em|figcaption|figure|h[1-6]|hr|i|img|li|ol|p|pre|span|strong|sub"
    r"|summary|sup|table|tbody|td|th|thead|tr|ul)\b[^<>\n]{0,1000}>",
    re.IGNORECASE,
)


def without_links(text: str) -> str:
    """Replaces links of Markdown by their labels, and removes web addresses and HTML tags.

    >>> without_links('Use [the form](https://a.example/forms "Forms") or www.a.example.<br>Call <b>ext. 7</b>.')
    'Use the form or  Call  ext. 7 .'
    """
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if "://" in text or "www." in text:
        text = _ADDRESS.sub("", text)
    return _TAG.sub(" ", text) if "<" in text else text
