"""The GPUs and networks that a plan can name, with data from their makers, and clusters of them.

Searches the fastest micro-batch of each ZeRO stage on a cluster, and cures for a plan that does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

from data_prep.common.errors import UserError, check_all
from data_prep.shards import Manifest
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Dtype, Phase, Recipe, list_divisors
from pretraining.mesh.cuts import find_crossing
from pretraining.planning.cost import OF_DATASHEET, REACH, Cluster, NodeNetwork
from pretraining.planning.memory import Room
from pretraining.planning.plan import Plan, Target, name_numbers, plan_phase

PER_NODE = 8
"""GPUs of a node by default."""
MOST_RANKS = 10_000


@dataclass(frozen=True)
class Gpu:
    """The data of a GPU; matrix products without sparsity."""

    products: float
    """FLOP/s in 16 bits"""
    products_fp32: float
    """FLOP/s in fp32 without TF32"""
    memory: float
    """bytes"""
    bandwidth: float
    """bytes of its memory a second"""
    link: float
    """bytes a second to the other GPUs of the node, in each direction"""
    network: str
    """network between the maker's own nodes of 8, taken by default"""
    bf16: bool = True
    """whether it has bf16 and TF32; otherwise fp16 is taken"""


GPUS = {
    "v100-16": Gpu(125e12, 15.7e12, 16e9, 900e9, 150e9, "edr100x4", bf16=False),  # SXM2; NVLink 2; DGX-1
    "v100-32": Gpu(125e12, 15.7e12, 32e9, 900e9, 150e9, "edr100x8", bf16=False),  # SXM2, SXM3; NVLink 2; DGX-2
    "a100-40": Gpu(312e12, 19.5e12, 40e9, 1555e9, 300e9, "hdr200x8"),  # SXM4; NVLink 3; DGX A100
    "a100-80": Gpu(312e12, 19.5e12, 80e9, 2039e9, 300e9, "hdr200x8"),  # SXM4; NVLink 3; DGX A100
    "h100-80": Gpu(989e12, 67e12, 80e9, 3350e9, 450e9, "ndr400x8"),  # SXM5; NVLink 4; DGX H100
    "h200": Gpu(989e12, 67e12, 141e9, 4800e9, 450e9, "ndr400x8"),  # SXM; NVLink 4; DGX H200
    "b200": Gpu(2250e12, 75e12, 180e9, 8000e9, 900e9, "ndr400x8"),  # HGX B200; NVLink 5; DGX B200
    "a6000": Gpu(154.8e12, 38.7e12, 48e9, 768e9, 32e9, "100gbe"),  # PCIe 4.0 x16
    "l40s": Gpu(362e12, 91.6e12, 48e9, 864e9, 32e9, "100gbe"),  # PCIe 4.0 x16
    "rtx-4090": Gpu(165.2e12, 82.6e12, 24e9, 1008e9, 32e9, "10gbe"),  # fp32 accumulation; PCIe 4.0 x16
}
"""From their datasheets; of the RTX 4090, from the paper on the Ada architecture."""


INFINIBAND, ETHERNET = 14e-6, 50e-6
"""Seconds of a hop of a collective between nodes: from NCCL's tuning table (tuning.cc, protocol Simple, NET), and of
TCP through the kernel."""
LINKS = {  # of one port: bytes a second, and latency
    "edr100": (12.5e9, INFINIBAND),  # InfiniBand EDR, 100 Gbit/s
    "hdr200": (25.0e9, INFINIBAND),  # InfiniBand HDR, 200 Gbit/s
    "ndr400": (50.0e9, INFINIBAND),  # InfiniBand NDR, 400 Gbit/s
    "400gbe": (50.0e9, INFINIBAND),  # RoCE over Ethernet of 400 Gbit/s
    "200gbe": (25.0e9, INFINIBAND),  # RoCE over Ethernet of 200 Gbit/s
    "100gbe": (12.5e9, ETHERNET),  # Ethernet of 100 Gbit/s
    "25gbe": (3.125e9, ETHERNET),  # Ethernet of 25 Gbit/s
    "10gbe": (1.25e9, ETHERNET),  # Ethernet of 10 Gbit/s
    "1gbe": (0.125e9, ETHERNET),  # Ethernet of 1 Gbit/s
}


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
        raise UserError(f"--gpu {_describe_unknown(name, GPUS)}")
    return GPUS[name.lower()]


