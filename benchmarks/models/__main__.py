"""``python -m benchmarks.models``: trains or evaluates the pair of models.

    train --folder work [--steps N] [--reference-steps N] [--device cuda] [--compile]
    evaluate --folder models [--count 100] [--cells qa_1doc ...]

``train`` writes ``draft`` and ``reference`` into the folder, in the format of transformers. Run it again with the same
options to resume an interrupted training. ``evaluate`` writes ``benchmarks/results/models.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks import ROOT, save
from benchmarks.models import tokens
from benchmarks.models.evaluation import CELLS, evaluated
from benchmarks.models.networks import SHAPES, export, grown, network
from benchmarks.models.training import DRAFT, REFERENCE, Plan, Training


def main(arguments: Sequence[str]) -> None:
    """Runs the named command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("--folder", type=Path, required=True)
    train.add_argument("--steps", type=int, default=DRAFT.steps, help="of the draft")
    train.add_argument("--reference-steps", type=int, default=None, help="default: in proportion")
    train.add_argument("--tokens", type=int, default=DRAFT.tokens, help="of a step of the draft")
    train.add_argument("--contexts", type=int, default=tokens.CONTEXTS, help="that the tokenizer learns from")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", default="cpu")
    train.add_argument("--compile", action="store_true")
    evaluate = commands.add_parser("evaluate")
    evaluate.add_argument("--folder", type=Path, default=ROOT / "models")
    evaluate.add_argument("--count", type=int, default=100)
    evaluate.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.command == "train":
        _train(options)
    else:
        found = {size: evaluated(options.folder / size, options.count, options.cells) for size in SHAPES}
        save("models", {"questions_per_cell": options.count, **found})


def _train(options: argparse.Namespace) -> None:
    """Trains the tokenizer, the draft, and then the reference, which is initialized from the draft."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(folder / "tokenizer.json", options.contexts)
    common: dict[str, Any] = {"device": options.device, "compiled": options.compile}
    plan = replace(DRAFT, steps=options.steps, tokens=options.tokens, seed=options.seed, **common)
    begun = network("draft", tokenizer.get_vocab_size(), plan.seed)
    draft = _trained(begun, tokenizer, plan, folder, "draft")
    steps = options.reference_steps or max(1, round(options.steps * REFERENCE.steps / DRAFT.steps))
    plan = replace(REFERENCE, steps=steps, tokens=2 * options.tokens, seed=options.seed + 1, **common)
    _trained(grown(draft.cpu(), "reference", plan.seed), tokenizer, plan, folder, "reference")


def _tokenizer(file: Path, contexts: int) -> Tokenizer:
    if not file.exists():
        tokens.trained(contexts).save(str(file))
    return Tokenizer.from_file(str(file))


def _trained(begun: Any, tokenizer: Tokenizer, plan: Plan, folder: Path, size: str) -> Any:
    print(f"{size}: {sum(p.numel() for p in begun.parameters()):,} parameters, {plan.steps} steps", file=sys.stderr)
    model = Training(begun, tokenizer, plan, folder / f"{size}.pt").run()
    export(model, tokenizer, folder / size)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
