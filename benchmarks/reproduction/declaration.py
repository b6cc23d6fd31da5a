"""What a table of the paper declares: its rows and what each changes, its columns, and the orderings that it claims.

A file of `tables/` has a table, `columns.toml` what a column measures, `scales.toml` how large everything is. Words are
those of a command line; in those of a scale and of a column, `{data}` is the folder that CLOZE_DATA names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, read_settings
from data_prep.common.sections import Positive, Section

HERE = Path(__file__).parent
ScaleName = Literal["demo", "tiny", "mini", "gpu", "base", "large"]
Words = Annotated[tuple[str, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
LEFT_OUT = ""
"""What stands in for a column that a scale has not."""


class TableColumn(Section):
    """What a column of a table measures, and by which command."""

    title: str
    """What a reader calls it."""
    entry: Literal["glue", "squad", "swag", "ner", "task", "pairs", "perplexity"]
    """The command of finetuning/ that measures it; `perplexity`: the run's own text that is held out."""
    words: Words = ()
    """Words of that command."""
    task: str = ""
    """What results.json calls the task."""
    split: str = ""
    """The split that is shown (default: the first)."""
    figure: str = ""
    """The figure that is shown (default: that by which runs are compared)."""
    files: Names = ()
    """Files that it reads, as patterns below data/ or the folder that CLOZE_DATA names; one of each is needed."""
    cure: str = ""
    """What a user does who has none."""
    chance: float | None = None
    """What guessing scores, where there is no row of fresh weights."""
    lower_is_better: bool = False
    """Whether less is better, as of perplexity."""

    @property
    def is_tuned(self) -> bool:
        """Whether a model is fine-tuned for it, as fresh weights can be too."""
        return self.entry not in ("pairs", "perplexity")

    @property
    def unit(self) -> float:
        """By what a figure is multiplied to be shown: scores are shown in hundredths."""
        return 1.0 if self.entry == "perplexity" else 100.0


class Row(Section):
    """A row: what it changes in data, pre-training and fine-tuning."""

    name: str
    """What the paper calls it."""
    runs: bool = True
    """Whether it is run here, rather than shown with the paper's values alone."""
    hidden: bool = False
    """Whether it is there for the sake of another row alone, which takes its model."""
    scales: Annotated[tuple[ScaleName, ...], Field(strict=False)] = ()
    """The scales at which it is run (default: all)."""
    model: str = ""
    """The row whose pre-trained model it takes (default: its own)."""
    backward: str = ""
    """The row whose model reads from the end, and is joined to its own."""
    part: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How much of the pre-training lies behind its model: that of the nearest checkpoint is taken."""
    shards: Words = ()
    """Words of shard.py."""
    train: Words = ()
    """Words of train.py."""
    train_at: dict[ScaleName, Words] = Field(default_factory=dict)
    """More of them at single scales."""
    fresh: bool = False
    """Fine-tune fresh weights of the model's sizes."""
    tune: Words = ()
    """Words of each command of fine-tuning."""
    recipe: str = ""
    """The recipe of its fine-tuning, where the scale has no words of its own for it but another recipe."""
    features: str = ""
    """The layers whose frozen activations a BiLSTM stands on, instead of fine-tuning."""
    columns: Names = ()
    """The columns that it has (default: all)."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's values."""


