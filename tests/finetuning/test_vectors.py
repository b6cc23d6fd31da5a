"""Files of vectors: the bytes of one uninterrupted run after any kill, and exact answers to queries."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.base_models import write_bert
from support.commands import run_main, start
from support.transformers_models import PIECES, change_weights

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import predict, prediction, vectors
from finetuning.flags import Predict
from pretraining.checkpoint.models import StoredModel
from pretraining.scoring.embedding import Embedder

TEXTS = [f"word{number % 42} {'abc ' * (number % 7)}word{number * 5 % 42}" for number in range(50)] + ["", "a\tb"]
QUERIES = ["word3 abc", "word17", "b"]
HOLD = "import fcntl, sys; it = open(sys.argv[1], 'a'); fcntl.lockf(it, fcntl.LOCK_EX); print(flush=True); input()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("vectors") / "model", WordPiece(PIECES, cased=False))


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vectors, "ROWS", 8)
    monkeypatch.setattr(vectors, "BLOCK", 16)
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES) + "\n")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path / "texts.txt"


def compute(model: Path, texts: Sequence[str]) -> Array:
    return Embedder.open(StoredModel.open(str(model)), torch.device("cpu")).compute(texts)


def test_vectors_of_a_file_are_those_of_its_texts(model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, columns = texts.with_suffix(".npy"), texts.with_suffix(".parquet")
    for out in (whole, columns):
        run_main(predict.main, model, texts, "--vectors", out)
    found, table = np.load(whole), pq.read_table(columns)
    np.testing.assert_allclose(found, compute(model, TEXTS), atol=1e-5)
    assert found.dtype == np.float32
    assert table["row"].to_pylist() == [*range(len(TEXTS))]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), found)
    monkeypatch.setattr(prediction, "choose_dtype", lambda dtype, _: {"fp32": torch.float32}.get(dtype, torch.bfloat16))
    answers = prediction.TextEmbedder(model, "auto", "cpu")(TEXTS)
    np.testing.assert_allclose([answer["vector"] for answer in answers], found, atol=1e-5)


@pytest.mark.parametrize(("ending", "older"), [(".npy", False), (".npy", True), (".parquet", True)])
@pytest.mark.parametrize("kills", [[0], [0, 1], [3, 1], [6]])
def test_a_killed_run_goes_on_to_the_same_bytes(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, kills: list[int], ending: str, older: bool
) -> None:
    """Until it ends, an older file stays; before its first vectors, the command of that file finds it whole."""
    names = (f"whole{ending}", f"out{ending}", f".out{ending}.part")
    whole, out, unfinished = map(texts.with_name, names)
    run_main(predict.main, model, texts, "--vectors", whole)
    first = [model, texts.with_name("queries.txt"), "--vectors", out]
    kept = [run_main(predict.main, *first), out.read_bytes()] if older else []
    computed: list[str] = []
    plain = Embedder.compute

    def count(self: Embedder, asked: Sequence[str]) -> Array:
        if len(computed) >= 8 * allowed:
            raise KeyboardInterrupt
        computed.extend(asked)
        return plain(self, asked)

    monkeypatch.setattr(Embedder, "compute", count)
    allowed = 0
    for kill in kills:
        allowed += kill
        with pytest.raises(KeyboardInterrupt):
            predict.predict_vectors(Predict(model, (texts,), vectors=out, replace=older), model)
        if older and not allowed:
            run_main(predict.main, *first)
        assert [out.read_bytes()] == kept[1:] if older else not out.exists()
        if allowed:
            os.truncate(unfinished, unfinished.stat().st_size + 9)  # a part of a row that was not recorded
    allowed = 100
    run_main(predict.main, model, texts, "--vectors", out, *["--replace"] * older)
    assert out.read_bytes() == whole.read_bytes()
    assert computed == TEXTS
    assert not unfinished.exists()


def test_rows_that_no_record_names_are_written_again(model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, few = texts.with_suffix(".npy"), texts.with_name("queries.txt")
    run_main(predict.main, model, few, "--vectors", out)
    whole = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(vectors, "write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            predict.predict_vectors(Predict(model, (texts,), vectors=out, replace=True), model)
    run_main(predict.main, model, few, "--vectors", out)
    assert out.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 100, 600, 128 + 52 * 128])
def test_an_unfinished_file_of_any_size_is_completed(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole, out, unfinished = map(texts.with_name, ("whole.npy", "out.npy", ".out.npy.part"))
    run_main(predict.main, model, texts, "--vectors", whole)
    unfinished.write_bytes(b"other")  # which no record names
    stopped = Mock(side_effect=[compute(model, TEXTS[:8]), KeyboardInterrupt])
    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "compute", stopped)
        with pytest.raises(KeyboardInterrupt):
            predict.predict_vectors(Predict(model, (texts,), vectors=out), model)
    os.truncate(unfinished, size)
    run_main(predict.main, model, texts, "--vectors", out)
    np.testing.assert_allclose(np.load(out), np.load(whole), atol=1e-6)


@pytest.mark.parametrize("counts", [(20, 12), (12, 20), (20, 0)])
def test_texts_that_change_while_they_are_read_have_as_many_vectors_as_were_read(
    model: Path, texts: Path, counts: tuple[int, int]
) -> None:
    out, read = texts.with_name("out.npy"), Mock(side_effect=[TEXTS[:count] for count in counts])
    vectors.VectorFile(prediction.TextEmbedder(model, "auto", "cpu"), texts, "lines", out, read).write(False)
    np.testing.assert_allclose(np.load(out), compute(model, TEXTS[: counts[0]]), atol=1e-5)
    assert json.loads(out.with_name("out.npy.json").read_text())["rows"] == counts[0]


def test_a_full_disk_leaves_an_older_file_and_its_record(model: Path, texts: Path) -> None:
    out, few = texts.with_name("out.npy"), texts.with_name("queries.txt")
    run_main(predict.main, model, few, "--vectors", out)
    kept = [(path, path.read_bytes()) for path in (out, out.with_name("out.npy.json"))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        assert "cannot be written" in run_main(predict.main, model, texts, "--vectors", out, "--replace", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept == [(path, path.read_bytes()) for path, _ in kept]
    assert not [*out.parent.glob(".out.npy.[pt]*")]
    run_main(predict.main, model, few, "--vectors", out)


def test_vectors_that_others_have_made_are_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.npy", write_bert(tmp_path / "other", WordPiece(PIECES, cased=False))
    change_weights(other, lambda weights: [each.mul_(1.5) for each in weights.values()])
    ask = partial(run_main, predict.main, model, texts, "--vectors", out)
    ask()
    kept = out.read_bytes()
    assert "another model" in run_main(predict.main, other, texts, "--vectors", out, code=2)
    texts.write_text('{"text": "word1"}\n')
    assert "another text" in ask(code=2)
    holder = start([sys.executable, "-c", HOLD, str(tmp_path / ".out.npy.lock")], stdin=subprocess.PIPE)
    assert next(holder.stdout or iter(""))
    assert "writes it" in ask("--replace", code=2)
    holder.communicate()
    assert out.read_bytes() == kept
    ask("--replace")
    assert np.load(out).shape == (1, 32)
    rows = texts.rename(tmp_path / "texts.jsonl")
    assert "another text" in run_main(predict.main, model, rows, "--vectors", out, code=2)
    (tmp_path / "out.npy.json").unlink()
    assert "no record" in run_main(predict.main, model, rows, "--vectors", out, code=2)


def test_files_that_are_read_stay(model: Path, texts: Path, tmp_path: Path) -> None:
    same = texts.rename(tmp_path / "texts.npy")
    assert "another --vectors" in run_main(predict.main, model, same, "--vectors", same, "--replace", code=2)
    assert same.read_text().splitlines() == TEXTS
    (tmp_path / "bad.jsonl").write_text("{}\n")
    run_main(predict.main, model, tmp_path / "bad.jsonl", "--vectors", tmp_path / "bad.npy", code=2)
    assert not [*tmp_path.glob(".*.part")]


def test_flags_that_do_not_belong_together_are_told(model: Path, texts: Path) -> None:
    out, found = ["--vectors", texts.with_suffix(".npy")], ["--nearest", texts]
    assert "--nearest needs --vectors" in run_main(predict.main, model, texts, *found, code=2)
    assert "--tsv does not apply to --vectors" in run_main(predict.main, model, texts, *out, "--tsv", code=2)
    assert "a file, not standard input" in run_main(predict.main, model, *out, code=2)
    assert "searches a .npy" in run_main(predict.main, model, texts, "--vectors", "o.parquet", *found, code=2)


def test_the_nearest_texts_are_those_of_all_products(model: Path, texts: Path, tmp_path: Path) -> None:
    flags = ["--vectors", tmp_path / "out.npy", "--nearest", tmp_path / "queries.txt", "--out", tmp_path / "found"]
    run_main(predict.main, model, texts, *flags)
    answers = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [answer["query"] for answer in answers] == QUERIES
    found = compute(model, [*QUERIES, *TEXTS])
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    own, others = found[: len(QUERIES)], found[len(QUERIES) :]
    for answer, scores in zip(answers, own @ others.T, strict=True):
        ranks, rows, said, nearest = zip(*(each.values() for each in answer["nearest"]), strict=True)
        np.testing.assert_allclose([said, scores[[*rows]]], [np.sort(scores)[::-1][:10]] * 2, atol=1e-5)
        assert (ranks, nearest) == (tuple(range(1, 11)), tuple(TEXTS[row] for row in rows))


def test_damaged_vectors_are_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    words = [model, texts, "--vectors", out, "--nearest", tmp_path / "queries.txt", "--out", tmp_path / "found"]
    run_main(predict.main, *words)
    content = np.load(out)
    content[37, 2] = np.nan
    np.save(out, content)
    assert "row 37" in run_main(predict.main, *words, code=2)
    np.save(out, content[:, :16])
    assert "(52, 16)" in run_main(predict.main, *words, code=2)
    out.write_bytes(out.read_bytes()[:500])
    assert "delete it" in run_main(predict.main, *words, code=2)
    out.unlink()
    run_main(predict.main, *words)
