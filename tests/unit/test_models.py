"""The offline pair in the repository, and the script that trains such a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs casemate[transformers]")
pytest.importorskip("transformers", reason="needs casemate[transformers]")

from benchmarks.models import networks, tokens  # noqa: E402
from benchmarks.models.__main__ import main  # noqa: E402
from benchmarks.models.documents import Text, Writer, shown  # noqa: E402
from benchmarks.models.evaluation import CELLS, answers, drawn, evaluated  # noqa: E402
from benchmarks.models.questions import KINDS, UNKNOWN, Asker  # noqa: E402
from benchmarks.models.rows import Rows  # noqa: E402
from benchmarks.models.training import Plan, Training, orthogonal  # noqa: E402

MODELS = Path(__file__).parents[2] / "models"
SMALL = Plan(6, tokens=400, until=(0.2, 0.4, 0.6), seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokens.read(MODELS / "draft")


def test_model_pair_is_small_and_has_one_tokenizer_and_a_model_card() -> None:
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16e6
    one, other = (MODELS / size / "tokenizer.json" for size in networks.SHAPES)
    assert one.read_bytes() == other.read_bytes()
    assert "Apache-2.0" in (MODELS / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_model_pair_has_the_shapes_of_the_training_script(tokenizer: Any) -> None:
    for size in networks.SHAPES:
        config = json.loads((MODELS / size / "config.json").read_text(encoding="utf-8"))
        made = networks.network(size, tokenizer.get_vocab_size(), 0).config.to_dict()
        assert {key: config[key] for key in networks.SHAPES[size]} == networks.SHAPES[size]
        for key in ("vocab_size", "num_attention_heads", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"):
            assert config[key] == made[key], key


def test_training_answers_are_contained_in_the_context() -> None:
    asker = Asker(Writer(1))
    seen = set()
    for _ in range(400):
        texts = asker.writer.context()
        asked = asker.ask(texts)
        seen.add(asked.kind)
        said = shown(texts)
        if asked.kind in {"qa", "yn"}:
            value = asked.answer.removesuffix(".").split(" is ", 1)[1]
            assert value in said
        if asked.kind == "rep":
            assert asked.answer == said
        if asked.kind == "cont":
            assert f"{asked.text.removeprefix('Complete this text: ')} {asked.answer}" in said
        if asked.kind in {"idk", "evidk"}:
            assert asked.answer == UNKNOWN
    assert seen == set(KINDS)


def test_training_data_never_contains_the_held_out_domain() -> None:
    writer = Writer(5)
    assert not any("vessel" == text.domain for _ in range(300) for text in writer.context())
    assert {text.domain for _ in range(20) for text in Writer(5, held_out=True).context(2, 0.0)} == {"vessel"}


def test_training_data_is_reproducible_with_the_same_seed() -> None:
    assert drawn(CELLS["yn_3docs"], 5) == drawn(CELLS["yn_3docs"], 5)


def test_tokenizer_splits_numbers_into_three_digits_from_the_left(tokenizer: Any) -> None:
    assert tokenizer.encode("48213 and 7", add_special_tokens=False).tokens[:2] == ["482", "13"]
    learned = tokens.trained(contexts=30, vocabulary=1500)
    text = 'The phone number of Maria is 555-12345. "$99,120" in 1987.'
    assert learned.decode(tokens.encoded(learned, text)) == text
    assert tokens.encoded(learned, "48213") == [learned.token_to_id("482"), learned.token_to_id("13")]


def test_question_attends_to_its_context_and_itself_only(tokenizer: Any) -> None:
    """Compares with the logits of each question alone."""
    model = networks.network("draft", tokenizer.get_vocab_size(), 1).eval()
    rows = Rows(tokenizer, 2)
    row = next(r for r in (rows.row(3, 256) for _ in range(50)) if len(r) > 2)
    rows.row = lambda stage, length: row  # type: ignore[method-assign]
    rows.rng.choice = lambda options: 256  # type: ignore[method-assign]
    batch = rows.batch(3, 256)
    with torch.inference_mode():
        logits = model(
            input_ids=batch.tokens, position_ids=batch.places, attention_mask=batch.seen, use_cache=False
        ).logits[0]
        begin = len(row[0].tokens)
        for branch in row[1:]:
            alone = model(torch.tensor([row[0].tokens + branch.tokens])).logits[0, len(row[0].tokens) :]
            assert torch.allclose(logits[begin : begin + len(branch.tokens)], alone, atol=1e-4)
            begin += len(branch.tokens)
    said = batch.answers[0] == 0
    assert batch.tokens[0][said].tolist() == row[1].tokens[row[1].given :]


def test_initial_attention_heads_attend_to_previous_tokens(tokenizer: Any) -> None:
    model = networks.network("draft", tokenizer.get_vocab_size(), 1)
    model.set_attn_implementation("eager")
    drawn = torch.randint(3, 3000, (1, 40), generator=torch.Generator().manual_seed(1))
    first = model(drawn, output_attentions=True).attentions[0][0]  # (heads, 40, 40)
    for head, back in enumerate((1, 2, 3)):
        assert (first[head, 5:].argmax(1) == torch.arange(5, 40) - back).float().mean() > 0.9


def test_enlarged_network_has_nearly_the_logits_of_the_small_one(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    small = AutoModelForCausalLM.from_pretrained(MODELS / "draft", dtype=torch.float32).eval()
    large = networks.grown(small, "reference", 4).eval()
    given = torch.tensor([tokens.prompt(tokenizer, "[1] The ward of Rosa Brund is C12.", "")[0]])
    with torch.inference_mode():
        one, other = small(given).logits, large(given).logits
    assert (one - other).abs().max() < 0.3  # the new dimensions change the norms slightly
    assert (one.argmax(-1) == other.argmax(-1)).float().mean() > 0.95


def test_orthogonal_preserves_directions() -> None:
    """Compares with the polar factor by singular value decomposition."""
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() and values.max() < 1.3
    assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.97


@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(tokenizer: Any, tmp_path: Path) -> None:
    def begun(file: str) -> Training:
        return Training(networks.network("draft", tokenizer.get_vocab_size(), 3), tokenizer, SMALL, tmp_path / file)

    whole = begun("whole.pt")
    losses = [whole.step() for _ in range(SMALL.steps)]
    assert whole.progress.stage == 3
    part = begun("part.pt")
    first = [part.step() for _ in range(3)]
    part.save()
    rest = begun("part.pt")
    assert first + [rest.step() for _ in range(3)] == losses
    assert all(torch.equal(whole.mean[name], rest.mean[name]) for name in whole.mean)
    with pytest.raises(SystemExit, match="of another plan"):
        Training(rest.model, tokenizer, Plan(7), tmp_path / "part.pt")


@pytest.mark.slow
def test_training_reduces_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    plan = Plan(30, tokens=1200, until=(1.0, 1.0, 1.0), seed=3)
    training = Training(networks.network("draft", tokenizer.get_vocab_size(), 3), tokenizer, plan, tmp_path / "t.pt")
    losses = [training.step() for _ in range(plan.steps)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.slow
def test_backend_loads_a_model_pair_trained_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--folder", str(tmp_path), "--steps", "4", "--tokens", "400", "--contexts", "300"]
    main(["train", *options])
    said = capsys.readouterr().err
    assert "draft: 1,148,032 parameters, 4 steps" in said and "reference: 4,066,048 parameters" in said
    from casemate.backends.generators.transformers import CausalLM

    draft, reference = (CausalLM(str(tmp_path / size), device="cpu") for size in ("draft", "reference"))
    assert draft.vocabulary == reference.vocabulary
    begun = draft.begin([draft.tokens("The ward of Rosa is C12.")])
    assert begun.read([]).shape == (1, 1, len(draft.vocabulary))


@pytest.mark.slow
def test_reference_model_reaches_the_accuracy_of_its_model_card() -> None:
    found = evaluated(MODELS / "reference", 20, ["qa_1doc", "mem_3docs", "idk_1doc"])
    assert all(cell["exact"].value >= 0.8 for cell in found.values())


def test_answer_ends_at_the_end_token(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODELS / "draft", dtype=torch.float32).eval()
    (item,) = drawn(CELLS["mem_3docs"], 1)
    assert answers(model, tokenizer, [item, item]) == [item.answer] * 2


def test_text_joins_its_sentences() -> None:
    assert Text(["One.", "Two."]).text == "One. Two."
