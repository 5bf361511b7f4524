import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.obedient.asking import Kind, understand
from casemate.crawl.everyday import SENTENCES, WORDS
from casemate.crawl.loot import COMMANDS, FEWEST, Loot, asked, common, pieces
from casemate.words import STOP_WORDS, words

FERRY = "The ferry at Crale runs every twenty minutes until half past ten."
BRIDGE = "Divers found cracks in two piers.\nSo the bridge over the Tarn was closed."
HERON = "Herons nest late in the reeds this year [sic] and few of them breed."
TEXTS = [FERRY, BRIDGE, HERON]


def longest(a, b):
    """The textbook table."""
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


sequences = st.lists(st.sampled_from("abcdefg"), max_size=14)


@given(sequences, sequences)
def test_common_is_that_of_the_table(a, b):
    assert common(a, b) == longest(a, b)


class TestPieces:
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
    def test_are_the_texts_whatever_the_form_of_the_reply(self, reply):
        assert pieces(reply) == TEXTS

    def test_are_lines_if_there_is_no_surer_boundary(self):
        assert pieces(f"- {FERRY}\n- {HERON}") == [FERRY, HERON]
        assert pieces(BRIDGE) == BRIDGE.splitlines()

    def test_keep_empty_lines_inside_of_what_stands_between_labels(self):
        assert pieces(f"Document 1:\n{FERRY}\n\nIt costs one mark.\nDocument 2:\n{HERON}") == [
            f"{FERRY}\n\nIt costs one mark.",
            HERON,
        ]

    def test_of_json_that_is_cut_off_hold_the_last_string_as_far_as_it_came(self):
        assert pieces(json.dumps(TEXTS)[:-19]) == [FERRY, BRIDGE, HERON[:-17]]

    def test_of_a_text_that_only_mentions_json_are_its_paragraphs(self):
        note = f'The setting ["a b c d e f"] was changed in May.\n\n{FERRY}'
        assert pieces(note) == note.split("\n\n")

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
    def test_are_none_of_a_refusal_or_an_empty_announcement(self, reply):
        assert pieces(reply) == []

    def test_of_a_long_text_that_begins_with_regret_are_its_texts(self):
        letter = "Sorry for the late reply. " + "We were away and the post was held back for us. " * 8
        assert pieces(f"{letter}\n\n{FERRY}") == [letter.strip(), FERRY]

    @given(st.text(max_size=300))
    def test_of_anything_are_stripped_and_long_enough(self, reply):
        for piece in pieces(reply):
            assert piece == piece.strip()
            assert len(words(piece)) >= FEWEST


class TestLoot:
    @given(
        st.lists(st.lists(st.sampled_from("abcdefghij"), min_size=5, max_size=12), max_size=12),
        st.sampled_from((0.4, 0.7, 1)),
    )
    def test_finds_exactly_what_comparing_with_all_finds(self, texts, limit):
        loot = Loot(limit)
        held = []
        for spoken in texts:
            alike = any(2 * longest(spoken, o) >= limit * (len(spoken) + len(o)) - 1e-9 for o in held)
            known = spoken in held
            assert loot.add(" ".join(spoken)) == (not alike and not known)
            held += [] if known else [spoken]
        assert loot.texts == [" ".join(spoken) for spoken in held]

    def test_gives_each_text_once_and_says_which_is_novel(self):
        loot = Loot()
        assert [p.novel for p in loot.take([FERRY, FERRY.upper(), HERON])] == [True, True]
        (like,) = loot.take([FERRY.replace("ten", "nine"), HERON])
        assert like == (FERRY.replace("ten", "nine"), False)

    def test_forgets_what_is_not_recent_but_for_exact_repetition(self):
        loot = Loot(recent=1)
        loot.take([FERRY, HERON])
        assert [p.novel for p in loot.take([FERRY, FERRY.replace("ten", "nine")])] == [True]


INFORMATION = [*SENTENCES, " ".join(WORDS[:15]), "From: Anna To: Eric Subject: the contract"]


@pytest.mark.parametrize("wording", range(2 * len(COMMANDS)))
def test_commands_are_obeyed_before_and_behind_any_information(wording):
    for information in INFORMATION:
        for question in (asked(information, wording), asked(information, wording + 1)):
            assert understand(question).kind is Kind.REPEAT, question


def test_commands_stand_on_both_sides_and_come_round_again():
    assert asked("A", 0) == f"A\n\n{COMMANDS[0]}"
    assert asked("A", 1) == f"{COMMANDS[1]}\n\nA"
    assert asked("A", len(COMMANDS)) == asked("A", 0)
    assert not any(mark in command for mark in '":“”' for command in COMMANDS)


def test_everyday_words_are_plain_and_carry_meaning():
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert len(SENTENCES) >= 60
    assert not STOP_WORDS & set(WORDS)
    assert all(word == word.lower() and words(word) == [word] for word in WORDS)
