"""The commands that fill a table, each named by a hash of its words and inputs, so that tables share them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.measure import find_data_folder
from benchmarks.reproduction.declaration import Row, ScaledTable, TableColumn
from data_prep.common.errors import UserError
from data_prep.common.files import sha256
from data_prep.common.reading import find_recipe
from data_prep.common.toml_text import read_toml
from data_prep.shards import MANIFEST
from finetuning.files.splits import FOLDERS, LABELLED, find_ner, find_swag, find_task
from finetuning.flags import find_data
from finetuning.results import RESULTS
from finetuning.settings import FORM as FINE_TUNING
from pretraining.config.overrides import FORM as PRE_TRAINING

CommandKind = Literal["task", "shards", "train", "tune", "pairs"]
PRODUCTS: Mapping[CommandKind, str] = {
    "task": "package.toml",
    "shards": MANIFEST,
    "train": "export/config.json",
    "tune": RESULTS,
    "pairs": RESULTS,
}
"""The last file that a command writes."""
RECIPES: Mapping[str, tuple[str, ...]] = {
    "finetuning/run_glue.py": ("glue", "miniature"),
    "finetuning/run_squad.py": ("squad1", "squad2"),
    "finetuning/run_swag.py": ("swag",),
    "finetuning/run_ner.py": ("ner",),
    "finetuning/run_task.py": ("own", "miniature"),
}
"""The default recipes of a fine-tuning command, of which it takes one."""
SEED = 12345
"""The seed of a row's first pre-training, that of the recipes; the next ones follow."""
FEATURES, FROZEN_NER = "--features.layers", ("--recipe", "ner_features")
"""The flag for the layers whose frozen activations replace fine-tuning."""
DATA = "{data}"
"""The folder of data in the words of a table."""
DIGITS = 16
"""The number of digits of a checksum."""


class LeftPath(NamedTuple):
    """A path in the folder that another command leaves, which therefore runs first."""

    command: Command
    path: str = ""


Word = str | LeftPath
Flags = dict[str, list[Word]]


@dataclass(frozen=True)
class Command:
    """A command that leaves a folder."""

    kind: CommandKind
    label: str
    """What it makes, in words."""
    script: str
    flags: Flags
    arguments: tuple[Word, ...] = ()
    """Words before the flags."""
    column: str = ""
    """The column that it fills."""
    reads: TableColumn | None = None
    """The column whose files it reads."""

    @cached_property
    def needs(self) -> list[Command]:
        """The commands whose folders it reads."""
        words = (*chain.from_iterable(self.flags.values()), *self.arguments)
        return [word.command for word in words if isinstance(word, LeftPath)]

    def list_needs(self) -> Iterator[Command]:
        """Yields the commands that must run before it, in order."""
        for need in self.needs:
            yield from (*need.list_needs(), need)

    def build_words(self, name_folder: Callable[[Command], str], data: str = DATA) -> list[str]:
        """Builds the script and its words, with names for the folders of other commands and of the data."""

        def spell(word: Word) -> str:
            return word.replace(DATA, data) if isinstance(word, str) else name_folder(word.command) + word.path

        return [self.script, *map(spell, (*self.arguments, *join_flags(self.flags)))]

    @cached_property
    def named_words(self) -> list[str]:
        """The script and its words with names for folders: the same on all machines."""
        return self.build_words(lambda need: f"{{{need.name}}}")

    @cached_property
    def name(self) -> str:
        """Its folder, below that of the scale: the same for equal words and inputs."""
        read = (f"{name} {checksum}" for name, checksum in sorted(self.inputs.items()))
        short = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:48]
        return f"{self.kind}/{short}-{compute_checksum(*self.named_words, *read)[:12]}"

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Checksums of the files that it reads and no other command makes, by names that are equal on all machines.
        Missing files have none."""
        folder = (PRE_TRAINING if self.kind == "train" else FINE_TUNING).folder
        recipes = self.flags.get("--recipe", RECIPES.get(self.script, ()))
        paths = [find_recipe(Path(name), folder) for name in recipes if isinstance(name, str)]
        found = {f"recipe {path.stem}": checksum_recipe(path) for path in paths}
        if self.kind == "shards":
            places = map(Path, self.build_words(lambda need: need.name, str(find_data_folder()))[1:])
            texts = zip(self.named_words[1:], map(checksum_text, places), strict=True)
            found |= {f"text {word}": checksum for word, checksum in texts if checksum}
        if self.reads is not None:
            with suppress(UserError):
                found |= {name: checksum_file(path) for name, path in find_files(self.reads).items()}
        return found

    def is_made(self, root: Path) -> bool:
        """Whether its result exists below the folder of the scale."""
        return (root / self.name / PRODUCTS[self.kind]).is_file()


def checksum_recipe(path: Path) -> str:
    """Computes the checksum of a recipe without its comments."""
    return compute_checksum(json.dumps(read_toml(path.read_text(encoding="utf-8")), sort_keys=True, default=str))


@cache
def checksum_text(place: Path) -> str:
    """Computes a checksum of the names and sizes of a folder's files, or of a file; empty if there are none."""
    paths = sorted(path for path in (place, *place.rglob("*")) if path.is_file())
    return compute_checksum(*(f"{path.relative_to(place)} {path.stat().st_size}" for path in paths)) if paths else ""


