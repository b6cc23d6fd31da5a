#!/usr/bin/env python3
"""Measures what a mixture of Wikipedia and books does: BLiMP, and held-out text of each.

    python benchmarks/mixtures.py --shorten 0.02 --each 100

Trains `bert_mini_two_hours` with each mixture and seed, on wiki/ and books/ of the folder that CLOZE_DATA names, with
one vocabulary of both. Each row is written at once; the same command goes on after a stop.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.measure import ROOT, ResultsFile, find_data_folder, run_command
from benchmarks.recipe_scores import run_script, summarise_pairs, summarise_training
from benchmarks.tables import show, summarise_mixtures
from data_prep.common.files import read_json
from data_prep.common.launchers import World
from data_prep.common.supervision import hear_signals
from pretraining.checkpoint.models import StoredModel
from pretraining.config.overrides import load_recipe
from pretraining.data.corpora import Corpora
from pretraining.processes.group import choose_device
from pretraining.scoring.validation import score_shards

RECIPE = "bert_mini_two_hours"
SEEDS, SHARES = (1, 2), (20, 50, 80)
"""Seeds, and percentages of Wikipedia; the rest are books."""


@dataclass(frozen=True)
class Mixtures:
    """Measures what a mixture of Wikipedia and books does."""

    shorten: float = 0.1
    """Share of the recipe's steps."""
    each: int | None = None
    """Pairs of every paradigm of BLiMP that are scored (default: all)."""
    threads: int = 1
    """Threads of each command."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results, by hardware)."""


def measure(wanted: Mixtures, console: Console) -> None:
    """Trains and scores each mixture with each seed, and keeps its row."""
    data, folder = find_data_folder().resolve(), ROOT / "build" / "mixtures"
    keeper = ResultsFile("mixtures", ["torch", "deepspeed"], wanted.out)
    hear_signals()
    do = partial(run_script, folder, console, threads=wanted.threads)
    texts, phases, vocabulary = (data / "wiki", data / "books"), load_recipe(Path(RECIPE)).phases, folder / "vocabulary"
    do("data_prep/shard.py", "--docs", *texts, "--out", vocabulary, "--vocab-size", 8192, "--documents-only")
    how = ("--vocab", vocabulary, "--lengths", *(phase.length for phase in phases), "--duplicates", 1)
    for text in texts:
        do("data_prep/shard.py", "--docs", text, "--out", folder / text.name, *how)
    words = [f"{text.name}={folder / text.name}" for text in texts]
    given, pairs = ("--recipe", RECIPE, "--data", *words), () if wanted.each is None else ("--each", wanted.each)
    corpora, device = Corpora.read(words), choose_device("auto", World())
    options = {name: getattr(wanted, name) for name in ("shorten", "each", "threads")}
    about = {"recipe": RECIPE, **options, "data": corpora.fingerprint}
    rows = keeper.earlier["rows"] if about.items() <= keeper.earlier.items() else []
    missing = {(seed, share) for seed in SEEDS for share in SHARES} - {(row["seed"], row["wiki"]) for row in rows}
    for seed, share in sorted(missing):
        run, short = folder / f"{wanted.shorten}-{share}-{seed}", ("--shorten", wanted.shorten) * (wanted.shorten != 1)
        mix = f"{{ wiki = {share / 100}, books = {1 - share / 100:.2f} }}"
        mixes = [word for number in range(len(phases)) for word in (f"--phases.{number}.mix", mix)]
        do("pretraining/train.py", *given, "--out", run, *short, "--seed", seed, *mixes)
        do("finetuning/run_pairs.py", "--model", run, "--out", run / "pairs", *pairs)
        model = StoredModel.open(str(run))
        scores = {part.name: score_shards(model, part, "validation", None, None, device) for part in corpora.parts}
        held_out = {name: {"examples": found.examples, **found.figures} for name, found in scores.items()}
        found = {"pairs": summarise_pairs(read_json(run / "pairs" / "results.json")), "held_out": held_out}
        rows.append({"seed": seed, "wiki": share, "training": summarise_training(run), **found})
        keeper.keep({**about, "rows": rows}, replaces=True)
    show(console, summarise_mixtures({"rows": rows}))
    console.print(f"kept in {keeper.path}", markup=False)


if __name__ == "__main__":
    run_command(Mixtures, measure, "mixtures")