class Claim(Section):
    """An ordering of rows that the paper claims."""

    text: str
    """The claim in the paper's words, or ours."""
    rows: Names
    """Rows from the best to the worst; where they are alike, all of them, the first of which the others are compared
    with."""
    columns: Names
    """The columns for which it is claimed."""
    within: Annotated[float, Field(gt=0)] | None = None
    """The rows are alike: no farther from the first than this, in the units shown."""

    def list_pairs(self, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The pairs of those rows that are there, of which the first is claimed to be better, or alike."""
        there = [name for name in self.rows if name in rows]
        yield from ((there[0], other) for other in there[1:]) if self.within else pairwise(there)


class Table(Section):
    """A table or a figure of the paper."""

    title: str
    """What it shows."""
    columns: Names
    """The paper's columns."""
    beside: Names = ("blimp",)
    """Columns that stand beside the paper's, wherever a model was pre-trained."""
    seeds: Positive | None = None
    """Pre-trainings of each row (default: as the scale has them)."""
    rows: Annotated[tuple[Row, ...], Field(strict=False, min_length=1)]
    """Rows."""
    claims: Annotated[tuple[Claim, ...], Field(strict=False)] = ()
    """What is claimed of them."""
    curve: bool = False
    """Whether the rows are places along a run, which a chart shows."""
    average: bool = False
    """Whether rows have a mean over all columns of the paper."""

    def find_row(self, name: str) -> Row:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def select_rows(self, scale: ScaleName) -> list[Row]:
        """The rows that are run at a scale."""
        return [row for row in self.rows if row.runs and not row.hidden and (not row.scales or scale in row.scales)]


class Scale(Section):
    """How large everything is."""

    what: str
    """For whom it is, in words."""
    text: Words = ()
    """What shards are made of, as words of shard.py after --docs; none where `shards` names documents in pieces."""
    shards: Words = ()
    """More words of shard.py."""
    recipe: str
    """The recipe of pre-training."""
    train: Words = ()
    """Values that it changes."""
    ranks: Positive
    """Processes of pre-training; where a machine has GPUs, it is as many as these."""
    steps: Positive
    """Steps of a pre-training, all phases together."""
    keep_every: Positive
    """Steps between the checkpoints that stay, for what is measured along the run."""
    save_every: Positive | None = None
    """Steps between all checkpoints (default: the same)."""
    seeds: Positive = 1
    """Pre-trainings of each row."""
    seeds_of: dict[str, Positive] = Field(default_factory=dict)
    """The same for single tables, by their names."""
    restarts: Positive
    """Fine-tunings of each model."""
    restarts_of: dict[str, Positive] = Field(default_factory=dict)
    """The same for single tables, by their names."""
    tune: Words = ()
    """Words of each command of fine-tuning."""
    tune_for: dict[str, Words] = Field(default_factory=dict)
    """More of them for single columns."""
    tune_features: Words = ()
    """Words of fine-tuning by frozen features, instead of those."""
    pairs: Words = ()
    """Words of run_pairs.py."""
    stand_ins: dict[str, str] = Field(default_factory=dict)
    """What is measured instead of a column of the paper, or of one table alone, as table5.squad; nothing, where it is
    left out."""
    minutes: dict[str, float] = Field(default_factory=dict)
    """What runs take on 2 cores: shards, train, pairs, and fine-tunings by their columns."""

    def find_checkpoint(self, part: float) -> int:
        """The step of the checkpoint that is nearest to a part of the run; 0 for its end."""
        step = max(1, round(part * self.steps / self.keep_every)) * self.keep_every
        return step if step < self.steps and part < 1.0 else 0

    def completed_share(self, part: float) -> float:
        """How much of the run lies behind that checkpoint."""
        return (self.find_checkpoint(part) or self.steps) / self.steps


class Columns(Section):
    """All columns that a table can have."""

    columns: dict[str, TableColumn]
    """Columns by their names."""


class Scales(Section):
    """All scales."""

    scales: dict[ScaleName, Scale]
    """Scales by their names."""


class Declared(NamedTuple):
    """A table with its columns at a scale."""

    name: str
    table: Table
    scale_name: ScaleName
    scale: Scale
    columns: dict[str, TableColumn]
    """All columns that there are."""

    @property
    def title(self) -> str:
        """`Table 5: …` as a heading."""
        kind, number = self.name[:-1].capitalize(), self.name[-1]
        return f"{kind} {number}: {self.table.title}"

    @property
    def rows(self) -> list[Row]:
        """The rows that are run."""
        return self.table.select_rows(self.scale_name)

    @property
    def seeds(self) -> int:
        """Pre-trainings of each row."""
        return self.scale.seeds_of.get(self.name, self.table.seeds or self.scale.seeds)

    @property
    def restarts(self) -> int:
        """Fine-tunings of each model."""
        return self.scale.restarts_of.get(self.name, self.scale.restarts)

    def find_stand_in(self, column: str) -> str:
        """The column that is measured for one of the paper; LEFT_OUT where none is."""
        given = self.scale.stand_ins
        return given.get(f"{self.name}.{column}", given.get(column, column))

    @property
    def measured(self) -> dict[str, TableColumn]:
        """The columns that are measured here, each once, in the order of the paper's."""
        names = dict.fromkeys(map(self.find_stand_in, (*self.table.columns, *self.table.beside)))
        return {name: self.columns[name] for name in names if name != LEFT_OUT}

    @property
    def averaged(self) -> list[str]:
        """The columns of which a row has a mean: those that stand for the paper's, not what is beside them."""
        return [name for name in self.measured if name not in self.table.beside] if self.table.average else []

    def list_columns(self, row: Row) -> list[str]:
        """The columns that a row has here."""
        own = set(map(self.find_stand_in, row.columns)) | set(self.table.beside)
        return [name for name in self.measured if not row.columns or name in own]

    @property
    def replaced(self) -> dict[str, str]:
        """What is measured instead of the paper's columns that are not."""
        there = {name: self.find_stand_in(name) for name in self.table.columns}
        return {name: other for name, other in there.items() if other != name}


def list_tables() -> list[str]:
    """The tables that there are: table1 to table8, then figure5."""
    return sorted((path.stem for path in (HERE / "tables").glob("*.toml")), key=lambda name: (name[0] != "t", name))


def format_flag(name: str) -> str:
    """A table as the command line names it: `--table 5` for table5."""
    return "--{} {}".format(*re.findall(r"[a-z]+|-?\d+", name))


@cache
def load_table(name: str, scale: ScaleName) -> Declared:
    """Reads the declaration of a table; UserError where there is none."""
    if name not in list_tables():
        there = ", ".join(map(format_flag, list_tables()))
        raise UserError(f"{format_flag(name)}: is not declared; there is {there}")
    table = read_settings(Form(Table), HERE / "tables" / f"{name}.toml", find_faults=find_table_faults)
    columns, scales = read_common()
    return Declared(name, table, scale, scales[scale], columns)


@cache
def read_common() -> tuple[dict[str, TableColumn], dict[ScaleName, Scale]]:
    """Reads what tables have in common: columns and scales."""
    columns = read_settings(Form(Columns), HERE / "columns.toml", find_faults=lambda _: [])
    scales = read_settings(Form(Scales), HERE / "scales.toml", find_faults=lambda _: [])
    return columns.columns, scales.scales


def find_table_faults(table: Table) -> list[str]:
    """Lists what a table names that it has not."""
    rows = [row.name for row in table.rows]
    faults = [f"rows: two are called {name}" for name in set(rows) if rows.count(name) > 1]
    for row in table.rows:
        others = {name for name in (row.model, row.backward) if name}
        faults += [f"rows: {row.name} names {name}, which is no row" for name in others - set(rows)]
        unknown = {*row.paper, *row.columns} - {*table.columns}
        faults += [f"rows: {row.name} has {name}, which is no column" for name in unknown]
    for claim in table.claims:
        faults += [f"claims: {claim.text}: no row {name}" for name in claim.rows if name not in rows]
        faults += [f"claims: {claim.text}: no column {name}" for name in claim.columns if name not in table.columns]
    return faults
