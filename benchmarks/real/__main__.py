"""Evaluation with real language models, in steps that can run on different machines.

    python -m benchmarks.real plan       # questions, and prompts for the writer that have no answer yet
    python -m benchmarks.real written    # instead: scripted questions, and the written ones of the recorded set
    python -m benchmarks.real retrieve   # contexts with the guard off and on, and prompts for the reader
    python -m benchmarks.real.answer PROMPTS ANSWERS --model FILE
    python -m benchmarks.real judge      # scores of the recorded answers by each attack
    python -m benchmarks.real forms      # output transforms that a reader follows: prompts, and shares of the answers
    python -m benchmarks.real quality    # judges of answers: prompts of reader and judge, and agreement
    python -m benchmarks.real requests   # wordings of the attacks' requests, fitted to a reader on another corpus
    python -m benchmarks.real table      # the tables of the documentation

Each step keeps existing results. The folder (`--work`) contains `prompts_writer.jsonl.gz` and
`prompts_reader.jsonl.gz`. It also contains the answers: `answers_writer*.jsonl.gz` and `answers_reader_MODEL.jsonl.gz`.
For crawls, see ``benchmarks.real.extraction``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import ROOT, save
from benchmarks.real import files, judging, output_forms, planning, quality, requests, table, written
from benchmarks.real.sample import CORPORA, EACH


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "step", choices=("plan", "written", "retrieve", "judge", "forms", "quality", "requests", "table")
    )
    parser.add_argument("--corpus", nargs="*", choices=CORPORA, default=["nfcorpus"])
    parser.add_argument("--work", type=Path, default=ROOT / "build/real")
    parser.add_argument("--each", type=int, default=EACH, help="members and non-members")
    parser.add_argument("--reader", nargs="*", default=["qwen1.5b"], help="judge: names of the readers' answer files")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    steps = {"plan": _plan, "written": _written, "retrieve": _retrieve, "judge": _judge, "forms": _forms}
    (steps | {"quality": _quality, "requests": _requests, "table": _table})[given.step](given)


def _plan(given: argparse.Namespace) -> None:
    missing = {}
    for corpus in given.corpus:
        missing |= planning.plan(corpus, given.work, given.each).missing
    _write(given.work / "prompts_writer.jsonl.gz", missing)


def _written(given: argparse.Namespace) -> None:
    for corpus in given.corpus:
        written.plan(corpus, given.work, given.each)


def _retrieve(given: argparse.Namespace) -> None:
    prompts = {}
    for corpus in given.corpus:
        planning.retrieve(corpus, given.work, given.each)
        prompts |= planning.prompts_file(corpus, given.work)
    _write(given.work / "prompts_reader.jsonl.gz", prompts)


def _write(path: Path, prompts: dict) -> None:
    count = files.write_prompts(path, prompts)
    characters = sum(len(p["user"]) + sum(map(len, p["texts"].values())) for p in prompts.values())
    answers = sum(p["max_tokens"] for p in prompts.values())
    print(
        f"{path}: {count} prompts, about {characters / 4.2e6:.1f} M tokens, at most {answers / 1e6:.2f} M new, "
        f"{path.stat().st_size / 1e6:.1f} MB"
    )


def _judge(given: argparse.Namespace) -> None:
    for corpus in given.corpus:
        save(f"real_{corpus}", {corpus: judging.judge(corpus, given.work, given.reader)})


def _forms(given: argparse.Namespace) -> None:
    _write(given.work / "prompts_forms.jsonl.gz", {row["id"]: row for _, _, row in output_forms.trials()})
    if models := [m for m in given.reader if (given.work / f"answers_forms_{m}.jsonl.gz").exists()]:
        save("real_output_forms", output_forms.judge(given.work, models))


def _requests(given: argparse.Namespace) -> None:
    """First the prompts on the corpus of the fit, then those of the chosen requests on the sample, then the figures."""
    fitting, testing = (given.work / name for name in ("fit", "test"))
    _write(given.work / "prompts_fit.jsonl.gz", requests.fit_prompts(fitting))
    found = {}
    for reader in given.reader:
        if not (answered := given.work / f"answers_fit_{reader}.jsonl.gz").exists():
            continue
        found[reader] = {"fit": requests.figures(requests.FITTED_ON, fitting, files.read_answers(answered))}
        chosen = requests.chosen(found[reader]["fit"])
        tested = requests.test_prompts(given.corpus[0], testing, given.each, chosen)
        _write(given.work / f"prompts_test_{reader}.jsonl.gz", tested)
        if (answered := given.work / f"answers_test_{reader}.jsonl.gz").exists():
            found[reader]["test"] = requests.figures(given.corpus[0], testing, files.read_answers(answered), chosen)
    if found:
        save("real_requests", {"fitted on": requests.FITTED_ON, "tested on": given.corpus[0], "readers": found})


def _quality(given: argparse.Namespace) -> None:
    """The first reader answers, the last one judges."""
    first, last = given.reader[0], given.reader[-1]
    _write(given.work / "prompts_quality.jsonl.gz", {case.row["id"]: case.row for case in quality.cases()})
    if (answered := given.work / f"answers_quality_{first}.jsonl.gz").exists():
        rows = quality.judge_rows(files.read_answers(answered)[0])
        _write(given.work / "prompts_quality_judge.jsonl.gz", {row["id"]: row for row in rows})
    if (given.work / f"answers_quality_judge_{last}.jsonl.gz").exists():
        save("real_quality", quality.judge(given.work, first, last))


def _table(given: argparse.Namespace) -> None:
    parts = [*map(table.membership, CORPORA), table.withheld("nfcorpus"), table.forms(), table.extraction()]
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
