"""The tasks of GLUE, as gluebenchmark.com or the Hugging Face hub have them, and the zip for the leaderboard."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.readers.tables import read_parquet, read_tsv
from finetuning.files import splits
from finetuning.inputs import Ragged
from finetuning.tasks import scores
from finetuning.tasks.sentences import SentenceItems, SentenceTask, format_tsv, join_items, read_classes, read_scores
from finetuning.tasks.task import Setup
from pretraining.architectures.weights import TaskHead


class GlueFormat(NamedTuple):
    """The columns of a task's texts and labels, in TSV, counted from 0, and on the hub."""

    labels: tuple[str, ...]
    """The class names of the hub, in its order; none for a score."""
    texts: tuple[int, ...]
    label: int
    test: tuple[int, ...]
    """The text columns of the test split."""
    fields: tuple[str, ...] = ("sentence1", "sentence2")
    """The text columns on the hub."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The figures of a split; runs are compared by the last."""
    spelled: bool = False
    """Whether the leaderboard takes class names instead of numbers."""
    names: tuple[str, ...] | None = None
    """All columns of train and dev, if the first line of their files does not name them."""
    short_rows: bool = False
    """Whether rows of train and dev with too few columns are left out."""


PAIR = (1, 2)
ENTAILED, NLI = ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction")
F1, CORRELATION = ("accuracy", "f1", scores.AVERAGE), ("pearson", "spearman", scores.AVERAGE)
SCORES = (0.0, 5.0)
"""The limits of STS-B's scores."""
COLA = ("source", "label", "mark", "sentence")
DUPLICATE, QUESTIONS = ("not_duplicate", "duplicate"), ("question1", "question2")
TASKS = {
    "cola": GlueFormat(("unacceptable", "acceptable"), (3,), 1, (1,), ("sentence",), ("matthews",), names=COLA),
    "sst2": GlueFormat(("negative", "positive"), (0,), 1, (1,), ("sentence",)),
    "mrpc": GlueFormat(("not_equivalent", "equivalent"), (3, 4), 0, (3, 4), metrics=F1),
    "qqp": GlueFormat(DUPLICATE, (3, 4), 5, PAIR, QUESTIONS, F1, short_rows=True),
    "stsb": GlueFormat((), (7, 8), 9, (7, 8), metrics=CORRELATION),
    "mnli": GlueFormat(NLI, (8, 9), -1, (8, 9), ("premise", "hypothesis"), spelled=True),
    "qnli": GlueFormat(ENTAILED, PAIR, 3, PAIR, ("question", "sentence"), spelled=True),
    "rte": GlueFormat(ENTAILED, PAIR, 3, PAIR, spelled=True),
    "wnli": GlueFormat(ENTAILED[::-1], PAIR, 3, PAIR),
}
"""The tasks by the hub's names."""


@dataclass
class GlueTask(SentenceTask):
    """A task of GLUE, whose test splits are also written in the leaderboard's format."""

    majority: bool = False
    """Whether every item gets the most frequent class of the training items."""

    def answer_without_model(self) -> dict[str, Ragged] | None:
        """Answers every item with the most frequent class, if `majority`."""
        if not self.majority:
            return None
        assert self.train.labels is not None
        counts = np.bincount(self.train.labels[:, 0], minlength=len(self.head.labels))
        rows = {split: np.arange(1, len(items) + 1) for split, items in {**self.dev, **self.test}.items()}
        answer = (counts == counts.max()).astype(np.float32)
        return {split: Ragged(np.tile(answer, (len(ends), 1)), ends) for split, ends in rows.items()}

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes the predictions for a split, and for a test split the leaderboard's file too."""
        super().write_predictions(split, outputs, folder)
        if split in self.test:
            answers = scores.compute_answers(self.head.kind, outputs.values)
            with replacing(folder / name_leaderboard_file(self.name, split)) as file:
                file.write(format_leaderboard_file(self.name, answers))


def name_leaderboard_file(name: str, split: str) -> str:
    """Returns the leaderboard's name of the file for a test split."""
    special = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", splits.AX: splits.AX_FOLDER}
    return f"{special.get(split, splits.FOLDERS[name])}.tsv"


