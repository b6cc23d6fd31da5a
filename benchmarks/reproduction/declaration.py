"""The declaration of a table of the paper: rows and what each changes, columns, and claims.

A file in `tables/` declares a table, `columns.toml` all columns, `scales.toml` the sizes. Words are those of a command
line; in those of a scale and of a column, `{data}` stands for the folder that CLOZE_DATA names.
"""

from __future__ import annotations

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
LEFT_OUT = ""
"""The stand-in of a column that is omitted at a scale."""


class TableColumn(Section):
    """A column: what it measures, and by which command."""

    title: str
    """The title."""
    entry: Literal["glue", "squad", "swag", "ner", "task", "pairs", "perplexity"]
    """The command of finetuning/ that measures it; `perplexity` is of the run's own held-out text."""
    words: Words = ()
    """Words of this command."""
    task: str = ""
    """The name of the task in results.json."""
    split: str = ""
    """The split to show (default: the first)."""
    figure: str = ""
    """The figure to show (default: that which selects runs)."""
    files: Words = ()
    """Patterns of the files that it reads, below data/ or the folder that CLOZE_DATA names; each needs a match."""
    cure: str = ""
    """How to get missing files."""
    chance: float | None = None
    """The score of guessing, if there is no row of fresh weights."""
    lower_is_better: bool = False
    """Whether lower is better, as for perplexity."""

    @property
    def is_tuned(self) -> bool:
        """Whether a model is fine-tuned for it; fresh weights can be too."""
        return self.entry not in ("pairs", "perplexity")

    @property
    def unit(self) -> float:
        """The factor of a figure when it is shown: scores are shown in percent."""
        return 1.0 if self.entry == "perplexity" else 100.0


class Row(Section):
    """A row: its changes to data, pre-training and fine-tuning."""

    name: str
    """The name in the paper."""
    runs: bool = True
    """Whether it is run, or shown with the paper's values alone."""
    hidden: bool = False
    """Whether it is not shown, and only makes the model of another row."""
    scales: Annotated[tuple[ScaleName, ...], Field(strict=False)] = ()
    """The scales at which it is run (default: all)."""
    model: str = ""
    """The row whose pre-trained model it takes (default: its own)."""
    backward: str = ""
    """The row of a right-to-left model that is joined to its own."""
    part: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the pre-training after which its model is taken, from the nearest checkpoint."""
    shards: Words = ()
    """Words of shard.py."""
    train: Words = ()
    """Words of train.py."""
    train_at: dict[ScaleName, Words] = Field(default_factory=dict)
    """More of them at some scales."""
    fresh: bool = False
    """Fine-tune fresh weights of the model's sizes."""
    tune: Words = ()
    """Words of each fine-tuning command."""
    recipe: str = ""
    """The recipe of fine-tuning, unless the scale has words of its own without a recipe."""
    features: str = ""
    """The layers whose frozen activations a BiLSTM reads, instead of fine-tuning."""
    columns: Words = ()
    """Its columns (default: all)."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's values."""


