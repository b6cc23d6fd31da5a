"""The flags of the commands of fine-tuning, which load no PyTorch: a help is there at once; and the search for data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import tyro
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from data_prep.common.flags import Heading, Shown, print_help_if_asked
from data_prep.common.sections import Removed
from pretraining.processes import environment

if TYPE_CHECKING:
    from finetuning.tasks.task import Setup, Task

MODEL, TRAINING, RESULTS = Heading("Model and task"), Heading("Training"), Heading("Results")
Sees = Literal["both", "before"]
Format = Literal["lines", "tabs", "tsv", "csv", "jsonl", "parquet"]
Numbers = Literal["auto", "bf16", "fp16", "fp32", "int8"]
"""The dtype that a model computes in."""
STANDARD_INPUT = Path("-")
AUTO_DEVICE = {"device": Removed("auto", 'CUDA_VISIBLE_DEVICES="" keeps it on the CPU')}


class Suite(NamedTuple):
    """The tasks of a command."""

    name: str
    """The last part of the folder of results."""
    recipe: str
    """The default recipe."""
    small_recipe: str | None = None
    """The default recipe for miniatures, if different."""


@dataclass(frozen=True)
class TuningFlags:
    """Flags of all commands of fine-tuning."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "learning_rates": Removed(None, 'give --learning_rate 1e-4, or --search.learning_rates "[3e-4, 1e-4]"')
    }
    model: Annotated[str | None, MODEL] = None
    """A run, a folder of transformers, or a name on the Hugging Face hub (default: the newest exported model)."""
    sees: Annotated[Sees | None, MODEL, Shown.SELDOM] = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: both)."""
    backward: Annotated[str | None, MODEL, Shown.SELDOM] = None
    """A second model, whose frozen features are concatenated with those of the first, layer by layer: with
    --recipe elmo, a left-to-right and a right-to-left model are ELMo's scheme."""
    recipe: Annotated[str | None, TRAINING] = None
    """TOML file of training settings, or the name of one in finetuning/recipes (default: by task and size)."""
    seeds: Annotated[int | None, TRAINING] = None
    """Restarts of each run, with another order of the data and another head (default: as the recipe says, mostly 1)."""
    from_scratch: Annotated[bool, TRAINING, Shown.SELDOM] = False
    """Start from fresh weights of the model's sizes, to measure the benefit of pre-training."""
    evaluate: Annotated[bool, TRAINING, Shown.SELDOM] = False
    """Score a model that is already fine-tuned for the task, without training."""
    time_limit: Annotated[str, TRAINING, Shown.SELDOM] = "auto"
    """Save and stop ahead of this, counted from the start: 90m, 2h (default: the end of the Slurm job)."""
    out: Annotated[Path | None, RESULTS] = None
    """Where results go (default: runs/MODEL/…)."""
    check: Annotated[bool, RESULTS] = False
    """Print tasks, runs, settings and memory, and stop."""
    share: Annotated[bool, RESULTS, Shown.SELDOM] = False
    """Share the runs with other commands in the same folder; repeat the command without it at the end."""

    def suite(self) -> Suite:
        """Returns the tasks of the command, with their recipes."""
        raise NotImplementedError

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files of all tasks."""
        raise NotImplementedError

    def finish(self, out: Path, tasks: Sequence[Task], console: Console) -> None:
        """Finishes the command after all runs of all tasks."""

    def overrides(self) -> list[str]:
        """Returns the command's own flags as overrides of settings."""
        return [] if self.seeds is None else [f"--search.seeds={self.seeds}"]


