"""WordPiece ids and offsets against the tokenizers package."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from casemate.backends.embedders.minilm import INSTALL, PACKAGE
from casemate.errors import DataError
from casemate.text.wordpiece import FOLD_CACHE_SIZE, WordPiece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = "a b c n un aff able word 2 ß é e i σ 東 ! - [ ] \u1112 \u1161".split()
VOCABULARY = {piece: i for i, piece in enumerate([*SPECIAL, *PIECES, *(f"##{piece}" for piece in PIECES)])}
TOKENIZER = WordPiece(VOCABULARY, SPECIAL)
ODD = ["A", "É", "e\u0301", "İ", "Σ", "한", "\u200b", "\x85", "\x1c", "\u2028", "€", "…", " ", "\n", "\t"]
TEXT = st.lists(
    st.sampled_from([*PIECES, *SPECIAL, *ODD]) | st.characters(max_codepoint=0x58F, exclude_categories=["Cs"]),
    max_size=30,
).map("".join)


def build_reference():
    found = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    found.add_special_tokens(SPECIAL)
    return found


REFERENCE = build_reference()


def assert_same(tokenizer, reference, text):
    expected = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == expected.ids
    assert tokenizer.spans(text) == expected.offsets


@given(TEXT)
@example("unaffable [MASK]Éa\x85b " + "a" * 101)
@example("")
def test_ids_and_spans_equal_the_tokenizers_package(text):
    assert_same(TOKENIZER, REFERENCE, text)


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"needs {PACKAGE}: {INSTALL}")
def test_tokenizer_of_the_default_embedder_equals_the_tokenizers_package():
    path = Path(importlib.util.find_spec(PACKAGE).origin).parent / "model/tokenizer.json"
    tokenizer, reference = WordPiece.load(path), Tokenizer.from_file(str(path))
    reference.no_padding()
    reference.no_truncation()
    for text in (Path(__file__).read_text("utf-8"), "Der Kläger beantragte Prozesskostenhilfe; 東京 👩‍🚀."):
        assert_same(tokenizer, reference, text)


@pytest.mark.parametrize(
    "about", ["", "{}", '{"model": {"type": "BPE"}, "normalizer": {}, "added_tokens": []}', "[1]"], ids=len
)
def test_other_files_raise_an_error(tmp_path, about):
    (tmp_path / "tokenizer.json").write_text(about)
    with pytest.raises(DataError, match="tokenizer.json"):
        WordPiece.load(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="absent"):
        WordPiece.load(tmp_path / "absent.json")


def test_load_reads_a_saved_tokenizer(tmp_path):
    model = {"type": "WordPiece", "continuing_subword_prefix": "##", "vocab": VOCABULARY}
    tokens = [{"content": token} for token in SPECIAL]
    about = {"model": model, "normalizer": {"type": "BertNormalizer", "lowercase": True}, "added_tokens": tokens}
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    assert WordPiece.load(tmp_path / "tokenizer.json").encode("unable") == TOKENIZER.encode("unable")


def test_time_and_memory_are_bounded():
    text = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x30000)]))
    TOKENIZER.encode(text)
    took = []
    for size in (1_000_000, 4_000_000):
        begin = time.process_time()
        TOKENIZER.encode("a" * size)
        took.append(time.process_time() - begin)
    assert took[1] < 9 * took[0]  # 4 if linear, 16 if quadratic
    from casemate.text.wordpiece import _FOLD_TABLE

    assert len(_FOLD_TABLE) <= FOLD_CACHE_SIZE
