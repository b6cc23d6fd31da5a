#!/usr/bin/env python3
"""Submits the way from text to scores as a chain of Slurm jobs, each of which waits for the one before.

    python cluster/submit.py pipeline --text wiki/ --dry-run
    python cluster/submit.py pipeline --text wiki/ --script pretrain_base --tasks rte cola --seeds 3
    python cluster/submit.py pipeline --from finetune --run runs/bert_large_lamb

Words that it does not know go to train.py. It needs Python and sbatch alone, so it runs on any login node.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLUSTER = Path("cluster")
"""Jobs run where they are submitted, which is Cloze's folder."""
STEPS = ("prepare", "pretrain", "finetune", "gather")
GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")


class RefusedError(Exception):
    """Something that the user must mend; the message says what."""


@dataclass(frozen=True)
class Job:
    """One job of the chain, as sbatch is told of it."""

    step: str
    script: str
    what: str
    """what it does, for a reader of the plan"""
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    words: Sequence[str] = ()
    """what follows the script, for the program that it runs"""
    waits: str = "afterok"
    """how the job before must have ended"""

    def command(self, before: str | None) -> list[str]:
        waits = [f"--dependency={self.waits}:{before}", "--kill-on-invalid-dep=yes"] if before else []
        return ["sbatch", "--parsable", *waits, *self.options, f"cluster/{self.script}.slurm", *self.words]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, 2 something to mend."""
    wanted, words = parser().parse_known_args(arguments)
    try:
        if not (CLUSTER / "functions.sh").exists():
            raise RefusedError(
                f"{Path.cwd()} is not Cloze's folder, in which the jobs are to run; submit them from there"
            )
        site = read_site()
        jobs = plan(wanted, words, site)
        check(wanted, words, jobs)
        submit(jobs, site, wanted.dry_run)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="submit.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("chain", choices=["pipeline"])
    made.add_argument("--text", default="wiki", help="what shards are made of (default: wiki)")
    made.add_argument("--shards", help="folder of the shards (default: data/ and the name of the text)")
    made.add_argument("--script", default="pretrain_large", help="pretrain_large (default) or pretrain_base")
    made.add_argument("--recipe", help="name or file of another recipe than the script's")
    made.add_argument("--run", help="folder of the run (default: runs/ and the name of the recipe)")
    made.add_argument("--tasks", nargs="+", default=GLUE, help="of GLUE, or squad, swag, ner (default: all of GLUE)")
    made.add_argument("--seeds", type=int, default=5, help="how often each task is learned anew (default: 5)")
    made.add_argument("--for-prepare", default="", metavar="WORDS", help="more words for shard.py, in quotes")
    made.add_argument("--for-finetune", default="", metavar="WORDS", help="more words for fine-tuning, in quotes")
    made.add_argument("--from", dest="first", choices=STEPS, default=STEPS[0], help="step to begin with")
    made.add_argument("--to", dest="last", choices=STEPS, default=STEPS[-1], help="step to end with")
    made.add_argument("--dry-run", action="store_true", help="print the commands, and submit nothing")
    return made


def read_site() -> dict[str, str]:
    """The environment with what cluster/site.env adds; where both say something, the environment counts."""
    if not (CLUSTER / "site.env").exists():
        return dict(os.environ)
    shown = subprocess.run(
        ["bash", "-c", "set -a; . cluster/site.env >&2 && env -0"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise RefusedError(f"cluster/site.env: the shell cannot read it: {shown.stderr.strip()}")
    return dict(pair.split("=", 1) for pair in shown.stdout.split("\0") if "=" in pair) | dict(os.environ)


def plan(wanted: argparse.Namespace, words: Sequence[str], site: Mapping[str, str]) -> list[Job]:
    """The jobs from the first to the last step that is wanted."""
    if not (CLUSTER / f"{wanted.script}.slurm").exists():
        raise RefusedError(f"--script {wanted.script}: there is no cluster/{wanted.script}.slurm")
    recipe = wanted.recipe or wanted.script.replace("pretrain", "bert") + "_lamb"
    shards = wanted.shards or f"data/{Path(wanted.text).name}"
    run = wanted.run or f"runs/{Path(recipe).stem}"
    tasks = {"CLOZE_RUN": run, "CLOZE_TASKS": " ".join(wanted.tasks), "CLOZE_SEEDS": str(wanted.seeds)}
    training = {"CLOZE_RECIPE": recipe, "CLOZE_SHARDS": shards, "CLOZE_RUN": run}
    preparing = {"CLOZE_TEXT": wanted.text, "CLOZE_SHARDS": shards}
    runs, tuning = len(wanted.tasks) * wanted.seeds, shlex.split(wanted.for_finetune)
    jobs = [
        Job("prepare", "prepare", f"{wanted.text} -> {shards}", preparing, words=shlex.split(wanted.for_prepare)),
        Job("pretrain", wanted.script, f"{shards} -> {run}, by {recipe}", training, words=words),
        Job("finetune", "finetune", f"{runs} runs of {run}", tasks, [f"--array=0-{runs - 1}"], tuning),
        Job("gather", "gather", f"results in {run}", tasks, words=tuning, waits="afterany"),
    ]
    steps = STEPS[STEPS.index(wanted.first) : STEPS.index(wanted.last) + 1]
    if not steps:
        raise RefusedError(f"--from {wanted.first} --to {wanted.last}: the first comes after the last")
    return [with_options(job, site) for job in jobs if job.step in steps]


def with_options(job: Job, site: Mapping[str, str]) -> Job:
    """The job with what the site has for its step, such as CLOZE_PREPARE_OPTIONS="--partition=cpu"."""
    own = shlex.split(site.get(f"CLOZE_{job.step.upper()}_OPTIONS", ""))
    return Job(job.step, job.script, job.what, job.variables, [*own, *job.options], job.words, job.waits)


def check(wanted: argparse.Namespace, words: Sequence[str], jobs: Sequence[Job]) -> None:
    """Refuses what would fail hours later, when its turn comes."""
    steps = [job.step for job in jobs]
    if words and "pretrain" not in steps:
        raise RefusedError(f"{' '.join(words)}: not understood")
    if "prepare" in steps and not Path(wanted.text).exists():
        raise RefusedError(f"--text {wanted.text}: no such file or folder")
    if "pretrain" in steps and importlib.util.find_spec("torch"):
        recipe = next(job.variables["CLOZE_RECIPE"] for job in jobs if job.step == "pretrain")
        command = [sys.executable, "pretraining/train.py", "--check", "--recipe", recipe, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError(done.stderr.strip().removeprefix("error: "))


def submit(jobs: Sequence[Job], site: Mapping[str, str], dry: bool) -> None:
    """Submits the jobs in their order, or prints the commands; where one is refused, those before are cancelled."""
    submitted: list[str] = []
    for job in jobs:
        before = submitted[-1] if submitted else None
        command = job.command(before)
        if dry:
            submitted.append(f"${job.step}")
            print(as_typed(job, command))
            continue
        try:
            done = subprocess.run(command, env={**site, **job.variables}, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RefusedError("no sbatch here; log in to the cluster, or see the commands with --dry-run") from None
        if done.returncode:
            if submitted:
                subprocess.run(["scancel", *submitted], check=False)
            raise RefusedError(f"{job.step}: {done.stderr.strip()}\nnothing is left in the queue of this chain")
        submitted.append(done.stdout.strip().partition(";")[0])
        print(f"{submitted[-1]:>10}  {job.step:<9} {job.what}{f', after {before}' if before else ''}")
    if not dry:
        print(f"squeue -j {','.join(submitted)} shows the jobs, python cluster/status.py the training")


def as_typed(job: Job, command: Sequence[str]) -> str:
    """The command as it can be typed into a shell, where it keeps the job's id for the one that follows."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in job.variables.items()]
    words = [word if ":$" in word else shlex.quote(word) for word in command]
    return f"{job.step}=$({' '.join([*variables, *words])})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
