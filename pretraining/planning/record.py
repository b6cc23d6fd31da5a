"""Records a plan in numbers: what `train.py --check --json` and `planner.py --json` print, and what the tables show.

Sizes are in bytes and times in seconds unless a name says otherwise. What is unknown is None, or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pretraining.config.schedule import PhaseSchedule
from pretraining.objectives.declaration import num_parameters
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.amount import USUAL_EPOCHS
from pretraining.planning.plan import PhasePlan, Plan, Target, sum_known

Record = dict[str, Any]
PREPARED = (6.63e6, 14.32e6, "benchmarks/results/preparation-avx512-bf16-2-cores.json")
"""Lowest and highest bytes of text a second that a core makes shards of, with 5 duplicates and with 1: `whole_runs`."""
TUNED, TUNED_MODEL = (603.9, 1239.7, "benchmarks/results/finetuning-*-2-cores.json"), (4, 256)
"""Lowest and highest number of sentences a second in fine-tuning on 2 cores, `sst2-dynamic` with autocast, and the
layers and width of that model. No GPU was measured."""
TOLD = 0.03
"""Relative difference of times that the model can resolve: about its mean error."""


def record_plan(plan: Plan, hour_price: float | None = None, notes: Iterable[str] = ()) -> Record:
    """Records the plan of a run; `hour_price` is that of a rank, `notes` come after those of the plan."""
    target, shape = plan.target, plan.target.shape
    return {
        **{name: getattr(target, name) for name in ("where", "dtype", "zero", "ranks", "all_ranks", "tensor")},
        **{name: getattr(shape, name) for name in ("layers", "hidden", "heads", "vocabulary")},
        "parameters": num_parameters(shape),
        "optimizer": target.recipe.optimizer.name,
        "flags": write_flags(plan),
        **{name: getattr(plan, name) for name in ("fits", "efficiency", "warning")},
        **{name: sum_known(getattr(each, name) for each in plan.phases) for name in ("steps", "pieces", "seconds")},
        "phases": [_record_phase(target, planned) for planned in plan.phases],
        "memory": [*_record_memory(plan)],
        "estimates": dict(_estimate(plan, hour_price)),
        "notes": [*plan.notes, *notes],
    }


def record_cluster(recipe: str, plans: Sequence[Plan], sizes: Sequence[Plan], hour_price: float | None) -> Record:
    """Records the plans of a cluster, first that of the recipe's ZeRO stage, and those of other numbers of ranks."""
    stages, others = ([record_plan(plan, hour_price) for plan in each] for each in (plans, sizes))
    return {"recipe": recipe, "advice": [*_advise(plans)], "stages": stages, "sizes": others}


def _estimate(plan: Plan, hour_price: float | None) -> Iterator[tuple[str, Record]]:
    """Estimates what a run takes, as far as it is known: a name with the unit, the range, and the planned value."""
    target, shape, parameters = plan.target, plan.target.shape, num_parameters(plan.target.shape)
    rates = {"hours": 1 / target.all_ranks, "cost": hour_price, "energy_kWh": target.watts and target.watts / 1000}
    for name, rate in rates.items():
        if plan.span is not None and rate is not None:
            values = (rate * target.all_ranks * seconds / 3600 for seconds in plan.span)
            yield name, dict(zip(("low", "planned", "high"), values, strict=True))
    yield "checkpoint_GB", {"planned": (4 + find_optimizer(target.recipe.optimizer).state_bytes) * parameters / 1e9}
    yield "checkpoints_kept", {"planned": target.recipe.checkpoints.keep}
    yield "export_GB", {"planned": 4 * parameters / 1e9}
    amounts = [("preparation_core_hours_per_GB_of_text", 1e9, PREPARED)]
    if target.corpora is not None:
        data = [part.manifest for part in target.corpora.parts]
        stored = sum(each.bytes + sum(file.size for file in each.kept) for each in data)
        yield "shards_GB", {"planned": stored / 1e9}
        amounts.append(("preparation_core_hours", sum(each.corpus.text_bytes for each in data), PREPARED))
    elif (read := sum_known(map(_count_bytes, plan.phases))) is not None:
        source = f"text that is read {USUAL_EPOCHS} times, as BERT's, or once"
        yield "shards_GB", {"low": read / USUAL_EPOCHS / 1e9, "high": read / 1e9, "source": source}
    if target.room.on_cpu and (shape.layers, shape.hidden) == TUNED_MODEL:
        amounts.append(("fine_tuning_hours_per_million_sentences", 1e6, TUNED))
    for name, amount, (slow, quick, source) in amounts:
        yield name, {"low": amount / quick / 3600, "high": amount / slow / 3600, "source": source}


