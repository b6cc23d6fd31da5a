"""Sides of the contests of embeddings: training on pairs beside sentence-transformers' trainer, and computing the
vectors of sentences beside its `encode`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contests import OURS, Turns, alternate
from benchmarks.finetuning_sides import Exercise, Numbers, OurFineTuning, build_arguments, run_epochs
from benchmarks.measure import ROOT, find_data_folder
from benchmarks.peer import find_missing_packages, silence_transformers
from benchmarks.sides import Answer, SideSpec, open_sides
from benchmarks.texts import read_demo_sentences
from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files
from data_prep.readers.text_pairs import TASK, write_pairs
from finetuning.running.base import find_model
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup, Task
from pretraining.processes.group import choose_device, default_threads
from pretraining.scoring.embedding import Embedder

MINILM = ROOT / "build" / "all-MiniLM-L6-v2"
"""Folder of sentence-transformers' model, which takes part where it is there."""
PEER = ("sentence_transformers", "datasets", "accelerate")
"""Packages of the peer."""
DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "autocast": torch.bfloat16}
TOGETHER, SENTENCES = 32, 872
"""Sentences of a batch of the peer, its usual number, and of a turn: those of SST-2's dev."""
ALLOWED: dict[Numbers, float] = {"fp32": 1e-3, "autocast": 0.1}
"""The largest distance of our vectors from the peer's, relative to the longest."""


class PairExercise(Exercise):
    """Epochs of training on pairs of titles and passages, as pairs.py makes them."""

    @property
    def batch(self) -> int:
        """Pairs of a batch, whose passages are each other's negatives."""
        return 64

    def find(self, setup: Setup) -> Task:
        """Opens the task with all of its items."""
        return open_own(self.data / TASK, setup)


def write_task(folder: Path) -> Path:
    """Writes a task of pairs of text in the folder that CLOZE_DATA names, or of the demo corpus; returns its folder."""
    text = find_data_folder() / "wiki" / "AA"
    problems = Problems("skip")
    write_pairs(folder, find_files([str(text) if text.is_dir() else "demo"], problems=problems), problems)
    return folder


def read_sentences() -> list[str]:
    """Reads the sentences of SST-2's dev, or as many of the demo corpus."""
    path = find_data_folder() / "glue" / "SST-2" / "dev.tsv"
    if path.is_file():
        return [row.partition("\t")[0] for row in path.read_text().splitlines()[1:]]
    return [sentence for sentence, _ in zip(read_demo_sentences(), range(SENTENCES), strict=False)]


@dataclass(frozen=True)
class TheirTraining:
    """sentence-transformers' trainer with its loss of in-batch negatives, and batches of like lengths."""

    numbers: Numbers
    exercise: Exercise

    def take_turns(self, answer: Answer) -> None:
        """Trains for all epochs."""
        silence_transformers()
        from datasets import Dataset, disable_progress_bars
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
        from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from transformers.trainer_pt_utils import LengthGroupedSampler

        disable_progress_bars()
        steps, settings, task = self.exercise.steps, self.exercise.settings(), self.exercise.open()
        torch.set_num_threads(default_threads(World()))
        chosen: Any = task.train
        texts = [[column[number] for number in chosen.numbers] for column in chosen.items.texts]
        lengths = chosen.items.encode(chosen.numbers).sequences.pieces.lengths.reshape(-1, 2).sum(1).tolist()

        def group_lengths(_: Any, batch_size: int, drop_last: bool, **__: Any) -> Any:
            sampler = LengthGroupedSampler(batch_size, lengths=lengths)
            return DefaultBatchSampler(sampler, batch_size=batch_size, drop_last=drop_last)

        model = SentenceTransformer(str(self.exercise.model))
        model.max_seq_length = settings.length
        loss = losses.MultipleNegativesRankingLoss(model, scale=1 / settings.embeddings.temperature)
        with tempfile.TemporaryDirectory() as folder:
            more: dict[str, Any] = {"kind": Arguments, "batch_sampler": group_lengths}
            arguments = build_arguments(settings, Path(folder), self.numbers, grouped=False, **more)
            rows = Dataset.from_dict(dict(zip(("question", "passage"), texts, strict=True)))
            trainer = SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss)
            run_epochs(trainer, steps, answer)


