"""A cluster as a command names it: its GPUs, how many to a node, what joins the nodes, and what that decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_prep.common.errors import UserError
from pretraining.config.settings import Dtype, Recipe
from pretraining.planning.cost import REACH, Cluster, gpu_cluster
from pretraining.planning.fitting import Room
from pretraining.planning.machines import Gpu, find_gpu, find_network

PER_NODE = 8
"""GPUs of a node, where nothing else is said."""
MOST_RANKS = 10_000


@dataclass(frozen=True)
class Site:
    """Where a run is planned for."""

    cluster: Cluster
    dtype: Dtype
    room: Room
    description: str


def name_site(
    recipe: Recipe,
    gpu_name: str,
    nodes: int,
    per_node: int = PER_NODE,
    network_name: str | None = None,
    gpu_memory: float | None = None,
) -> Site:
    """The site of so many nodes with these GPUs; `gpu_memory`, in GB, takes the place of what the table has."""
    check_size(nodes, per_node)
    gpu = find_gpu(gpu_name)
    dtype = dtype_on(gpu, gpu_name, recipe)
    network = find_network(network_name or gpu.network)
    cluster = gpu_cluster(gpu, dtype, nodes, per_node, network, recipe.precision.tf32)
    size = gpu.memory if gpu_memory is None else 1e9 * gpu_memory
    joined = f", joined by {network.name}" if nodes > 1 else ""
    return Site(
        cluster,
        dtype,
        Room(size),
        f"{nodes:,} node{'s' * (nodes > 1)} of {per_node} {gpu_name} with {size / 1e9:.0f} GB{joined}; {dtype}; "
        f"{REACH:.0%} of a GPU's matrix rate is taken to be reached",
    )


def check_numbers(**options: float | None) -> None:
    """UserError for options, by their names, that cannot have their value: whole numbers count something, and others
    measure it."""
    faults = []
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            needed = "at least 1" if isinstance(value, int) else "a number above 0"
            faults.append(f"--{name.replace('_', '-')} {value:g}: {needed}")
    if faults:
        raise UserError("\n".join(faults))


def split_ranks(ranks: int, per_node: int | None) -> tuple[int, int]:
    """Nodes, and ranks of a node, of so many ranks."""
    each = min(ranks, PER_NODE) if per_node is None else per_node
    if each < 1 or ranks % each:
        raise UserError(f"--gpus-per-node {each}: {ranks} ranks do not divide into nodes of {each}; give what does")
    return ranks // each, each


def check_size(nodes: int, per_node: int) -> None:
    """UserError where no cluster has such a size."""
    if nodes < 1 or per_node < 1 or nodes * per_node > MOST_RANKS:
        raise UserError(
            f"--nodes {nodes} --gpus-per-node {per_node}: {nodes * per_node:,} GPUs; plans go from 1 to {MOST_RANKS:,}"
        )


def dtype_on(gpu: Gpu, name: str, recipe: Recipe) -> Dtype:
    """The numbers that a recipe computes in on a GPU; UserError where it has none of them."""
    wanted = recipe.precision.dtype
    if wanted == "auto":
        return "bf16" if gpu.bf16 else "fp16"
    if wanted == "bf16" and not gpu.bf16:
        raise UserError(f'precision.dtype = "bf16": {name} has none; take "fp16" or "auto"')
    return wanted
