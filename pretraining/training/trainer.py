"""The training loop: phases, steps, and what happens between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from data_prep.common.progress import duration
from data_prep.shards import Manifest
from pretraining.checkpoint.reading import Progress
from pretraining.checkpoint.writing import Saver
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Phase, Recipe, micro_batches
from pretraining.data.batches import Loader
from pretraining.data.dataset import Dataset, num_held_out
from pretraining.data.order import Order, fold
from pretraining.data.statistics import measure_text, summarise_data
from pretraining.engine.engine import CollapseError, Engine
from pretraining.engine.lamb import Lamb
from pretraining.model.batch import StepBatches
from pretraining.model.shape import Shape
from pretraining.processes.group import gather
from pretraining.processes.stopping import Control, Decision, StoppedError
from pretraining.reporting.hardware import matrix_rate
from pretraining.reporting.meter import Meter
from pretraining.reporting.records import COUNTS, SUMS, EvaluationRecord, StepRecord
from pretraining.reporting.run_log import RunLog
from pretraining.training.clock import Clock
from pretraining.training.evaluate import evaluate
from pretraining.training.guards import DivergedError, Guard, Skip, batch_number, first_of


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what, and where it goes."""

    recipe: Recipe
    data: Path
    manifest: Manifest
    run: Path
    stop_after: str | None = None
    """name of a phase"""

    @property
    def shape(self) -> Shape:
        return self.recipe.model.shape(self.manifest.vocabulary_size)


