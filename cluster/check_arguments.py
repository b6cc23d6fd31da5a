#!/usr/bin/env python3
"""Checks the arguments (words) of planned jobs with the parsers of their commands; submit.py runs it with their Python.

python cluster/check_arguments.py '[{"step": "tables", "script": "reproduce", "what": "", "words": ["--table", "5"]}]'
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

from cluster.submit import CLUSTER, OTHERS, ChainJob, read_number
from data_prep.common.errors import UserError, check_all
from data_prep.common.terminal import run_curable

FLAGS: dict[str, Any] = {"config": (tyro.conf.FlagCreatePairsOff,)}
"""Settings of tyro that all commands use."""


def main(arguments: list[str]) -> int:
    """Checks the jobs in JSON of the first argument and prints all faults; returns the exit code, 0 or 2."""
    jobs = {job.step: job for job in (ChainJob(**each) for each in json.loads(arguments[0]))}
    return run_curable(lambda: check_jobs(jobs))


def check_jobs(jobs: Mapping[str, ChainJob]) -> None:
    """Checks the words of all jobs; raises one UserError with all faults."""
    lengths: list[int] = []
    checks: dict[str, Callable[[ChainJob], None]] = {
        "prepare": partial(check_preparation, lengths),
        "pretrain": partial(check_pretraining, lengths if "prepare" in jobs else None),
        "finetune" if "finetune" in jobs else "gather": check_tuning,
        "tables": check_table,
    }
    check_all(*(partial(check, jobs[step]) for step, check in checks.items() if step in jobs))


def check_preparation(lengths: list[int], job: ChainJob) -> None:
    """Checks the words of shard.py, also against the contents of its folder; adds its lengths to `lengths`."""
    from data_prep.command_line import parse_settings
    from data_prep.common.workers import Workers
    from data_prep.pipeline.inputs import find_inputs
    from data_prep.pipeline.pipeline import Pipeline

    text, shards = (job.variables[name] for name in ("CLOZE_TEXT", "CLOZE_SHARDS"))
    settings = parse_settings(["--docs", text, "--out", shards, *job.words])
    try:
        quiet = Console(quiet=True)
        Pipeline(find_inputs(Path(shards), settings, quiet), Workers(), quiet).check_beginning()
    except UserError as error:
        raise UserError(str(error).replace("--out", "--shards").replace("--docs", "--text")) from None
    lengths.extend(settings.lengths)


def check_pretraining(lengths: Collection[int] | None, job: ChainJob) -> None:
    """Checks words and recipe for the ranks of the job and the `lengths` of its shards, None if these exist already."""
    from pretraining.train import Train, read_plan

    shards = ["--data", job.variables["CLOZE_SHARDS"]] if lengths is None else []
    words, ranks = ["--recipe", job.variables["CLOZE_RECIPE"], *shards, *job.words], count_ranks(job)
    wanted, overrides = tyro.cli(Train, args=words, prog="train.py", return_unknown_args=True, **FLAGS)
    try:
        recipe, _ = read_plan(wanted, overrides, ranks)
    except UserError as error:
        told = f"\nthe job has {ranks} ranks: CLOZE_PRETRAIN_OPTIONS='--nodes=N --gpus-per-node=N' changes that"
        raise UserError(f"{error}{told if 'rank' in str(error) else ''}".replace("--data", "--shards")) from None
    longest = max(phase.length for phase in recipe.phases)
    if lengths and longest > max(lengths):
        needed = " ".join(map(str, sorted({*lengths, longest})))
        raise UserError(
            f"--for-prepare: the recipe has a phase of length {longest}, longer than all shards; add --lengths {needed}"
        )


def count_ranks(job: ChainJob) -> int:
    """Counts the ranks of a job on the fewest nodes that its script, the environment and its options allow."""
    words = re.findall(r"^#SBATCH (\S+)", (CLUSTER / f"{job.script}.slurm").read_text(), re.MULTILINE)
    words += [f"--gpus-per-node={os.environ[name]}" for name in ("SBATCH_GPUS_PER_NODE",) if name in os.environ]
    given, own = " ".join(["--nodes=1 --gpus-per-node=1", *words, *job.options]), "CLOZE_RANKS_PER_NODE"
    nodes = re.findall(r"(?:--nodes[= ]|(?<!\S)-N ?)(\d+)", given)[-1]
    gpus = re.findall(r"(?:^|[:,])(\d+)(?=,|$)", re.findall(r"--gpus-per-node[= ](\S+)", given)[-1])
    return int(nodes) * read_number(own, os.environ.get(own) or str(sum(map(int, gpus)) or 1))


def check_tuning(job: ChainJob) -> None:
    """Checks the words of fine-tuning with the command of each task."""
    from finetuning.settings import load_settings

    for name in dict.fromkeys(task if task in OTHERS else "glue" for task in job.variables["CLOZE_TASKS"].split()):
        kind = getattr(import_module(f"finetuning.run_{name}"), f"Run{name.title()}")
        flags, overrides = tyro.cli(kind, args=job.words, prog=f"run_{name}.py", return_unknown_args=True, **FLAGS)
        load_settings(flags.recipe or flags.suite().recipe, [*flags.overrides(), *overrides])


def check_table(job: ChainJob) -> None:
    """Checks the words of reproduce.py."""
    from benchmarks.reproduce import Reproduce

    tyro.cli(Reproduce, args=job.words, prog="reproduce.py", **FLAGS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
