#!/usr/bin/env python3
"""Submits the steps from text to scores as a chain of Slurm jobs, each of which waits for the one before.

    python cluster/submit.py pipeline --text wiki/ --dry-run
    python cluster/submit.py pipeline --text wiki/ --script pretrain_base --tasks rte cola --seeds 3
    python cluster/submit.py pipeline --from finetune --run runs/bert_large_lamb
    python cluster/submit.py tables --shares 4 table5 --scale base

Unknown words are passed on to train.py, those of `tables` to reproduce.py. It needs Python and sbatch alone, so that it
runs on any login node.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(oldest=(3, 9))

import argparse
import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from data_prep.common.errors import UserError
from finetuning.files.splits import FOLDERS as GLUE
from finetuning.files.splits import find_task_folder

CLUSTER = Path("cluster")
"""Relative to Cloze's folder, in which jobs are submitted and run."""
TABLES = Path(__file__).resolve().parents[1] / "benchmarks" / "reproduction" / "tables"
"""Folder with a file for each table of the paper that can be made."""
STEPS = ("prepare", "pretrain", "finetune", "gather")
OURS = ("CLOZE_", "SBATCH_")
"""Prefixes of the variables that the jobs or sbatch read."""
OTHERS = ("squad", "swag", "ner")
NODES, TIME = r"(?:--nodes[= ]|(?<!\S)-N ?)(\d\S*)", r"(?:--time[= ]|(?<!\S)-t ?)(\S+)"
"""Options of sbatch that limit a job."""
FOR_PLANS = ("ranks", "gpu", "price_per_gpu_hour", "json")
"""Options that train.py reads with --check alone."""


