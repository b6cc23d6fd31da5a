#!/usr/bin/env python3
"""Trains a recipe to its end and scores the model, so that what a recipe gives stands beside it.

    python benchmarks/recipe_scores.py
    python benchmarks/recipe_scores.py --recipe bert_mini

The model is asked for all minimal pairs of BLiMP, and it is fine-tuned on STS-B. The text is in wiki/ and books/ of the
folder that CLOZE_DATA names. What is in build/ already is used, and what was stopped goes on by the same command.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.measure import RESULTS, ROOT, ResultsFile, find_data_folder, name_hardware, run_command
from benchmarks.processes import follow
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, sha256
from data_prep.common.supervision import hear_signals
from pretraining.config.overrides import load_recipe
from pretraining.huggingface.folders import WEIGHTS
from pretraining.reporting.metrics_file import METRICS, read_all_records

TEXT = ("wiki", "books")
"""Folders of the real data that are trained on."""
TASK = "stsb"
GRID = ("--learning_rate", "1e-4", "--seeds", 3, "--epochs", 10)
"""The fine-tuning, which was chosen with another mini."""
THREADS = 2
"""Threads of the training, which is one process: the machine class of these recipes has two cores."""


@dataclass(frozen=True)
class RecipeScores:
    """Trains a recipe to its end and scores the model."""

    recipe: str = "bert_mini_two_hours"
    """Name of a recipe, or a TOML file."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results, by recipe and hardware)."""


def run_script(folder: Path, console: Console, script: str, *words: object, threads: int = THREADS) -> None:
    """Runs a command of the project, with its log in a folder; UserError if it fails."""
    name = Path(script).stem
    console.print(f"{name} …", markup=False)

    def say(line: str) -> None:
        if line.startswith(("error: ", "warning: ")):
            console.print(f"    {line}", markup=False)

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    log = folder / f"{name}.log"
    code = follow([sys.executable, str(ROOT / script), *map(str, words)], log, say, environment)
    if code != Code.DONE:
        raise UserError(f"{name} has ended with code {code}: {log} says why; the same command goes on from there")


def measure(wanted: RecipeScores, console: Console) -> None:
    """Trains, scores, and keeps what comes of it."""
    recipe, data = load_recipe(Path(wanted.recipe)), find_data_folder()
    hear_signals()
    name = Path(wanted.recipe).stem
    folder = ROOT / "build" / f"recipe-{name}"
    kept = RESULTS / f"recipe-{name.replace('_', '-')}-{name_hardware()}.json"
    keeper = ResultsFile("recipe_scores", ["torch", "deepspeed"], wanted.out or kept)

    do = partial(run_script, folder, console)
    shards, run = folder / "text", folder / "run"
    size = ("--vocab-size", 8192, "--lengths", *sorted({phase.length for phase in recipe.phases}), "--duplicates", 1)
    do("data_prep/shard.py", "--docs", *(data / each for each in TEXT), "--out", shards, *size)
    do("pretraining/train.py", "--recipe", wanted.recipe, "--data", shards, "--out", run)
    do("pretraining/export.py", run, "--out", folder / "export")
    found = {"recipe": name, "training": summarise_training(run), "weights_sha256": sha256(folder / "export" / WEIGHTS)}
    do("finetuning/run_pairs.py", "--model", run, "--out", folder / "pairs")
    found["pairs"] = summarise_pairs(read_json(folder / "pairs" / "results.json"))
    keeper.keep(found)
    glue = ("--task", TASK, "--data", data / "glue", "--model", run, "--out", folder / "glue")
    do("finetuning/run_glue.py", *glue, *GRID)
    found[TASK] = summarise_task(read_json(folder / "glue" / "results.json")[TASK])
    path = keeper.keep(found)
    console.print_json(json.dumps(found))
    console.print(f"kept in {path}", markup=False)


def summarise_training(run: Path) -> dict[str, Any]:
    """Summarises the log of a run: steps, minutes, speed, and its last figures on held-out text."""
    lines = [*read_all_records(run / METRICS)]
    steps: dict[int, dict[str, Any]] = {line["step"]: line for line in lines if line["kind"] == "step"}
    if not steps:
        raise UserError(f"{run}: its log has no steps")
    seconds, by_phase, before = 0.0, defaultdict(list), 0
    for step, line in sorted(steps.items()):
        seconds += (step - before) * line["seconds_per_step"]
        by_phase[line["phase"]].append((step - before, line["seconds_per_step"]))
        before = step
    usual = sum(sum(count for count, _ in phase) * median(each for _, each in phase) for phase in by_phase.values())
    scored: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "evaluation"), {})
    return {
        "steps": before,
        "minutes": round(seconds / 60, 1),
        "minutes_at_the_median_speed_of_each_phase": round(usual / 60, 1),
        "held_out": {name: value for name, value in scored.items() if name.startswith(("masked", "next"))},
    }


def summarise_pairs(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the share of minimal pairs that a model judges rightly, in all and by phenomenon."""
    phenomena = {name: round(each["accuracy"], 4) for name, each in found["phenomena"].items()}
    about = {name: found[name] for name in ("pairs", "data_sha256", "chance")}
    return {"accuracy": found["accuracy"], "spread": found["spread"], **about, "phenomena": phenomena}


def summarise_task(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of all restarts on dev, and their median."""
    runs = {name: run["score"] for name, run in found["runs"].items()}
    scores = [score for score in runs.values() if score is not None]
    return {"metric": found["metric"], "runs": runs, "median": median(scores) if scores else None}


if __name__ == "__main__":
    run_command(RecipeScores, measure)
