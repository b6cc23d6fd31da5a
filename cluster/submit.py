#!/usr/bin/env python3
"""Submits the way from text to scores as a chain of Slurm jobs, each of which waits for the one before.

    python cluster/submit.py pipeline --text wiki/ --dry-run
    python cluster/submit.py pipeline --text wiki/ --script pretrain_base --tasks rte cola --seeds 3
    python cluster/submit.py pipeline --from finetune --run runs/bert_large_lamb

Words that it does not know go to train.py. It needs Python and sbatch alone, so it runs on any login node.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

CLUSTER = Path("cluster")
"""Jobs run where they are submitted, which is Cloze's folder."""
STEPS = ("prepare", "pretrain", "finetune", "gather")
OURS = ("CLOZE_", "SBATCH_")
"""How the variables begin that the jobs or sbatch read."""
OTHERS = ("squad", "swag", "ner")
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
    waits: Mapping[str, str] = field(default_factory=dict)
    """how earlier steps must have ended, by their names"""

    def command(self, submitted: Mapping[str, str]) -> list[str]:
        """The words of sbatch, where these jobs are in the queue already, by their steps."""
        how = [f"{how}:{submitted[step]}" for step, how in self.waits.items() if step in submitted]
        waits = [f"--dependency={','.join(how)}", "--kill-on-invalid-dep=yes"] if how else []
        script = f"cluster/{self.script}.slurm"
        return ["sbatch", "--parsable", "--export=ALL", *waits, *self.options, script, *self.words]


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
        check(jobs, words, site)
        submit(jobs, site, wanted.dry_run)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="submit.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("chain", choices=["pipeline"])
    made.add_argument("--text", help="what shards are made of (default: wiki)")
    made.add_argument("--shards", help="folder of the shards (default: data/ and the name of the text)")
    made.add_argument("--script", default="pretrain_large", help="pretrain_large (default) or pretrain_base")
    made.add_argument("--recipe", help="name or file of another recipe than the script's")
    made.add_argument("--run", help="folder of the run (default: runs/ and the name of the recipe)")
    made.add_argument("--tasks", nargs="+", help="of GLUE, or squad, swag, ner (default: all of GLUE)")
    made.add_argument("--seeds", type=int, help="how often each task is learned anew (default: 5)")
    made.add_argument("--for-prepare", default="", metavar="WORDS", help="more words for shard.py, in quotes")
    made.add_argument("--for-finetune", default="", metavar="WORDS", help="more words for fine-tuning, in quotes")
    made.add_argument("--from", dest="first", choices=STEPS, default=STEPS[0], help="step to begin with")
    made.add_argument("--to", dest="last", choices=STEPS, default=STEPS[-1], help="step to end with")
    made.add_argument("--dry-run", action="store_true", help="print the commands, and submit nothing")
    return made


