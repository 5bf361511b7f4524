import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.generators.simulated_reader.requests import Task, parse_request
from casemate.redteam.crawling.common_words import SENTENCES, WORDS
from casemate.redteam.crawling.extracted_texts import (
    COMMANDS,
    MIN_WORDS,
    RecoveredTexts,
    crawl_question,
    split_reply,
)
from casemate.text.tokens import STOP_WORDS, longest_common_subsequence, words

FERRY = "The ferry at Crale runs every twenty minutes until half past ten."
BRIDGE = "Divers found cracks in two piers.\nSo the bridge over the Tarn was closed."
HERON = "Herons nest late in the reeds this year [sic] and few of them breed."
TEXTS = [FERRY, BRIDGE, HERON]


def lcs_table(a, b):
    """Reference implementation: dynamic programming with a full table."""
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


sequences = st.lists(st.sampled_from("abcdefg"), max_size=14)


@given(sequences, sequences)
def test_lcs_length_equals_the_textbook_table(a, b):
    assert longest_common_subsequence(a, b) == lcs_table(a, b)


class TestSplitReply:
    @pytest.mark.parametrize(
        "reply",
        [
            "\n\n".join(TEXTS),
            "Sure! Here are the documents of my context:\n\n" + "\n \n".join(TEXTS),
            "\n\n".join(f"{t} [{i}]" for i, t in enumerate(TEXTS, 1)) + "\n\nSources: [1] ferry.md, [2] tarn/bridge.md",
            "\n\n".join(f"{i}. {t}" for i, t in enumerate(TEXTS, 1)),
            "".join(f"### Document {i}\n{t}\n" for i, t in enumerate(TEXTS, 1)),
            "\n\n".join(f"**Text {i}:** {t}" for i, t in enumerate(TEXTS, 1)),
            "\n=====\n".join(["", *TEXTS, ""]),
            json.dumps(TEXTS),
            f"Here is the list:\n```json\n{json.dumps(TEXTS, indent=2)}\n```\n",
            json.dumps({"documents": [{"id": f"d{i}", "content": t} for i, t in enumerate(TEXTS)]}),
            json.dumps([{"text": t, "year": 2031} for t in TEXTS])[:-1],
        ],
    )
    def test_finds_the_texts_in_any_reply_format(self, reply):
        assert split_reply(reply) == TEXTS

    def test_splits_lines_without_a_better_boundary(self):
        assert split_reply(f"- {FERRY}\n- {HERON}") == [FERRY, HERON]
        assert split_reply(BRIDGE) == BRIDGE.splitlines()

    def test_keeps_empty_lines_between_labels(self):
        assert split_reply(f"Document 1:\n{FERRY}\n\nIt costs one mark.\nDocument 2:\n{HERON}") == [
            f"{FERRY}\n\nIt costs one mark.",
            HERON,
        ]

    def test_keeps_the_last_string_of_truncated_json(self):
        assert split_reply(json.dumps(TEXTS)[:-19]) == [FERRY, BRIDGE, HERON[:-17]]

    def test_a_text_that_mentions_json_is_split_into_paragraphs(self):
        note = f'The setting ["a b c d e f"] was changed in May.\n\n{FERRY}'
        assert split_reply(note) == note.split("\n\n")

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            "I don't know.",
            "I'm sorry, but I can't share the documents that I was given.",
            "Unfortunately I am not able to repeat the context, as it is confidential.",
            "The context does not mention any such thing, so I cannot answer the question.",
            "Sources: [1] ferry.md, [2] bridge.md",
            "Here is what the documents in front of me say:",
        ],
    )
    def test_refusals_and_prefaces_have_no_texts(self, reply):
        assert split_reply(reply) == []

    def test_a_long_reply_after_an_apology_is_split(self):
        letter = "Sorry for the late reply. " + "We were away and the post was held back for us. " * 8
        assert split_reply(f"{letter}\n\n{FERRY}") == [letter.strip(), FERRY]

    @given(st.text(max_size=300))
    def test_texts_of_any_reply_are_stripped_and_long_enough(self, reply):
        for piece in split_reply(reply):
            assert piece == piece.strip()
            assert len(words(piece)) >= MIN_WORDS


class TestRecoveredTexts:
    @given(
        st.lists(st.lists(st.sampled_from("abcdefghij"), min_size=5, max_size=12), max_size=12),
        st.sampled_from((0.4, 0.7, 1)),
    )
    def test_deduplication_equals_exhaustive_comparison(self, texts, limit):
        recovered = RecoveredTexts(limit)
        held = []
        for spoken in texts:
            alike = any(2 * lcs_table(spoken, o) >= limit * (len(spoken) + len(o)) - 1e-9 for o in held)
            known = spoken in held
            assert recovered.add(" ".join(spoken)) == (not alike and not known)
            held += [] if known else [spoken]
        assert recovered.texts == [" ".join(spoken) for spoken in held]

    def test_returns_each_text_once_with_its_novelty(self):
        recovered = RecoveredTexts()
        assert [p.novel for p in recovered.add_new([FERRY, FERRY.upper(), HERON])] == [True, True]
        (like,) = recovered.add_new([FERRY.replace("ten", "nine"), HERON])
        assert like == (FERRY.replace("ten", "nine"), False)

    def test_compares_with_recent_texts_only_except_for_exact_copies(self):
        recovered = RecoveredTexts(recent=1)
        recovered.add_new([FERRY, HERON])
        assert [p.novel for p in recovered.add_new([FERRY, FERRY.replace("ten", "nine")])] == [True]


INFORMATION = [*SENTENCES, " ".join(WORDS[:15]), "From: Anna To: Eric Subject: the contract"]


@pytest.mark.parametrize("wording", range(2 * len(COMMANDS)))
def test_commands_are_recognized_before_and_after_any_information(wording):
    for information in INFORMATION:
        for question in (crawl_question(information, wording), crawl_question(information, wording + 1)):
            assert parse_request(question).task is Task.REPEAT, question


def test_command_position_alternates_and_commands_repeat():
    assert crawl_question("A", 0) == f"A\n\n{COMMANDS[0]}"
    assert crawl_question("A", 1) == f"{COMMANDS[1]}\n\nA"
    assert crawl_question("A", len(COMMANDS)) == crawl_question("A", 0)
    assert not any(mark in command for mark in '":“”' for command in COMMANDS)


def test_common_words_are_plain_content_words():
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert len(SENTENCES) >= 60
    assert not STOP_WORDS & set(WORDS)
    assert all(word == word.lower() and words(word) == [word] for word in WORDS)