@dataclass(frozen=True)
class ChainJob:
    """A job of the chain."""

    step: str
    script: str
    what: str
    """what it does, in words"""
    words: Sequence[str]
    """arguments of the script, for the program that it runs"""
    options: Sequence[str] = ()
    waits: Mapping[str, str] = field(default_factory=dict)
    """how earlier steps must have ended, by name"""
    faults: Sequence[str] = ()
    """what must be mended before the job can run"""

    def command(self, submitted: Mapping[str, str]) -> list[str]:
        """Builds the sbatch command, where `submitted` has the ids of earlier jobs by step."""
        how = [f"{how}:{submitted[step]}" for step, how in self.waits.items() if step in submitted]
        waits = [f"--dependency={','.join(how)}", "--kill-on-invalid-dep=yes"] if how else []
        script = f"cluster/{self.script}.slurm"
        return ["sbatch", "--parsable", "--export=ALL", *waits, *self.options, script, *self.words]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, or with --dry-run ready to be; 2 something to mend."""
    wanted, words = build_parser().parse_known_args(arguments)
    try:
        if not (CLUSTER / "functions.sh").exists():
            raise UserError(f"{Path.cwd()} is not Cloze's folder, in which the jobs are to run; submit them from there")
        site = read_site()
        plan = plan_tables if wanted.chain == "tables" else plan_pipeline
        submit(plan(wanted, words, site), site, wanted.dry_run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="submit.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("chain", choices=["pipeline", "tables"])
    made.add_argument("--text", nargs="+", default=["wiki"], help="what shards are made of, as --docs (default: wiki)")
    shards = "folder of the shards, or several, as NAME=FOLDER (default: data/ and the name of the text, if it is one)"
    made.add_argument("--shards", nargs="+", help=shards)
    made.add_argument("--script", default="pretrain_large", help="pretrain_large (default) or pretrain_base")
    made.add_argument("--recipe", help="name or file of another recipe than the script's")
    made.add_argument("--run", help="folder of the run (default: runs/ and the name of the recipe)")
    made.add_argument("--tasks", nargs="+", help="of GLUE, or squad, swag, ner (default: all of GLUE)")
    made.add_argument("--seeds", default="5", help="how often each task is learned anew (default: 5)")
    made.add_argument("--for-prepare", default="", metavar="WORDS", help="more words for shard.py, in quotes")
    made.add_argument("--for-finetune", default="", metavar="WORDS", help="more words for fine-tuning, in quotes")
    made.add_argument("--from", dest="first", choices=STEPS, default=STEPS[0], help="step to begin with")
    made.add_argument("--to", dest="last", choices=STEPS, default=STEPS[-1], help="step to end with")
    made.add_argument("--shares", default="1", help="of tables: jobs that share the runs (default: 1)")
    made.add_argument("--dry-run", action="store_true", help="print the jobs and what is missing, and submit nothing")
    return made


def read_site() -> dict[str, str]:
    """Reads the variables of Cloze and sbatch from cluster/site.env; the environment takes precedence."""
    shown = run_program(["bash", "-c", ". cluster/functions.sh; read_site >&2; tell_removed; env -0"])
    pairs = [pair.partition("=") for pair in shown.split("\0")]
    site = {name: value for name, _, value in pairs if name.startswith(OURS)}
    return site | {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def choose_shards(wanted: argparse.Namespace, steps: Sequence[str]) -> list[str]:
    """Returns the folder of the shards that `--shards` names, or of the text, or several that are not made here."""
    text, shards = " ".join(wanted.text), wanted.shards
    if not shards and (len(wanted.text) > 1 or set("=*?[") & set(text)):
        raise UserError(f"--text {text}: name the folder of the shards: --shards")
    if shards and (len(shards) > 1 or re.match(r"\w+=", shards[0])) and "prepare" in steps:
        raise UserError(f"--shards {' '.join(shards)}: a text makes one folder, without a name; take --from pretrain")
    return shards or [f"data/{Path(text).name}"]


def plan_pipeline(wanted: argparse.Namespace, words: Sequence[str], site: Mapping[str, str]) -> list[ChainJob]:
    """Plans the jobs from the first to the last requested step."""
    script = CLUSTER / f"{wanted.script}.slurm"
    own = re.search(r"^pretrain (\w+)", script.read_text(), re.MULTILINE) if script.exists() else None
    if own is None:
        raise UserError(f"--script {wanted.script}: there is no cluster/{script.name} that pre-trains")
    steps = STEPS[STEPS.index(wanted.first) : STEPS.index(wanted.last) + 1]
    if not steps:
        raise UserError(f"--from {wanted.first} --to {wanted.last}: the first comes after the last")
    recipe, names, seeds = wanted.recipe or own[1], find_tasks(wanted.tasks), read_number("--seeds", wanted.seeds)
    text, shards = " ".join(wanted.text), choose_shards(wanted, steps)
    run = wanted.run or f"runs/{Path(recipe).stem}"
    what = f"{' '.join(shards)} -> {run}, by {recipe}{', not checked here, but by the job' * (not find_python(site))}"
    preparing = ["--docs", *wanted.text, "--out", *shards, *split_words("--for-prepare", wanted.for_prepare)]
    training = ["--recipe", recipe, "--data", *shards, "--out", run, *words]
    tuning = ["--model", run, "--task", *names, "--seeds", str(seeds)]
    tuning += split_words("--for-finetune", wanted.for_finetune)
    runs, prepared, trained = len(names) * seeds, {"prepare": "afterok"}, {"pretrain": "afterok"}
    jobs = [
        ChainJob("prepare", "prepare", f"{text} -> {' '.join(shards)}", preparing),
        ChainJob("pretrain", wanted.script, what, training, (), prepared),
        ChainJob("finetune", "finetune", f"{runs} runs of {run}", tuning, [f"--array=0-{runs - 1}"], trained),
        ChainJob("gather", "gather", f"results in {run}", tuning, (), {**trained, "finetune": "afterany"}),
    ]
    if words and "pretrain" not in steps:
        raise UserError(f"{' '.join(words)}: not understood")

    def list_faults(job: ChainJob) -> Iterator[str]:
        for source in wanted.text if job.step == "prepare" else ():
            label, _, path = source.partition("=")
            places = [source, path] if re.fullmatch(r"\w[\w.+-]*", label) else [source]  # NAME=PATH, as shard.py has it
            if "demo" not in places and not any(glob.glob(place, recursive=True) for place in places):
                yield f"--text {source}: no such file or folder"
        if job.step == wanted.first and job.step in ("finetune", "gather") and not Path(run).exists():
            yield f"--run {run}: no such folder; name a trained run, or train it first: --from pretrain"
        if job.step == "finetune":
            yield from dict.fromkeys(list_missing_data(names, site))
        if job.step == "pretrain":
            yield from check_training(job, site, words, [] if "prepare" in steps else ["--data", *shards])

    jobs = [add_options(job, site) for job in jobs if job.step in steps]
    return [replace(job, faults=[*list_faults(job)]) for job in jobs]


def plan_tables(wanted: argparse.Namespace, words: Sequence[str], site: Mapping[str, str]) -> list[ChainJob]:
    """Plans the jobs for a table of the paper: an array for its runs, then a job that makes the table."""
    shares = read_number("--shares", wanted.shares)
    said = " ".join(words)
    if len({*words} & {path.stem for path in TABLES.glob("*.toml")}) != 1:
        raise UserError(f"tables: {said or 'nothing is named'}: give table1 to table8, or figure5")
    jobs = [
        ChainJob("tables", "reproduce", f"{shares} shares of {said}", words, [f"--array=1-{shares}"]),
        ChainJob("conclude", "reproduce", f"the tables of {said}", words, (), {"tables": "afterany"}),
    ]
    return [add_options(job, site) for job in jobs]


def add_options(job: ChainJob, site: Mapping[str, str]) -> ChainJob:
    """Adds the site's options for the step of a job, such as CLOZE_PREPARE_OPTIONS="--partition=cpu"."""
    name = f"CLOZE_{job.step.upper()}_OPTIONS"
    return replace(job, options=[*split_words(name, site.get(name, "")), *job.options])