def _count_bytes(planned: PhasePlan) -> float | None:
    """Counts the bytes in shards of the examples that a phase reads; 15 of each are no pieces."""
    text, size = planned.statistics, 2  # of a piece, and of its position
    return planned.sequences and planned.sequences * (size * text.pieces + 2 * size * text.predictions + 15)


PLANNED = ("micro_batch", "accumulation", "steps", "pieces", "epochs", "seconds", "efficiency")


def _record_phase(target: Target, planned: PhasePlan) -> Record:
    phase, step = planned.phase, planned.step
    parts = {} if step is None else {**step._asdict(), "in all": step.total}
    return {
        **{name: getattr(phase, name) for name in ("name", "objective", "length", "batch")},
        **{name: getattr(planned, name) for name in PLANNED},
        "stored_length": planned.statistics.stored,
        "pieces_a_sequence": planned.statistics.pieces,
        "micro_batch_is_estimate": phase.micro_batch == "auto",
        "bytes_of_a_rank": target.bytes_needed(phase, planned.micro_batch),
        "learning_rates": _find_learning_rates(planned.schedule),
        "step_seconds": {name: part for name, part in parts.items() if name != "sums" or target.tensor > 1},
        "sequences_per_second": step and phase.batch / step.total,
    }


def _find_learning_rates(schedule: PhaseSchedule) -> list[float]:
    """Finds the first, the highest and the last learning rate of a phase."""
    by_clock = schedule.schedule.by_clock
    places = [place * schedule.length / 1000 for place in range(1001)]
    top = schedule.schedule.warmup - schedule.begin
    places += [top - (0 if by_clock else 1)] if 0 < top <= schedule.length else []
    learning_rates = [schedule.learning_rate(int(place), place) for place in places if place < schedule.length]
    last = schedule.learning_rate(int(schedule.length) - 1, schedule.length)
    return [learning_rates[0], max(learning_rates), last]


def _record_memory(plan: Plan) -> Iterator[Record]:
    """Records the bytes of a rank under each ZeRO stage."""
    for memory in plan.memories if plan.fits else ():
        kept, recomputed = (memory.device + size for size in plan.activations)
        yield {**memory._asdict(), "with activations": kept, "with activations recomputed": recomputed}


def _advise(plans: Sequence[Plan]) -> Iterator[str]:
    """Returns the options for the recipe's own stage, and for another if that is clearly faster."""
    own, *others = plans
    if not own.fits:
        return
    yield f"to take: {write_flags(own)}"
    faster = min((plan for plan in others if plan.fits), key=lambda plan: plan.step_seconds, default=own)
    if faster.step_seconds < (1 - TOLD) * own.step_seconds:
        yield f"faster by {1 - faster.step_seconds / own.step_seconds:.0%}: {write_flags(faster)}"


def write_flags(plan: Plan) -> str:
    """Writes the options of train.py for the ZeRO stage and the micro-batches of a plan."""
    sizes = (f"--phases.{number}.micro_batch {planned.micro_batch}" for number, planned in enumerate(plan.phases))
    return f"--parallel.zero {plan.target.zero} {' '.join(sizes)}"
