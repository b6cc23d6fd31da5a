"""Files that the columns of a table read, and what is missing of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reproduction.declaration import load_table
from benchmarks.reproduction.inputs import find_files, find_missing

NEEDED = {
    "mnli": ["glue/MNLI/train.tsv", "glue/MNLI/dev_matched.tsv", "glue/MNLI/dev_mismatched.tsv"],
    "stsb": ["glue/STS-B/train.tsv", "glue/STS-B/dev.tsv"],
    "squad": ["squad/train-v1.1.json"],
    "squad2": ["squad/train-v2.0.json"],
    "swag": ["swag/train.csv", "swag/val.csv"],
    "ner": ["ner/train.txt", "ner/valid.txt"],
    "nerfeatures": ["ner/eng.train", "ner/eng.testa"],
    "blimp": ["pairs/blimp.jsonl.xz"],
}
"""What a column needs: SQuAD's commands hold out a part of what there is."""


@pytest.mark.parametrize("name", NEEDED)
def test_a_column_has_its_data_when_its_command_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path / "given"))
    column = load_table("table1", "base").columns[name]
    assert find_missing(column)
    for number, file in enumerate(NEEDED[name], 1):
        path = tmp_path / "given" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        assert bool(find_missing(column)) == (number < len(NEEDED[name]))
    assert sorted(find_files(column)) == sorted(NEEDED[name])


def test_a_lone_csv_serves_swag_as_it_serves_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path))
    (tmp_path / "swag").mkdir()
    (tmp_path / "swag" / "some.csv").write_text("x")
    assert not find_missing(load_table("table4", "base").columns["swag"])
