#!/usr/bin/env python3
"""Measures fine-tuning against transformers' Trainer: items a second in training and in prediction.

    python benchmarks/fine_tuning.py
    python benchmarks/fine_tuning.py --contests base-sst2-padded base-squad-dynamic
    python benchmarks/fine_tuning.py --contests embeddings

Both train the same model on the same items of real tasks (from the folder that CLOZE_DATA names; without it, sentences
of the demo corpus), with equal batches, dropout, AdamW and clipping. We pad nothing; the Trainer pads to the longest
sequence that a task allows, or to the longest of a batch with lengths grouped. It computes in bf16 by autocast, and on
a CPU in fp32 too. If it is not installed, we are measured alone. A turn is an epoch of some steps; ratios are medians.

The contest `embeddings` has sentence-transformers as its peer: training on pairs of text by in-batch negatives, lengths
grouped, and computing the vectors of SST-2's sentences.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.contests import OURS, Turns, alternate
from benchmarks.finetuning_sides import (
    DTYPES,
    MINILM,
    PAIRS_PEER,
    PEER,
    SQUAD,
    Exercise,
    Numbers,
    OurFineTuning,
    TheirEmbeddings,
    TheirFineTuning,
    load_ours,
    load_theirs,
    write_pair_task,
)
from benchmarks.measure import ResultsFile, describe_run, find_data_folder, run_command
from benchmarks.peer import find_missing_packages
from benchmarks.sides import Side, SideSpec, open_sides
from benchmarks.tables import show_contest
from benchmarks.texts import choose_vocabulary, read_sentences, write_demo_task
from data_prep.common.errors import UserError
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.devices import find_kind
from pretraining.huggingface.folders import write_folder
from pretraining.objectives.declaration import build_model

FILES = {"sst2": "glue/SST-2", "cola": "glue/CoLA", "squad": SQUAD}
Make = Callable[..., Any]
"""Makes a side."""
PADDINGS = ("padded", "dynamic")
EMBEDDINGS = "embeddings"
"""The contest of vectors, with mini, and with MiniLM where its folder is."""
SENTENCES = 872
"""Sentences whose vectors are computed: those of SST-2's dev."""
ALLOWED: dict[Numbers, float] = {"fp32": 1e-3, "autocast": 0.1}
"""The largest distance of our vectors from the peer's, relative to the longest."""
DEMO = "demo"
"""Stands for a task on sentences of the demo corpus, in the format of SST-2."""
STEPS, GPU_STEPS = {"mini": 64, "small": 16, EMBEDDINGS: 8}, 8
"""Steps of an epoch, so that a turn takes seconds: by the size of the model on a CPU; LEAST_STEPS for other sizes."""
LEAST_STEPS = 4


@dataclass(frozen=True)
class FineTuningSpeed:
    """Measures fine-tuning against transformers' Trainer."""

    contests: tuple[str, ...] = ()
    """SIZE-TASK-padded or SIZE-TASK-dynamic, such as mini-sst2-dynamic, or embeddings; earlier results of others stay
    (default: mini on all tasks in CLOZE_DATA, or else on the demo corpus)."""
    rounds: int = 5
    """Turns for the median."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results)."""


def make_model(size: str, folder: Path) -> Path:
    """Writes a transformers folder with fresh weights and the published vocabulary."""
    vocabulary = choose_vocabulary()
    vocabulary.write(folder.with_name("vocabulary"))
    shape = make_shape(size, len(vocabulary))
    weights = build_model(shape).initialize(0).state_dict()
    write_folder(folder, shape, weights, folder.with_name("vocabulary"), "fresh weights\n")
    return folder


def open_both(
    ours: Make, packages: Sequence[str], theirs: Make, *given: Any
) -> AbstractContextManager[dict[str, Side]]:
    """Opens our side and, where its packages are installed, that of a peer, which has the name of the first one."""
    kinds = {OURS: SideSpec(ours, small_steps=True)}
    if not find_missing_packages(*packages):
        kinds[packages[0]] = SideSpec(theirs, prepared=False)
    return open_sides(kinds, *given)


def take_turns(sides: Mapping[str, Side], method: str, exercise: Exercise) -> Turns:
    """Calls a method of all sides in turns; the first turns do not count."""
    return alternate({name: partial(side.ask, method) for name, side in sides.items()}, exercise.epochs - 1, 1)


def compete(numbers: Numbers, width: int, exercise: Exercise) -> dict[str, Turns]:
    """Lets all sides take turns in training and in prediction."""
    with open_both(OurFineTuning, PEER, partial(TheirFineTuning, numbers, width), exercise) as sides:
        methods = {"training": "train", "prediction": "predict"}
        return {what: take_turns(sides, method, exercise) for what, method in methods.items()}


def compete_on_vectors(numbers: Numbers, exercise: Exercise, sentences: Sequence[str]) -> dict[str, Turns]:
    """Lets all sides take turns in training on pairs and in computing vectors, after these have been compared."""
    with open_both(OurFineTuning, PAIRS_PEER, partial(TheirEmbeddings, numbers), exercise) as sides:
        training = take_turns(sides, "train", exercise)
    ours, theirs = partial(load_ours, numbers), partial(load_theirs, numbers)
    with open_both(ours, PAIRS_PEER[:1], theirs, exercise.model, sentences) as sides:
        vectors, *others = (side.ask("encode") for side in sides.values())
        for other in others:
            away = np.abs(vectors - other).max() / np.linalg.norm(other, axis=1).max()
            assert away <= ALLOWED[numbers], f"vectors are {away:.2g} away from those of {PAIRS_PEER[0]}"
        return {"training": training, "encoding": take_turns(sides, "encode", exercise)}


