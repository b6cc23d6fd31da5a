#!/usr/bin/env python3
"""Asks a pre-trained model which sentence of minimal pairs is the good one: its grammar, without any labels.

    python finetuning/run_pairs.py --model runs/mini
    python finetuning/run_pairs.py --model exported/mini --pairs own.tsv --out results/own

The usual pairs are BLiMP's, in the folder pairs/ of data/ or of CLOZE_DATA. The same command goes on where it was
stopped; docs/evaluating.md says how a sentence is scored. It writes into OUT:

results.json        accuracy, by phenomenon and by paradigm
pairs.jsonl         every pair with the scores of both sentences
begun.json          checksums of the model and the pairs
parts/00000.jsonl   the scores so far, until all are there
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from data_prep.common.flags import print_help_if_asked
    from finetuning.flags import RunPairs

    print_help_if_asked(RunPairs, sys.argv[1:], "run_pairs.py", "evaluating")  # without PyTorch

from pretraining.processes.environment import prepare_process

prepare_process(small_steps=True)

import json
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import replacing, sha256
from data_prep.common.flags import read_flags
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK, locked
from data_prep.common.progress import StepProgress
from data_prep.common.supervision import exit_now
from data_prep.common.terminal import make_table, open_console
from finetuning.flags import RunPairs, find_data
from finetuning.results import BEGUN, RESULTS, Begun, GroupScore, PairsResult, format_percent
from finetuning.running.base import RUNS, compute_checksum, find_model, list_casing_doubts, summarize_model
from finetuning.tasks.scores import estimate_share_spread
from pretraining.checkpoint.models import StoredModel
from pretraining.processes.ending import Ending
from pretraining.processes.group import choose_device
from pretraining.processes.stopping import Decision, StoppedError
from pretraining.scoring import pairs as minimal
from pretraining.scoring.sentences import Scorer

PART = 1000
"""Pairs that are scored and written together: a paradigm of BLiMP."""
SCORED, PARTS = "pairs.jsonl", "parts"
USUAL = tuple(f"blimp.jsonl{ending}" for ending in ("", ".gz", ".xz", ".zst"))
"""Possible names of the default file of pairs; the first that exists is read."""
NAMELESS = "(none named)"
"""The name shown for a phenomenon or paradigm without one."""
BUSY = "{owner} is at work there; wait for it, or name another --out"
Group = tuple[str, str]
"""A phenomenon and one of its paradigms; either name may be empty."""


@dataclass
class Questions:
    """A model, its minimal pairs and the folder of their scores."""

    model: StoredModel
    scorer: Scorer
    path: Path
    pairs: Sequence[minimal.Pair]
    counts: minimal.Asked
    begun: Begun
    out: Path
    console: Console
    scored_now: int = 0
    """Pairs that this start has scored."""
    seconds: float = 0.0


def score_pairs(wanted: RunPairs, console: Console) -> None:
    """Scores all pairs, or the first ones of every paradigm, that have no score in the folder yet, and writes the
    results."""
    if wanted.each is not None and wanted.each < 1:
        raise UserError(f"--each {wanted.each}: give a number of pairs above 0")
    path, way = wanted.pairs or find_usual(), f"-{wanted.sees}" if wanted.sees else ""
    model = find_model(wanted.model, wanted.sees)
    out = wanted.out or Path(RUNS) / summarize_model(model).name / f"pairs{way}"
    pairs = minimal.read_pairs(path)
    if wanted.each is not None:
        pairs = minimal.take_pairs(pairs, wanted.each)
    network = model.build_pretrained(predicts=True)
    checksum = compute_checksum(model.vocabulary, network.shape, network.state_dict())
    begun = Begun(model={"checksum": checksum}, data={"pairs": f"{len(pairs)} {sha256(path)}"})
    scorer = Scorer(network, model.vocabulary, choose_device("auto", World()))
    counts = minimal.Asked.from_pairs(pairs, scorer.cut_texts(minimal.list_sentences(pairs)), scorer.longest)
    counts.require_telling(f"--pairs {path}")
    asked = Questions(model, scorer, path, pairs, counts, begun, out, console)
    console.print(f"model {model.name}; {len(pairs):,} pairs of {path}\nresults go to {out}")
    for note in (*list_casing_doubts(model), *counts.list_doubts()):
        console.print(note)
    with locked(out / LOCK, f"--out {out}", BUSY):
        require_same(asked)
        write_results(asked, score_missing(asked))


def find_usual() -> Path:
    """Finds the default file of pairs."""
    cure = "name a file of pairs: --pairs FILE"
    folder = find_data(None, "pairs", cure, "--pairs")
    found = next((folder / name for name in USUAL if (folder / name).exists()), None)
    if found is None:
        raise UserError(f"--pairs: not given, and {folder} has none of {', '.join(USUAL)}; {cure}")
    return found


def require_same(asked: Questions) -> None:
    """Refuses a folder with the scores of another model or of other pairs."""
    out, before = asked.out, Begun.read(asked.out / BEGUN)
    others = before is None and any((out / name).exists() for name in (SCORED, RESULTS))
    if others or before not in (None, asked.begun):
        raise UserError(f"--out {out}: holds the scores of another model or of other pairs; name another --out")
    asked.begun.write(out / BEGUN)


def score_missing(asked: Questions) -> Array:
    """Scores the pairs without a score; returns the scores of all pairs (pairs, 2)."""
    if (asked.out / SCORED).exists():
        return read_scores(asked.out / SCORED, asked.pairs)
    begins = enumerate(range(0, len(asked.pairs), PART))
    parts = {asked.out / PARTS / f"{n:05}.jsonl": asked.pairs[begin : begin + PART] for n, begin in begins}
    left = {place: part for place, part in parts.items() if not place.exists()}
    total, done = len(asked.pairs), sum(len(part) for place, part in parts.items() if place not in left)
    progress, begin = StepProgress(asked.console, "pairs", "", total, done), time.monotonic()
    asked.scored_now = total - done
    try:
        with progress.show():
            for place, part in left.items():
                write_scores(place, part, asked.scorer.score(minimal.list_sentences(part)).reshape(-1, 2))
                progress.advance(len(part))
                done += len(part)
    except KeyboardInterrupt as error:
        cause = Decision.INTERRUPT if error.args[:1] in ((), (signal.SIGINT,)) else Decision.SIGNAL
        kept = f"stopped by {cause.cause}: {done:,} of {total:,} pairs are scored"
        raise StoppedError(f"{kept}; the same command goes on", cause) from None
    asked.seconds = time.monotonic() - begin
    return np.concatenate([read_scores(place, part) for place, part in parts.items()])


def write_scores(path: Path, pairs: Sequence[minimal.Pair], scores: Array) -> None:
    """Writes pairs with their scores, a JSON object a line; null for a missing score."""
    with replacing(path) as file:
        for pair, (good, bad) in zip(pairs, scores.tolist(), strict=True):
            found = {"good_score": good, "bad_score": bad}
            line = {**pair._asdict(), **{name: None if math.isnan(score) else score for name, score in found.items()}}
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode(errors="replace"))


def read_scores(path: Path, pairs: Sequence[minimal.Pair]) -> Array:
    """Reads the scores (pairs, 2) of these pairs."""
    try:
        with path.open("rb") as file:
            found = [json.loads(line) for line in file]
        scores = np.array([[line["good_score"], line["bad_score"]] for line in found], np.float64).reshape(-1, 2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{path}: cannot be read: {error}; remove it, and run again") from error
    if len(scores) != len(pairs):
        raise DamageError(f"{path}: {len(scores):,} pairs where there are {len(pairs):,}; remove it, and run again")
    return scores


def write_results(asked: Questions, scores: Array) -> None:
    """Writes and prints the results."""
    out, groups = asked.out, [(pair.phenomenon, pair.paradigm) for pair in asked.pairs]
    called = name_groups(groups)
    phenomena, paradigms = (
        {name: make_group_score(count) for name, count in minimal.count_right(names, scores).items()}
        for names in ([group[0] for group in groups], [called[group] for group in groups])
    )
    result = PairsResult(
        **make_group_score(minimal.PairCount.from_scores(scores)).as_dict(),
        model=asked.model.name,
        checksum=asked.begun.model["checksum"],
        data=str(asked.path),
        data_sha256=asked.begun.data["pairs"].split()[1],
        chance=minimal.CHANCE,
        equal=asked.counts.equal,
        too_long=asked.counts.too_long,
        without_pieces=asked.counts.without_pieces,
        phenomena=phenomena,
        paradigms=paradigms,
        seconds=asked.seconds,
        scored_now=asked.scored_now,
        dtype="fp32",
        device=asked.scorer.device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    if not (out / SCORED).exists():
        write_scores(out / SCORED, asked.pairs, scores)
    if asked.scored_now or not (out / RESULTS).exists():
        result.write(out / RESULTS)
    shutil.rmtree(out / PARTS, ignore_errors=True)
    asked.console.print("", build_table(result, called), "", f"all scores are in {out}", sep="\n")


def make_group_score(count: minimal.PairCount) -> GroupScore:
    """Makes the accuracy of a group with its standard error."""
    spread = estimate_share_spread(count.right, count.pairs)
    return GroupScore(accuracy=count.accuracy, spread=spread, **asdict(count))


def name_groups(groups: Sequence[Group]) -> dict[Group, str]:
    """Names every group in results: by its paradigm, or by phenomenon and paradigm where several have the name."""
    different = dict.fromkeys(groups)
    often = Counter(paradigm for _, paradigm in different)
    spelled = {group: ": ".join(name or NAMELESS for name in group) for group in different}
    return {group: group[1] if often[group[1]] == 1 else spelled[group] for group in different}


def build_table(result: PairsResult, called: Mapping[Group, str]) -> Table:
    """Builds the table by phenomenon and paradigm, without groups whose pairs were all left out."""
    rows: list[tuple[str, str, GroupScore]] = []
    for phenomenon, whole in result.phenomena.items():
        own = {paradigm: name for (group, paradigm), name in called.items() if group == phenomenon}
        inner = {paradigm: result.paradigms[name] for paradigm, name in own.items() if name in result.paradigms}
        if phenomenon or len(result.phenomena) > 1:
            rows.append((phenomenon or NAMELESS, "", whole))
        if [*inner] not in ([phenomenon], [""]):
            rows += [("", paradigm or NAMELESS, score) for paradigm, score in inner.items()]
    table = make_table("phenomenon", "paradigm", ">right", ">pairs")
    for phenomenon, paradigm, each in (*rows, ("all", "", result)):
        table.add_row(phenomenon, paradigm, format_percent(each.accuracy, each.spread), f"{each.pairs:,}")
    return table


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    wanted = read_flags(RunPairs, arguments, "run_pairs.py", "evaluating")
    with Ending() as ending:
        score_pairs(wanted, open_console(soft_wrap=True, markup=False))
    return ending.code


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
