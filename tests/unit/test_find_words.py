"""Search of words: the regular expression for ASCII texts must find the same words as the general one."""

from itertools import product

from casemate.text.tokens import WORD, find_words


def test_ascii_expression_finds_the_same_words_as_the_general_expression():
    for characters in product("aZ0'.-_ ", repeat=5):
        text = "".join(characters)
        assert find_words(text) == WORD.findall(text)
    for code in range(128):
        for text in (chr(code), f"a{chr(code)}b", f"a'{chr(code)}b"):
            assert find_words(text) == WORD.findall(text)


def test_words_include_accents_and_typographic_apostrophes():
    assert find_words("It’s café No. 7-b") == ["It’s", "café", "No", "7-b"]
