#!/usr/bin/env python3
"""Measures inference of a fine-tuned model beside its peers: latency, and sentences a second.

    python benchmarks/inference.py
    python benchmarks/inference.py --sizes mini --model runs/mini/glue/sst2/model

A request has sequences of pieces; its answer is their logits. Sequences have the --lengths, or those of SST-2's
sentences in the order of the file (from the folder that CLOZE_DATA names; without it, sentences of the demo corpus).
Each side has a process with two threads, the same weights and the same requests, and must give the same logits. Peers
pad to the longest sequence of a request. "All at once" gives us all sentences in one request, which we sort by length,
as predict.py does; the peers get 32 at a time in the order of the file. Sides take turns; ratios are medians over the
rounds. Peers are transformers and ONNX Runtime, if they are installed: the reason is printed if a side cannot take
part. Results go to benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.answerers import CORES, EVERY, KINDS, Replies, Request, cut_into_pieces, is_ours
from benchmarks.contests import Turns, spread
from benchmarks.measure import DATA, ResultsFile, describe_run, run_command
from benchmarks.sides import Side, SideFailedError, open_sides
from benchmarks.tables import show_contest
from benchmarks.texts import choose_vocabulary, read_demo_sentences
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.heads import TaskModel
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface.folders import read_shape, write_fine_tuned

TOGETHER = 32
"""Sentences of a request of SST-2's lengths, beside requests of one; of the peers also if we get all at once."""
TURN_SECONDS, MOST_REQUESTS = 1.5, 400
TOLERANCES = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.05, "autocast": 0.05, "int8": 0.5}
"""The largest difference of logits from those in fp32, relative to the largest logit or 1."""


@dataclass(frozen=True)
class Inference:
    """Measures inference of a fine-tuned model, by Cloze and others."""

    sizes: tuple[str, ...] = ("mini", "base")
    """Sizes of the models, which have fresh weights."""
    model: Path | None = None
    """Folder of a fine-tuned model, transformers' BertForSequenceClassification, instead of --sizes."""
    data: Path = DATA
    """Folder with glue/SST-2 and vocab.txt."""
    sides: tuple[str, ...] = tuple(KINDS)
    """Sides, such as "cloze bf16"."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences of a request, for requests of one length."""
    lengths: tuple[int, ...] = (128,)
    """Lengths of these sequences, in pieces."""
    sentences: int = 64
    """The number of SST-2's sentences; 0 for none, which needs no numba."""
    rounds: int = 3
    """Turns of every side, for the median."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results, by hardware)."""


@dataclass(frozen=True)
class InferenceContest:
    """A contest, in which all sides answer the same requests."""

    name: str
    requests: Sequence[Request]
    """The requests of the peers, and ours unless `at_once`."""
    at_once: bool = False
    """Whether our sides get all sequences in one request."""

    def requests_for(self, side: str) -> Sequence[Request]:
        """The requests of a side."""
        return [list(itertools.chain(*self.requests))] if self.at_once and is_ours(side) else self.requests


def split_requests(sequences: Sequence[Array], size: int) -> list[Request]:
    """Splits sequences into requests of this size, in order."""
    return [sequences[begin : begin + size] for begin in range(0, len(sequences), size)]


def build_contests(
    settings: Inference, source: str, sentences: Sequence[Array], vocabulary: int, longest: int
) -> Iterator[InferenceContest]:
    """Yields the contests of a model."""
    random = np.random.default_rng(0)
    for length, batch in itertools.product([min(each, longest) for each in settings.lengths], settings.batches):
        even = [random.integers(5, vocabulary, length).astype(np.int32) for _ in range(batch)]
        yield InferenceContest(f"{batch} x {length}", [even])
    if sentences:
        for batch in (1, TOGETHER):
            yield InferenceContest(f"{source}, {batch} at a time", split_requests(sentences, batch))
        yield InferenceContest(f"{source}, all at once", split_requests(sentences, TOGETHER), at_once=True)


def read_sentences(settings: Inference, console: Console) -> tuple[str, list[str]]:
    """Reads sentences in the order of their file; returns their source, SST-2 or the demo corpus, too."""
    path = settings.data / "glue" / "SST-2" / "dev.tsv"
    if path.is_file():
        rows = path.read_text().splitlines()[1:]
        return "SST-2", [row.partition("\t")[0] for row in rows][: settings.sentences]
    console.print(f"{path} is not there: lengths are those of sentences of the demo corpus")
    return "demo corpus", list(itertools.islice(read_demo_sentences(), settings.sentences))


def make_model(size: str, vocabulary: Vocabulary, folder: Path) -> None:
    """Writes a transformers folder with fresh weights and a head of two classes."""
    if size not in BERT.sizes:
        raise UserError(f"--sizes {size}: is none of {', '.join(BERT.sizes)}")
    shape, head = make_shape(size, len(vocabulary)), TaskHead("classes", ("0", "1"))
    weights = TaskModel(shape, head).initialize(0).state_dict()
    task = {"task": "none", "fields": ["text"], "length": shape.positions}
    write_fine_tuned(folder, shape, head, weights, vocabulary, "fresh weights\n", task, shape.positions)


