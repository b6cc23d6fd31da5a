"""Files of splits: which are found, what is said of those that are missing, and what is held out in their place; and
SWAG from CSV with the official columns."""

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, refusal
from support.tasks import CUTTER, encode, labels, laid_out, saying

from finetuning.files.splits import choose_held_out, find_splits, list_hub_names
from finetuning.settings import FineTuning
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.swag import open_swag
from finetuning.tasks.task import Setup

NAMES = {"train": ("train.csv", *list_hub_names("train")), "test": ("test.csv",)}


def lay(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text("")
    return folder


def test_the_first_name_that_is_there_is_taken(tmp_path: Path) -> None:
    lay(tmp_path, "train-00000-of-00001.parquet")
    assert find_splits(tmp_path, NAMES) == {"train": [tmp_path / "train-00000-of-00001.parquet"]}
    lay(tmp_path, "train.csv", "training.csv")
    assert find_splits(tmp_path, NAMES) == {"train": [tmp_path / "train.csv"]}
    assert find_splits(tmp_path / "none", NAMES) == {}


def test_what_is_needed_and_missing_is_named_with_what_is_there(tmp_path: Path) -> None:
    lay(tmp_path, "train.csv")
    assert "test" not in find_splits(tmp_path, NAMES, needed=["train"])
    told = f"{tmp_path}: the test split is missing: neither test.csv; there is train.csv"
    assert refusal(find_splits, tmp_path, NAMES, needed=["test"]) == told
    told = "; python finetuning/fetch.py swag fetches it"
    assert refusal(find_splits, tmp_path, NAMES, ["test"], "swag").endswith(told)


@pytest.mark.parametrize("parts", [["0-of-00002"], ["1-of-00002"], ["0-of-00001", "0-of-00001-abc"]])
def test_parts_that_make_up_no_whole_are_refused(parts: list[str], tmp_path: Path) -> None:
    lay(tmp_path, *(f"train-0000{part}.parquet" for part in parts))
    assert f"but {len(parts)} are there" in refusal(find_splits, tmp_path, NAMES)


@settings(max_examples=30)
@given(st.lists(st.text(), min_size=2), st.floats(0.01, 0.99))
def test_some_are_held_out_and_never_all(texts: list[str], share: float) -> None:
    chosen, _ = choose_held_out(Path("a.csv"), texts, share, "rows")
    assert 0 < sum(chosen) < len(texts)
    again, _ = choose_held_out(Path("a.csv"), texts[::-1], share, "rows")
    assert sorted(itertools.compress(texts, chosen)) == sorted(itertools.compress(texts[::-1], again))


# SWAG

COLUMNS = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"


def write_items(path: Path, count: int, labelled: bool = True) -> None:
    row = '{0},lsmdc,{0},,"He sat, ""{0}"".",He,gold,a.,"b, b.",c.,d.'
    rows = [row.format(number) + f",{number % 4}" * labelled for number in range(count)]
    path.write_text("".join(f"{line}\r\n" for line in (COLUMNS + ",label" * labelled, *rows)))


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
    encoded = encode(task.train, 5, 2)
    assert (len(encoded), encoded.choices, len(encoded.sequences.pieces)) == (2, 4, 8)
    assert labels(task.train) == [0, 1, 2, 3, 0, 1]
    assert (len(task.dev["dev"]), len(task.test["test"])) == (4, 3)
    assert encode(task.test["test"]).labels is None
    assert encode(open_task(swag, length=8).train).sequences.pieces.lengths.max() == 8


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
    missing = r"none: the train split is missing: .*fetch\.py swag --out .*none fetches"
    assert_refusal(missing, open_task, tmp_path / "none")
    (swag / "val.csv").rename(swag / "elsewhere.csv")
    assert "the dev split is missing: neither val.csv nor dev.csv" in refusal(open_task, swag)
    write_items(swag / "val.csv", 2)
    content = (swag / "val.csv").read_text()
    (swag / "val.csv").write_text(content.replace("d.,1", "d.,4"))
    assert "val.csv:3: unknown label '4'; the labels are 0, 1, 2, 3" in refusal(open_task, swag)
    (swag / "val.csv").write_text(content.replace("ending3", "ending4"))
    assert "val.csv: no column 'ending3'; there is '', 'video-id'" in refusal(open_task, swag)


@pytest.mark.realdata
def test_the_real_items_are_read(real_data: Path) -> None:
    task = open_task(real_data / "swag")
    assert len(task.train) + len(task.dev["dev"]) == 160
