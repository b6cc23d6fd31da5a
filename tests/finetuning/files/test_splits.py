"""Files of splits: which are found, what is said of those that are missing, and what is held out in their place."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refusal

from finetuning.files.splits import choose_held_out, find_splits, list_hub_names, name_files

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


def test_a_line_names_all_files() -> None:
    parts = [Path(f"a/train-0000{number}-of-00002.parquet") for number in range(2)]
    said = "reads a/train-00000-of-00002.parquet, a/train-00001-of-00002.parquet, b/AX.tsv"
    assert name_files({"train": parts, "ax": [Path("b/AX.tsv")]}) == said


@settings(max_examples=30)
@given(st.lists(st.text(), min_size=2), st.floats(0.01, 0.99))
def test_some_are_held_out_and_never_all(texts: list[str], share: float) -> None:
    chosen, _ = choose_held_out(Path("a.csv"), texts, share, "rows")
    assert 0 < sum(chosen) < len(texts)
    again, _ = choose_held_out(Path("a.csv"), texts[::-1], share, "rows")
    assert sorted(itertools.compress(texts, chosen)) == sorted(itertools.compress(texts[::-1], again))
