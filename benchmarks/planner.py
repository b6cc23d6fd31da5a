#!/usr/bin/env python3
"""Plans a run on a cluster that need not be at hand: memory, time, efficiency, cost, and what to take.

    python benchmarks/planner.py --recipe bert_large_lamb --nodes 32 --gpus-per-node 8 --gpu a100-80 --network hdr200x8

Any value of the recipe can be given as --section.key VALUE, as train.py takes it. `docs/planning.md` states the model,
its constants, and how far it is from what others have published and from what was measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from benchmarks.measure import mistakes_told
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.common.terminal import open_console
from pretraining.config.overrides import load_recipe_and_data
from pretraining.config.settings import Recipe
from pretraining.planning.cluster_table import render_cluster, render_scale
from pretraining.planning.site import Site, check_size, name_site
from pretraining.planning.sweep import Scaled, Target, check_batches, cures, scale, sweep


@dataclass(frozen=True)
class Planner:
    """Plans a run on a cluster; every value of the recipe can be given as --section.key VALUE."""

    recipe: Path = Path("bert_large_lamb")
    """TOML file that says how to train, or the name of one in pretraining/recipes."""
    data: Path | None = None
    """Folder of shards, for the lengths of real text (default: full sequences)."""
    nodes: int = 1
    """Nodes of the cluster."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    gpu: str = "h100-80"
    """What they are: v100-32, a100-80, h100-80, h200, …"""
    network: str | None = None
    """What joins the nodes, and how many ports a node has: hdr200x8, edr100x4, 10gbe (default: the maker's own)."""
    gpu_memory: float | None = None
    """GB of a GPU (default: what it is sold with)."""
    price_per_gpu_hour: float | None = None
    """What a GPU costs an hour, in any currency."""
    chart: Path | None = None
    """PNG of hours and efficiency over the number of nodes."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings, overrides = tyro.cli(
        Planner, args=arguments, prog="planner.py", return_unknown_args=True, config=(tyro.conf.FlagCreatePairsOff,)
    )
    console = open_console()
    recipe, manifest = load_recipe_and_data(settings.recipe, overrides, settings.data)
    site = find_site(settings, recipe)
    check_batches(recipe, settings.nodes, settings.gpus_per_node)
    target = Target(recipe, manifest, site.dtype, site.cluster, site.room)
    console.print(f"{settings.recipe.stem} on {site.description}\n")
    options = sweep(target)
    console.print(render_cluster(target, options, settings.price_per_gpu_hour))
    if not options[0].fits:
        said = "; ".join(cures(target, options)) or "no GPU of the table would do"
        raise UserError(f"ZeRO {options[0].zero} does not fit into {target.room.size / 1e9:.0f} GB a GPU; {said}")
    others = scale(target)
    console.print(render_scale(others, settings.price_per_gpu_hour))
    if settings.chart is not None:
        draw(others, settings.chart)
        console.print(f"\ndrawn: {settings.chart}")
    return 0


def find_site(settings: Planner, recipe: Recipe) -> Site:
    """Where the run is planned for: GPUs of the table, or a machine that was measured."""
    check_size(settings.nodes, settings.gpus_per_node)
    return name_site(
        recipe, settings.gpu, settings.nodes, settings.gpus_per_node, settings.network, settings.gpu_memory
    )


def draw(others: Sequence[Scaled], path: Path) -> None:
    """Draws hours and efficiency over the number of GPUs."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    gpus = [other.ranks for other in others]
    left.plot(gpus, [other.seconds / 3600 for other in others], marker="o", color="#0072B2")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="hours")
    right.plot(gpus, [100 * other.efficiency for other in others], marker="o", color="#D55E00")
    right.set(xscale="log", ylim=(0, 105), xlabel="GPUs", ylabel="efficiency against one GPU, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150, format="png")


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
