#!/usr/bin/env python3
"""Measures inference of a fine-tuned model beside its peers: latency, and sentences a second.

    python benchmarks/inference.py
    python benchmarks/inference.py --contests mini-128-8 mini-sst2

A request has sequences of pieces; its answer is their logits. In a contest such as mini-128-8 they have one length; in
mini-sst2 those of SST-2's sentences in the order of the file (from the folder that CLOZE_DATA names; without it, of
sentences of the demo corpus). Models have fresh weights. Each side has a process with two threads, the same weights and
the same requests, and must give the same logits. Peers pad to the longest sequence of a request. "All at once" gives us
all sentences in one request, which we sort by length, as predict.py does; the peers get 32 at a time in the order of
the file. Sides take turns; ratios are medians over the rounds. Peers are transformers and ONNX Runtime, if they are
installed: the reason is printed if a side cannot take part. Results go to benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import itertools
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.answerers import CORES, ON_CPU, ON_GPU, SIDES, Replies, Request, cut_into_pieces, is_ours
from benchmarks.contests import Turns, spread
from benchmarks.measure import ResultsFile, describe_run, run_command
from benchmarks.sides import Side, SideFailedError, open_sides
from benchmarks.tables import show_contest
from benchmarks.texts import choose_vocabulary, read_sentences
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.heads import TaskModel
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.architectures.weights import TaskHead
from pretraining.devices import find_kind
from pretraining.huggingface.folders import write_fine_tuned

TOGETHER, SENTENCES = 32, 64
"""Sentences of a request of SST-2's lengths, beside requests of one, also of the peers if we get all at once; and how
many there are: two such requests."""
LENGTHS = "sst2"
"""Stands in the name of a contest for the lengths of SST-2's sentences."""
CONTESTS = {
    "cpu": tuple(f"{size}-{each}" for size in ("mini", "base") for each in ("128-1", "128-8", "128-32", LENGTHS)),
    "cuda": ("base-128-1", "base-128-8", "base-384-1", "base-384-8"),
}
"""The usual contests of a device. A GPU needs no text for its own, so that a bare machine can run them."""
TURN_SECONDS, MOST_REQUESTS = 1.5, 400
TOLERANCES = {"fp32": 1e-4, "bf16": 0.05, "int8": 0.5}
"""The largest difference of logits from those in fp32, relative to the largest logit or 1."""


@dataclass(frozen=True)
class Inference:
    """Measures inference of a fine-tuned model, by Cloze and others."""

    contests: tuple[str, ...] = ()
    """SIZE-LENGTH-SEQUENCES of a request each, or SIZE-sst2 (default: by device)."""
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


def parse_contests(names: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Reads the names of contests; returns lengths and sequences by the size of the model, (0, 0) for SST-2's."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in names:
        parts = re.fullmatch(rf"(\w+)-(?:([1-9]\d*)-([1-9]\d*)|{LENGTHS})", name)
        if not parts or parts[1] not in BERT.sizes:
            form = f"SIZE-LENGTH-SEQUENCES, such as base-128-8, or base-{LENGTHS}"
            raise UserError(f"{name}: no contest; give {form}; sizes are {', '.join(BERT.sizes)}")
        found.setdefault(parts[1], []).append((int(parts[2] or 0), int(parts[3] or 0)))
    return found


def build_contests(
    wanted: Sequence[tuple[int, int]], vocabulary: Vocabulary, longest: int, console: Console
) -> Iterator[InferenceContest]:
    """Yields the contests of a model."""
    random = np.random.default_rng(0)
    for length, batch in wanted:
        if length:
            sizes = (batch, min(length, longest))
            even = random.integers(5, len(vocabulary), sizes).astype(np.int32)
            yield InferenceContest(f"{sizes[0]} x {sizes[1]}", [[*even]])
            continue
        source, texts = read_sentences(console.print, SENTENCES)
        sentences = cut_into_pieces(texts, vocabulary, longest)
        for together in (1, TOGETHER):
            yield InferenceContest(f"{source}, {together} at a time", split_requests(sentences, together))
        yield InferenceContest(f"{source}, all at once", split_requests(sentences, TOGETHER), at_once=True)


def make_model(size: str, vocabulary: Vocabulary, folder: Path) -> int:
    """Writes a transformers folder with fresh weights and a head of two classes; returns its longest sequence."""
    shape, head = make_shape(size, len(vocabulary)), TaskHead("classes", ("0", "1"))
    weights = TaskModel(shape, head).initialize(0).state_dict()
    task = {"task": "none", "fields": ["text"], "length": shape.positions}
    write_fine_tuned(folder, shape, head, weights, vocabulary, "fresh weights\n", task, shape.positions)
    return shape.positions


class Contestants:
    """The sides that take part, without those that have failed."""

    def __init__(self, names: Iterable[str], folder: Path, stack: ExitStack, console: Console) -> None:
        self.sides: dict[str, Side] = {}
        self._console = console
        for name in names:
            console.print(f"making ready: {name}")  # some peers need minutes
            try:
                self.sides |= stack.enter_context(open_sides({name: SIDES[name]}, folder))
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
    lengths = list(map(len, itertools.chain(*contest.requests)))
    about = {"sequences": len(lengths), "mean_length": round(fmean(lengths), 1)}
    return {**about, "sides": sides, "times_as_fast": ratios}


def measure(settings: Inference, console: Console) -> None:
    """Runs the contests of all models, and writes the results after each model."""
    wanted = parse_contests(settings.contests or CONTESTS[find_kind()])
    if settings.rounds < 1:
        raise UserError(f"--rounds {settings.rounds}: at least 1")
    vocabulary, names = choose_vocabulary(), ON_GPU if find_kind() == "cuda" else ON_CPU
    keeper = ResultsFile("inference", ["torch", "transformers", "onnxruntime"], settings.out)
    models: dict[str, Any] = keeper.earlier.get("models", {})
    with tempfile.TemporaryDirectory() as place:
        for size, contests in wanted.items():
            folder = Path(place) / size  # into which peers write their graphs
            longest = make_model(size, vocabulary, folder)
            with ExitStack() as stack:
                contestants = Contestants(names, folder, stack, console)
                found = models[size] = {"rounds": settings.rounds, **describe_run()}
                for contest in build_contests(contests, vocabulary, longest, console):
                    found[contest.name] = run_contest(contest, contestants, settings.rounds)
                    show_contest(console, f"{size}: {contest.name}", found[contest.name])
            console.print(f"kept in {keeper.keep({'threads': CORES, 'models': models})}")


if __name__ == "__main__":
    run_command(Inference, measure)