def run_contest(padded: bool, exercise: Exercise) -> dict[str, Any]:
    """Runs a contest against the Trainer with each type of numbers: on a GPU nobody trains in fp32."""
    numbers: tuple[Numbers, ...] = ("autocast", "fp32")
    if torch.cuda.is_available() or find_missing_packages(*PEER):
        numbers = numbers[:1]
    width = exercise.width if padded else 0
    items = dict.fromkeys(("training", "prediction"), exercise.steps * exercise.batch)
    against = {each: summarise(compete(each, width, exercise), items) for each in numbers}
    return {"batch": exercise.batch, "steps": exercise.steps, "against": against}


def summarise(taken: Mapping[str, Turns], items: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Returns items a second of both sides, and how many times as fast we are; `items`: those of a turn."""
    summaries = dict[str, dict[str, Any]]()
    for what, turns in taken.items():
        medians = {side: turns.summarise_side(side)["median"] for side in turns.seconds}
        found: dict[str, Any] = {
            f"{side}_items_per_second": round(items[what] / each, 1) for side, each in medians.items()
        }
        for ratio in turns.compute_ratios().values():  # there is one peer at most
            found["times_as_fast"] = ratio
        summaries[what] = found
    return summaries


def run_embeddings(exercise: Exercise, sentences: Sequence[str]) -> dict[str, Any]:
    """Runs the contest of vectors with each type of numbers."""
    items = {"training": exercise.steps * exercise.batch, "encoding": len(sentences)}
    against = {each: summarise(compete_on_vectors(each, exercise, sentences), items) for each in DTYPES}
    return {"batch": exercise.batch, "steps": exercise.steps, "sentences": len(sentences), "against": against}


def measure(settings: FineTuningSpeed, console: Console) -> None:
    """Runs the contests, and writes the results after each, since they take minutes."""
    keeper = ResultsFile("finetuning", ["torch", "deepspeed", *PEER, PAIRS_PEER[0]], settings.out)
    models = keeper.earlier.get("models", {})
    if settings.rounds < 1:
        raise UserError(f"--rounds {settings.rounds}: at least 1")
    names = [name for name in settings.contests if name != EMBEDDINGS]
    contests = find_contests(names, console) if names or not settings.contests else []
    epochs = 1 + settings.rounds

    def keep(model: str, name: str, peer: Sequence[str], run: Callable[[], dict[str, Any]]) -> None:
        absent = find_missing_packages(*peer)
        if absent:
            console.print(f"not installed: {', '.join(absent)}; nothing is compared with")
        name += ", alone" * bool(absent)  # so that it replaces no ratio
        found = models.setdefault(model, {"contests": {}})["contests"]
        found[name] = {**run(), **describe_run()}
        written = keeper.keep({"models": models})
        show_contest(console, f"{model}: {name}", found[name])
        console.print(f"kept in {written}")

    with tempfile.TemporaryDirectory() as place:
        folder, demo = Path(place), Path(place) / "data"
        if any(task == DEMO for _, task, _ in contests):
            write_demo_task(demo)
        for size, task, how in contests:
            model = folder / size
            if not model.exists():
                make_model(size, model)
            own, data = ("sst2", demo) if task == DEMO else (task, find_data_folder().resolve())
            exercise = Exercise(own, model, data, count_steps(size), epochs)
            keep(size, f"{task}-{how}", PEER, partial(run_contest, how == "padded", exercise))
        if EMBEDDINGS in settings.contests:
            pairs, mini = write_pair_task(folder / "pairs"), make_model("mini", folder / "fresh-mini")
            _, sentences = read_sentences(console.print, SENTENCES)
            for title, model in {"mini": mini, MINILM.name: MINILM}.items():
                if model.is_dir():
                    exercise = Exercise("pairs", model, pairs, count_steps(EMBEDDINGS), epochs)
                    keep(title, EMBEDDINGS, PAIRS_PEER, partial(run_embeddings, exercise, sentences))
                else:
                    console.print(f"{model}: not there, so {title} takes no part", markup=False)


def count_steps(size: str) -> int:
    """Returns the steps of an epoch for a size or a contest, so that a turn takes seconds."""
    return GPU_STEPS if find_kind() == "cuda" else STEPS.get(size, LEAST_STEPS)


def find_contests(names: Sequence[str], console: Console) -> list[tuple[str, ...]]:
    """Returns size, task and padding of the requested contests, or of all of mini with data; without any data, of those
    on the demo corpus."""
    data = find_data_folder()
    tasks = [task for task, file in FILES.items() if (data / file).exists()]
    if not names and not tasks:
        console.print(f"{data} has no tasks: sentences of the demo corpus are taken (real ones: CLOZE_DATA)")
    found = [tuple(name.split("-")) for name in names]
    for name, parts in zip(names, found, strict=True):
        if len(parts) != 3 or parts[0] not in BERT.sizes or parts[1] not in (*tasks, DEMO) or parts[2] not in PADDINGS:
            form = f"SIZE-TASK-padded or SIZE-TASK-dynamic, such as mini-{DEMO}-padded"
            there = ", ".join((*tasks, DEMO))
            raise UserError(f"{name}: no contest; give {form}; {data}, which CLOZE_DATA names, has {there}")
    return found or [("mini", task, how) for task in tasks or (DEMO,) for how in PADDINGS]


if __name__ == "__main__":
    run_command(FineTuningSpeed, measure)