def format_leaderboard_file(name: str, answers: Array) -> bytes:
    """Formats the leaderboard's file for a test split."""
    columns = TASKS[name]
    if not columns.labels:
        spelled = [f"{score:.3f}" for score in np.clip(answers, *SCORES).tolist()]
    else:
        spelled = [columns.labels[answer] if columns.spelled else str(answer) for answer in answers.tolist()]
    return format_tsv(("index", "prediction"), ((str(row), said) for row, said in enumerate(spelled)))


def open_glue(name: str, folder: Path, setup: Setup) -> GlueTask:
    """Reads a task from its folder in this one; `name` may have the folder's spelling."""
    if (key := splits.normalize_name(name)) not in TASKS:
        raise UserError(f"{name}: no task of GLUE; there is {', '.join(TASKS)}")
    files, columns = splits.find_task(folder, key, setup.trained is not None), TASKS[key]
    if key == "mnli":
        names = (f"{splits.AX_FOLDER}.tsv", "test.tsv", *splits.list_hub_names("test"))
        files |= splits.find_splits(splits.find_task_folder(folder, splits.AX), {splits.AX: names})
    items, notes = {}, [splits.name_files(files)]
    for split, paths in files.items():
        read = (_read(path, columns, split, notes) for path in paths)
        items[split] = join_items([SentenceItems(setup.cutter, setup.settings.length, *each) for each in read])
    head = TaskHead("classes" if columns.labels else "score", columns.labels)
    majority = key == "wnli" and setup.settings.glue.wnli_majority and "train" in items and setup.trained is None
    metrics, fields = columns.metrics, columns.fields
    return GlueTask(key, head, metrics[-1], metrics, fields, items, tuple(notes), majority=majority)


def _read(path: Path, columns: GlueFormat, split: str, notes: list[str]) -> tuple[tuple[list[str], ...], Array | None]:
    """Reads the texts of a split and its labels, if any; notes skipped rows."""
    labelled = split.startswith(splits.LABELLED)
    texts: Sequence[str | int] = columns.fields
    label: str | int = "label"
    if path.suffix == ".parquet":
        table = read_parquet(path)
    else:
        table = read_tsv(path, columns.names if labelled else None, skip_short=labelled and columns.short_rows)
        texts, label = PAIR if split == splits.AX else columns.texts if labelled else columns.test, columns.label
    if table.skipped:
        notes.append(f"{path}: rows with too few columns, which are skipped: {table.skipped}")
    found = tuple(map(table.column, texts))
    if not labelled:
        return found, None
    if not columns.labels:
        return found, read_scores(table, label, SCORES)
    spelled = {spelled: number for number, name in enumerate(columns.labels) for spelled in (name, str(number))}
    return found, read_classes(table, label, spelled)


TEST_ROWS = {
    ("cola", "test"): 1_063,
    ("sst2", "test"): 1_821,
    ("mrpc", "test"): 1_725,
    ("stsb", "test"): 1_379,
    ("mnli", "test_matched"): 9_796,
    ("mnli", "test_mismatched"): 9_847,
    ("qnli", "test"): 5_463,
    ("qqp", "test"): 390_965,
    ("rte", "test"): 3_000,
    ("wnli", "test"): 146,
    ("mnli", splits.AX): 1_104,
}
"""Rows of the leaderboard's test splits."""
MADE = (1980, 1, 1, 0, 0, 0)
"""The fixed time of files in the zip."""


def write_submission(folders: Sequence[Path], path: Path, *, fill: bool = False) -> None:
    """Writes the answers in these folders to a zip for the leaderboard.

    `fill` answers missing splits with the first class or 0; without it they are a UserError.
    """
    contents, missing = {}, []
    for (name, split), rows in TEST_ROWS.items():
        file = name_leaderboard_file(name, split)
        if found := next((folder / file for folder in folders if (folder / file).is_file()), None):
            if (answers := len(read_tsv(found))) != rows:
                raise UserError(f"{found}: {answers:,} answers; the leaderboard has {rows:,} questions")
            contents[file] = found.read_bytes()
        else:
            missing.append(file)
            contents[file] = format_leaderboard_file(name, np.zeros(rows, np.int64))
    if missing and not fill:
        count = f"{len(missing)} of its {len(TEST_ROWS)} files"
        raise UserError(f"{path.name}: {count} have no answers yet; --submission fills them in")
    with replacing(path) as target, zipfile.ZipFile(target, "w") as archive:
        for file, content in contents.items():
            archive.writestr(zipfile.ZipInfo(file, MADE), content, zipfile.ZIP_DEFLATED)