@dataclass(frozen=True)
class SentenceEncoder:
    """Computes the vectors of the same sentences again and again."""

    compute: Callable[[Sequence[str]], Array]
    sentences: Sequence[str]

    def encode(self) -> Array:
        """Computes the vectors of all sentences."""
        return self.compute(self.sentences)


def load_ours(numbers: Numbers, model: Path, sentences: Sequence[str]) -> SentenceEncoder:
    """Loads a model as predict.py does for vectors."""
    torch.set_num_threads(default_threads(World()))
    embedder = Embedder.open(find_model(str(model)), choose_device("auto", World()), DTYPES[numbers])
    return SentenceEncoder(embedder.compute, sentences)


def load_theirs(numbers: Numbers, model: Path, sentences: Sequence[str]) -> SentenceEncoder:
    """Loads a model into sentence-transformers."""
    silence_transformers()
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(default_threads(World()))
    encoder = SentenceTransformer(str(model), model_kwargs={"dtype": DTYPES[numbers]})

    def compute(texts: Sequence[str]) -> Array:
        return np.asarray(encoder.encode([*texts], batch_size=TOGETHER, convert_to_tensor=True).float().cpu())

    return SentenceEncoder(compute, sentences)


def train_in_turns(numbers: Numbers, exercise: Exercise) -> Turns:
    """Lets both sides train in turns; the first turns do not count."""
    kinds = {OURS: SideSpec(OurFineTuning, small_steps=True)}
    if not find_missing_packages(*PEER):
        kinds[PEER[0]] = SideSpec(partial(TheirTraining, numbers), prepared=False)
    with open_sides(kinds, exercise) as sides:
        turns = {name: partial(side.ask, "train") for name, side in sides.items()}
        return alternate(turns, exercise.epochs - 1, 1)


def encode_in_turns(numbers: Numbers, model: Path, sentences: Sequence[str], rounds: int) -> Turns:
    """Lets both sides compute the vectors of the same sentences in turns, after these have been compared."""
    kinds = {OURS: SideSpec(partial(load_ours, numbers), small_steps=True)}
    if not find_missing_packages(PEER[0]):
        kinds[PEER[0]] = SideSpec(partial(load_theirs, numbers), prepared=False)
    with open_sides(kinds, model, sentences) as sides:
        ours, *theirs = (side.ask("encode") for side in sides.values())
        for vectors in theirs:
            away = np.abs(ours - vectors).max() / np.linalg.norm(vectors, axis=1).max()
            assert away <= ALLOWED[numbers], f"vectors are {away:.2g} away from those of {PEER[0]}"
        return alternate({name: partial(side.ask, "encode") for name, side in sides.items()}, rounds)


def summarise_items(turns: Turns, items: int) -> dict[str, Any]:
    """Returns items a second of both sides, and how many times as fast we are."""
    medians = {side: turns.summarise_side(side)["median"] for side in turns.seconds}
    found: dict[str, Any] = {f"{side}_items_per_second": round(items / each, 1) for side, each in medians.items()}
    for ratio in turns.compute_ratios().values():  # there is one peer at most
        found["times_as_fast"] = ratio
    return found


def run_embeddings(exercise: PairExercise) -> dict[str, Any]:
    """Runs the contest of vectors with each type of numbers."""
    sentences, against = read_sentences(), dict[str, Any]()
    rounds, pairs = exercise.epochs - 1, exercise.steps * exercise.batch
    for each in DTYPES:
        against[each] = {
            "training": summarise_items(train_in_turns(each, exercise), pairs),
            "encoding": summarise_items(encode_in_turns(each, exercise.model, sentences, rounds), len(sentences)),
        }
    return {"batch": exercise.batch, "steps": exercise.steps, "sentences": len(sentences), "against": against}