class Claim(Section):
    """A claim of the paper about the order of rows."""

    text: str
    """The claim, in the paper's words or ours."""
    rows: Words
    """Rows from the best to the worst; with `within`, rows that are compared with the first."""
    columns: Words
    """The columns of the claim."""
    within: Annotated[float, Field(gt=0)] | None = None
    """The largest distance from the first row, if the claim is that rows are equal; in the units shown."""

    def list_pairs(self, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yields pairs of the available rows, of which the first is claimed to be better or equal."""
        there = [name for name in self.rows if name in rows]
        yield from ((there[0], other) for other in there[1:]) if self.within else pairwise(there)


class Table(Section):
    """A table or a figure of the paper."""

    title: str
    """The title."""
    columns: Words
    """The paper's columns."""
    beside: Words = ("blimp",)
    """Columns beside the paper's, for all rows with a pre-trained model."""
    rows: Annotated[tuple[Row, ...], Field(strict=False, min_length=1)]
    """Rows."""
    claims: Annotated[tuple[Claim, ...], Field(strict=False)] = ()
    """Claims about the rows."""

    def find_row(self, name: str) -> Row:
        """Finds a row by name."""
        return next(row for row in self.rows if row.name == name)


class TableScale(Section):
    """The sizes of data, models and fine-tuning."""

    text: Words = ()
    """The text, as words of shard.py after --docs; none if `shards` names documents in pieces."""
    shards: Words = ()
    """More words of shard.py."""
    recipe: str
    """The recipe of pre-training."""
    train: Words = ()
    """Words of train.py."""
    train_for: dict[str, Words] = Field(default_factory=dict)
    """More of them for rows of single objectives."""
    ranks: Positive
    """Processes of pre-training on CPUs; on GPUs, there is one for each."""
    steps: Positive
    """Steps of a pre-training, over all phases."""
    keep_every: Positive
    """Steps between the checkpoints that are kept, for scores along the run."""
    save_every: Positive | None = None
    """Steps between checkpoints (default: the same)."""
    seeds_of: dict[str, Positive] = Field(default_factory=dict)
    """Pre-trainings of each row for single tables, by their names (default: 1)."""
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
    """Stand-ins for columns of the paper, or of one table, as in table5.squad; empty to omit a column."""
    minutes: dict[str, float] = Field(default_factory=dict)
    """Minutes of runs on 2 cores: `task`, `shards`, `train`, and those of fine-tunings and minimal pairs by column."""

    def find_checkpoint(self, part: float) -> int:
        """Returns the step of the checkpoint nearest to a part of the run; 0 for the end."""
        step = max(1, round(part * self.steps / self.keep_every)) * self.keep_every
        return step if step < self.steps and part < 1.0 else 0


class Common(Section):
    """The content of columns.toml, or of scales.toml."""

    columns: dict[str, TableColumn] = Field(default_factory=dict)
    """Columns by their names."""
    scales: dict[ScaleName, TableScale] = Field(default_factory=dict)
    """Scales by their names."""


class ScaledTable(NamedTuple):
    """A table with its columns at a scale."""

    name: str
    table: Table
    scale_name: ScaleName
    scale: TableScale
    columns: dict[str, TableColumn]
    """All declared columns."""

    @property
    def title(self) -> str:
        """`Table 5: …` as a heading."""
        kind, number = self.name[:-1].capitalize(), self.name[-1]
        return f"{kind} {number}: {self.table.title}"

    @property
    def rows(self) -> list[Row]:
        """The rows that are run."""
        usable = [row for row in self.table.rows if row.runs and not row.hidden]
        return [row for row in usable if not row.scales or self.scale_name in row.scales]

    @property
    def seeds(self) -> int:
        """Pre-trainings of each row."""
        return self.scale.seeds_of.get(self.name, 1)

    @property
    def restarts(self) -> int:
        """Fine-tunings of each model."""
        return self.scale.restarts_of.get(self.name, self.scale.restarts)

    def find_stand_in(self, column: str) -> str:
        """Returns the column that stands for one of the paper; LEFT_OUT if it is omitted."""
        given = self.scale.stand_ins
        return given.get(f"{self.name}.{column}", given.get(column, column))

    @property
    def measured(self) -> dict[str, TableColumn]:
        """The measured columns, each once, in the order of the paper's."""
        names = dict.fromkeys(map(self.find_stand_in, (*self.table.columns, *self.table.beside)))
        return {name: self.columns[name] for name in names if name != LEFT_OUT}

    def list_columns(self, row: Row) -> list[str]:
        """Returns the measured columns of a row."""
        own = set(map(self.find_stand_in, row.columns)) | set(self.table.beside)
        return [name for name in self.measured if not row.columns or name in own]


def list_tables() -> list[str]:
    """Lists all tables: table1 to table8, then figure5."""
    return sorted((path.stem for path in (HERE / "tables").glob("*.toml")), key=lambda name: (name[0] != "t", name))


@cache
def load_table(name: str, scale: ScaleName) -> ScaledTable:
    """Reads the declaration of a table. Raises UserError if there is none."""
    if name not in list_tables():
        raise UserError(f"{name}: is not declared; there is {', '.join(list_tables())}")
    table = read_settings(Form(Table), HERE / "tables" / f"{name}.toml", find_faults=find_table_faults)
    files = (HERE / "columns.toml", HERE / "scales.toml")
    columns, scales = (read_settings(Form(Common), path, find_faults=lambda _: []) for path in files)
    return ScaledTable(name, table, scale, scales.scales[scale], columns.columns)


def find_table_faults(table: Table) -> list[str]:
    """Lists unknown or repeated names in a table."""
    rows = [row.name for row in table.rows]
    faults = [f"rows: two are called {name}" for name in set(rows) if rows.count(name) > 1]
    others = [(row.model, row.backward) for row in table.rows] + [claim.rows for claim in table.claims]
    columns = [(*row.paper, *row.columns) for row in table.rows] + [claim.columns for claim in table.claims]
    faults += [f"rows: {name} is named, but is no row" for name in set().union(*others) - {*rows, ""}]
    return faults + [f"columns: {name} is named, but is no column" for name in set().union(*columns) - {*table.columns}]
