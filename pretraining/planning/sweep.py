"""Searches the fastest micro-batches of each ZeRO stage on a cluster, and cures for a plan that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from data_prep.common.errors import UserError
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Phase, Recipe, list_divisors
from pretraining.planning.machines import GPUS, MOST_RANKS, choose_dtype_on
from pretraining.planning.memory import Room
from pretraining.planning.plan import STAGES, Plan, Target, plan_phase


def plan_stages(target: Target) -> list[Plan]:
    """Finds the fastest plan of each ZeRO stage that the recipe permits, its own first."""
    return [find_fastest(target, zero) for zero in (target.recipe.parallel.zero, *list_other_stages(target))]


def list_other_stages(target: Target) -> Iterator[int]:
    """Lists the other ZeRO stages that the recipe permits."""
    for zero in STAGES:
        if zero != target.recipe.parallel.zero and not find_faults(target.change_section("parallel", zero=zero).recipe):
            yield zero


def find_fastest(target: Target, zero: int) -> Plan:
    """Finds the fastest micro-batches that fit under a ZeRO stage; of equally fast ones the largest."""
    found = []
    for number, phase in enumerate(target.recipe.phases):
        sizes = [size for size in target.sizes(phase) if target.fits(phase, zero, size)]
        planned = [plan_phase(target, number, zero, size) for size in sizes]
        if planned:
            found.append(min(planned, key=lambda each: (round(each.step_seconds, 9), -each.micro_batch)))
    return Plan(target, zero, tuple(found))


def plan_sizes(target: Target) -> list[Plan]:
    """Plans the run on 1 rank, on 1, 2, 4, ... nodes, and on the cluster itself, under the recipe's ZeRO stage; returns
    the plans that fit."""
    own = target.cluster
    assert own is not None
    sizes = {(1, 1), (own.nodes, own.per_node)}
    sizes |= {(2**power, own.per_node) for power in range(14) if 2**power * own.per_node <= MOST_RANKS}
    found = []
    for nodes, per_node in sorted(sizes, key=math.prod):
        cluster = replace(own, nodes=nodes, per_node=per_node)
        if not any(phase.batch % cluster.ranks for phase in target.recipe.phases):
            other = replace(target, ranks=cluster.ranks, cluster=cluster)
            found.append(find_fastest(other, target.recipe.parallel.zero))
    return [plan for plan in found if plan.fits]


def check_batches(recipe: Recipe, nodes: int, per_node: int) -> None:
    """Raises UserError if the batches of a recipe do not divide among the GPUs, with numbers of nodes that do."""
    ranks = nodes * per_node
    for phase in recipe.phases:
        if phase.batch % ranks:
            raise UserError(
                f"{ranks:,} GPUs: phase {phase.name} has a batch of {phase.batch:,}, which does not divide among them; "
                + _list_batch_cures(recipe, nodes, per_node)
            )


def _list_batch_cures(recipe: Recipe, nodes: int, per_node: int) -> str:
    """Suggests the next numbers of nodes that divide all batches, or batches that these nodes divide."""
    fitting = [
        count
        for count in list_divisors(recipe.phases[0].batch)
        if all(phase.batch % (count * per_node) == 0 for phase in recipe.phases)
    ]
    below = max((count for count in fitting if count < nodes), default=None)
    above = min((count for count in fitting if count > nodes and count * per_node <= MOST_RANKS), default=None)
    found = [f"--nodes {count}" for count in (below, above) if count is not None]
    batches = _find_divisible_batches(recipe, nodes * per_node)
    if not found:
        found = [f"another --gpus-per-node, since with {per_node} no number of nodes fits,"]
    return "take " + " or ".join([*found, batches] if batches else found)


def _find_divisible_batches(recipe: Recipe, ranks: int) -> str:
    """Returns command-line options for the largest batches below those of a recipe that `ranks` divides; empty if a
    batch has fewer sequences than ranks."""
    if any(phase.batch < ranks for phase in recipe.phases):
        return ""
    batches = (phase.batch // ranks * ranks for phase in recipe.phases)
    return " ".join(f"--phases.{number}.batch {batch}" for number, batch in enumerate(batches))


def check_fit(target: Target) -> None:
    """Raises UserError if a phase needs more memory than a rank has, with settings that fit."""
    for number, phase in enumerate(target.recipe.phases):
        needed, most = find_demand(target, phase)
        if needed > most:
            alone = phase.micro_batch == "auto"
            size = "one sequence at a time" if alone else f"micro-batches of {phase.micro_batch}"
            zero, said = target.recipe.parallel.zero, "; ".join(list_cures(target, number))
            room = f"may take {most / 1e9:.1f} of {target.room.size / 1e9:.1f} GB"
            raise UserError(
                f"phase {phase.name} needs {needed / 1e9:.1f} GB a rank under ZeRO {zero} with {size}, and {room}; "
                f"{said or 'no other setting or GPU would do'}"
            )


def find_demand(target: Target, phase: Phase) -> tuple[float, float]:
    """Finds the bytes that a phase needs and those that it may use: all for a given micro-batch, less a margin for
    "auto"."""
    zero, room = target.recipe.parallel.zero, target.room
    if phase.micro_batch == "auto":
        return target.bytes_needed(phase, zero, 1), room.usable
    return target.bytes_needed(phase, zero, phase.micro_batch), room.size


def fits(target: Target) -> bool:
    """Whether all phases fit into the memory of a rank."""
    return all(needed <= most for needed, most in (find_demand(target, phase) for phase in target.recipe.phases))


def list_cures(target: Target, number: int) -> Iterator[str]:
    """Lists settings and GPUs with which a phase would fit."""
    phase = target.recipe.phases[number]
    needed, most = find_demand(target, phase.model_copy(update={"micro_batch": "auto"}))
    if phase.micro_batch != "auto" and needed <= most:
        yield f"--phases.{number}.micro_batch auto fits"
    for zero in list_other_stages(target):
        if fits(target.change_section("parallel", zero=zero)):
            yield f"--parallel.zero {zero} fits"
    if fits(target.change_section("compute", checkpoint_activations=True)):
        yield "--compute.checkpoint_activations true fits"
    if not target.room.on_cpu:
        yield from _find_gpu(target)


def _find_gpu(target: Target) -> Iterator[str]:
    """Finds the smallest GPU that the plan fits into, in the precision that it would have there."""
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        try:
            dtype = choose_dtype_on(gpu, name, target.recipe)
        except UserError:
            continue  # lacks the recipe's dtype
        if fits(replace(target, dtype=dtype, room=Room(gpu.memory))):
            yield f"--gpu {name} fits"
            return
