"""SWAG from CSV with the official columns: what is laid out for the four endings, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import refusal
from support.tasks import CUTTER, labels, laid_out, saying

from data_prep.common.errors import UserError
from finetuning.settings import FineTuning
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.swag import open_swag
from finetuning.tasks.task import Setup

NAMES = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
NAMES += [f"ending{number}" for number in range(4)]


def write_items(path: Path, count: int, labelled: bool = True) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*NAMES, *["label"] * labelled])
        for number in range(count):
            row = [number, "lsmdc", number, "", f'He sat, "{number}".', "He", "gold", "a.", "b, b.", "c.", "d."]
            writer.writerow([*row, *[number % 4] * labelled])


def open_task(folder: Path, **settings: object) -> SentenceTask:
    return open_swag(folder, Setup(CUTTER, FineTuning.model_validate(settings)))


@pytest.fixture
def swag(tmp_path: Path) -> Path:
    (tmp_path / "swag").mkdir()
    write_items(tmp_path / "swag/train.csv", 6)
    write_items(tmp_path / "swag/val.csv", 4)
    write_items(tmp_path / "swag/test.csv", 3, labelled=False)
    return tmp_path / "swag"


def test_an_item_is_one_pair_for_each_ending(swag: Path) -> None:
    task = open_task(swag)
    assert laid_out(task.train, 1) == [
        f'[CLS] he sat , " 1 " . [SEP] he {ending} . [SEP]' for ending in ("a", "b , b", "c", "d")
    ]
    encoded = task.train.encode(np.array([5, 2]))
    assert (len(encoded), encoded.choices, len(encoded.sequences.pieces)) == (2, 4, 8)
    assert labels(task.train) == [0, 1, 2, 3, 0, 1]
    assert (len(task.dev["dev"]), len(task.test["test"])) == (4, 3)
    assert task.test["test"].encode(np.array([0])).labels is None
    assert open_task(swag, length=8).train.encode(np.arange(6)).sequences.pieces.lengths.max() == 8


def test_accuracy_counts_the_right_endings(swag: Path, tmp_path: Path) -> None:
    task = open_task(swag)
    assert task.score("dev", saying([0, 1, 2, 0], 4)) == {"accuracy": 0.75}
    task.write_predictions("test", saying([3, 0, 1], 4), tmp_path)
    lines = (tmp_path / "predictions_test.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lines[1:]] == [["0", "3"], ["1", "0"], ["2", "1"]]


def test_the_parquet_of_the_hub_is_read(tmp_path: Path) -> None:
    columns = {"sent1": ["A."], "sent2": ["B"], **{f"ending{number}": [f"{number}."] for number in range(4)}}
    (tmp_path / "regular").mkdir()
    for split, label in {"train": 2, "validation": 1}.items():
        path = tmp_path / f"regular/{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({**columns, "label": pa.array([label])}), path)
    task = open_task(tmp_path)
    assert (labels(task.train), labels(task.dev["dev"])) == ([2], [1])
    assert laid_out(task.train, 0)[3] == "[CLS] a . [SEP] b 3 . [SEP]"


def test_one_file_alone_is_parted(tmp_path: Path) -> None:
    write_items(tmp_path / "some.csv", 10)
    task = open_task(tmp_path)
    assert (len(task.train), len(task.dev["dev"])) == (8, 2)
    assert task.notes == (f"{tmp_path}/some.csv: 2 of its 10 rows are held out from training and scored",)


def test_what_is_wrong_is_told(swag: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: the train split is missing: .*fetch\.py swag --out .*none fetches"):
        open_task(tmp_path / "none")
    (swag / "val.csv").rename(swag / "elsewhere.csv")
    assert "the dev split is missing: neither val.csv nor dev.csv" in refusal(open_task, swag)
    write_items(swag / "val.csv", 2)
    content = (swag / "val.csv").read_text()
    (swag / "val.csv").write_text(content.replace("d.,1", "d.,4"))
    assert "val.csv:3: unknown label '4'; the labels are 0, 1, 2, 3" in refusal(open_task, swag)
    (swag / "val.csv").write_text(content.replace("ending3", "ending4"))
    assert "val.csv: no column 'ending3'; there is , video-id" in refusal(open_task, swag)


@pytest.mark.realdata
def test_the_real_items_are_read(real_data: Path) -> None:
    task = open_task(real_data / "swag")
    assert len(task.train) + len(task.dev["dev"]) == 160
