r"""Counts the words of given texts that an answer discloses, in any form, while the answer streams.

``counter`` reads an answer piece by piece (``pieces``) and compares it with the texts (``context``, ``indexed_text``):

- **chains**: a common subsequence of the content words of answer and text. Neighbors in a chain are at most
  ``MAX_SKIP`` content words apart in the text, forwards or backwards. Words of the answer that the text does not
  contain never break a chain, so inserted numbers and fillers hide nothing. A chain of ``MIN_CHAIN`` words discloses
  its words, and the function words before each.
- **unordered**: words of a text in another order. ``UNORDERED_SHARE`` of the words that only one text contains suffice:
  the answer then discloses all of its words that this text contains.
- **outlines** (``casemate.text.outlines``): every word is changed and the order kept. The first or last letters of
  twelve consecutive words then disclose these words.
- **decodings**: parts of the answer without a word of the texts are decoded (``casemate.text.disguises``). The search
  corrects misspelled words (``spelling``). It ignores spaces, and tries reversed texts and rotated alphabets
  (``letter_search``).
- **readability**: unreadable parts are counted as copies, because their form may have no decoder here. A part is
  unreadable if its words do not resemble words of the texts.
- **codes**: readable words count as copies if few of them are in changing order, or mix forms of letters, because each
  word or form can stand for a letter or a bit. First letters of lines and sentences are searched like other letters.

Time is linear in the answer: every decoding is read once, and a word is compared with at most ``MAX_OCCURRENCES``
positions of each text.
"""

from casemate.text.disclosure.chains import MAX_APART, MAX_SKIP, MIN_CHAIN
from casemate.text.disclosure.counter import MAX_BLOCK, DisclosureCounter
from casemate.text.disclosure.pieces import PIECE_END, pieces_with_words

__all__ = [
    "MAX_APART",
    "MAX_BLOCK",
    "MAX_SKIP",
    "MIN_CHAIN",
    "PIECE_END",
    "DisclosureCounter",
    "pieces_with_words",
]
