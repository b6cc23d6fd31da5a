"""Clusters of the GPUs and networks in machines.toml, which holds data from their makers.

Searches the fastest micro-batch of each ZeRO stage on a cluster, and cures for a plan that does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from data_prep.common.errors import UserError, check_all
from data_prep.common.toml_text import read_toml
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Dtype, Phase, Recipe
from pretraining.data.corpora import Corpora
from pretraining.mesh.cuts import find_crossing
from pretraining.planning.cost import OF_DATASHEET, REACH, Cluster, NodeNetwork
from pretraining.planning.memory import Room
from pretraining.planning.plan import Plan, Target, plan_phase

PER_NODE = 8
"""GPUs of a node by default."""
MOST_RANKS = 10_000
"""The largest cluster that `plan_sizes` adds to a plan."""


@dataclass(frozen=True)
class Gpu:
    """The data of a GPU; matrix products without sparsity."""

    products: float
    """FLOP/s in 16 bits"""
    products_fp32: float
    """FLOP/s in fp32 without TF32"""
    memory: float
    """bytes"""
    watts: float
    """most power of the card"""
    bandwidth: float
    """bytes of its memory a second"""
    link: float
    """bytes a second to the other GPUs of the node, in each direction"""
    network: str
    """network between the maker's own nodes of 8, taken by default"""
    bf16: bool = True
    """whether it has bf16; otherwise fp16 is taken"""


_KNOWN = read_toml(Path(__file__).with_suffix(".toml").read_text())
GPUS = {name: Gpu(**data) for name, data in _KNOWN["gpus"].items()}
PORTS: dict[str, dict[str, float]] = _KNOWN["ports"]


def check_options(*, gpu: str | None = None, network: str | None = None, **numbers: float | None) -> None:
    """Raises UserError for an unknown GPU or network, and for numbers, by option, that are below 1 if whole, or not
    above 0 otherwise."""
    finders = ((find_gpu, gpu), (find_network, network))
    check_all(
        *[partial(_check_number, *option) for option in numbers.items()],
        *[partial(find, name) for find, name in finders if name is not None],
    )