class Contestants:
    """The sides that take part, without those that have failed."""

    def __init__(self, names: Sequence[str], folder: Path, stack: ExitStack, console: Console) -> None:
        self.sides: dict[str, Side] = {}
        self.absent: dict[str, str] = {}
        """Why the others do not take part."""
        self._console = console
        for name in names:
            try:
                self.sides |= stack.enter_context(open_sides({name: EVERY[name]}, folder))
            except SideFailedError as error:
                self.drop(name, str(error))

    def ask(self, requests: Mapping[str, Sequence[Request]]) -> dict[str, Replies]:
        """Returns the replies of all sides; drops those that fail. Raises UserError if none is left."""
        found = {}
        for name, side in list(self.sides.items()):
            try:
                found[name] = side.ask("answer_all", requests[name])
            except SideFailedError as error:
                self.drop(name, str(error))
            time.sleep(0.05)  # in which the threads of this side stop spinning
        if not found:
            raise UserError("no side can answer")
        return found

    def drop(self, name: str, fault: str) -> None:
        """Drops a side, and prints why."""
        self.sides.pop(name, None)
        self.absent[name] = fault
        self._console.print(fault)


def run_contest(contest: InferenceContest, contestants: Contestants, rounds: int) -> dict[str, Any]:
    """Lets all sides answer in turns, after their logits have been compared."""
    wanted = {name: contest.requests_for(name) for name in contestants.sides}
    contestants.ask(wanted)  # what is compiled or captured at a first answer is not timed
    first = contestants.ask(wanted)
    for name, fault in find_deviations({name: replies.logits for name, replies in first.items()}).items():
        contestants.drop(name, f"{contest.name}: {fault}")
    for name in contestants.sides:
        wanted[name] = list(wanted[name]) * count_repeats(sum(first[name].seconds), contest.at_once)
    turns = [contestants.ask(wanted) for _ in range(rounds)]
    return summarise(contest, {name: [turn[name] for turn in turns] for name in contestants.sides})


def count_repeats(seconds: float, at_once: bool = False) -> int:
    """Returns the number of times that a turn repeats the requests, so that it takes about TURN_SECONDS."""
    return 1 if at_once else max(1, min(MOST_REQUESTS, round(TURN_SECONDS / seconds)))


def find_deviations(said: Mapping[str, Array]) -> dict[str, str]:
    """Returns the sides whose logits differ from those of a reference by more than rounding, with messages. The
    reference is the side in fp32 with which most others agree."""

    def compare_with(reference: str) -> dict[str, str]:
        scale, found = max(1.0, float(np.abs(said[reference]).max())), {}
        for name, logits in said.items():
            away, allowed = float(np.abs(logits - said[reference]).max()), TOLERANCES[name.split()[-1]] * scale
            if not away <= allowed:  # also true for nan
                found[name] = f"logits of {name} are {away:.2g} away from those of {reference}; {allowed:.2g} may be"
        return found

    return min((compare_with(name) for name in said if name.endswith("fp32")), key=len, default={})


def summarise(contest: InferenceContest, taken: Mapping[str, Sequence[Replies]]) -> dict[str, Any]:
    """Returns milliseconds of a request, sentences a second, and our ratios to each peer."""
    speeds = {name: [len(each.logits) / sum(each.seconds) for each in turns] for name, turns in taken.items()}
    turns = Turns({name: [1 / speed for speed in found] for name, found in speeds.items()})
    sides = {}
    for name, answers in taken.items():
        milliseconds = [1000 * each for turn in answers for each in turn.seconds]
        half, most = np.percentile(milliseconds, (50, 99), method="inverted_cdf").round(2).tolist()  # measured values
        sides[name] = {"p50_ms": half, "p99_ms": most, "requests": len(milliseconds)}
        sides[name]["sentences_per_second"] = spread(speeds[name], 1)
    ratios = {
        ours: {name: ratio for name, ratio in turns.compute_ratios(ours).items() if not is_ours(name)}
        for ours in filter(is_ours, taken)
    }
    return {"sequences": sum(map(len, contest.requests)), "sides": sides, "times_as_fast": ratios}


def measure(settings: Inference, console: Console) -> None:
    """Runs the contests of all models, and writes the results after each model."""
    unknown = [name for name in settings.sides if name not in EVERY]
    if unknown:
        raise UserError(f"--sides {unknown[0]}: is none of {', '.join(map(repr, EVERY))}")
    if min((settings.rounds, *settings.batches, *settings.lengths)) < 1 or settings.sentences < 0:
        raise UserError("--rounds, --batches and --lengths: at least 1; --sentences: at least 0")
    vocabulary = read_vocabulary(settings.model) if settings.model else choose_vocabulary(settings.data)
    source, texts = read_sentences(settings, console) if settings.sentences else ("", [])
    keeper = ResultsFile("inference", ["torch", "transformers", "onnxruntime"], settings.out)
    models: dict[str, Any] = keeper.earlier.get("models", {})
    with tempfile.TemporaryDirectory() as place:
        for size in [settings.model.resolve().name] if settings.model else settings.sizes:
            folder = Path(place) / size  # into which peers write their graphs
            if settings.model:
                shutil.copytree(settings.model.resolve(), folder, copy_function=os.symlink)
            else:
                make_model(size, vocabulary, folder)
            shape = read_shape(folder)
            sentences = cut_into_pieces(texts, vocabulary, shape.positions) if texts else []
            with ExitStack() as stack:
                contestants = Contestants(settings.sides, folder, stack, console)
                found = models[size] = {"absent": contestants.absent, "rounds": settings.rounds, **describe_run()}
                found |= {"mean_length": round(fmean(map(len, sentences)), 1)} if sentences else {}
                for contest in build_contests(settings, source, sentences, len(vocabulary), shape.positions):
                    found[contest.name] = run_contest(contest, contestants, settings.rounds)
                    show_contest(console, f"{size}: {contest.name}", found[contest.name])
            console.print(f"kept in {keeper.keep({'threads': CORES, 'models': models})}")


if __name__ == "__main__":
    run_command(Inference, measure)