def split_words(name: str, text: str) -> list[str]:
    """Splits a text into words as a shell does; `name` is used in the message of an error."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}: {text}: {error}") from None


def read_number(name: str, text: str) -> int:
    """Reads a whole number; `name` is used in the message of an error."""
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UserError(f"{name} {text}: give a whole number from 1 to 9999")
    return int(text)


def find_tasks(named: Sequence[str] | None) -> list[str]:
    """Returns the named tasks, each once, or all of GLUE; UserError for an unknown one."""
    unknown = [name for name in named or () if name not in (*GLUE, *OTHERS)]
    if unknown:
        raise UserError(f"--tasks {' '.join(unknown)}: there is {', '.join([*GLUE, *OTHERS])}")
    return list(dict.fromkeys(named or GLUE))


def list_missing_data(tasks: Sequence[str], site: Mapping[str, str]) -> Iterator[str]:
    """Lists the folders of data of tasks that are missing, each with its cure."""
    for name in tasks:
        place = "glue" if name in GLUE else name
        places = [Path(base) / place for base in ("data", site.get("CLOZE_DATA", "data"))]
        found = next(filter(Path.exists, places), places[0])
        folder = find_task_folder(found, name) if name in GLUE and found.exists() else found
        if not folder.exists():
            cure = f"python finetuning/fetch.py {place}{f' --task {name}' * (folder != found)} fetches it"
            yield f"{folder}: not there; {cure} (ner: see docs/finetuning.md)"


def check_training(job: ChainJob, site: Mapping[str, str], words: Sequence[str], data: Sequence[str]) -> Iterator[str]:
    """Lists the faults that train.py finds in recipe and words for the ranks of the job, with the Python of the jobs if
    it is available; otherwise shards that are missing."""
    for word in words:
        if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in FOR_PLANS:
            yield f"{word}: only for train.py --check; leave it out"
    python = find_python(site)
    if not python:
        yield from (f"--shards {at}: not there" for at in data[1:] if not Path(at.rpartition("=")[2]).exists())
        return
    ranks = count_ranks(job, site)
    checked = ["--check", f"--ranks={ranks}", *job.words[:2], *data, *words]
    try:
        here = {"PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}  # a GPU of the login node is none of the job
        run_program([python, "pretraining/train.py", *checked], {**os.environ, **site, **here})
    except UserError as error:
        told = f"\nthe job has {ranks} ranks: CLOZE_PRETRAIN_OPTIONS='--nodes=N --gpus-per-node=N' changes that"
        yield from f"{error}{told if 'rank' in str(error) else ''}".replace("--data", "--shards").splitlines()


def find_python(site: Mapping[str, str]) -> str:
    """Finds the Python of the jobs; empty if only the jobs have it."""
    python = site.get("CLOZE_PYTHON", ".venv/bin/python")
    return "" if site.get("CLOZE_IMAGE") or not shutil.which(python) else python


def count_ranks(job: ChainJob, site: Mapping[str, str]) -> int:
    """Counts the ranks of a job on the fewest nodes that its script, the environment and its options allow."""
    given = join_options(job, site)
    nodes = re.split(r"\D", re.findall(NODES, given)[-1])[0]  # of 2-4 or 2,4
    gpus = re.findall(r"(?:^|[:,])(\d+)(?=,|$)", re.findall(r"--gpus-per-node[= ](\S+)", given)[-1])
    asked = re.findall(r"--ntasks-per-node[= ](\d+)", given)
    return int(nodes) * (int(asked[-1]) if asked else sum(map(int, gpus)) or 1)


def join_options(job: ChainJob, site: Mapping[str, str]) -> str:
    """Joins the options of a job: those of its script, of the environment, and its own, which count most."""
    words = re.findall(r"^#SBATCH (\S+)", (CLUSTER / f"{job.script}.slurm").read_text(), re.MULTILINE)
    variables = {"gpus-per-node": "SBATCH_GPUS_PER_NODE", "time": "SBATCH_TIMELIMIT"}
    words += [f"--{name}={site[variable]}" for name, variable in variables.items() if variable in site]
    return " ".join(["--nodes=1 --gpus-per-node=1 --time=default", *words, *job.options])


def run_program(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Runs a program; returns its output. UserError where it fails."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
        )
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        told = done.stderr.strip().removeprefix("error: ")
        raise UserError(told or f"{command[0]} ended with {done.returncode} and said nothing")
    return done.stdout


def submit(jobs: Sequence[ChainJob], site: Mapping[str, str], dry: bool) -> None:
    """Submits the jobs in order, or prints them, unless something must be mended. If one is refused, those before it
    are cancelled."""
    submitted: dict[str, str] = {}
    for job in jobs if dry else ():
        print(describe_job(job, site), format_command(job, job.command(submitted), site), sep="\n", flush=True)
        submitted[job.step] = f"${job.step}"
    faults = [line for job in jobs for line in job.faults]
    if faults:
        raise UserError("\n".join(faults))
    if dry:
        return
    for job in jobs:
        command = job.command(submitted)
        try:
            submitted[job.step] = call_sbatch(command, {**os.environ, **site})
        except (UserError, KeyboardInterrupt) as error:
            left = f"\n{cancel_jobs([*submitted.values()])}" if submitted else ""
            said = error if isinstance(error, UserError) else "interrupted; squeue --me shows whether Slurm took it"
            raise UserError(f"{job.step}: {said}{left}") from None
        print(f"{submitted[job.step]:>10}  {job.step:<9} {job.what}")
    shown = ",".join(submitted.values())
    print(f"squeue -j {shown} shows the jobs, python cluster/status.py the training")


def call_sbatch(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Calls sbatch; returns the id of the job."""
    if not shutil.which("sbatch"):
        raise UserError("no sbatch here; log in to the cluster, or see the commands with --dry-run")
    shown = run_program(command, environment)
    ids = re.findall(r"(?m)^\s*(\d+)(?:;\S*)?\s*$", shown)
    if not ids:
        raise UserError(f"sbatch printed no id: {shown.strip()}\nsqueue --me shows whether it took the job")
    return str(ids[-1])  # some sites print a greeting first