@dataclass(frozen=True)
class GlueFlags(TuningFlags):
    """Fine-tunes a model on the tasks of GLUE, and scores it. Every value of the recipe can be given as --key VALUE or
    --section.key VALUE; those that matter most are --learning_rate, --batch, --epochs and --length.

        python finetuning/run_glue.py --task sst2 mrpc --model runs/mini --seeds 5

    The same command continues what was stopped. docs/finetuning-recipes.md has all values of a recipe.
    """

    removed: ClassVar = {**TuningFlags.removed, "keep_going": Removed(None, "name the tasks that are there: --task")}
    task: Annotated[tuple[str, ...], MODEL] = ()
    """cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli (default: all that are found)."""
    data: Annotated[Path | None, MODEL] = None
    """Folder with a folder for each task (default: data/glue, then glue in the folder that CLOZE_DATA names)."""
    submission: Annotated[bool, RESULTS, Shown.SELDOM] = False
    """Write submission.zip also where tasks are missing, which it answers with their first class."""

    def suite(self) -> Suite:
        return Suite("glue", "glue", "miniature")


@dataclass(frozen=True)
class SquadFlags(TuningFlags):
    """Fine-tunes a model on SQuAD, and scores it. Every value of the recipe can be given as --key VALUE or
    --section.key VALUE; those that matter most are --learning_rate, --batch, --epochs and --length.

        python finetuning/run_squad.py --version 1.1 --model runs/mini

    The same command continues what was stopped. docs/finetuning-recipes.md has all values of a recipe.
    """

    version: Annotated[Literal["1.1", "2.0"], MODEL] = "1.1"
    """1.1: every question has an answer; 2.0: some have none."""
    data: Annotated[Path | None, MODEL] = None
    """Folder with train-v1.1.json and dev-v1.1.json, or those of 2.0 (default: data/squad, or squad in CLOZE_DATA)."""
    train: Annotated[Path | None, MODEL, Shown.SELDOM] = None
    """The file to train on, instead of that of the folder."""
    dev: Annotated[Path | None, MODEL, Shown.SELDOM] = None
    """The file to score, instead of that of the folder (default: a tenth of the training questions, by whole articles,
    where there is none)."""

    def suite(self) -> Suite:
        return Suite(f"squad-{self.version}", f"squad{self.version[0]}")


@dataclass(frozen=True)
class SwagFlags(TuningFlags):
    """Fine-tunes a model to choose how a situation goes on, as in SWAG, and scores it. Every value of the recipe can be
    given as --key VALUE or --section.key VALUE; those that matter most are --learning_rate, --batch, --epochs and
    --length.

        python finetuning/run_swag.py --model runs/mini

    The same command continues what was stopped. docs/finetuning-recipes.md has all values of a recipe.
    """

    data: Annotated[Path | None, MODEL] = None
    """Folder with train.csv, val.csv and test.csv (default: data/swag, then swag in CLOZE_DATA)."""

    def suite(self) -> Suite:
        return Suite("swag", "swag")


@dataclass(frozen=True)
class NerFlags(TuningFlags):
    """Fine-tunes a model to find names in sentences, as in CoNLL-2003, and scores it by whole names. Every value of the
    recipe can be given as --key VALUE or --section.key VALUE; those that matter most are --learning_rate, --batch,
    --epochs and --length.

        python finetuning/run_ner.py --data conll2003/ --model google-bert/bert-base-cased

    The same command continues what was stopped. docs/finetuning-recipes.md has all values of a recipe.
    """

    removed: ClassVar = {
        **TuningFlags.removed,
        "features": Removed(None, "give --recipe ner_features --features.layers LAYERS, and --out"),
    }
    data: Annotated[Path | None, MODEL] = None
    """Folder with train.txt, valid.txt and test.txt of CoNLL-2003, or eng.train, eng.testa and eng.testb (default:
    data/ner, then ner in the folder that CLOZE_DATA names)."""

    def suite(self) -> Suite:
        return Suite("ner", "ner")


@dataclass(frozen=True)
class TaskFlags(TuningFlags):
    """Fine-tunes a model on tasks of your own, and scores it. Every value of the recipe can be given as --key VALUE or
    --section.key VALUE; those that matter most are --learning_rate, --batch, --epochs and --length.

        python finetuning/run_task.py reviews.toml --model runs/mini

    The same command continues what was stopped. docs/own-tasks.md says what describes a task, and
    docs/finetuning-recipes.md has all values of a recipe.
    """

    tasks: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """TOML files that describe tasks, at least one."""

    def suite(self) -> Suite:
        return Suite("own", "own", "miniature")


