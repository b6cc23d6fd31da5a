#!/usr/bin/env python3
"""Pre-trains an encoder on shards.

    python pretraining/train.py --recipe bert_mini --data data/wiki --out runs/mini
    python pretraining/train.py --recipe … --data wiki=data/wiki books=data/books --out …
    torchrun --nproc-per-node 2 pretraining/train.py --recipe … --data … --out …
    deepspeed --num_gpus 2 pretraining/train.py --recipe … --data … --out …

and likewise under srun and mpirun. Any value of the recipe can be given anew: `--phases.0.steps 100 --parallel.zero 2`.
`--check` prints what the run will be, without training. The same command continues a run that was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

    from data_prep.common.flags import print_help_if_asked
    from pretraining.flags import Train

    print_help_if_asked(Train, sys.argv[1:], "train.py", "training")  # without PyTorch

import json
import os
import re
from contextlib import suppress
from functools import partial
from typing import Literal

from data_prep.common.supervision import exit_now, outlive_mpirun
from data_prep.common.terminal import open_console, say_at_once
from pretraining.processes.environment import prepare_process

prepare_process()
if __name__ == "__main__":
    outlive_mpirun()  # before PyTorch starts threads, and loads what a process that only waits need not have
    say_at_once("loading PyTorch")

from rich.console import Console

from data_prep.common.errors import SharedError, UserError, check_all, quote
from data_prep.common.flags import read_flags_and_rest
from data_prep.common.launchers import World, find_world, missing_tasks
from data_prep.common.locks import LOCK, locked, read_lock
from data_prep.common.reading import peek, peek_device
from data_prep.common.toml_text import toml_value
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.record import RECIPE, RECORD
from pretraining.config.overrides import FORM, load_recipe_and_data
from pretraining.config.settings import Recipe
from pretraining.config.shortening import check_share, shorten_recipe
from pretraining.data.corpora import Corpora, split_word
from pretraining.devices import find_kind
from pretraining.flags import Train
from pretraining.planning.machines import check_fit, check_options, make_target, split_ranks
from pretraining.planning.plan import build_plan
from pretraining.planning.record import record_plan
from pretraining.planning.table import render_plan
from pretraining.processes.ending import Ending
from pretraining.processes.stopping import parse_time_limit
from pretraining.training.changes import compare_recipes
from pretraining.training.origin import OriginFinder, check_data, count_recorded_phases, read_recorded_base
from pretraining.training.phases import read_sample
from pretraining.training.preview import plan_run
from pretraining.training.request import Branch, Request, find_earlier
from pretraining.training.run import run_training


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    arguments = [word for word in arguments if not re.fullmatch(r"--local[_-]rank=\d+", word)]  # deepspeed adds it
    wanted, overrides = read_flags_and_rest(Train, arguments, "train.py", "training")
    console = open_console()
    with Ending() as ending:
        ending.world = world = find_world(os.environ)
        if wanted.check:
            check(wanted, overrides, world, console)
        else:
            tasks = missing_tasks(os.environ, world)
            if tasks:
                said = f"warning: Slurm reserved {tasks} tasks, and this is one process alone: srun is missing"
                open_console(stderr=True, soft_wrap=True).print(said)
            record_early(wanted.out, ending)
            read = partial(read_request, wanted, overrides, world)
            run_training(peek_device(FORM, wanted.recipe, overrides), wanted.out, read, ending, console)
    return ending.code


def record_early(out: Path | None, ending: Ending) -> None:
    """Lets a run's folder tell of mistakes in the command too, unless another run is at work in it."""
    if ending.world.rank == 0 and out is not None and (out / LOCK).exists():
        with suppress(UserError):
            with locked(out / LOCK, "", ""):
                ending.record_in(out)
            ending.start = read_lock(out / LOCK)  # until this rank has the lock again, another start may take it


