"""The benchmark of fine-tuning: both sides get the same items and take turns, also without a real task or a peer."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.base_models import write_bert
from support.tasks import CUTTER, VOCABULARY

from benchmarks import fine_tuning
from benchmarks.contests import Turns
from benchmarks.fine_tuning import find_contests, run_embeddings
from benchmarks.finetuning_sides import Exercise, ItemSubset, encode_rows
from data_prep.common.errors import UserError
from data_prep.readers.text_pairs import TASK, TASK_TEXT
from finetuning.inputs import Ragged
from finetuning.tasks.sentences import SentenceItems

ITEMS = SentenceItems(CUTTER, 12, (["a b", "c", "d e f"], ["g", "h i", "j"]), np.array([[0], [1], [1]]))


def test_rows_are_the_items_padded_or_as_long_as_they_are() -> None:
    pieces = ITEMS.encode(np.arange(3)).sequences.pieces
    for width in (0, 12):
        for number, row in enumerate(encode_rows(ITEMS, "classes", width)):
            length = int(pieces.lengths[number])
            assert row["input_ids"] == [*pieces.row(number).tolist(), *[0] * (width - length)]
            assert sum(row["attention_mask"]) == length
            assert sum(row["token_type_ids"]) == len(ITEMS.texts[1][number].split()) + 1
            assert (row["labels"], len(row["input_ids"])) == ([0, 1, 1][number], width or length)


def test_some_items_are_those_of_the_split() -> None:
    some = ItemSubset(ITEMS, np.array([2, 0]))
    found, wanted = some.encode(np.array([1, 0])), ITEMS.encode(np.array([0, 2]))
    assert len(some) == 2
    assert found.sequences.pieces.values.tolist() == wanted.sequences.pieces.values.tolist()
    assert isinstance(found.labels, Ragged)
    assert found.labels.values.tolist() == [0, 1]


def test_ratios_are_of_the_same_turn() -> None:
    taken = {
        "training": Turns({"cloze": [1.0, 2.0, 4.0], "transformers": [3.0, 8.0, 8.0]}),
        "prediction": Turns({"cloze": [1.0], "transformers": [5.0]}),
    }
    found = fine_tuning.summarise(taken, {"training": 160, "prediction": 40})
    speeds = {"cloze_items_per_second": 80.0, "transformers_items_per_second": 20.0}
    assert found["training"] == {**speeds, "times_as_fast": {"median": 3.0, "lowest": 2.0, "highest": 4.0}}
    assert found["prediction"]["times_as_fast"]["median"] == 5.0
    assert found["prediction"]["cloze_items_per_second"] == 40.0


@pytest.mark.slow
def test_all_sides_take_their_turns(tmp_path: Path) -> None:
    data = tmp_path / "data" / "glue" / "SST-2"
    data.mkdir(parents=True)
    rows = "".join(f"{'a b c d'[: 1 + number % 7]}\t{number % 2}\n" for number in range(40))
    for split in ("train", "dev"):
        (data / f"{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    model = write_bert(tmp_path / "model", VOCABULARY, positions=128)
    exercise = Exercise("sst2", model, tmp_path / "data", steps=1, epochs=3, dtype="fp32")
    taken = fine_tuning.compete("fp32", 128, exercise)
    assert taken.keys() == {"training", "prediction"}
    assert all([*map(len, turns.seconds.values())] == [2, 2] for turns in taken.values())
    found = fine_tuning.run_contest(padded=False, exercise=exercise)
    assert found["against"]["fp32"]["training"]["times_as_fast"]["median"] > 0


def test_contests_are_those_whose_data_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path))
    console = Console(quiet=True)
    assert find_contests((), console) == [("mini", "demo", "padded"), ("mini", "demo", "dynamic")]
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    assert find_contests((), console) == [("mini", "cola", "padded"), ("mini", "cola", "dynamic")]
    assert find_contests(("base-demo-padded",), console) == [("base", "demo", "padded")]
    for name in ("mini-squad-padded", "mini-cola-pad", "huge-cola-padded", "cola-padded"):
        with pytest.raises(UserError, match=rf"{name}: no contest; .*, which CLOZE_DATA names, has cola, demo"):
            find_contests((name,), console)


@pytest.mark.slow
def test_both_sides_train_on_the_same_pairs_and_give_the_same_vectors(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [
        {"question": f"a {'b ' * (number % 5)}", "passage": f"{'c d ' * (1 + number % 7)}"} for number in range(140)
    ]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / TASK).write_text(TASK_TEXT)
    model = write_bert(tmp_path / "model", VOCABULARY, positions=128)
    found = run_embeddings(Exercise("pairs", model, tmp_path, steps=1, epochs=2, dtype="fp32"), ["a b", "c"])
    assert found["against"].keys() == {"autocast", "fp32"}
    for each in found["against"].values():
        assert all(turns["times_as_fast"]["median"] > 0 for turns in each.values())
