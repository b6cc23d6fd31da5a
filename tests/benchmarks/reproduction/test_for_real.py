"""A table with its real commands, at the smallest size: text, pre-training, fine-tuning and minimal pairs."""

import io
import json
import lzma
import os
import signal
import threading
from pathlib import Path

import pytest
from conftest import WORDS, write_wiki
from rich.console import Console
from support.reproduction import read_result

from benchmarks import reproduce
from benchmarks.reproduce import Reproduce, make
from benchmarks.reproduction.declaration import ScaledTable, load_table
from data_prep.common.codes import Code

ROWS = ("BERT", "LTR & No NSP", "from scratch")


def smallest(folder: Path) -> ScaledTable:
    """Table 5 without a row, on made-up text, in a handful of steps."""
    table, demo = load_table("table5", "demo").table, load_table("table5", "demo")
    text = write_wiki(folder / "wiki", documents=60)
    steps = ("--phases.0.steps", "12", "--phases.1.steps", "4", "--phases.1.batch", "4", "--phases.1.micro_batch", "4")
    scale = demo.scale.model_copy(
        update={
            "text": (str(text),),
            "shards": ("--vocab-size", "300", "--duplicates", "1", "--workers", "1"),
            "train": (*steps, "--phases.0.batch", "8", "--phases.0.micro_batch", "8", "--logging.every", "2"),
            "steps": 16,
            "keep_every": 4,
            "restarts": 2,
            "tune": ("--epochs", "1", "--learning_rate", "1e-3", "--search.jobs", "1"),
            "pairs": ("--each", "2"),
            "stand_ins": dict.fromkeys(("mnli", "qnli", "mrpcacc", "squad"), "") | {"sst2": "sst2"},
        }
    )
    rows = tuple(row for row in table.rows if row.name in ROWS)
    claims = tuple(claim for claim in table.claims if {*claim.rows} <= {*ROWS})
    return demo._replace(table=table.model_copy(update={"rows": rows, "claims": claims}), scale=scale)


def write_tasks(folder: Path) -> None:
    """A task of GLUE and some minimal pairs, where the commands look for them."""
    sst2, pairs = folder / "glue" / "SST-2", folder / "pairs"
    sst2.mkdir(parents=True)
    pairs.mkdir()
    for split in ("train", "dev"):
        ends = [f"{'river' if number % 2 else 'mountain'}\t{number % 2}" for number in range(48)]
        rows = [f"the {WORDS[number % 20]} {end}" for number, end in enumerate(ends)]
        (sst2 / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    with lzma.open(pairs / "blimp.jsonl.xz", "wt") as file:
        for number in range(6):
            pair = {"good": f"the {WORDS[number]} is", "bad": f"is {WORDS[number]} the"}
            file.write(json.dumps({**pair, "paradigm": f"p{number % 2}", "phenomenon": "order"}) + "\n")


@pytest.mark.slow
def test_a_table_is_made_by_its_commands_and_goes_on_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "given")
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path / "given"))
    monkeypatch.setattr(reproduce, "count_ranks", lambda wanted: 1)
    monkeypatch.setattr(reproduce, "load_table", lambda name, scale: smallest(tmp_path))
    wanted = Reproduce("table5", out=tmp_path)
    console = Console(file=io.StringIO(), width=250)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background ignore
    threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    assert make(wanted, console) == Code.INTERRUPTED
    signal.signal(signal.SIGINT, before)
    assert make(wanted, console) == 0, console.file.getvalue()  # type: ignore[attr-defined]
    found = read_result(tmp_path / "table5-demo.json")
    assert [row.name for row in found.rows] == [*ROWS]
    for row in found.rows:
        assert len(row.cells["sst2"].values) == 2, row.cells["sst2"].notes
        assert len(row.cells["blimp"].values) == (row.name != "from scratch")
    assert all(outcome.code == 0 for outcome in found.runs.values())
    assert make(wanted, console) == 0
    assert read_result(tmp_path / "table5-demo.json").rows == found.rows