def check(wanted: Train, overrides: list[str], world: World, console: Console) -> None:
    """Prints the plan of the run, on rank 0."""
    if world.rank > 0:
        return
    ranks = world.size if wanted.ranks is None else wanted.ranks
    recipe, corpora, notes = read_plan(wanted, overrides, ranks)
    notes += read_sample(recipe, corpora)[-1]
    if wanted.gpu is not None:
        plan = build_plan(make_target(recipe, corpora, wanted.gpu, *split_ranks(ranks)))
    else:
        readers = max(1, ranks // recipe.parallel.tensor)
        plan = plan_run(recipe, corpora, readers, ranks == world.size)
    record = record_plan(plan, wanted.price_per_gpu_hour, notes)
    if wanted.json:
        print(json.dumps(record, indent=1))
    else:
        console.print(render_plan(record), soft_wrap=True)
    if wanted.gpu is not None:
        check_fit(plan.target)


def read_plan(wanted: Train, overrides: list[str], ranks: int) -> tuple[Recipe, Corpora | None, tuple[str, ...]]:
    """Reads the recipe for this number of ranks, the corpora, if any, and notes; raises all faults at once."""
    *_, (recipe, corpora, _, notes) = check_all(
        lambda: check_options(ranks=wanted.ranks, gpu=wanted.gpu, price_per_gpu_hour=wanted.price_per_gpu_hour),
        lambda: parse_time_limit(wanted.time_limit),
        lambda: read_all(wanted, overrides, max(1, ranks)),
    )
    return recipe, corpora, notes


def read_request(wanted: Train, overrides: list[str], world: World) -> Request:
    """Reads the recipe and what is known of the data; every fault of them and of the command at once."""
    out = wanted.out
    faults = [f"--{name}: is missing" for name, value in (("data", wanted.data), ("out", out)) if not value]
    of_plan = ("ranks", "gpu", "price_per_gpu_hour", "json")
    given = [name for name in of_plan if getattr(wanted, name) is not getattr(Train, name)]  # 0 is given too
    faults += [f"--{name.replace('_', '-')}: only with --check" for name in given]
    if wanted.profile < 0:
        faults.append(f"--profile {wanted.profile}: at least 0")
    for word in wanted.data:
        if out is not None and out.resolve().is_relative_to(split_word(word)[1].resolve()):
            faults.append(f"--out {out}: lies in --data {word}, which a run must not change; name another --out")
    if out is not None and (out / RECORD).exists():
        faults.append(f"--out {out}: is a checkpoint; name its run, or a new folder with --branch {quote(out)}")
    branch = None if wanted.branch is None else Branch.parse(wanted.branch)
    if branch is not None and wanted.init is not None:
        faults.append(f"--init {wanted.init}: not with --branch, which has the weights of a run; leave one of them out")
    if branch is not None and out is not None and out.resolve() == branch.run.resolve():
        faults.append(f"--branch {branch}: is the run in --out {out} itself; name another --out")
    limit = parse_time_limit(wanted.time_limit)
    try:
        recipe, corpora, origin, notes = read_all(wanted, overrides, world.size, find_kind())
    except SharedError:
        raise  # another rank's
    except UserError as error:
        raise UserError("\n".join([*faults, str(error)])) from None
    names = [phase.name for phase in recipe.phases]
    if wanted.stop_after not in (None, *names):
        faults.append(f"--stop-after {wanted.stop_after}: no phase of this name; there is {', '.join(names)}")
    if faults or corpora is None or out is None:
        raise UserError("\n".join(faults))
    pairs, retrieval, lines = read_sample(recipe, corpora)
    how = (wanted.stop_after, limit, wanted.profile, pairs, retrieval, (*notes, *lines))
    return Request(recipe, corpora, out, origin, *how, branch)


def read_all(
    wanted: Train, overrides: list[str], ranks: int, device: Literal["cpu", "cuda"] | None = None
) -> tuple[Recipe, Corpora | None, StoredModel | None, tuple[str, ...]]:
    """Reads the recipe, what is known of the data, and the model to begin with; checks them against each other.

    Returns them with a note on what --shorten has changed in the recipe."""
    run, base = find_earlier(wanted.out, wanted.branch), wanted.init
    if wanted.branch is not None and run is not None and peek(FORM, wanted.recipe, overrides, "base_model") is None:
        base = read_recorded_base(run)
    given = overrides if base is None else [*overrides, f"--base_model={toml_value(base)}"]
    finder = OriginFinder(run, peek(FORM, wanted.recipe, given, "base_model"))
    done = count_recorded_phases(run)
    load = partial(load_recipe_and_data, ranks=ranks, device=device, find_shape=finder.shape, done=done)
    _, (recipe, corpora) = check_all(
        lambda: check_share(wanted.shorten, wanted.recipe, wanted.out and wanted.out / RECIPE),
        lambda: load(wanted.recipe, given, wanted.data),
    )
    if finder.origin is not None and corpora is not None:
        check_data(finder.origin, corpora)
    shortened = recipe if wanted.shorten == 1 else shorten_recipe(recipe, wanted.shorten)
    changes = [f"{name} {then} -> {now}" for name, then, now in compare_recipes(recipe, shortened)]
    notes = (f"all phases shortened to {100 * wanted.shorten:.3g}%: {', '.join(changes)}",) if changes else ()
    return shortened, corpora, finder.origin, notes


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