@dataclass(frozen=True)
class Predict:
    """Asks a fine-tuned model about text, and writes an answer for every row, in the same order.

        python finetuning/predict.py runs/mini/glue/sst2/model reviews.txt

    Every row gets an answer, an empty line too.
    """

    removed: ClassVar = AUTO_DEVICE
    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a fine-tuned model, of run_glue.py and the like or of transformers."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = (STANDARD_INPUT,)
    """Files with text; - is standard input."""
    format: Literal["auto"] | Format = "auto"
    """Format of the rows: lines of text; tabs between texts; TSV or CSV with names of columns in the first line; JSON
    objects; Parquet (default: by the ending of the file; otherwise lines, or tabs where a row has several texts)."""
    out: Path | None = None
    """File to write, whole or not at all (default: standard output)."""
    tsv: bool = False
    """Write columns parted by tabs, with their names in the first line, instead of JSON."""
    with_input: bool = False
    """Write all columns of the input beside each answer."""
    vectors: Path | None = None
    """Write the vector of every text to this file, .npy or .parquet, instead of answers; the same command goes on after
    a stop."""
    nearest: Path | None = None
    """File of queries. Prints the 10 nearest texts of each. Needs --vectors."""
    serve: str | None = None
    """Answer requests over HTTP at this port of this machine, or at HOST:PORT, until Ctrl-C."""
    replace: Annotated[bool, Shown.SELDOM] = False
    """Replace a file that something else has made."""
    flush: Annotated[bool, Shown.SELDOM] = False
    """Answer each row as soon as it is read, for a program that waits for the answer; otherwise up to 4,096 rows are
    answered together, which is faster."""
    dtype: Annotated[Numbers, Shown.SELDOM] = "auto"
    """Numbers in which the model computes; auto: those that the device is fast in, for vectors fp32. int8 is faster on
    a CPU, and less exact: look at the scores first."""


@dataclass(frozen=True)
class RunPairs:
    """Asks a pre-trained model which sentence of minimal pairs is the good one: its grammar, without labels.

        python finetuning/run_pairs.py --model runs/mini

    The same command continues what was stopped.
    """

    removed: ClassVar = AUTO_DEVICE
    model: str | None = None
    """A run, a checkpoint, a folder of transformers with the heads of pre-training, or a name on the Hugging Face
    hub (default: the newest exported model)."""
    pairs: Path | None = None
    """Table with columns good and bad, and perhaps paradigm and phenomenon: .jsonl, .tsv, .csv or .parquet, also
    compressed (default: BLiMP)."""
    out: Path | None = None
    """Where results go (default: runs/MODEL/pairs)."""
    each: int | None = None
    """Score only the first so many pairs of every paradigm (default: all)."""
    sees: Annotated[Sees | None, Shown.SELDOM] = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: both)."""


def begin_rank(kind: type[TuningFlags]) -> None:
    """Prints the help of a command if that is asked; else prepares the rank, before PyTorch is loaded."""
    print_help_if_asked(kind, sys.argv[1:], Path(sys.argv[0]).name, "finetuning")
    environment.begin_rank(small_steps=True)


def find_data(given: Path | None, name: str, cure: str = "", flag: str = "--data") -> Path:
    """Finds the folder of data: the given one, or the first of the usual places of this name.

    `cure` tells a user without the data what to do (default: fetch it); `flag` is the flag that names the folder.
    """
    places = [Path("data") / name]
    if folder := os.environ.get("CLOZE_DATA"):
        places.append(Path(folder) / name)
    found = next((place for place in (places if given is None else [given]) if place.exists()), None)
    if found is None and given is not None:
        raise UserError(f"{flag} {given}: {absence(given, 'folder')}")
    if found is None:
        there = " or ".join(map(str, places))
        cure = cure or f"python finetuning/fetch.py {name} fetches it"
        raise UserError(f"{flag}: not given, and nothing at {there}; {cure}")
    return found