def read_site() -> dict[str, str]:
    """What cluster/site.env says to Cloze and to sbatch, and the environment, which counts more."""
    site: dict[str, str] = {}
    if (CLUSTER / "site.env").exists():
        command = ["bash", "-c", "bash -n cluster/site.env || exit 2; set -a; . cluster/site.env >&2; env -0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise RefusedError(f"cluster/site.env: the shell cannot read it: {shown.stderr.strip()}")
        pairs = [pair.partition("=") for pair in shown.stdout.split("\0")]
        site = {name: value for name, _, value in pairs if name.startswith(OURS)}
    return site | {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def plan(wanted: argparse.Namespace, words: Sequence[str], site: Mapping[str, str]) -> list[Job]:
    """The jobs from the first to the last step that is wanted."""
    if not (CLUSTER / f"{wanted.script}.slurm").exists():
        raise RefusedError(f"--script {wanted.script}: there is no cluster/{wanted.script}.slurm")
    text = wanted.text or site.get("CLOZE_TEXT", "wiki")
    recipe = wanted.recipe or site.get("CLOZE_RECIPE") or wanted.script.replace("pretrain", "bert") + "_lamb"
    shards = wanted.shards or site.get("CLOZE_SHARDS") or f"data/{Path(text).name}"
    run = wanted.run or site.get("CLOZE_RUN") or f"runs/{Path(recipe).stem}"
    names = wanted.tasks or site.get("CLOZE_TASKS", " ".join(GLUE)).split()
    seeds = wanted.seeds or int(site.get("CLOZE_SEEDS", "5"))
    model = run if wanted.run else site.get("CLOZE_MODEL", run)
    preparing = {"CLOZE_TEXT": text, "CLOZE_SHARDS": shards}
    training = {"CLOZE_RECIPE": recipe, "CLOZE_SHARDS": shards, "CLOZE_RUN": run}
    tasks = {"CLOZE_MODEL": model, "CLOZE_TASKS": " ".join(names), "CLOZE_SEEDS": str(seeds)}
    runs, tuning, trained = len(names) * seeds, shlex.split(wanted.for_finetune), {"pretrain": "afterok"}
    every = [f"--array=0-{runs - 1}"]
    jobs = [
        Job("prepare", "prepare", f"{text} -> {shards}", preparing, words=shlex.split(wanted.for_prepare)),
        Job("pretrain", wanted.script, f"{shards} -> {run}, by {recipe}", training, (), words, {"prepare": "afterok"}),
        Job("finetune", "finetune", f"{runs} runs of {model}", tasks, every, tuning, trained),
        Job("gather", "gather", f"results in {model}", tasks, (), tuning, {**trained, "finetune": "afterany"}),
    ]
    steps = STEPS[STEPS.index(wanted.first) : STEPS.index(wanted.last) + 1]
    if not steps:
        raise RefusedError(f"--from {wanted.first} --to {wanted.last}: the first comes after the last")
    return [with_options(job, site) for job in jobs if job.step in steps]


def with_options(job: Job, site: Mapping[str, str]) -> Job:
    """The job with what the site has for its step, such as CLOZE_PREPARE_OPTIONS="--partition=cpu"."""
    own = shlex.split(site.get(f"CLOZE_{job.step.upper()}_OPTIONS", ""))
    return replace(job, options=[*own, *job.options])


def check(jobs: Sequence[Job], words: Sequence[str], site: Mapping[str, str]) -> None:
    """Refuses what would fail hours later, when its turn comes."""
    variables = {job.step: job.variables for job in jobs}
    if words and "pretrain" not in variables:
        raise RefusedError(f"{' '.join(words)}: not understood")
    if "prepare" in variables and not Path(text := variables["prepare"]["CLOZE_TEXT"]).exists():
        raise RefusedError(f"--text {text}: no such file or folder")
    if "finetune" in variables:
        check_tasks(variables["finetune"]["CLOZE_TASKS"].split(), site)
    if "pretrain" in variables:
        check_recipe(variables["pretrain"]["CLOZE_RECIPE"], words, site)


def check_tasks(names: Sequence[str], site: Mapping[str, str]) -> None:
    """Refuses tasks that there are not, and those whose data is nowhere."""
    for name in names:
        if name not in (*GLUE, *OTHERS):
            raise RefusedError(f"--tasks {name}: there is {', '.join([*GLUE, *OTHERS])}")
        place = "glue" if name in GLUE else name
        if not any((Path(base) / place).exists() for base in ("data", site.get("CLOZE_DATA", "data"))):
            cure = f"python finetuning/fetch.py {place}" if name != "ner" else "docs/finetuning.md tells what it has"
            raise RefusedError(f"data/{place}: not there; {cure}")


def check_recipe(recipe: str, words: Sequence[str], site: Mapping[str, str]) -> None:
    """Lets train.py look at the recipe with its overrides, where the Python of the jobs is at hand."""
    python = site.get("CLOZE_PYTHON", ".venv/bin/python")
    if site.get("CLOZE_IMAGE") or not shutil.which(python):
        print("the recipe is not checked here: the job does it", file=sys.stderr)
        return
    command = [python, "pretraining/train.py", "--check", "--recipe", recipe, *words]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stderr.strip().removeprefix("error: "))


def submit(jobs: Sequence[Job], site: Mapping[str, str], dry: bool) -> None:
    """Submits the jobs in their order, or prints the commands; where one is refused, those before are cancelled."""
    submitted: dict[str, str] = {}
    for job in jobs:
        command = job.command(submitted)
        if dry:
            submitted[job.step] = f"${job.step}"
            print(as_typed(job, command, site))
            continue
        environment = {**os.environ, **site, **job.variables}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RefusedError("no sbatch here; log in to the cluster, or see the commands with --dry-run") from None
        if done.returncode:
            if submitted:
                subprocess.run(["scancel", *submitted.values()], check=False)
            raise RefusedError(f"{job.step}: {done.stderr.strip()}\nnothing is left in the queue of this chain")
        after = f", after {submitted[list(submitted)[-1]]}" if submitted else ""
        submitted[job.step] = done.stdout.split()[-1].partition(";")[0]  # some sites greet before the id
        print(f"{submitted[job.step]:>10}  {job.step:<9} {job.what}{after}")
    if not dry:
        shown = ",".join(submitted.values())
        print(f"squeue -j {shown} shows the jobs, python cluster/status.py the training")


def as_typed(job: Job, command: Sequence[str], site: Mapping[str, str]) -> str:
    """The command as it can be typed into a shell, where it keeps the job's id for the one that follows."""
    of_site = {name: value for name, value in site.items() if name.startswith("SBATCH_") and name not in os.environ}
    variables = [f"{name}={shlex.quote(value)}" for name, value in {**of_site, **job.variables}.items()]
    words = [word if ":$" in word else shlex.quote(word) for word in command]
    return f"{job.step}=$({' '.join([*variables, *words])})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
