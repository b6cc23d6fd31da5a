"""Runs of a task of vectors: the same however they are stopped, on any ranks and in any micro-batches; and folders,
which sentence-transformers opens with the same vectors, and which go on with the pooling of the one they began with."""

import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import finetuning as tuning
from support.commands import refusal
from support.faults import replace as put
from support.finetuning import Toy, changed, fine_tune, launch, metrics, outcome, results
from support.marks import slow
from support.training import assert_ended, assert_well

from finetuning.model import contrastive
from finetuning.prediction import load
from finetuning.run_task import RunTask
from finetuning.running.base import Base
from finetuning.running.outputs import list_layout_overrides
from finetuning.settings import EmbeddingSettings, FineTuning
from pretraining.checkpoint.models import StoredModel
from pretraining.huggingface.pooling import Pooling, PoolingName, read_pooling
from pretraining.processes import stopping
from pretraining.processes.ending import Code

TASK = 'name = "toy"\nkind = "embeddings"\ntrain = "train.tsv"\ndev = "dev.tsv"\nsecond = ["passage", "other"]\n'
TEXTS = ["a", "the plot, and a film", "good " * 30, "fine 7"]
RUN = Path("toy") / "lr0.003-seed1"


@pytest.fixture
def pairs(toy: Toy, tmp_path: Path) -> Toy:
    """Questions of letters, whose passages have them in another order; the last batch of an epoch has one item, some
    texts occur again."""
    draw = random.Random(2)
    files = {"toy.toml": TASK, "test.tsv": ""}
    for name, count in (("train.tsv", 41), ("dev.tsv", 16)):
        words = ["".join(draw.choices("abcdef", k=3)) for _ in range(count)]
        rows = [f"{word}\t{word[::-1]} {draw.choice('xyz')}\t{draw.choice(words)}\n" for word in words]
        files[name] = "question\tpassage\tother\n" + "".join(rows)
    return Toy(toy.model, changed(toy, tmp_path / "pairs", files), tmp_path)


def run(pairs: Toy, out: str, *more: object, ranks: int = 1) -> dict[str, Any]:
    assert_well(fine_tune(pairs.command(out, *more), ranks))
    return outcome(pairs.folder / out)


WAYS = [
    (2, ["--micro_batch", "3"]),
    slow(1, ["--micro_batch", "3"]),
    slow(2, ["--parallel.zero", "2"]),
    slow(2, ["--micro_batch", "2", "--parallel.zero", "3"]),
]


@pytest.mark.parametrize(("ranks", "more"), WAYS)
def test_stops_ranks_and_micro_batches_change_nothing(pairs: Toy, ranks: int, more: list[str]) -> None:
    """With dropout, whose masks are those of the first pass in the second one. Stopped runs have the same bits; other
    ranks and micro-batches round otherwise."""
    whole, wanted = run(pairs, "whole"), run(pairs, "wanted", *more, ranks=ranks)
    for one, other in zip(wanted[f"{RUN}/metrics.jsonl"], whole[f"{RUN}/metrics.jsonl"], strict=True):
        assert {**one, "kind": 0} == pytest.approx({**other, "kind": 0}, rel=2e-5)
    stopped = launch(pairs.command("stopped", *more), ranks, partial(tuning.stop_at, 4))
    assert_ended(stopped, Code.STOPPED, "after step 4, and saved; the same command continues from there")
    assert run(pairs, "stopped", *more, ranks=ranks) == wanted


