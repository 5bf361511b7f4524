"""Search of words: ASCII texts are searched with another expression, which must find the same words."""

from itertools import product

from casemate.text.tokens import WORD, find_words


def test_words_of_ascii_texts_are_those_of_all_texts():
    for characters in product("aZ0'.-_ ", repeat=5):
        text = "".join(characters)
        assert find_words(text) == WORD.findall(text)
    for code in range(128):
        for text in (chr(code), f"a{chr(code)}b", f"a'{chr(code)}b"):
            assert find_words(text) == WORD.findall(text)


def test_accents_and_typographic_apostrophes_are_inside_words():
    assert find_words("It’s café No. 7-b") == ["It’s", "café", "No", "7-b"]
