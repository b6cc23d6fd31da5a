"""Records a plan in numbers: what `train.py --check --json` and `planner.py --json` print, and what the tables show.

Sizes are in bytes and times in seconds unless a name says otherwise. What is unknown is None, or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pretraining.architectures.weights import count_parameters
from pretraining.config.schedule import PhaseSchedule
from pretraining.objectives.declaration import find_objective, num_parameters
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.plan import PhasePlan, Plan, Target, sum_known

Record = dict[str, Any]
PREPARED = (6.63e6, 14.32e6, "benchmarks/results/preparation-avx512-bf16-2-cores.json")
"""Lowest and highest bytes of text a second that a core makes shards of, with 5 duplicates and with 1: `whole_runs`."""
TUNED, TUNED_MODEL = (603.9, 1239.7, "2 CPU cores: benchmarks/results/finetuning-*.json"), (4, 256)
"""Lowest and highest number of sentences a second in fine-tuning, `sst2-dynamic` with autocast, and the layers and
width of that model. No GPU was measured."""
TOLD = 0.03
"""Relative difference of times that the model can resolve: about its mean error."""


def record_plan(plan: Plan, hour_price: float | None = None, notes: Iterable[str] = ()) -> Record:
    """Records the plan of a run; `hour_price` is that of a rank, `notes` come after those of the plan."""
    target, shape = plan.target, plan.target.shape
    estimates = dict(_estimate(plan, hour_price))
    told = [f"{name.replace('_', ' ')}: {each['source']}" for name, each in estimates.items() if "source" in each]
    told += ["fine-tuning: not measured for this model on such a device"] * ("fine_tuning" not in " ".join(estimates))
    told += ["cost: unknown, as the hours are"] * (hour_price is not None and "cost" not in estimates)
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
        "estimates": estimates,
        "notes": [*plan.notes, *told, *notes],
    }


def record_cluster(recipe: str, plans: Sequence[Plan], sizes: Sequence[Plan], hour_price: float | None) -> Record:
    """Records the plans of a cluster, first that of the recipe's ZeRO stage, and those of other numbers of ranks."""
    stages, others = ([record_plan(plan, hour_price) for plan in each] for each in (plans, sizes))
    return {"recipe": recipe, "advice": [*_advise(plans)], "stages": stages, "sizes": others}


def _estimate(plan: Plan, hour_price: float | None) -> Iterator[tuple[str, Record]]:
    """Estimates what a run takes, as far as it is known: a name with the unit, the range, and the planned value."""
    target, shape, span = plan.target, plan.target.shape, plan.span
    if target.recipe.hours is not None:  # the clock ends it
        if span is not None:
            steps = sum(each.steps or 0.0 for each in plan.phases)
            yield "steps", {"low": steps * span[1] / span[2], "planned": steps, "high": steps * span[1] / span[0]}
        span = (plan.seconds,) * 3 if plan.fits and plan.seconds is not None else None
    rates = {"hours": 1 / target.all_ranks, "cost": hour_price, "energy_kWh": target.watts and target.watts / 1000}
    for name, rate in rates.items():
        if span is not None and rate is not None:
            values = (rate * target.all_ranks * seconds / 3600 for seconds in span)
            yield name, dict(zip(("low", "planned", "high"), values, strict=True))
    parameters, kept = num_parameters(shape), target.recipe.checkpoints
    exported = parameters - count_parameters(find_objective(shape).own_weights(shape))
    yield "checkpoint_GB", {"planned": (4 + find_optimizer(target.recipe.optimizer).state_bytes) * parameters / 1e9}
    yield "checkpoints_kept", {"planned": kept.keep + len(kept.keep_at or ())}
    yield "export_GB", {"planned": 4 * exported / 1e9}
    amounts = [("preparation_core_hours_per_GB_of_text", 1e9, PREPARED)]
    if target.corpora is not None:
        data = [part.manifest for part in target.corpora.parts]
        stored = sum(each.bytes + sum(file.size for file in each.kept) for each in data)
        yield "shards_GB", {"planned": stored / 1e9}
        amounts = [("preparation_core_hours", sum(each.corpus.text_bytes for each in data), PREPARED)]
    if target.room.on_cpu and (shape.layers, shape.hidden) == TUNED_MODEL:
        amounts.append(("fine_tuning_hours_per_million_sentences", 1e6, TUNED))
    for name, amount, (slow, quick, source) in amounts:
        yield name, {"low": amount / quick / 3600, "high": amount / slow / 3600, "source": source}


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
    return [learning_rates[0], max(learning_rates), schedule.learning_rate(int(schedule.length) - 1, schedule.length)]


def _record_memory(plan: Plan) -> Iterator[Record]:
    """Records the bytes of a rank under each ZeRO stage."""
    for memory in plan.memories if len(plan.phases) == len(plan.target.recipe.phases) else ():
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
