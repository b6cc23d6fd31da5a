"""The files of tasks that README and docs/ speak of, with a few rows each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

ROWS = 4
CONTEXT = "The river is longer than the mountain is high, and the empire lay between them."


def write_tasks(folder: Path) -> None:
    """A task of GLUE, SQuAD, SWAG, NER and one's own, where the commands look for them."""
    _write_glue(folder / "data" / "glue")
    _write_squad(folder / "data" / "squad")
    _write_swag(folder / "data" / "swag")
    _write_ner(folder / "data" / "ner")
    for name in ("train", "dev", "unseen"):
        rows = [[f"it was a film of {row} words", str(row % 3)] for row in range(ROWS)]
        _write_csv(folder / f"{name}.csv", [["review", "stars"], *rows])
    _write_tsv(folder / "pairs.tsv", [["good", "bad"], ["the cats sleep", "the cats sleeps"], ["he is", "he are"]])
    (folder / "reviews.txt").write_text("a fine film\ntwo hours that I want back\n")


def _write_glue(folder: Path) -> None:
    sentences = [[f"a fine film of {row} words", str(row % 2)] for row in range(ROWS)]
    for split in ("train", "dev"):
        _write_tsv(folder / "SST-2" / f"{split}.tsv", [["sentence", "label"], *sentences])


def _write_squad(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "dev"):
        asked = [
            {
                "id": f"{split}{row}",
                "question": f"What is longer, number {row}?",
                "answers": [{"text": "The river", "answer_start": 0}],
            }
            for row in range(ROWS)
        ]
        data = [{"title": "Rivers", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]
        (folder / f"{split}-v1.1.json").write_text(json.dumps({"version": "1.1", "data": data}))


def _write_swag(folder: Path) -> None:
    endings = [f"ending{number}" for number in range(4)]
    rows = [
        ["He sees a river.", "He", "swims.", "flies.", "reads.", "is a river.", str(row % 4)] for row in range(ROWS)
    ]
    for split in ("train", "val"):
        _write_csv(folder / f"{split}.csv", [["sent1", "sent2", *endings, "label"], *rows])


def _write_ner(folder: Path) -> None:
    folder.mkdir(parents=True)
    sentence = "Anna NNP B-NP B-PER\nsees VBZ B-VP O\nRome NNP B-NP B-LOC\n. . O O\n\n"
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text("-DOCSTART- -X- O O\n\n" + sentence * ROWS)


def _write_tsv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def _write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
