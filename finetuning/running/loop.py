"""The loop of fine-tuning: starts or resumes a run, trains, evaluates, and keeps its best weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import NoReturn

from pydantic import BaseModel
from torch import Tensor

from finetuning.inputs import Items
from finetuning.model.contrastive import Contrast
from finetuning.model.features import FeatureModel
from finetuning.model.heads import Output
from finetuning.results import ModelScores
from finetuning.running.base import Base, Run
from finetuning.running.batches import TaskBatches, TrainingBatches
from finetuning.running.folders import keep_model
from finetuning.running.outputs import (
    BrokenError,
    Outputs,
    add_certainty,
    compute_outputs,
    keep_activations,
    name_shortage,
    score_splits,
)
from finetuning.running.records import ScoreRecord, TuningStep
from pretraining.checkpoint.loop import Loop
from pretraining.checkpoint.reading import find_newest_whole, restore_engine, restore_model
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import CollapseError, Engine
from pretraining.engine.step import GivenUpError, Seeds, train_step
from pretraining.processes.context import Context
from pretraining.processes.group import shared_errors
from pretraining.processes.stopping import Decision
from pretraining.reporting.meter import Meter
from pretraining.reporting.records import describe_progress


class TuningState(BaseModel):
    """The state of a run besides its engine."""

    step: int = 0
    seconds: float = 0.0
    """Seconds of the logged steps, without evaluation and saving."""
    items: int = 0
    """Items of these steps, over all ranks."""
    best: float | None = None
    """The best score so far, by the metric of the task."""
    worse: int = 0
    """Evaluations since then."""
    scored: int = -1
    """The step of the last evaluation."""
    kept: ModelScores = ModelScores()
    """The scores of the kept weights."""


def compute_minimised(output: Output, batches: TaskBatches, share: float) -> Tensor:
    """Computes the minimised loss: the mean over labels, plus a share of the language head's mean over pieces."""
    own = output.loss / batches.labels
    return own + share * output.language / max(batches.predictions, 1) if share else own


