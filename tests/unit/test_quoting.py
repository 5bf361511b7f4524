"""What counts as quoted, against a count by hand."""

from hypothesis import given
from hypothesis import strategies as st

from casemate.quoting import RUN, Quotes, spoken

WORDS = st.lists(st.sampled_from("abcde"), max_size=24).map(" ".join)


def naive(texts, answer):
    """Every run of RUN words of the answer, looked for in every text."""
    said = answer.split()
    quoted, covered = set(), [set() for _ in texts]
    places = [(n, at, t.split()[at : at + RUN]) for n, t in enumerate(texts) for at in range(len(t.split()) - RUN + 1)]
    for start in range(len(said) - RUN + 1):
        for number, at, run in places:
            if run == said[start : start + RUN]:
                quoted |= set(range(start, start + RUN))
                covered[number] |= set(range(at, at + RUN))
    return len(quoted), [sum(1 << i for i in c) for c in covered]


@given(st.lists(WORDS, max_size=3), WORDS)
def test_runs_of_words_are_counted_once_and_marked_everywhere(texts, answer):
    quotes = Quotes(texts)
    for word in answer.split():
        quotes.take(word)
    assert (quotes.words, quotes.covered) == naive(texts, answer)
    assert quotes.lengths == [len(text.split()) for text in texts]


@given(WORDS, WORDS, st.integers(0, 40))
def test_it_does_not_matter_how_the_answer_comes_in(text, answer, cut):
    whole, parts = Quotes([text]), Quotes([text])
    whole.take(answer)
    words = answer.split()
    parts.take(" ".join(words[:cut]))
    parts.take(" ".join(words[cut:]))
    assert (whole.words, whole.covered) == (parts.words, parts.covered)


def test_case_punctuation_marks_and_invisible_characters_are_no_hiding_place():
    quotes = Quotes(["Take the blue tablet twice a day."])
    quotes.take("TAKE, the bl\u200bue—tablet twïce")
    assert quotes.words == 5
    assert spoken("ﬁne\u00adly \u2060Ａ") == ["finely", "a"]


def test_to_be_told_what_one_has_said_is_no_quotation():
    quotes = Quotes(["one two three four five six seven eight nine"], "is it: One two, three FOUR five?")
    quotes.take("one two three four five")
    assert quotes.words == 0
    quotes.take("six seven eight nine")
    assert quotes.words == 7
