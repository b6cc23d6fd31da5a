"""A phase of training: its examples in order, its learning rate, its clock and its validation.

At its end minimal pairs and retrieval are scored, to follow what a model learns of grammar and of topics: by an fp32
copy of the model, so that the results equal those of run_pairs.py and evaluate.py under any precision and ZeRO stage.
Ranks that share a model may have no room for a whole copy: they score by the model itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from data_prep.common.progress import duration, join_first
from data_prep.common.toml_text import show_value
from data_prep.shards import Manifest
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.state import RunState
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Recipe, count_micro_batches
from pretraining.data.batches import count_examples, training_batches, validation_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset, num_held_out
from pretraining.data.mixing import MixedOrder, divide_whole, make_corpus_order
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.engine import Engine
from pretraining.huggingface.pooling import Pooling
from pretraining.huggingface.weights import list_row_names
from pretraining.mesh.mesh import Mesh
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.objectives.declaration import MINIMAL_PAIRS, build_model, configure_objective, find_objective
from pretraining.processes.context import Context
from pretraining.processes.group import exchange
from pretraining.reporting.records import EvaluationRecord
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.pairs import Asked, Pair, PairCount, list_sentences, read_pairs, take_pairs
from pretraining.scoring.retrieval import Retrieval, RetrievalScores
from pretraining.scoring.sentences import Scorer, SentenceCutter
from pretraining.scoring.validation import sum_losses
from pretraining.training.micro_batch import MicroBatches
from pretraining.training.request import Request
from pretraining.training.skips import Skip


class TrainingPhase:
    """One phase, constructed when it begins or continues."""

    def __init__(
        self, request: Request, context: Context, mesh: Mesh, state: RunState, skips: list[Skip], found: MicroBatches
    ) -> None:
        self.number, self.settings = state.phase, request.recipe.phases[state.phase]
        self.micro_batch = found.size_for(self.settings)
        uneven = request.recipe.parallel.same_bits
        self.accumulation = count_micro_batches(self.settings, mesh.data_ranks, self.number, self.micro_batch, uneven)
        self.count = self.settings.batch // self.micro_batch
        """the micro-batches of a step, of all ranks"""
        self._request, self._mesh, self._device = request, mesh, context.device
        self._schedule = build_schedules(request.recipe)[self.number]
        self._mixture = self.settings.mixture(request.corpora)
        self._dataset = self._open(self._mixture.corpora, validation=False)
        self._mixed = self._mix(state) if request.corpora.is_named else None
        seed = int(hash_key(request.recipe.seed, self.number)[0])
        examples = self._mixed or Order(seed, self._dataset.shard_rows)
        left_out = {skip.first + index for skip in skips if skip.phase == self.number for index in range(skip.count)}
        behind, total = request.recipe.objective_steps(self.number) or (0, None)
        self._order = BatchOrder(examples, self.settings.batch, left_out, behind, total)
        ends, mixed = {each: np.array([each, each + 1]) * self.settings.batch for each in left_out}, self._mixed
        self._skipped = {each: mixed.count(end) - mixed.count(start) for each, (start, end) in ends.items() if mixed}
        held_out = {part.name for part in request.corpora.parts if self._has_held_out(part.manifest)}
        self._without = [part for part in self._mixture.corpora.parts if part.name not in held_out]
        scored = request.corpora.select(held_out if len(self._without) < len(self._mixture.names) else ())
        self.validation = self._open(scored, validation=True) if scored.parts else None
        self.scored = self._divide_scored(scored)
        """number of held-out examples of each corpus that an evaluation scores; None for all"""
        self.longest = max(self.settings.length, state.trained_length)
        """longest sequences that the weights are trained on at the end"""

    def _open(self, corpora: Corpora, validation: bool) -> Dataset:
        place = self._mesh.data_rank, self._mesh.data_ranks
        objective = configure_objective(self._request.recipe.in_phase(self.settings).objective)
        return Dataset(corpora, self.settings.length, validation, *place, objective)

    def _mix(self, state: RunState) -> MixedOrder:
        """Makes the order of a phase with named corpora, each of which goes on where earlier phases ended; notes their
        shares in the state."""
        seed, dataset, mixture, steps = self._request.recipe.seed, self._dataset, self._mixture, self._schedule.steps
        firsts, stored = dataset.first_sets, dataset.stored
        offsets = [state.count_read(name, stored) for name in mixture.names]
        orders = [
            make_corpus_order(seed, name, stored, dataset.shard_rows[first:stop])
            for name, first, stop in zip(mixture.names, firsts[:-1], firsts[1:], strict=True)
        ]
        slots = mixture.make_slots(None if steps is None else steps * self.settings.batch)
        state.note_corpora(self._list_read(np.zeros((2, len(orders)), np.int64)))
        return MixedOrder(int(hash_key(seed, self.number)[0]), slots, orders, firsts[:-1], offsets)

    def _list_read(self, counts: Array) -> dict[str, dict[str, int]]:
        """Lists of each corpus its shares, its sequences, and those of them in batches that were left out."""
        keys, stored = ("first", "last", "sequences", "skipped", "stored"), self._dataset.stored
        columns = zip(self._mixture.names, self._mixture.first, self._mixture.last, *counts.tolist(), strict=True)
        return {name: dict(zip(keys, (*facts, stored), strict=True)) for name, *facts in columns}

    def _has_held_out(self, manifest: Manifest) -> bool:
        """Whether shards have examples held out of the length that the phase reads."""
        length = self.settings.length
        return manifest.length_for(length) == self._dataset.stored and num_held_out(manifest, length) > 0

    def _divide_scored(self, scored: Corpora) -> list[int | None]:
        """Divides the held-out examples of an evaluation among these corpora by their shares; each has one or more.
        Those that the phase does not read have as many as with equal shares, besides."""
        examples, own = self._request.recipe.evaluation.examples, {part.name for part in scored.parts}
        shares = {name: mean for name, mean in zip(self._mixture.names, self._mixture.mean, strict=True) if name in own}
        divided = dict(zip(shares, divide_whole([*shares.values()], examples).tolist() if shares else (), strict=True))
        equal = examples // len(self._request.corpora.parts)
        return [max(1, divided.get(part.name, equal)) if examples else None for part in scored.parts]

    @property
    def notes(self) -> list[str]:
        """Lines on the mixture, and on what is not validated."""
        length, parts = self.settings.length, self._mixture.corpora.parts
        lines = [self._mixture.describe(self._mixture.mean)] * (self._mixed is not None)
        of = f" of {', '.join(part.name for part in self._without)}" * (self._mixed is not None)
        left = "no validation" if len(self._without) == len(parts) else "not validated"
        return lines + [f"no examples of length {length}{of} are held out: {left}"] * bool(self._without)

    def _count_read(self, state: RunState) -> dict[str, dict[str, int]]:
        """Counts the sequences of each named corpus that the phase has passed; see `_list_read`."""
        if self._mixed is None:
            return {}
        number = self.batch_number(state.phase_step)
        passed = self._mixed.count(number * self.settings.batch)
        skipped = sum((count for each, count in self._skipped.items() if each < number), 0 * passed)
        return self._list_read(np.stack([passed, skipped]))

    def find_corpora(self, batches: PretrainingBatches) -> Array:
        """Finds the corpus of each prediction of this rank, by its number among those of the run."""
        numbers = np.searchsorted([part.name for part in self._request.corpora.parts], self._mixture.names)
        return np.asarray(numbers[np.concatenate([self._dataset.find_parts(batch) for batch in batches.micro])])

    def measure_reading(self, state: RunState, losses: Mapping[str, float] = {}) -> dict[str, float]:
        """Computes figures of what was read of each named corpus so far, by the mean pieces of an example, beside the
        mean `losses` of its predictions in some steps."""
        figures = {f"loss/{name}": loss for name, loss in losses.items()}
        phases = [*state.corpora[: self.number], self._count_read(state)]
        for phase, read in zip(self._request.recipe.phases, phases, strict=False):
            for part in [part for part in self._request.corpora.parts if part.name in read]:
                count = read[part.name]["sequences"] - read[part.name]["skipped"]
                epochs, pieces = f"epochs/{part.name}", f"pieces/{part.name}"
                figures[epochs] = figures.get(epochs, 0.0) + count / (part.count_examples(phase.length) or np.inf)
                figures[pieces] = figures.get(pieces, 0.0) + count * part.measure_pieces(phase.length)
        return figures

    def finish(self, state: RunState) -> str | None:
        """Notes what a phase at its end has read of each named corpus, and describes it; None without names."""
        if not (read := self._count_read(state)):
            return None
        state.note_corpora(read)
        figures, counts = self.measure_reading(state), [each["sequences"] - each["skipped"] for each in read.values()]
        epochs = np.array([figures[f"epochs/{name}"] for name in read])
        return f"phase {self.settings.name} read {self._mixture.describe(np.array(counts), epochs)}"

    def batches(self, state: RunState) -> AbstractContextManager[Iterator[tuple[PretrainingBatches, float]]]:
        """Starts the clock, and yields this rank's batches to the end of the phase, each with the seconds spent waiting
        for it."""
        end = self._schedule.steps
        steps = count(state.phase_step) if end is None else range(state.phase_step, end)
        self.clock = Clock(state.phase_seconds, self._device)
        return closing(training_batches(self._dataset, self._order, steps, self.count, self._device))

    def batch_number(self, step: int) -> int:
        """Number, in the order of the phase, of the batch of a step."""
        return self._order.number(step)

    def learning_rate(self, state: RunState) -> float:
        """Learning rate of the next step."""
        return self._schedule.learning_rate(state.phase_step, self.clock.seconds)

    def is_over(self, state: RunState) -> bool:
        """Whether all steps are done or, by the clock, the time is used up."""
        return self._schedule.is_over(state.phase_step, self.clock.seconds)

    def is_last_step(self, state: RunState) -> bool:
        """Whether the step just done is the last one; by the clock it is not known."""
        return state.phase_step == self._schedule.steps

    def last_step(self, state: RunState) -> int | None:
        """Step of the run that ends the phase; None by the clock."""
        steps = self._schedule.steps
        return None if steps is None else state.step + steps - state.phase_step

    def describe(self, state: RunState) -> str:
        """Describes the phase in one line."""
        phase, schedule = self.settings, self._schedule
        amount = duration(schedule.length) if schedule.steps is None else f"{schedule.steps:,} steps"
        done = f", {state.phase_step:,} of them done" if state.phase_step else ""
        count, stored = len(self._request.recipe.phases), self._dataset.stored
        cut = f", cut out of examples of {stored}" if stored > phase.length else ""
        most = "up to " if self.count % (ranks := self._mesh.data_ranks) else ""
        idle = f" ({ranks - self.count} of {ranks} ranks have no work)" if self.count < ranks else ""
        return (
            f"phase {phase.name} ({self.number + 1} of {count}): {amount}{done}; a step: {phase.batch:,} "
            f"sequences of length {phase.length}{cut}, {most}{self.accumulation} x {self.micro_batch} a rank{idle}"
        )

    def copy_positions(self, engine: Engine, known: int) -> str | None:
        """Copies the embeddings of trained positions to those beyond, if the recipe says so; returns a line on it.

        `known` is the number of trained positions; 0: nothing to copy.
        """
        phase, rows = self.settings, engine.model.shape.positions
        tables = list_row_names(engine.model.shape, "positions")
        if not 0 < known < phase.length or phase.new_positions != "copied" or not tables:
            return None
        for name in tables:
            engine.change_weight(name, lambda weight: repeat_rows(weight, known))
        return f"positions {known:,} to {rows - 1:,} begin as copies of those before them"

    @torch.no_grad()
    def evaluate(
        self, engine: Engine, step: int, before: Callable[[], None], validates: bool, ends: bool
    ) -> EvaluationRecord | None:
        """Scores held-out examples if it `validates`, and pairs and retrieval if the phase `ends`; None without any.

        The number of ranks changes the result by rounding only. `before` is called before each batch; an error that it
        raises must be the same on all ranks.
        """
        begin = time.perf_counter()
        learns, lines, examples = dict[str, float](), list[str](), 0
        if validates and self.validation is not None:
            learns, lines, examples = self._validate(engine, self.validation, before)
        if ends and self._request.pairs:
            tally = score_pairs(engine, self._request.pairs, self._request.corpora.folder, before)
            learns[MINIMAL_PAIRS.name] = tally.accuracy
            lines.append(f"pairs {tally.accuracy:.1%} of {tally.pairs:,}")
        if ends and self._request.retrieval is not None:
            found = score_retrieval(engine, self._request.retrieval, self._request.corpora.folder, self.longest, before)
            learns |= {f"retrieval_{name}": score for name, score in found.scores.items()}
            lines.append(found.describe())
        if not lines:
            return None
        return EvaluationRecord(step, self.number + 1, learns, examples, time.perf_counter() - begin, lines)

    def _validate(
        self, engine: Engine, validation: Dataset, before: Callable[[], None]
    ) -> tuple[dict[str, float], list[str], int]:
        """Returns the figures of the objective on held-out examples of what the phase reads, and of each named corpus,
        their lines for the console, and the number of examples that the phase reads."""
        objective, shape = find_objective(engine.model.shape), engine.model.shape
        place, totals, examples = (self._mesh.data_rank, self._mesh.data_ranks), dict[str, float](), 0
        scored = list[tuple[int, str, dict[str, float]]]()

        def batches(*chosen: Any) -> Iterator[tuple[PretrainingBatch, bool]]:
            for each in validation_batches(validation, *place, self.micro_batch, *chosen):
                before()
                yield each

        engine.deepspeed.eval()
        for number, (part, limit) in enumerate(zip(validation.corpora.parts, self.scored, strict=True)):
            read, where = batches(limit, number), (engine.device, self._mesh.data_group, engine.same_bits)
            found = sum_losses(objective, shape, engine.forward, read, *where)
            if part.name in self._mixture.names:
                totals = {name: value + totals.get(name, 0.0) for name, value in found.items()}
                examples += count_examples(validation, limit, number)
            if part.name and found["predictions"]:
                scored.append((-(limit or 0), part.name, objective.score(objective.measure(found))))
        engine.deepspeed.train()
        figures = objective.score(objective.measure(totals))
        scored.sort(key=lambda each: each[0])
        by_corpus = {f"{figure}/{name}": value for _, name, own in scored for figure, value in own.items()}
        told = [join_first([f"{name} {objective.describe_figures(own)[0]}" for _, name, own in scored])]
        told = [*objective.describe_figures(figures), *(f"by corpus: {each}" for each in told if each)]
        return {**figures, **by_corpus}, told, examples


def repeat_rows(positions: torch.Tensor, trained: int) -> torch.Tensor:
    """Repeats the trained rows for all others, except row 0, the position of [CLS]."""
    rows = torch.arange(len(positions))
    return positions[torch.where(rows < trained, rows, 1 + (rows - 1) % (trained - 1))]


class Clock:
    """Seconds of a phase, equal on all ranks: those of rank 0, broadcast in steps that log."""

    def __init__(self, seconds: float, device: torch.device):
        self.seconds = seconds
        self.agreed = False
        """whether rank 0 has broadcast them yet"""
        self._device, self._start = device, time.monotonic() - seconds
        self._last, self._steps, self._pace = seconds, 0, 0.0

    def step(self) -> None:
        """Counts a step. Until the next broadcast, a step is assumed to take as long as those before."""
        self._steps += 1
        self.seconds = self._last + self._steps * self._pace

    def agree(self) -> None:
        """Broadcasts the clock of rank 0; all ranks call it together."""
        now = torch.tensor([time.monotonic() - self._start], dtype=torch.float64, device=self._device)
        dist.broadcast(now, src=0)
        if self._steps:
            self._pace = (float(now) - self._last) / self._steps
        self.seconds = self._last = float(now)
        self._steps, self.agreed = 0, True


ASKED = 20
"""Number of pairs asked of each paradigm."""


def read_sample(recipe: Recipe, corpora: Corpora | None) -> tuple[tuple[Pair, ...], Retrieval | None, tuple[str, ...]]:
    """Reads what a recipe has scored at the ends of phases: a sample of each paradigm of its pairs, and its folder for
    retrieval; nothing if it names none.

    Returns them, and lines on them: their sizes and, where the data is known, the pairs that cannot be scored. Raises
    UserError if no pair can.
    """
    name, folder = recipe.evaluation.pairs, recipe.evaluation.retrieval
    pairs = () if name is None else tuple(take_pairs(read_pairs(Path(name)), ASKED))
    retrieval = None if folder is None else Retrieval.read(Path(folder))
    notes: list[str] = []
    if pairs and corpora is not None:
        cut = SentenceCutter(read_vocabulary(corpora.folder)).cut_texts(list_sentences(pairs))
        asked = Asked.from_pairs(pairs, cut, recipe.shape(corpora.common).positions)
        asked.require_telling(f"evaluation.pairs = {show_value(name)}")
        notes += [f"pairs that are asked at the ends of phases: {len(pairs):,}, of {name}", *asked.list_doubts()]
    if retrieval is not None:
        sizes = f"{len(retrieval.queries):,} queries, {len(retrieval.places):,} passages"
        notes.append(f"retrieval that is scored at the ends of phases: {sizes} of {folder}")
    return pairs, retrieval, tuple(notes)


def copy_model(engine: Engine) -> Any:
    """Copies the model in fp32; returns the model itself if ranks share it."""
    if engine.mesh.tensor_ranks > 1:
        return engine.model
    model: Any = build_model(engine.model.shape)
    for name, weight in engine.weights():
        model.get_parameter(name).copy_(weight)
    return model


@torch.no_grad()
def score_pairs(engine: Engine, pairs: Sequence[Pair], data: Path, before: Callable[[], None]) -> PairCount:
    """Scores pairs, divided among all ranks, which call it together. Pairs too long for the model are left out.
    `data` is the folder of the vocabulary."""
    mesh, vocabulary = engine.mesh, read_vocabulary(data)
    scorer = Scorer(copy_model(engine), vocabulary, engine.device, as_it_is=mesh.tensor_ranks > 1)
    engine.deepspeed.eval()
    found = scorer.score(list_sentences(pairs), before, mesh.data_rank, mesh.data_ranks)
    engine.deepspeed.train()
    shared = torch.from_numpy(found).to(engine.device)
    dist.all_reduce(shared, group=mesh.data_group)
    return PairCount.from_scores(shared.cpu().numpy().reshape(-1, 2))


@torch.no_grad()
def score_retrieval(
    engine: Engine, retrieval: Retrieval, data: Path, length: int, before: Callable[[], None]
) -> RetrievalScores:
    """Scores retrieval, whose passages are divided among all ranks, which call it together. Texts are read up to this
    length; `data` is the folder of the vocabulary."""
    mesh, model, shared = engine.mesh, copy_model(engine), engine.mesh.tensor_ranks > 1
    if not shared:
        model = model.float().to(engine.device).eval().requires_grad_(False)
    embedder = Embedder(model, read_vocabulary(data), Pooling(length=length), shared=shared)
    engine.deepspeed.eval()
    # the vectors of texts depend on those beside them by rounding, so with same_bits each rank computes all
    place = (0, 1) if engine.same_bits else (mesh.data_rank, mesh.data_ranks)
    own = retrieval.rank(embedder.compute, before=before, place=place)
    engine.deepspeed.train()
    found, best = retrieval.start_ranking(), np.stack([own.rows, own.scores])
    alike = dist.get_world_size() if engine.same_bits else mesh.tensor_ranks  # ranks that have found the same
    for told in exchange(best.tobytes())[::alike]:
        rows, scores = np.frombuffer(told).reshape(best.shape)
        found.add_ranking(rows.astype(np.int64), scores.astype(np.float32))
    return retrieval.score(found.rows)