def cancel_jobs(jobs: Sequence[str]) -> str:
    """Cancels jobs of this chain, the last first; says whether some may remain."""
    command = ["scancel", *reversed(jobs)]
    try:
        run_program(command)
    except UserError as error:
        return f"some may still be in the queue of this chain, since scancel failed ({error}): {' '.join(command)}"
    return "nothing is left in the queue of this chain"


def describe_job(job: ChainJob, site: Mapping[str, str]) -> str:
    """Describes a job in comments of a shell: what it does, its nodes and time limit, and what must be mended."""
    nodes, time = (re.findall(limit, join_options(job, site))[-1] for limit in (NODES, TIME))
    lines = f"{job.step}: {job.what}; nodes: {nodes}, time limit: {time}", *(f"to mend: {each}" for each in job.faults)
    return "\n".join(f"# {' '.join(line.split())}" for line in lines)


def format_command(job: ChainJob, command: Sequence[str], site: Mapping[str, str]) -> str:
    """Formats a command for a shell, which stores the id of the job for the next command."""
    of_site = {name: value for name, value in site.items() if name.startswith("SBATCH_") and name not in os.environ}
    variables = [f"{name}={shlex.quote(value)}" for name, value in of_site.items()]
    words = [word if ":$" in word else shlex.quote(word) for word in command]
    return f"{job.step}=$({' '.join([*variables, *words])})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