def _check_number(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        needed = "at least 1" if isinstance(value, int) else "a number above 0"
        raise UserError(f"--{name.replace('_', '-')} {value:g}: {needed}")


def find_gpu(name: str) -> Gpu:
    """Finds the GPU of this name; raises UserError if it is unknown."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown; there is {', '.join(GPUS)}")
    return GPUS[name.lower()]


def find_network(name: str) -> NodeNetwork:
    """Finds the network of this name, such as hdr200x8: a kind of port, and the ports of a node (default: one)."""
    match = re.fullmatch(r"(\w+?)(?:x([1-9]\d?))?", name.lower())
    if match is None or match[1] not in PORTS:
        raise UserError(f"--network {name}: unknown; there is {', '.join(PORTS)}, and a node's ports as in hdr200x8")
    port = PORTS[match[1]]
    return NodeNetwork(name.lower(), int(match[2] or 1) * port["bandwidth"], port["latency"])


def make_cluster(gpu: Gpu, dtype: Dtype, nodes: int, per_node: int, network: NodeNetwork) -> Cluster:
    """Makes a cluster of nodes with these GPUs, at the speed that encoders reach."""
    products = gpu.products_fp32 if dtype == "fp32" else gpu.products
    return Cluster(REACH * products, OF_DATASHEET * gpu.bandwidth, nodes, per_node, gpu.link, network)


def make_target(
    recipe: Recipe, corpora: Corpora | None, gpu_name: str, nodes: int, per_node: int, network_name: str | None = None
) -> Target:
    """Makes the target of a run on nodes with these GPUs."""
    if fault := find_crossing(recipe.parallel.tensor, per_node, recipe.parallel.across_nodes):
        raise UserError(fault)
    gpu = find_gpu(gpu_name)
    dtype = choose_dtype_on(gpu, gpu_name, recipe)
    network = find_network(network_name or gpu.network)
    cluster = make_cluster(gpu, dtype, nodes, per_node, network)
    joined = f", joined by {network.name}" if nodes > 1 else ""
    where = (
        f"{nodes:,} node{'s' * (nodes > 1)} of {per_node} {gpu_name} with {gpu.memory / 1e9:.0f} GB{joined}; "
        f"{dtype}; {REACH:.0%} of a GPU's matrix throughput is taken to be reached"
    )
    ranks = nodes * per_node // recipe.parallel.tensor
    return Target(recipe, corpora, dtype, Room(gpu.memory), ranks, cluster, where, watts=gpu.watts)


def split_ranks(ranks: int) -> tuple[int, int]:
    """Divides ranks among nodes; returns the number of nodes and the ranks of each."""
    each = min(ranks, PER_NODE)
    if ranks % each:
        raise UserError(f"--ranks {ranks}: do not divide into nodes of {each}; benchmarks/planner.py plans for others")
    return ranks // each, each


def choose_dtype_on(gpu: Gpu, name: str, recipe: Recipe) -> Dtype:
    """Chooses the dtype of a recipe on a GPU; raises UserError if the GPU lacks it."""
    wanted = recipe.precision.dtype
    if wanted == "auto":
        return "bf16" if gpu.bf16 else "fp16"
    if wanted == "bf16" and not gpu.bf16:
        raise UserError(f'precision.dtype = "bf16": {name} has none; take "fp16" or "auto"')
    return wanted


def list_other_stages(target: Target) -> list[Target]:
    """Lists the run under the other ZeRO stages that the recipe permits."""
    return [each for each in target.stages if each.zero != target.zero and not find_faults(each.recipe)]


def find_fastest(target: Target) -> Plan:
    """Plans the run with the fastest micro-batches that fit; of equally fast ones with the largest."""
    found = []
    for number, phase in enumerate(target.recipe.phases):
        planned = [plan_phase(target, number, size) for size in target.sizes(phase) if target.fits(phase, size)]
        if planned:
            found.append(min(planned, key=lambda each: (round(each.step_seconds, 9), -each.micro_batch)))
    return Plan(target, tuple(found))


def plan_sizes(target: Target) -> list[Plan]:
    """Plans the run on 1 rank, on 1, 2, 4, ... nodes, and on the cluster itself; returns the plans that fit."""
    own = target.cluster
    assert own is not None
    fewest = own.select_tensor_ranks(target.tensor)
    sizes = {(fewest.nodes, fewest.per_node), (own.nodes, own.per_node)}
    sizes |= {(2**power, own.per_node) for power in range(14) if 2**power * own.per_node <= MOST_RANKS}
    found = []
    for nodes, per_node in sorted(sizes, key=math.prod):
        cluster = replace(own, nodes=nodes, per_node=per_node)
        ranks, rest = divmod(cluster.ranks, target.tensor)
        if ranks and not rest and not any(phase.batch % ranks for phase in target.recipe.phases):
            found.append(find_fastest(replace(target, ranks=ranks, cluster=cluster)))
    return [plan for plan in found if plan.fits]


def check_fit(target: Target) -> None:
    """Raises UserError if a phase needs more memory than a rank has, with settings that fit."""
    for number, phase in enumerate(target.recipe.phases):
        size, room = _find_least(phase), target.room
        if not target.fits(phase, size):
            needed = f"{target.bytes_needed(phase, size) / 1e9:.1f} GB a rank under ZeRO {target.zero}"
            may = f"may take {room.usable / 1e9:.1f} of {room.size / 1e9:.1f} GB"
            cures = "; ".join(list_cures(target, number)) or "no other setting or GPU would do"
            raise UserError(f"phase {phase.name} needs {needed} with a micro-batch of {size}, and {may}; {cures}")


def _find_least(phase: Phase) -> int:
    """Finds the smallest micro-batch that a phase may have."""
    return 1 if phase.micro_batch == "auto" else phase.micro_batch


def fits_in_memory(target: Target) -> bool:
    """Whether all phases fit into the memory of a rank."""
    return all(target.fits(phase, _find_least(phase)) for phase in target.recipe.phases)


def list_cures(target: Target, number: int) -> Iterator[str]:
    """Lists settings and GPUs with which a phase would fit."""
    phase = target.recipe.phases[number]
    if phase.micro_batch != "auto" and target.fits(phase, 1):
        yield f"--phases.{number}.micro_batch auto fits"
    yield from (f"--parallel.zero {other.zero} fits" for other in list_other_stages(target) if fits_in_memory(other))
    if fits_in_memory(target.change_section("compute", checkpoint_activations=True)):
        yield "--compute.checkpoint_activations true fits"
    yield from _find_gpu(target)


def _find_gpu(target: Target) -> Iterator[str]:
    """Finds the smallest GPU that the plan fits into, in the precision that it would have there."""
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        try:
            dtype = choose_dtype_on(gpu, name, target.recipe)
        except UserError:
            continue  # lacks the recipe's dtype
        if fits_in_memory(replace(target, dtype=dtype, room=Room(gpu.memory))):
            yield f"--gpu {name} fits"
            return