def find_network(name: str) -> NodeNetwork:
    """Finds the network of this name, such as hdr200x8: a kind of port, and the ports of a node (default: one)."""
    match = re.fullmatch(r"(\w+?)(?:x(\d{1,2}))?", name.lower())
    kind, count = (match[1], int(match[2] or 1)) if match else ("", 0)
    if kind not in LINKS or not count:
        said = _describe_unknown(name, LINKS)
        raise UserError(f"--network {said}, with the ports of a node after an x, as in hdr200x8")
    bandwidth, latency = LINKS[kind]
    return NodeNetwork(name.lower(), count * bandwidth, latency)


def _describe_unknown(name: str, known: Iterable[str]) -> str:
    close = [each for each in known if each.startswith(name.lower())] or get_close_matches(name.lower(), known, 1)
    meant = f", did you mean {close[0]}?" if close else ""
    return f"{name}: unknown{meant}; there is {', '.join(known)}"


def make_cluster(
    gpu: Gpu, dtype: Dtype, nodes: int, per_node: int, network: NodeNetwork, tf32: bool = False
) -> Cluster:
    """Makes a cluster of nodes with these GPUs, at the speed that encoders reach."""
    products = gpu.products
    if dtype == "fp32":
        products = gpu.products / 2 if tf32 else gpu.products_fp32
    return Cluster(REACH * products, OF_DATASHEET * gpu.bandwidth, nodes, per_node, gpu.link, network)


