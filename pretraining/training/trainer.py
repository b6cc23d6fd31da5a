"""The training loop: phases, steps, and what happens between steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from typing import NoReturn

from data_prep.common.errors import UserError
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.average import Average, average_together
from pretraining.checkpoint.loop import Loop, give_up_if_asked, is_due
from pretraining.checkpoint.state import RunRecord, Saved
from pretraining.engine.engine import CollapseError, Engine, is_shortage
from pretraining.engine.precision import explain_slowness
from pretraining.engine.step import GivenUpError, Seeds, StepResult, train_step
from pretraining.huggingface.model_card import DataSummary
from pretraining.model.batch import PretrainingBatches
from pretraining.model.losses import keep_losses
from pretraining.objectives.declaration import COUNTS, count_step_flops, find_objective
from pretraining.planning.amount import RemainingWork
from pretraining.processes.context import Context
from pretraining.processes.gpu_faults import DeviceError, is_gpu_failure
from pretraining.processes.group import gather
from pretraining.processes.stopping import Decision, StoppedError
from pretraining.reporting.hardware import measure_flops
from pretraining.reporting.meter import Meter
from pretraining.reporting.records import EvaluationRecord, StepRecord, describe_progress
from pretraining.training.guards import CURE, BatchCheck, DivergedError, Finding, Guard, choose_first
from pretraining.training.micro_batch import MicroBatches
from pretraining.training.origin import StartingPoint
from pretraining.training.phases import TrainingPhase
from pretraining.training.profiling import profile_steps
from pretraining.training.request import Request
from pretraining.training.same_bits import describe_conditions, find_kept
from pretraining.training.skips import Skip


class Trainer(Loop):
    """One rank's part of a run, from its starting point to the end."""

    def __init__(self, request: Request, context: Context, engine: Engine, start: StartingPoint):
        recipe, world, state, latest = request.recipe, context.world, start.state, start.latest
        found = {} if latest is None else latest.run.micro_batches
        self.micro_batches = MicroBatches(request, context, engine, found, find_kept(latest, request) is not None)
        self.micro_batches.find(state.phase)
        ceiling = recipe.logging.peak_flops or measure_flops(engine.device, engine.dtype)
        shape = engine.model.shape
        self.objective = find_objective(shape)
        readers, same_bits = engine.mesh.data_ranks, engine.same_bits
        parts = [part.name for part in request.corpora.parts if part.name]
        meter = Meter(engine.device, self.objective.sums(shape), COUNTS, ceiling, None, readers, same_bits, parts)
        super().__init__(request.out, context, engine, meter, state.step, recipe.logging, recipe.checkpoints)
        self.request, self.state, self.skips = request, state, start.skips
        self.scores: EvaluationRecord | None = None
        """the latest evaluation"""
        self.base = request.origin.summary(read_vocabulary(request.corpora.folder)) if request.origin else None
        """the model whose weights the run began with"""
        self.branch = None if latest is None else latest.run.branch
        """where the run branched off from another; None if it did not"""
        self.remaining = RemainingWork(recipe, request.corpora)
        scaled, counts = engine.loss_scale is not None, engine.mesh.counts
        self.guard = Guard(world.rank, world.size, recipe.guards.spike, scaled, counts)
        self.batch_check = BatchCheck(engine.mesh)
        profiles = request.profile > 0 and world.rank == 0
        self.profile = profile_steps(request.out, request.profile, engine.device, self.log.say) if profiles else None
        self.batch_saved = self.batch_kept = 0
        """numbers, within this phase, of the first batch after the last checkpoint, and after the last that a rollback
        goes back to"""
        if latest is not None:
            self.restore(latest)

    def restore(self, saved: Saved) -> None:
        """Restores meter, guard and scores from a checkpoint; progress and weights are restored already."""
        run = saved.run
        if find_objective(saved.record.shape) == self.objective:  # otherwise no step is left to log
            self.meter.restore(saved.record.rank_states, self.context.world.rank, self.context.world.size)
        self.guard.losses.extend(run.logged_losses)
        self.scores, self.base = run.scores, run.base
        self.log.keep(EvaluationRecord.kind, 0 if run.scores is None else run.scores.step)

    def close(self) -> None:
        """Releases threads and memory, so that another trainer can take over."""
        self.saver.close()
        self.engine.close()

    @property
    def is_done(self) -> bool:
        """Whether all phases of the recipe are trained."""
        return self.state.phase >= len(self.request.recipe.phases)

    @property
    def learns_otherwise(self) -> bool:
        """Whether the next phase to train has another objective, and so another model than this one."""
        wanted = self.request.shape_in(self.state.phase)
        return self.state.phase < self.request.num_phases and wanted != self.engine.model.shape

    def train(self) -> None:
        """Trains the phases that are left, up to one with another objective."""
        request = self.request
        with self.log, self.saver, self.profile or nullcontext():
            slowness = explain_slowness(request.recipe.precision.dtype, self.engine.device)
            for line in (*request.notes, *([slowness] if slowness else [])):
                self.log.say(line)
            if self.state.phase >= request.num_phases:
                self.log.say("all that was asked for is trained already")
            with self.context.control.interruptible(self.log.say):
                while self.state.phase < request.num_phases and not self.learns_otherwise:
                    self.train_phase()
                self.saver.finish()
            if not self.is_done and not self.learns_otherwise:
                self.log.say(f"stopped after phase {request.stop_after}; to go on, leave out --stop-after")

    def train_phase(self) -> None:
        """Trains the rest of one phase."""
        where = self.request, self.context, self.engine.mesh
        phase = TrainingPhase(*where, self.state, self.skips, self.micro_batches)
        self.log.say(phase.describe(self.state))
        for note in phase.notes:
            self.log.say(note)
        copied = None if self.state.phase_step else phase.copy_positions(self.engine, self.state.known_positions)
        if copied is not None:
            self.log.say(copied)
        self.batch_saved = phase.batch_number(self.state.phase_step)
        self.batch_kept = phase.batch_number(self.state.kept_step)
        self.meter.begin()
        with phase.batches(self.state) as steps:
            self.evaluate_what_a_stop_left(phase)
            for batches, waited in steps:
                if phase.is_over(self.state):
                    break
                self.show_progress(phase)
                self.train_step(phase, batches, waited)
                self.after_step(phase, last=phase.is_last_step(self.state))
        self.finish_phase(phase)

    def train_step(self, phase: TrainingPhase, batches: PretrainingBatches, waited: float) -> None:
        """Makes one optimizer step, and passes its result to the guard and the meter."""
        state, world = self.state, self.context.world
        learning_rate = phase.learning_rate(state)
        number = phase.batch_number(state.phase_step)
        seeds = Seeds.derive(self.request.recipe.seed, state.step, world.rank)
        mark, gives_up = self.context.watch.mark, self.context.control.stop_requested_anywhere
        result = None
        try:
            with keep_losses(bool(self.meter.parts)) as kept:
                result = train_step(self.engine, batches, learning_rate, seeds, self.objective.loss, mark, gives_up)
        except GivenUpError:
            self.stop(phase, self.decide(checks=True))  # the next start repeats the step
        except CollapseError:
            reason = f"gradients overflow up to step {state.step + 1} with the smallest scale of the loss"
            raise self.make_divergence(reason, self.batch_kept, number + 1) from None
        except RuntimeError as error:
            if is_gpu_failure(error):
                raise DeviceError(error, state.step + 1) from error
            if not is_shortage(error):
                raise
        if result is None:  # here, where the error no longer holds the step's tensors
            with self.context.watch.pause():
                raise self.micro_batches.explain_shortage(phase.number, phase.settings)
        state.advance(batches.sequences, phase.settings.length)
        self.guard.add(state.step, number, result, batches)
        self.batch_check.add(batches)
        self.measure(phase, batches, result)
        if kept and self.engine.mesh.counts:
            self.meter.add_parts(kept, phase.find_corpora(batches))
        self.meter.step(learning_rate, waited)
        if self.profile is not None:
            with self.context.watch.pause(), self.meter.watch.pause():
                self.profile.step()

    def measure(self, phase: TrainingPhase, batches: PretrainingBatches, result: StepResult) -> None:
        """Adds a step to the figures of the next log line; of ranks that share a model, one does."""
        if not self.engine.mesh.counts:
            return
        for batch, losses in zip(batches.micro, result.outputs, strict=True):
            self.meter.add(
                losses,
                predictions=len(batch.labels),
                sequences=len(batch.lengths),
                pieces=sum(batch.lengths),
                padded=len(batch.lengths) * phase.settings.length,
                flops=count_step_flops(self.engine.model.shape, batch.lengths, len(batch.labels)),
            )

    def after_step(self, phase: TrainingPhase, last: bool) -> None:
        """Votes, logs, evaluates and saves, each if it is due; after the last step of a phase `finish_phase` does it.

        A run that is stopped skips an evaluation that is due: the next start makes it up.
        """
        recipe, step = self.request.recipe, self.state.step
        saves = recipe.checkpoints.saves_at(step) and not last
        logs = is_due(step, recipe.logging.every) or last
        evaluates = is_due(step, recipe.evaluation.every) and not last
        decision = self.decide(checks=logs or saves or evaluates or self.looks_at_once)
        phase.clock.step()
        if logs or saves or not phase.clock.agreed or phase.is_over(self.state):  # an estimate alone ends no phase
            phase.clock.agree()
        if logs:
            self.log_step(phase)
        if decision != Decision.GO_ON:
            self.stop(phase, decision)
        if evaluates:
            self.evaluate(phase)
            phase.clock.agree()  # time that no step took
        if saves:
            self.save(phase)
        self.saver.report()
        self.heap.after_step()

    def evaluate_what_a_stop_left(self, phase: TrainingPhase) -> None:
        """Makes up an evaluation that was due when the last start was stopped, except at the end of a phase."""
        is_between = self.state.phase_step and not phase.is_last_step(self.state)
        is_scored = self.scores is not None and self.scores.step == self.state.step
        if is_between and not is_scored and is_due(self.state.step, self.request.recipe.evaluation.every):
            self.evaluate(phase)
            phase.clock.agree()

    def finish_phase(self, phase: TrainingPhase) -> None:
        """Scores and saves the end of a phase, and begins the next."""
        decision = self.decide(checks=True)
        if self.meter.steps:
            self.log_step(phase)
        if decision != Decision.GO_ON:
            self.stop(phase, decision)
        self.evaluate(phase, ends=True)
        if told := phase.finish(self.state):
            self.log.say(told)
        self.state.begin_phase(phase.number + 1)
        leapt = self.find_leap()
        self.guard.begin_phase()
        self.write_checkpoint(self.state.step, self.make_section(leapt).as_json())
        if self.is_done and self.request.recipe.checkpoints.average:
            self.score_average(phase, self.request.recipe.checkpoints.average)

    def score_average(self, phase: TrainingPhase, count: int) -> None:
        """Compares the average of the last checkpoints with the last one. The engine has the average afterwards; a stop
        that is asked for meanwhile waits, since the run is at its end."""
        self.saver.finish()
        with self.meter.watch.pause():
            try:
                with self.context.watch.pause():
                    steps, weights = average_together(self.request.out, self.engine.model.shape, count)
                    if len(steps) < 2:
                        fault = "this model has one checkpoint: there is no average"
                        self.context.warn(f"checkpoints.average = {count}: {fault}")
                        return
                    for name, weight in weights:
                        self.engine.change_weight(name, weight.to)  # to the type and device of the one that it replaces
            except UserError as error:
                self.context.warn(f"there is no average of the last checkpoints: {error}")
                return
            found = phase.evaluate(self.engine, self.state.step, self.context.watch.mark, validates=True, ends=True)
        if self.context.world.rank == 0:
            scored = (each.learns if each and each.scored_examples else None for each in (found, self.scores))
            loss, last_loss = (None if learns is None else self.objective.total(learns) for learns in scored)
            Average(steps, loss, last_loss, found).write(self.request.out)

    @property
    def looks_at_once(self) -> bool:
        """Whether each step is checked when it is done; on a GPU that would mean waiting for it."""
        return self.engine.device.type == "cpu"

    def decide(self, checks: bool) -> Decision:
        """Agrees with all ranks on what to do next; raises DivergedError if one of them has found a fault."""
        finding = self.guard.first_fault() if checks else None
        decision = self.context.control.decide(wrong=finding is not None, saving=self.saver.longest)
        if decision == Decision.WRONG:
            first = choose_first(Finding(*each) for each in gather(finding) if each)
            raise self.make_divergence(first.text, first.batch, first.batch + 1)
        return decision

    def stop(self, phase: TrainingPhase, decision: Decision) -> NoReturn:
        """Stops the run early, and saves first unless its progress is saved already."""
        if not self.looks_at_once:
            self.decide(checks=True)  # a faulty state is not saved
        if phase.batch_number(self.state.phase_step) != self.batch_saved:
            phase.clock.agree()
            self.save(phase)
        if not self.state.step:
            raise StoppedError(f"stopped by {decision.cause} in the first step; the same command begins anew", decision)
        self.end(decision, self.state.step)

    def make_divergence(self, reason: str, begin: int, end: int) -> DivergedError:
        """Makes the error for a fault in these batches of the phase; those before the checkpoint that the run goes back
        to are done."""
        begin = max(begin, self.batch_kept)
        return DivergedError(Skip(self.state.phase, begin, max(1, end - begin), reason))

    def estimate_work_left(self, phase: TrainingPhase) -> tuple[float | None, float | None]:
        """Estimates the operations that are left or, by the clock, the seconds."""
        return self.remaining.estimate(self.state.phase, self.state.phase_step, phase.clock.seconds)

    def show_progress(self, phase: TrainingPhase) -> None:
        """Shows progress between two records, without waiting for the GPU or other ranks."""
        if self.context.world.rank:
            return
        every, step = self.request.recipe.logging.every, self.state.step
        next_record = min(step - step % every + every, phase.last_step(self.state) or step + every)
        estimates = self.meter.estimate(*self.estimate_work_left(phase))
        self.log.show(describe_progress(step, self.remaining.total_steps, next_record, *estimates))

    def log_step(self, phase: TrainingPhase) -> None:
        """Writes the record of the steps since the last one."""
        state, steps = self.state, self.meter.steps
        self.batch_check.compare(state.step)
        totals, speed = self.meter.flush(*self.estimate_work_left(phase))
        state.pieces_seen += int(totals["pieces"])
        norm = self.engine.gradient_norm
        figures = self.objective.measure(totals)
        record = StepRecord(
            loss=self.objective.total(figures),
            learns={**figures, **phase.measure_reading(state, self.meter.part_losses)},
            said=self.objective.describe_figures(figures, width=5),
            speed=speed,
            step=state.step,
            phase=state.phase + 1,
            learning_rate=self.meter.learning_rate,
            gradient_norm=None if norm is None else float(norm),
            loss_scale=self.engine.loss_scale,
            examples_seen=state.examples_seen,
            pieces_seen=state.pieces_seen,
            total_steps=self.remaining.total_steps,
        )
        if self.guard.is_leap(record.loss):
            first = phase.batch_number(max(0, state.phase_step - steps))
            reason = f"the loss leapt to {record.loss:.2f} in the steps to {record.step}"
            raise self.make_divergence(reason, first, phase.batch_number(state.phase_step))
        self.log.write(record)

    def evaluate(self, phase: TrainingPhase, ends: bool = False) -> None:
        """Scores held-out examples, unless done at this step, and pairs and retrieval if the phase `ends`."""
        known, here = self.scores, (self.state.step, phase.number + 1)
        if known is not None and (known.step, known.phase) != here:  # by the clock, a phase may end at a scored step
            known = None
        try:
            with self.meter.watch.pause():
                before = partial(give_up_if_asked, self.context)
                found = phase.evaluate(self.engine, self.state.step, before, known is None, ends)
        except GivenUpError:
            self.stop(phase, self.decide(checks=True))
        if found is not None:
            self.scores = found if known is None else known.join(found)
            self.log.write(found)

    def save(self, phase: TrainingPhase) -> None:
        """Saves a checkpoint within a phase."""
        self.state.phase_seconds = phase.clock.seconds
        self.batch_saved, leapt = phase.batch_number(self.state.phase_step), self.find_leap()
        if leapt is None:  # a rollback goes back to this one
            self.batch_kept, self.state.kept_step = self.batch_saved, self.state.phase_step
        self.write_checkpoint(self.state.step, self.make_section(leapt).as_json())

    def find_leap(self) -> float | None:
        """Returns the last loss if it has leapt, and warns; else None. No rollback goes back to such a checkpoint."""
        leapt, step = self.guard.find_leap(), self.state.step
        if leapt is not None and self.context.world.rank == 0:
            self.context.warn(f"step {step:,}: saved when the loss had leapt to {leapt:.3g}; {CURE}")
        return leapt

    def make_section(self, leapt: float | None) -> RunRecord:
        """Makes the section of a checkpoint's record on the progress of the run."""
        data, losses = DataSummary.from_corpora(self.request.corpora), list(self.guard.losses)
        skips = [list(astuple(skip)) for skip in self.skips]
        same_bits = describe_conditions(self.request, self.context)
        found, begun = self.micro_batches.found, (self.base, leapt, self.branch, skips, same_bits)
        return RunRecord(self.state, self.request.recipe, data, self.scores, losses, found, *begun)
