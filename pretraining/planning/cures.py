"""Whether a plan fits into the memory of its ranks, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from data_prep.common.errors import UserError
from pretraining.config.settings import Phase
from pretraining.planning.fitting import Room
from pretraining.planning.machines import GPUS
from pretraining.planning.site import dtype_on
from pretraining.planning.sweep import Target, other_stages, with_stage


def check_fit(target: Target) -> None:
    """UserError where a phase needs more memory than a rank has: it says what would fit."""
    for number, phase in enumerate(target.recipe.phases):
        needed, most = demand(target, phase)
        if needed > most:
            alone = phase.micro_batch == "auto"
            size = "one sequence at a time" if alone else f"micro-batches of {phase.micro_batch}"
            zero, said = target.recipe.parallel.zero, "; ".join(cures(target, number))
            room = f"may take {most / 1e9:.1f} of {target.room.size / 1e9:.1f} GB"
            raise UserError(
                f"phase {phase.name} needs {needed / 1e9:.1f} GB a rank under ZeRO {zero} with {size}, and {room}; "
                f"{said or 'no other setting or GPU would do'}"
            )


def demand(target: Target, phase: Phase) -> tuple[float, float]:
    """The bytes of a rank that a phase needs, and how many it may take: a micro-batch of the recipe's own may go to the
    limit, and one that a run finds leaves a margin."""
    zero, room = target.recipe.parallel.zero, target.room
    if phase.micro_batch == "auto":
        return target.bytes_needed(phase, zero, 1), room.usable
    return target.bytes_needed(phase, zero, phase.micro_batch), room.size


def fits(target: Target) -> bool:
    """Whether all phases do."""
    return all(needed <= most for needed, most in (demand(target, phase) for phase in target.recipe.phases))


def cures(target: Target, number: int) -> Iterator[str]:
    """What would make a plan fit whose phase of this number does not."""
    recipe, phase = target.recipe, target.recipe.phases[number]
    needed, most = demand(target, phase.model_copy(update={"micro_batch": "auto"}))
    if phase.micro_batch != "auto" and needed <= most:
        yield f"--phases.{number}.micro_batch auto fits"
    for zero in other_stages(target):
        if fits(replace(target, recipe=with_stage(recipe, zero))):
            yield f"--parallel.zero {zero} fits"
    compute = recipe.compute.model_copy(update={"checkpoint_activations": True})
    if fits(replace(target, recipe=recipe.model_copy(update={"compute": compute}))):
        yield "--compute.checkpoint_activations true fits"
    if not target.room.on_cpu:
        yield from _gpus(target)


def _gpus(target: Target) -> Iterator[str]:
    """The smallest GPU that the plan fits into, with the numbers that it would compute in there."""
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        try:
            dtype = dtype_on(gpu, name, target.recipe)
        except UserError:
            continue  # lacks the recipe's numbers
        if fits(replace(target, dtype=dtype, room=Room(gpu.memory))):
            yield f"--gpu {name} fits"
            return
