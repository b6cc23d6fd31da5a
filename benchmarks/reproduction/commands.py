"""The commands that fill a table, each named by a hash of its words and inputs, so that tables share them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from benchmarks.reproduction.declaration import Declared, Row, TableColumn
from benchmarks.reproduction.inputs import SHARD, TRAIN, checksum_inputs, compute_checksum
from data_prep.shards import MANIFEST
from finetuning.results import RESULTS

CommandKind = Literal["task", "shards", "train", "tune", "pairs"]
PRODUCTS: Mapping[CommandKind, str] = {
    "task": "package.toml",
    "shards": MANIFEST,
    "train": "export/config.json",
    "tune": RESULTS,
    "pairs": RESULTS,
}
"""The last file that a command writes."""
SEED = 12345
"""The seed of a row's first pre-training, that of the recipes; the next ones follow."""
OBJECTIVE = "--objective.name"
FEATURES = "--features.layers"
"""The flag for the layers whose frozen activations replace fine-tuning."""


@dataclass(frozen=True)
class Command:
    """A command that leaves a folder. {NAME} in its words is the folder of another command, {data} that of the data."""

    kind: CommandKind
    label: str
    """What it makes, in words."""
    script: str
    words: tuple[str, ...]
    needs: tuple[Command, ...] = ()
    column: str = ""
    """The column that it fills."""
    reads: TableColumn | None = None
    """The column whose files it reads."""

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Checksums of the files that it reads and no other command makes, by name."""
        return checksum_inputs(self.script, self.words, self.reads)

    @cached_property
    def name(self) -> str:
        """Its folder, below that of the scale: the same for equal words and inputs."""
        read = (f"{name} {checksum}" for name, checksum in sorted(self.inputs.items()))
        short = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:48]
        return f"{self.kind}/{short}-{compute_checksum(self.script, *self.words, *read)[:12]}"

    def is_made(self, root: Path) -> bool:
        """Whether its result exists below the folder of the scale."""
        return (root / self.name / PRODUCTS[self.kind]).is_file()

    @property
    def folder(self) -> str:
        """The placeholder for its folder in the words of other commands."""
        return f"{{{self.name}}}"

    def build_words(self, root: Path, data: Path) -> list[str]:
        """Builds the script and its words, with folders for placeholders."""
        places = {need.folder: str(root / need.name) for need in self.list_needs()}
        places["{data}"] = str(data)
        words = []
        for word in self.words:
            for place, folder in places.items():
                word = word.replace(place, folder)
            words.append(word)
        return [self.script, *words, "--out", str(root / self.name)]

    def list_needs(self) -> Iterator[Command]:
        """Yields the commands that must run before it, in order."""
        for need in self.needs:
            yield from need.list_needs()
            yield need


@dataclass(frozen=True)
class TableCell:
    """A cell of the table for one pre-training, and the command that fills it."""

    row: str
    column: str
    seed: int
    """Number of the pre-training, counted from 1."""
    command: Command


class CellLister:
    """Lists the cells of a table at a scale."""

    def __init__(self, declared: Declared) -> None:
        self._declared, self._scale = declared, declared.scale

    def list_cells(self) -> Iterator[TableCell]:
        """Yields the cells of all rows and pre-trainings, the first pre-training of all rows first."""
        for seed in range(1, self._declared.seeds + 1):
            # Fresh weights have no pre-training, and are fine-tuned once.
            for row in (each for each in self._declared.rows if seed == 1 or not each.fresh):
                for name in self._declared.list_columns(row):
                    if command := self._build_command(row, name, seed):
                        yield TableCell(row.name, name, seed, command)

    def _build_command(self, row: Row, name: str, seed: int) -> Command | None:
        """Returns the command that fills a cell; None if there is none."""
        column = self._declared.measured[name]
        if column.entry == "perplexity":
            return None if row.fresh else self._build_training_command(row, seed)
        if column.entry == "pairs":
            return None if row.fresh or row.backward else self._build_pairs_command(row, column, seed)
        return self._build_tuning_command(row, name, seed)

    def _build_shards_command(self, row: Row) -> Command:
        """Returns the command that makes the data of a row."""
        scale = self._scale
        label = " ".join(("text", *(word.strip("-") for word in row.shards)))
        text = ("--docs", *scale.text) if scale.text else ()
        return Command("shards", label, SHARD, merge_words(*text, *scale.shards, *row.shards))

    def _build_training_command(self, row: Row, seed: int) -> Command:
        """Returns the command that pre-trains the model of a row."""
        row = self._declared.table.find_row(row.model) if row.model else row
        scale, shards = self._scale, self._build_shards_command(row)
        often = str(scale.save_every or scale.keep_every)
        kept = ("--checkpoints.every", often, "--checkpoints.keep_every", str(scale.keep_every))
        usual = merge_words("--recipe", scale.recipe, "--data", shards.folder, *scale.train, *kept)
        names = split_flags(row.train).get(OBJECTIVE, ())
        for_objective = [word for name in names for word in scale.train_for.get(name, ())]
        own = merge_words(*usual, *for_objective, *row.train, *row.train_at.get(self._declared.scale_name, ()))
        words = merge_words(*own, "--seed", str(SEED + seed - 1))
        changes = " ".join((*row.shards, *[word for word in own if word not in (*usual, *for_objective)]))
        return Command("train", f"{describe_words(changes) or 'base'} seed {seed}", TRAIN, words, (shards,))

    def _model(self, row: Row, seed: int) -> tuple[str, Command]:
        """Returns the value of `--model` for a row, and the command that makes the model."""
        trained = self._build_training_command(row, seed)
        step = self._scale.find_checkpoint(row.part)
        return (f"{trained.folder}/checkpoints/step-{step:08}" if step else trained.folder), trained

    def _build_pairs_command(self, row: Row, column: TableColumn, seed: int) -> Command:
        model, trained = self._model(row, seed)
        words = merge_words("--model", model, *column.words, *self._scale.pairs)
        label = f"pairs of {trained.label}{describe_place(row)}"
        return Command("pairs", label, name_script("pairs"), words, (trained,), "blimp", column)

    def _build_tuning_command(self, row: Row, name: str, seed: int) -> Command:
        """Returns the command that fine-tunes the model of a row for a column."""
        column, scale = self._declared.columns[name], self._scale
        model, trained = self._model(row, seed)
        files: tuple[str, ...] = ()
        needs: tuple[Command, ...] = (trained,)
        own = self._words(row, name)
        if row.backward:
            other = self._build_training_command(self._declared.table.find_row(row.backward), seed)
            own, needs = [*own, "--backward", other.folder], (*needs, other)
        if column.entry == "task":
            task = Command("task", "demo task", "finetuning/fetch.py", ("demo",))
            files, needs = (f"{task.folder}/package.toml",), (*needs, task)
        own += [*["--from-scratch"] * row.fresh, "--seeds", str(self._declared.restarts)]
        words = (*files, *merge_words("--model", model, *own))
        more = f"{self._declared.restarts} restarts" * (self._declared.restarts != scale.restarts)
        changed = describe_words(" ".join((more, *row.tune, row.features, "fresh weights of" * row.fresh)))
        label = f"{column.task} {changed} {trained.label}{describe_place(row)}"
        return Command("tune", " ".join(label.split()), name_script(column.entry), words, needs, name, column)

    def _words(self, row: Row, name: str) -> list[str]:
        """Returns the words for fine-tuning a row for a column."""
        column, scale = self._declared.columns[name], self._scale
        flag = "--features" if column.entry == "ner" else FEATURES
        features = [flag, row.features] if row.features else []
        usual = [*scale.tune, *scale.tune_for.get(name, ())]
        if FEATURES in (*features, *column.words):
            usual = [*scale.tune_features]
        recipe = ["--recipe", row.recipe] if row.recipe and (not usual or "--recipe" in usual) else []
        return [*usual, *recipe, *column.words, *row.tune, *features]


def name_script(entry: str) -> str:
    """Names the script of a column's entry."""
    return f"finetuning/run_{entry}.py"