class Tuner(Loop):
    """Trains one run of a task. All ranks use it together."""

    def __init__(self, run: Run, base: Base, context: Context) -> None:
        """Starts from the initial model, or from the newest checkpoint in the run's folder."""
        task, settings, folder = run.task, run.settings, run.folder
        checkpoint = find_newest_whole(folder, context.warn)
        of_engine = EngineSettings(settings.optimizer, settings.precision, settings.parallel, settings.compute)
        with name_shortage():
            model = base.build_model(task.head, settings, task.scale, fresh=checkpoint is None)
            if checkpoint is not None:
                restore_model(checkpoint, model)
            engine = Engine(model, of_engine, context.device)
        language = bool(settings.language_loss)
        sums, counts = ["loss", *["language"] * language], ["labels", "items", *["predictions"] * language]
        meter, self.state = Meter(engine.device, sums, counts), TuningState()
        if checkpoint is not None:
            record = restore_engine(checkpoint, engine)
            meter.restore(record.rank_states, context.world.rank, context.world.size)
            self.state = TuningState.model_validate(record.caller)
        super().__init__(folder, context, engine, meter, self.state.step, settings.logging, settings.checkpoints)
        self.run, self.base, self.task, self.settings = run, base, task, settings
        self.items: Mapping[str, Items] = {"train": task.train, **task.dev, **task.test}
        self.batches = TrainingBatches(task.train, settings, context.world.rank, context.world.size)
        self.steps, self.schedule = self.batches.steps, settings.schedule(self.batches.steps)
        self.begun, self.first_step = time.monotonic(), self.state.step
        self.next_record = 0

    def train(self) -> TuningState:
        """Trains the remaining steps."""
        control = self.context.control
        with self.log, self.saver, control.interruptible(self.log.say):
            try:
                self.keep_activations()
                with closing(self.batches.iterate(self.state.step, self.context.device)) as ahead:
                    self.meter.begin()
                    self.begun = time.monotonic()
                    self.score_where_due()  # a stop may have come before it
                    while not self.is_over:
                        self.show_progress()
                        self.step(*next(ahead))
                        self.after_step()
                        self.heap.after_step()
            except GivenUpError:
                self.stop(control.decide(wrong=False, saving=0.0))
            except CollapseError:
                raise BrokenError(f"gradients overflow after step {self.state.step}") from None
        return self.state

    def keep_activations(self) -> None:
        """Keeps the activations of frozen encoders if there is room, for later runs of the task too."""
        model, kept, world = self.engine.model, self.base.kept, self.context.world
        if isinstance(model, FeatureModel):
            key = f"{self.task.name} {model.frozen.compute_fingerprint(self.engine.dtype)}"
            if key not in kept:
                kept.clear()
                kept[key] = keep_activations(self.items, model.frozen, self.engine.dtype, self.context, self.log.say)
            self.items = kept[key]
            self.batches = TrainingBatches(self.items["train"], self.settings, world.rank, world.size)

    def close(self) -> None:
        """Waits for checkpoints being saved, and frees the memory for the next run."""
        self.saver.finish()
        self.engine.close()

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.state.step / self.batches.steps_per_epoch

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or dev has not improved within the patience."""
        return self.state.step >= self.steps or 0 < self.settings.patience <= self.state.worse

    def step(self, batches: TaskBatches, waited: float) -> None:
        """Makes one optimizer step."""
        step, context = self.state.step, self.context
        learning_rate = self.schedule.learning_rate(step)
        seeds = Seeds.derive(self.settings.seed, step, context.world.rank)
        loss_of: Callable[[Output, TaskBatches], Tensor] = partial(compute_minimised, share=self.settings.language_loss)
        mark, gives_up = context.watch.mark, context.control.stop_requested_anywhere
        contrasts = self.task.head.kind == "embeddings"
        with name_shortage():
            if contrasts:
                loss_of = Contrast(self.engine, self.settings.embeddings, batches, seeds, mark, gives_up).loss_of
            result = train_step(self.engine, batches, learning_rate, seeds, loss_of, mark, gives_up)
        self.state.step += 1
        for batch, output, part in zip(batches.micro, result.outputs, result.losses, strict=True):
            if batch.labels is not None:
                pieces = sum(batch.lengths)
                loss = part * batches.labels if contrasts else output.loss
                sums, counts = [loss], {"labels": len(batch.labels), "items": batch.items}
                if self.settings.language_loss:
                    sums, counts = [*sums, output.language], {**counts, "predictions": pieces - len(batch.lengths)}
                self.meter.add(sums, **counts, pieces=pieces)
        self.meter.step(learning_rate, waited)

    def after_step(self) -> None:
        """Logs, evaluates and saves when due; stops on request."""
        step = self.state.step
        decision = self.context.control.decide(wrong=False, saving=self.saver.longest)
        if self.is_logged(step):
            self.log_step()
        if decision != Decision.GO_ON:
            self.stop(decision)
        self.score_where_due()
        if self.settings.checkpoints.saves_at(step) and not self.is_over:
            self.write_checkpoint(step, self.state.model_dump())
        self.saver.report()

    def is_logged(self, step: int) -> bool:
        """Tells whether the log has a record of this step."""
        return step % self.settings.logging.every == 0 or self.batches.ends_stretch(step)

    def log_step(self) -> None:
        """Writes the record of the steps since the last one."""
        steps, learning_rate, norm = self.meter.steps, self.meter.learning_rate, self.engine.gradient_norm
        totals, speed = self.meter.flush(seconds_left=self.estimate_seconds_left())
        seconds, items = steps * speed.seconds_per_step, int(totals["items"])
        language = totals["language"] / max(totals["predictions"], 1) if self.settings.language_loss else None
        record = TuningStep(
            self.state.step,
            self.epoch,
            loss=totals["loss"] / max(totals["labels"], 1),
            learning_rate=learning_rate,
            gradient_norm=None if norm is None else float(norm),
            items_per_second=items / seconds,
            speed=speed,
            total_steps=self.steps,
            language_loss=language,
        )
        if not math.isfinite(record.loss):
            raise BrokenError(f"the loss is {record.loss} at step {self.state.step}")
        self.state.seconds += seconds
        self.state.items += items
        self.log.write(record)

    def show_progress(self) -> None:
        """Shows the progress of the run, and when its next record is due."""
        if self.context.world.rank == 0:
            step = self.state.step
            if step >= self.next_record:
                self.next_record = next(end for end in range(step + 1, self.steps + 1) if self.is_logged(end))
            estimates = self.meter.estimate(None, self.estimate_seconds_left())
            self.log.show(describe_progress(step, self.steps, self.next_record, *estimates))

    def estimate_seconds_left(self) -> float | None:
        """Estimates the seconds left for the run from the time of its steps since this start, including evaluation and
        saving; None before the first."""
        done = self.state.step - self.first_step
        return (time.monotonic() - self.begun) / done * (self.steps - self.state.step) if done else None

    def score_where_due(self) -> None:
        """Evaluates dev when due, once; keeps the last weights, or with early stopping the best."""
        state, task = self.state, self.task
        if state.scored == state.step or not self.batches.ends_stretch(state.step):
            return
        with self.meter.watch.pause():
            dev, test = ({name: self.items[name] for name in splits} for splits in (task.dev, task.test))
            outputs = compute_outputs(self.engine, task.head.kind, dev, self.context)
            scores = score_splits(task, outputs)
            score = next(iter(scores.values()))[task.metric]
            better = state.best is None or score > state.best
            kept = better if self.settings.patience else state.step == self.steps
            if kept:
                outputs |= compute_outputs(self.engine, task.head.kind, test, self.context)
            self.log.write(ScoreRecord(state.step, self.epoch, scores, task.metric))
            state.best, state.worse = (score, 0) if better else (state.best, state.worse + 1)
            if kept:
                state.kept = add_certainty(task, scores, outputs)
                with self.context.watch.pause():
                    self.keep(outputs)
            state.scored = state.step

    def keep(self, outputs: Outputs) -> None:
        """Writes the weights as a model, and the predictions for all splits."""
        weights = dict(self.engine.weights())
        with shared_errors():
            if self.context.world.rank == 0:
                keep_model(self.run, self.base, self.engine.model.shape, weights, self.state.kept, outputs)

    def stop(self, decision: Decision) -> NoReturn:
        """Saves and ends the run early."""
        self.write_checkpoint(self.state.step, self.state.model_dump())
        self.end(decision, self.state.step, f"{self.run.folder}: ")