def make_target(
    recipe: Recipe,
    manifest: Manifest | None,
    gpu_name: str,
    nodes: int,
    per_node: int,
    network_name: str | None = None,
    gpu_memory: float | None = None,
) -> Target:
    """Makes the target of a run on nodes with these GPUs; `gpu_memory`, in GB, replaces that of the table."""
    ranks, tensor = nodes * per_node, recipe.parallel.tensor
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(
            f"--nodes {nodes} --gpus-per-node {per_node}: {ranks:,} GPUs; plans go from 1 to {MOST_RANKS:,}"
        )
    if fault := find_crossing(tensor, per_node, recipe.parallel.across_nodes):
        raise UserError(fault)
    if ranks % tensor:
        raise UserError(f"parallel.tensor = {tensor}: does not divide the {ranks:,} GPUs; take a multiple of {tensor}")
    gpu = find_gpu(gpu_name)
    dtype = choose_dtype_on(gpu, gpu_name, recipe)
    network = find_network(network_name or gpu.network)
    cluster = make_cluster(gpu, dtype, nodes, per_node, network, recipe.precision.tf32)
    size = gpu.memory if gpu_memory is None else 1e9 * gpu_memory
    joined = f", joined by {network.name}" if nodes > 1 else ""
    where = (
        f"{nodes:,} node{'s' * (nodes > 1)} of {per_node} {gpu_name} with {size / 1e9:.0f} GB{joined}; "
        f"{name_numbers(recipe, dtype)}; {REACH:.0%} of a GPU's matrix throughput is taken to be reached"
    )
    return Target(recipe, manifest, dtype, Room(size), ranks // tensor, cluster, where)


def split_ranks(ranks: int, per_node: int | None) -> tuple[int, int]:
    """Divides ranks among nodes; returns the number of nodes and the ranks of each."""
    each = min(ranks, PER_NODE) if per_node is None else per_node
    if each < 1 or ranks % each:
        raise UserError(f"--gpus-per-node {each}: {ranks} ranks do not divide into nodes of {each}; give what does")
    return ranks // each, each


def choose_dtype_on(gpu: Gpu, name: str, recipe: Recipe) -> Dtype:
    """Chooses the dtype of a recipe on a GPU; raises UserError if the GPU lacks it."""
    wanted = recipe.precision.dtype
    if wanted == "auto":
        return "bf16" if gpu.bf16 else "fp16"
    if wanted == "bf16" and not gpu.bf16:
        raise UserError(f'precision.dtype = "bf16": {name} has none; take "fp16" or "auto"')
    if recipe.precision.tf32 and not gpu.bf16:
        raise UserError(f"precision.tf32 = true: {name} has none; take false")
    return wanted


def list_other_stages(target: Target) -> list[Target]:
    """Lists the run under the other ZeRO stages that the recipe permits."""
    return [each for each in target.stages if each.zero != target.zero and not find_faults(each.recipe)]


def find_fastest(target: Target) -> Plan:
    """Plans the run with the fastest micro-batches that fit; of equally fast ones with the largest."""
    found = []
    for number, phase in enumerate(target.recipe.phases):
        sizes = [size for size in target.sizes(phase) if target.fits(phase, size)]
        planned = [plan_phase(target, number, size) for size in sizes]
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
        if _divides(cluster.ranks, target.recipe):
            found.append(find_fastest(replace(target, ranks=cluster.ranks // target.tensor, cluster=cluster)))
    return [plan for plan in found if plan.fits]


def _divides(gpus: int, recipe: Recipe) -> bool:
    """Whether all batches divide among so many GPUs."""
    ranks, rest = divmod(gpus, recipe.parallel.tensor)
    return ranks > 0 and not rest and not any(phase.batch % ranks for phase in recipe.phases)


def check_batches(recipe: Recipe, nodes: int, per_node: int) -> None:
    """Raises UserError if the batches of a recipe do not divide among the GPUs, with numbers of nodes that do."""
    ranks = nodes * per_node // recipe.parallel.tensor
    for phase in recipe.phases:
        if phase.batch % ranks:
            raise UserError(
                f"{nodes * per_node:,} GPUs: phase {phase.name} has a batch of {phase.batch:,}, which does not divide "
                f"among them; take {' or '.join(_list_batch_cures(recipe, nodes, per_node))}"
            )


def _list_batch_cures(recipe: Recipe, nodes: int, per_node: int) -> Iterator[str]:
    """Lists options: the next numbers of nodes that divide all batches, or the largest batches below those of the
    recipe that these nodes divide, if none has fewer sequences than ranks."""
    fitting = [count for count in range(1, MOST_RANKS // per_node + 1) if _divides(count * per_node, recipe)]
    below, above = [count for count in fitting if count < nodes], [count for count in fitting if count > nodes]
    yield from (f"--nodes {count}" for count in [*below[-1:], *above[:1]])
    if not fitting:
        yield f"another --gpus-per-node, since with {per_node} no number of nodes fits,"
    ranks = nodes * per_node // recipe.parallel.tensor
    batches = [phase.batch // ranks * ranks for phase in recipe.phases]
    if all(batches):
        yield " ".join(f"--phases.{number}.batch {batch}" for number, batch in enumerate(batches))


def check_fit(target: Target) -> None:
    """Raises UserError if a phase needs more memory than a rank has, with settings that fit."""
    for number, phase in enumerate(target.recipe.phases):
        needed, most = find_demand(target, phase)
        if needed > most:
            alone = phase.micro_batch == "auto"
            size = "one sequence at a time" if alone else f"micro-batches of {phase.micro_batch}"
            room = f"may take {most / 1e9:.1f} of {target.room.size / 1e9:.1f} GB"
            cures = "; ".join(list_cures(target, number)) or "no other setting or GPU would do"
            said = f"phase {phase.name} needs {needed / 1e9:.1f} GB a rank under ZeRO {target.zero} with {size}"
            raise UserError(f"{said}, and {room}; {cures}")


def find_demand(target: Target, phase: Phase) -> tuple[float, float]:
    """Finds the bytes that a phase needs and those that it may use: all for a given micro-batch, less a margin for
    "auto"."""
    if phase.micro_batch == "auto":
        return target.bytes_needed(phase, 1), target.room.usable
    return target.bytes_needed(phase, phase.micro_batch), target.room.size


def fits(target: Target) -> bool:
    """Whether all phases fit into the memory of a rank."""
    return all(needed <= most for needed, most in (find_demand(target, phase) for phase in target.recipe.phases))


def list_cures(target: Target, number: int) -> Iterator[str]:
    """Lists settings and GPUs with which a phase would fit."""
    phase = target.recipe.phases[number]
    needed, most = find_demand(target, phase.model_copy(update={"micro_batch": "auto"}))
    if phase.micro_batch != "auto" and needed <= most:
        yield f"--phases.{number}.micro_batch auto fits"
    yield from (f"--parallel.zero {other.zero} fits" for other in list_other_stages(target) if fits(other))
    if fits(target.change_section("compute", checkpoint_activations=True)):
        yield "--compute.checkpoint_activations true fits"
    yield from _find_sharing(target)
    yield from _find_gpu(target)


def _find_sharing(target: Target) -> Iterator[str]:
    """Finds the fewest ranks that could share a model so that the plan fits, within a node."""
    shape, ranks = target.shape, target.all_ranks
    for tensor in list_divisors(target.cluster.per_node if target.cluster else PER_NODE):
        if tensor <= target.tensor or ranks % tensor or math.gcd(shape.heads, shape.intermediate) % tensor:
            continue
        other = replace(target.change_section("parallel", tensor=tensor), ranks=ranks // tensor)
        if not find_faults(other.recipe) and fits(other):
            yield f"--parallel.tensor {tensor} fits"
            return


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