def compute_checksum(*texts: str) -> str:
    """Computes the checksum of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:DIGITS]


def checksum_file(path: Path) -> str:
    """Computes the checksum of a file, again only if its size or time has changed."""
    about = path.stat()
    return _checksum_version(path, about.st_size, about.st_mtime_ns)


@cache
def _checksum_version(path: Path, _size: int, _modified: int) -> str:
    return sha256(path)[:DIGITS]


def find_files(column: TableColumn) -> dict[str, Path]:
    """Finds the files that a column reads, by names that are equal on all machines. Raises UserError with the cure if
    one is missing."""
    found: dict[str, Path] = {}
    if column.entry in ("glue", "swag", "ner"):
        place = find_data(None, column.entry, column.cure)
        folder = f"glue/{FOLDERS[column.task]}" if column.entry == "glue" else column.entry
        finders = {"swag": find_swag, "ner": find_ner}
        splits = finders[column.entry](place) if column.entry in finders else find_task(place, column.task)
        labelled = chain.from_iterable(paths for split, paths in splits.items() if split.startswith(LABELLED))
        found = {f"{folder}/{path.name}": path for path in labelled}
    for pattern in column.files:
        folder, _, name = pattern.partition("/")
        place = find_data(None, folder, column.cure)
        files = {f"{folder}/{path.name}": path for path in sorted(place.glob(name)) if path.is_file()}
        if not files:
            raise UserError(f"{place}: no {name}; {column.cure}")
        found |= files
    return found


def find_missing(column: TableColumn) -> str:
    """Describes missing data of a column, with the cure; empty if it is complete."""
    try:
        find_files(column)
    except UserError as error:
        return str(error).removeprefix("--data: ")
    return ""


def find_lacking(declared: ScaledTable) -> dict[str, str]:
    """Returns the columns whose data is missing, with descriptions."""
    return {name: lacks for name, column in declared.measured.items() if (lacks := find_missing(column))}


class TableCell(NamedTuple):
    """A cell of the table for one pre-training, and the command that fills it."""

    row: str
    column: str
    command: Command


def list_cells(declared: ScaledTable) -> list[TableCell]:
    """Lists the cells of all rows and pre-trainings, the first pre-training of all rows first."""
    return [
        TableCell(row.name, name, command)
        for seed in range(1, declared.seeds + 1)
        for row in declared.rows
        if seed == 1 or not row.fresh  # fresh weights have no pre-training, and are fine-tuned once
        for name in declared.list_columns(row)
        if (command := build_command(declared, row, name, seed))
    ]


def build_command(declared: ScaledTable, row: Row, name: str, seed: int) -> Command | None:
    """Builds the command that fills a cell; None if there is none."""
    column = declared.columns[name]
    if column.is_tuned:
        return build_tuning_command(declared, row, name, seed)
    if row.fresh or (column.entry == "pairs" and row.backward):
        return None
    trained = build_training_command(declared, row, seed)
    if column.entry == "perplexity":
        return trained
    flags = split_flags("--model", find_model(declared, row, trained), *column.words, *declared.scale.pairs)
    label = describe_words("pairs of", trained.label, describe_place(row))
    return Command("pairs", label, f"finetuning/run_{column.entry}.py", flags, column=name, reads=column)


def build_training_command(declared: ScaledTable, row: Row, seed: int) -> Command:
    """Builds the command that pre-trains the model of a row, after that which makes its data."""
    row, scale = declared.table.find_row(row.model or row.name), declared.scale
    text = ("--docs", *scale.text) if scale.text else ()
    data = split_flags(*text, *scale.shards, *row.shards)
    shards = LeftPath(Command("shards", describe_words("text", *row.shards), "data_prep/shard.py", data))
    saved = ("--checkpoints.every", str(scale.save_every or scale.keep_every))
    kept = ("--checkpoints.keep_at", str([*range(scale.keep_every, scale.steps, scale.keep_every)]))
    own = (*row.train, *row.train_at.get(declared.scale_name, ()))
    [objective] = split_flags(*row.train).get("--objective.name", [""])
    for_objective = scale.train_for.get(str(objective), ())
    usual: tuple[Word, ...] = ("--recipe", scale.recipe, "--data", shards, *scale.train, *saved, *kept, *for_objective)
    flags = split_flags(*usual, *own)
    changes = [str(word) for word in join_flags(flags) if word not in usual]
    label = f"{describe_words(*row.shards, *changes) or 'base'} seed {seed}"
    return Command("train", label, "pretraining/train.py", flags | {"--seed": [str(SEED + seed - 1)]})


def build_tuning_command(declared: ScaledTable, row: Row, name: str, seed: int) -> Command:
    """Builds the command that fine-tunes the model of a row for a column."""
    column, scale, restarts = declared.columns[name], declared.scale, declared.restarts
    trained = build_training_command(declared, row, seed)
    layers = (FEATURES, row.features) if row.features else ()
    is_frozen = FEATURES in (*layers, *column.words)
    usual = scale.tune_features
    if not is_frozen or column.entry == "ner":
        usual = (*FROZEN_NER * is_frozen, *scale.tune, *scale.tune_for.get(name, ()))
    recipe = ("--recipe", row.recipe) if row.recipe and (not usual or "--recipe" in usual) else ()
    flags = split_flags(
        "--model", find_model(declared, row, trained), *usual, *recipe, *column.words, *row.tune, *layers
    )
    if row.backward:
        other = build_training_command(declared, declared.table.find_row(row.backward), seed)
        flags["--backward"] = [LeftPath(other)]
    flags |= {"--from-scratch": []} if row.fresh else {}
    flags["--seeds"] = [str(restarts)]
    task = Command("task", "demo task", "finetuning/fetch.py", {}, ("demo",))
    files = (LeftPath(task, "/package.toml"),) if column.entry == "task" else ()
    changes = (f"{restarts} restarts" * (restarts != scale.restarts), *row.tune, row.features)
    label = (column.task, *changes, "fresh weights of" * row.fresh, trained.label, describe_place(row))
    return Command("tune", describe_words(*label), f"finetuning/run_{column.entry}.py", flags, files, name, column)


def find_model(declared: ScaledTable, row: Row, trained: Command) -> LeftPath:
    """Finds the model of a row in the folder of its pre-training."""
    step = declared.scale.find_checkpoint(row.part)
    return LeftPath(trained, f"/checkpoints/step-{step:08}" if step else "")


def split_flags(*words: Word) -> Flags:
    """Splits words into flags with their values, of which the last ones count, in the place of the first."""
    flags: Flags = {}
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            own = flags[word] = []
        else:
            own.append(word)
    return flags


def join_flags(flags: Flags) -> list[Word]:
    """Joins flags with their values to words."""
    return [word for flag, values in flags.items() for word in (flag, *values)]


def describe_place(row: Row) -> str:
    """Describes at which part of its run the model of a row is taken."""
    return f"at {row.part:.2f}" if row.part < 1 else ""


def describe_words(*words: str) -> str:
    """Formats words of a command as text, without dashes and the sections of keys."""
    return " ".join(re.sub(r"^-+([a-z_]+\.)*", "", part) for word in words for part in word.split())


def order_commands(cells: Sequence[TableCell]) -> list[Command]:
    """Returns the commands that the cells need, each once, in an order in which they can run."""
    found: dict[str, Command] = {}
    for cell in cells:
        for command in (*cell.command.list_needs(), cell.command):
            found.setdefault(command.name, command)
    return list(found.values())


def divide_commands(commands: Sequence[Command], shares: int) -> list[list[Command]]:
    """Divides commands into parts with about the same number of pre-trainings. Commands that need the same model stay
    together; all parts make the data."""
    models = {
        command.name: {need.name for need in (*command.list_needs(), command) if need.kind == "train"}
        for command in commands
    }
    groups: list[set[str]] = []
    for own in filter(None, models.values()):
        joined = own.union(*(group for group in groups if group & own))
        groups = [*(group for group in groups if not group & own), joined]
    parts: list[list[Command]] = [[] for _ in range(shares)]
    for command in commands:
        numbers = {number % shares for number, group in enumerate(groups) if group & models[command.name]}
        for number in numbers or range(shares):
            parts[number].append(command)
    return parts
