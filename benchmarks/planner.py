#!/usr/bin/env python3
"""Plans a run on any cluster: memory, time, efficiency, cost, and the settings to take.

    python benchmarks/planner.py --recipe bert_large_lamb --nodes 32 --gpus-per-node 8 --gpu a100-80 --network hdr200x8

Any value of the recipe can be given as --section.key VALUE, as for train.py. `docs/planning.md` has the model, its
constants, and its errors against published runs.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import json
from dataclasses import dataclass

from data_prep.common.errors import UserError, check_all
from data_prep.common.flags import read_flags_and_rest
from data_prep.common.terminal import open_console, run_curable
from pretraining.config.conflicts import find_faults
from pretraining.config.overrides import load_recipe_and_data
from pretraining.planning import machines
from pretraining.planning.record import record_cluster
from pretraining.planning.table import render_cluster


@dataclass(frozen=True)
class Planner:
    """Plans a run on a cluster. Every value of the recipe can be given as --section.key VALUE."""

    recipe: Path = Path("bert_large_lamb")
    """A recipe: a TOML file, or the name of one in pretraining/recipes."""
    data: Path | None = None
    """Folder of shards, for the lengths of real text (default: full sequences)."""
    nodes: int = 1
    """Nodes of the cluster."""
    gpus_per_node: int = machines.PER_NODE
    """GPUs of a node."""
    gpu: str = "h100-80"
    """Kind of the GPUs: v100-32, a100-80, h100-80, h200, …"""
    network: str | None = None
    """Network between nodes, with the ports of a node: hdr200x8, edr100x4, 10gbe (default: the maker's)."""
    price_per_gpu_hour: float | None = None
    """Price of a GPU for an hour, in any currency."""
    json: bool = False
    """Print JSON, for a file: `> FILE`."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings, overrides = read_flags_and_rest(Planner, arguments, "planner.py", "measurements")
    console = open_console()
    checked = ("nodes", "gpus_per_node", "price_per_gpu_hour", "gpu", "network")
    _, (recipe, corpora) = check_all(
        lambda: machines.check_options(**{name: getattr(settings, name) for name in checked}),
        lambda: load_recipe_and_data(settings.recipe, overrides, [settings.data] if settings.data else ()),
    )
    phases = tuple(phase.model_copy(update={"micro_batch": "auto"}) for phase in recipe.phases)
    recipe = recipe.model_copy(update={"phases": phases})
    faults = find_faults(recipe, ranks=settings.nodes * settings.gpus_per_node)
    if faults:
        raise UserError("\n".join(faults))
    cluster = (settings.gpu, settings.nodes, settings.gpus_per_node, settings.network)
    target = machines.make_target(recipe, corpora, *cluster)
    plans = [machines.find_fastest(each) for each in (target, *machines.list_other_stages(target))]
    sizes = machines.plan_sizes(target) if plans[0].fits else []
    record = record_cluster(settings.recipe.stem, plans, sizes, settings.price_per_gpu_hour)
    if settings.json:
        print(json.dumps(record, indent=1))
    else:
        console.print(render_cluster(record), soft_wrap=True)
    machines.check_fit(target)
    return 0


if __name__ == "__main__":
    sys.exit(run_curable(lambda: main(sys.argv[1:])))