def stop_in_first_pass() -> None:
    """A fault: a signal comes after the first micro-batch of a step, before any loss is known."""
    stopping.QUESTION_SECONDS = 0.0
    forward, calls = contrastive.VectorModel.forward, [0]

    def forward_and_signal(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 14:  # of 6 in each step of two passes
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(*arguments)

    put(contrastive.VectorModel, "forward", forward_and_signal)


def test_a_signal_in_the_first_pass_ends_the_step(pairs: Toy) -> None:
    more = ["--micro_batch", "3"]
    stopped = launch(pairs.command("stopped", *more), fault=stop_in_first_pass)
    assert_ended(stopped, Code.STOPPED, "after step 2, and saved; the same command continues from there")
    assert run(pairs, "stopped", *more) == run(pairs, "straight", *more)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_a_folder_of_sentence_transformers_goes_in_and_goes_on(how: PoolingName, pairs: Toy) -> None:
    """It learns by the recipe of vectors, keeps its pooling and its length, and sentence-transformers, predict.py and
    the scores have the same vectors."""
    library: Any = pytest.importorskip("sentence_transformers")
    library.SentenceTransformer(str(pairs.model), device="cpu").save(str(pairs.folder / "theirs"))
    Pooling(how, normalizes=True).write(pairs.folder / "theirs", 32, 40)
    begin = Toy(pairs.folder / "theirs", pairs.data, pairs.folder)
    settings = ["--epochs=8", "--batch=8", "--learning_rate=3e-3", "--precision.dtype=fp32", "--logging.every=3"]
    command = [pairs.data / "toy.toml", "--model", begin.model, "--out", pairs.folder / "out", *settings]
    [done] = fine_tune([*map(str, command)])
    assert_well([done])
    assert "TEXTS --vectors vectors.npy --nearest QUERIES" in done.output
    logged = [line["loss"] for line in metrics(begin.folder / "out" / RUN / "metrics.jsonl") if line["kind"] == "step"]
    assert logged[-1] < 0.8 * logged[0]
    model = begin.folder / "out" / "toy" / "model"
    assert read_pooling(model) == Pooling(how, normalizes=True)
    theirs = library.SentenceTransformer(str(model), device="cpu")
    assert (theirs.max_seq_length, json.loads((model / "task.json").read_text())["kind"]) == (40, "embeddings")
    vectors = [answer["vector"] for answer in load(model, "fp32")(TEXTS)]
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), atol=1e-5)
    score = results(begin.folder / "out")["score"]
    again = Toy(model, begin.data, begin.folder)
    run(again, "again", "--evaluate")
    assert results(begin.folder / "again")["score"] == pytest.approx(score, abs=1e-6)


def test_modules_that_are_not_known_are_refused(toy: Toy, tmp_path: Path) -> None:
    folder, modules = shutil.copytree(toy.model, tmp_path / "theirs"), tmp_path / "theirs" / "modules.json"
    Pooling().write(folder, 32)
    modules.write_text(modules.read_text().replace("models.Pooling", "models.Dense"))
    base = Base(StoredModel.open(str(folder)))
    assert "makes vectors by Transformer, Dense" in refusal(list_layout_overrides, base, True, [])
    (folder / "config.json").unlink()
    assert "modules.json names a folder within" in refusal(StoredModel.open, str(folder))


def test_tasks_of_vectors_and_others_are_not_mixed(pairs: Toy, toy: Toy) -> None:
    flags = RunTask(tasks=(pairs.data / "toy.toml", toy.data / "toy.toml"))
    assert "give them in another command" in refusal(flags.suite)


def test_texts_are_as_long_as_the_model_reads(toy: Toy, tmp_path: Path) -> None:
    """Vectors that were compared by their products are said to be compared in another way."""
    folder = shutil.copytree(toy.model, tmp_path / "theirs")
    base = Base(StoredModel.open(str(folder)))
    most = base.model.trained
    assert list_layout_overrides(base, True, []) == [f"--length={most}"]
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "dot"}')
    for limit in (100_000, 20):
        Pooling().write(folder, 32, limit)
        base = Base(base.model)
        assert list_layout_overrides(base, True, []) == [f"--length={min(most, limit)}"]
    assert list_layout_overrides(base, True, ["--length", "9"]) == []
    assert "by dot product" in next(base.list_doubts(FineTuning(length=20), vectors=True))


SETTINGS: dict[str, dict[str, Any]] = {
    "features.layers: kind": {"features": {"layers": "mix"}},
    "bilstm.hidden: kind": {"bilstm": {"hidden": 8}},
    "language_loss: kind": {"language_loss": 0.5},
    "embeddings.widths: 33: a vector of": {"embeddings": {"widths": (32, 33)}},
    "batch = 1: one row has no negatives": {"search": {"batches": (8, 1)}},
}


@pytest.mark.parametrize("said", SETTINGS)
def test_settings_that_do_not_fit_are_refused(said: str, toy: Toy) -> None:
    base = Base(StoredModel.open(str(toy.model)))
    base.require_vectors(FineTuning(embeddings=EmbeddingSettings(widths=(32, 8))))
    assert said in refusal(base.require_vectors, FineTuning.model_validate(SETTINGS[said]))