class Trainer:
    """One rank's part of a run."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        progress: Progress,
        console: Console,
        skips: Sequence[Skip],
        control: Control,
        mark: Callable[[], None],
    ):
        """`mark` is what to call as training advances."""
        self.job, self.engine, self.progress = job, engine, progress
        self.skips, self.control, self.mark = list(skips), control, mark
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.schedules = build_schedules(job.recipe)
        names = [phase.name for phase in job.recipe.phases]
        self.stop = len(names) if job.stop_after is None else names.index(job.stop_after) + 1
        """the first phase that is not to be trained now"""
        self.clock = Clock(0.0, engine.device)
        """of the phase"""
        self.learning_rate = 0.0
        """of the last step"""
        self.scores: EvaluationRecord | None = None
        """the latest of the validation"""
        ceiling = job.recipe.logging.peak_flops or matrix_rate(engine.device, engine.dtype)
        self.meter = Meter(engine.device, SUMS, COUNTS, ceiling)
        self.log = RunLog(
            job.run,
            console,
            tensorboard=job.recipe.logging.tensorboard,
            first_step=progress.step + 1 if progress.step else 0,
            active=self.rank == 0,
        )
        self.saver = Saver(job.run, job.recipe.checkpoints, self.log.say)
        self.guard = Guard(self.rank, job.recipe.guards.spike, scaled=engine.loss_scale is not None)
        self.saved = self.batch
        """the next batch at the last checkpoint"""

    def restore(self, record: dict[str, Any]) -> None:
        """Takes up what a checkpoint's record says, besides where the run stands."""
        self.meter.restore(record["meters"], self.rank, self.ranks)
        self.guard.losses.extend(record["logged_losses"])
        if scores := dict(record["metrics"]):
            del scores["perplexity"]
            self.scores = EvaluationRecord(**scores)

    def close(self) -> None:
        """Lets go of all, so that another can take over."""
        self.saver.close()
        self.engine.close()

    def train(self) -> None:
        """Runs the phases that are left."""
        begin = time.monotonic()
        with self.log:
            if self.progress.phase >= self.stop:
                self.log.say("all that was asked for is trained already")
            try:
                for number in range(self.progress.phase, self.stop):
                    self.run_phase(number)
                self.saver.finish()
            finally:
                self.say_what_saving_took(time.monotonic() - begin)
            if not self.finished:
                self.log.say(f"stopped after phase {self.job.stop_after}; to go on, leave out --stop-after")

    def say_what_saving_took(self, seconds: float) -> None:
        """Of the seconds of this run."""
        if waited := self.saver.stalled:
            share = f"{waited / seconds:.1%}"
            self.log.say(f"training waited {duration(waited)} of {duration(seconds)} for saving: {share}")

    @property
    def finished(self) -> bool:
        return self.progress.phase >= len(self.schedules)

    def run_phase(self, number: int) -> None:
        """One phase, from where it stands to its end."""
        phase, schedule = self.job.recipe.phases[number], self.schedules[number]
        accumulation = micro_batches(phase, self.ranks, number)
        dataset = self.dataset(phase)
        order = Order(int(fold(self.job.recipe.seed, number)[0]), dataset.shard_rows)
        self.announce(number, accumulation)
        self.begin_positions(number)
        self.meter.begin()
        with Loader(
            dataset,
            order,
            global_batch=phase.batch,
            rank=self.rank,
            ranks=self.ranks,
            accumulation=accumulation,
            start=self.progress.phase_step,
            stop=schedule.steps,
            number=lambda step: batch_number(step, number, self.skips),
        ) as loader:
            self.clock = Clock(self.progress.phase_seconds, self.engine.device)
            self.saved = self.batch
            for batches in loader:
                if schedule.finished(self.progress.phase_step, self.clock.seconds):
                    break
                self.train_step(batches, phase, schedule.learning_rate(self.progress.phase_step, self.clock.seconds))
                self.between_steps(last=self.progress.phase_step == schedule.steps)
        self.finish_phase(number)

    def announce(self, number: int, accumulation: int) -> None:
        """What the phase will do."""
        phase, schedule = self.job.recipe.phases[number], self.schedules[number]
        amount = duration(schedule.length) if schedule.steps is None else f"{schedule.steps:,} steps"
        started = f", {self.progress.phase_step:,} of them done" if self.progress.phase_step else ""
        self.log.say(
            f"phase {phase.name} ({number + 1} of {len(self.schedules)}): {amount}{started}; a step: {phase.batch:,} "
            f"sequences of length {phase.length}, {accumulation} x {phase.micro_batch} a rank"
        )
        if not num_held_out(self.job.manifest, phase.length):
            self.log.say(f"no examples of length {phase.length} are held out: no validation")

    def begin_positions(self, number: int) -> None:
        """Gives positions that no phase before has trained the embeddings of those that are."""
        phase, before = self.job.recipe.phases[number], self.job.recipe.phases[:number]
        known = max((each.length for each in before), default=phase.length)
        if phase.new_positions == "copied" and known < phase.length and not self.progress.phase_step:
            self.engine.change_weight("embeddings.position.weight", lambda weight: repeated(weight, known))

    def train_step(self, batches: StepBatches, phase: Phase, learning_rate: float) -> None:
        """One optimizer step. Losses are divided by the global batch's counts: exact for any ranks and micro-batch."""
        step = self.progress.step
        self.engine.model.draw = int(fold(self.job.recipe.seed, step)[0])
        torch.manual_seed(int(fold(self.job.recipe.seed, step, self.rank)[0]) >> 1)  # for dropout without our kernels
        found = []
        for index, batch in enumerate(batches.micro):
            self.mark()
            losses = self.engine.forward(batch.to(self.engine.device))
            loss = losses.masked / max(batches.predictions, 1) + losses.next_sentence / batches.sequences
            found.append(loss.detach())
            self.engine.backward(loss, last=index == len(batches.micro) - 1)
            self.meter.add(
                losses,
                predictions=len(batch.labels),
                sequences=len(batch.lengths),
                pieces=sum(batch.lengths),
                padded=len(batch.lengths) * phase.length,
                flops=self.job.shape.flops(batch.lengths, len(batch.labels)),
            )
        try:
            self.engine.step(learning_rate)
        except CollapseError:
            reason = f"gradients overflow up to step {step + 1} with the smallest scale of the loss"
            raise self.diverged(reason, self.saved, self.batch + 1) from None
        self.mark()
        self.meter.step(batches.waited)
        self.guard.add(
            step + 1, self.batch, found, self.engine.gradient_norm, [each.examples for each in batches.micro]
        )
        self.learning_rate = learning_rate
        self.progress.step += 1
        self.progress.phase_step += 1

    @property
    def batch(self) -> int:
        """The number of the next batch in the order of the phase."""
        return batch_number(self.progress.phase_step, self.progress.phase, self.skips)

    def between_steps(self, last: bool) -> None:
        """Looks, logs, evaluates and saves where it is time to; what the last step of a phase needs, its end does."""
        recipe, step = self.job.recipe, self.progress.step
        saves = is_due(step, recipe.checkpoints.every) and not last
        logs = is_due(step, recipe.logging.every) or last
        evaluates = is_due(step, recipe.evaluation.every) and not last
        decision = self.decide(looks=logs or saves or self.engine.device.type == "cpu")
        stops = decision != Decision.GO_ON
        self.clock.step()
        if logs or saves or stops or not self.clock.agreed:
            self.clock.agree()
        if logs:
            self.log_step()
        if stops:
            self.save()
            self.saver.finish()  # whoever stops us may not wait for an evaluation
        if evaluates:
            self.evaluate()
            self.clock.agree()  # that took time, and no step did
        if saves or (stops and evaluates):
            self.save()
        self.saver.look()
        if stops:
            self.stop_here(decision)

    def decide(self, looks: bool) -> Decision:
        """What all ranks do now; raises where one of them has found something wrong."""
        finding = self.guard.look() if looks else None
        decision = self.control.decide(wrong=finding is not None, saving=self.saver.longest)
        if decision == Decision.WRONG:
            first = first_of(gather(finding))
            raise self.diverged(first.text, first.batch, first.batch + 1)
        return decision

    def stop_here(self, decision: Decision) -> None:
        """Ends the run before its end; all is saved."""
        self.saver.finish()
        what = "a signal" if decision == Decision.SIGNAL else "the time limit"
        raise StoppedError(
            f"stopped by {what} after step {self.progress.step:,}, and saved; the same command continues from there"
        )

    def diverged(self, reason: str, begin: int, end: int) -> DivergedError:
        """What went wrong in these batches of the phase; those before the last checkpoint are done."""
        begin = max(begin, self.saved)
        return DivergedError(Skip(self.progress.phase, begin, max(1, end - begin), reason))

    def log_step(self) -> None:
        """Writes what happened since the last time."""
        steps = self.meter.steps
        by_clock = self.job.recipe.hours is not None
        totals, speed = self.meter.flush(self.flops_left(), self.seconds_left() if by_clock else None)
        norm = self.engine.gradient_norm
        record = StepRecord.of(
            totals,
            speed=speed,
            step=self.progress.step,
            phase=self.progress.phase + 1,
            learning_rate=self.learning_rate,
            gradient_norm=None if norm is None else float(norm),
            loss_scale=self.engine.loss_scale,
            total_steps=sum(schedule.steps or 0 for schedule in self.schedules),
            phases=len(self.schedules),
        )
        if self.guard.leaps(record.loss):
            first = batch_number(max(0, self.progress.phase_step - steps), self.progress.phase, self.skips)
            raise self.diverged(f"the loss leapt to {record.loss:.2f} in the steps to {record.step}", first, self.batch)
        self.log.write(record)
        if isinstance(self.engine.optimizer, Lamb) and self.log.tensorboard:
            self.log.histograms("trust_ratio", record.step, by_layer(self.engine.optimizer.trust_ratios()))

    def evaluate(self) -> None:
        """Scores the model on the held-out examples of the phase's length, if there are any."""
        phase = self.job.recipe.phases[self.progress.phase]
        if num_held_out(self.job.manifest, phase.length):
            with self.meter.watch.pause():
                self.scores = evaluate(
                    self.engine,
                    self.dataset(phase, validation=True),
                    micro_batch=phase.micro_batch,
                    limit=self.job.recipe.evaluation.examples or None,
                    step=self.progress.step,
                    phase=self.progress.phase + 1,
                    mark=self.mark,
                )
            self.log.write(self.scores)

    def save(self) -> None:
        """A checkpoint of where the run stands, written while training goes on."""
        self.progress.phase_seconds, self.saved = self.clock.seconds, self.batch
        meter = self.meter.state()
        with self.meter.watch.pause():
            self.log.sync()
            self.saver.save(self.engine, self.progress, self.record(), meter)

    def finish_phase(self, number: int) -> None:
        """Scores and saves its end, which is the beginning of the next."""
        self.decide(looks=True)
        if self.meter.steps:
            self.log_step()
        now = (self.progress.step, number + 1)
        if self.scores is None or (self.scores.step, self.scores.phase) != now:  # by the clock, a phase may end on it
            self.evaluate()
        self.progress.phase, self.progress.phase_step = number + 1, 0
        self.clock = Clock(0.0, self.engine.device)
        self.guard.losses.clear()  # at the beginning of a phase, losses may well leap
        self.save()

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of the run, besides where it stands."""
        return {
            "shape": asdict(self.job.shape),
            "recipe": self.job.recipe.as_dict(),
            "data": summarise_data(self.job.manifest),
            "step": self.progress.step,
            "metrics": {} if self.scores is None else self.scores.figures(),
            "logged_losses": list(self.guard.losses),
        }

    def dataset(self, phase: Phase, validation: bool = False) -> Dataset:
        """The examples of the phase's length."""
        return Dataset(self.job.data, self.job.manifest, phase.length, validation, self.rank, self.ranks)

    def seconds_left(self) -> float:
        """Of all phases, where the clock decides."""
        return max(0.0, sum(each.length for each in self.schedules[self.progress.phase :]) - self.clock.seconds)

    def flops_left(self) -> float | None:
        """Of all phases, for the time left; None where the clock decides."""
        total = 0.0
        for number in range(self.progress.phase, len(self.schedules)):
            phase, steps = self.job.recipe.phases[number], self.schedules[number].steps
            if steps is None:
                return None
            done = self.progress.phase_step if number == self.progress.phase else 0
            total += (steps - done) * phase.batch * measure_text(self.job.shape, phase.length, self.job.manifest).flops
        return total


def repeated(positions: torch.Tensor, known: int) -> torch.Tensor:
    """The first so many rows over and over, without row 0, where [CLS] stands alone."""
    rows = torch.arange(len(positions))
    return positions[torch.where(rows < known, rows, 1 + (rows - 1) % (known - 1))]


def by_layer(values: dict[str, float]) -> dict[str, list[float]]:
    """Values of parameters, by the layer of each."""
    layers: dict[str, list[float]] = {}
    for name, value in values.items():
        parts = name.split(".")
        layers.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(value)
    return layers


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens after this one; 0 is never."""
    return bool(every) and step % every == 0