def split_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Splits words into flags with their values, of which the last ones count."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            own = flags[word] = []
        else:
            own.append(word)
    return flags


def join_flags(flags: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Joins flags with their values to words."""
    return tuple(word for flag, values in flags.items() for word in (flag, *values))


def merge_words(*words: str) -> tuple[str, ...]:
    """Merges repeated flags: the last values in the place of the first."""
    return join_flags(split_flags(words))


def describe_place(row: Row) -> str:
    """Describes at which part of its run the model of a row is taken."""
    return f" at {row.part:.2f}" if row.part < 1 else ""


def describe_words(words: str) -> str:
    """Formats words of a command as text, without dashes and the sections of keys."""
    return re.sub(r"(^|(?<= ))-+([a-z_]+\.)*", "", words)


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
    groups: list[set[str]] = []
    for command in commands:
        models = {need.name for need in (*command.list_needs(), command) if need.kind == "train"}
        if models:
            joined = set().union(models, *(group for group in groups if group & models))
            groups = [*(group for group in groups if not group & models), joined]
    parts: list[list[Command]] = [[] for _ in range(shares)]
    place = {name: number % shares for number, group in enumerate(groups) for name in group}
    for command in commands:
        own = {place[need.name] for need in (*command.list_needs(), command) if need.name in place}
        for number in own or range(shares):
            parts[number].append(command)
    return parts
