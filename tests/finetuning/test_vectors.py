"""Files of vectors: the bytes of one uninterrupted run after any kill, and exact answers to queries."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.base_models import write_bert
from support.commands import run_main
from support.transformers_models import PIECES, change_weights

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import predict, vectors
from finetuning.flags import Predict
from pretraining.checkpoint.models import StoredModel
from pretraining.scoring.embedding import Embedder

TEXTS = [f"word{number % 42} {'abc ' * (number % 7)}word{number * 5 % 42}" for number in range(50)] + ["", "a\tb"]
QUERIES = ["word3 abc", "word17", "b"]


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


def test_the_vectors_of_a_file_are_those_of_its_texts(model: Path, texts: Path, tmp_path: Path) -> None:
    run_main(predict.main, model, texts, "--vectors", tmp_path / "out.npy")
    run_main(predict.main, model, texts, "--vectors", tmp_path / "out.parquet")
    found, table = np.load(tmp_path / "out.npy"), pq.read_table(tmp_path / "out.parquet")
    np.testing.assert_allclose(found, compute(model, TEXTS), atol=1e-5)
    assert found.dtype == np.float32
    assert table["row"].to_pylist() == [*range(len(TEXTS))]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), found)


@pytest.mark.parametrize("ending", [".npy", ".parquet"])
@pytest.mark.parametrize("kills", [[0], [1], [3, 1], [6]])
def test_a_killed_run_goes_on_to_the_same_bytes(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: list[int], ending: str
) -> None:
    whole, out = tmp_path / f"whole{ending}", tmp_path / f"out{ending}"
    run_main(predict.main, model, texts, "--vectors", whole)
    computed: list[str] = []
    plain = Embedder.compute

    def count(self: Embedder, asked: Sequence[str]) -> Array:
        if len(computed) >= 8 * allowed:
            raise KeyboardInterrupt
        computed.extend(asked)
        return plain(self, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "compute", count)
        allowed = 0
        for kill in kills:
            allowed += kill
            with pytest.raises(KeyboardInterrupt):
                predict.predict_vectors(Predict(model, (texts,), vectors=out), model)
            assert not out.exists()
            with (tmp_path / f".{out.name}.part").open("ab") as file:
                file.write(b"half a row that was not recorded")
        allowed = 100
        run_main(predict.main, model, texts, "--vectors", out)
    assert out.read_bytes() == whole.read_bytes()
    assert computed == TEXTS
    assert not (tmp_path / f".{out.name}.part").exists()


def test_another_model_or_other_texts_are_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.npy", write_bert(tmp_path / "other", WordPiece(PIECES, cased=False))
    change_weights(other, lambda weights: [each.mul_(1.5) for each in weights.values()])
    run_main(predict.main, model, texts, "--vectors", out)
    assert "another model" in run_main(predict.main, other, texts, "--vectors", out, code=2)
    kept = out.read_bytes()
    texts.write_text("word1\n")
    assert "another text" in run_main(predict.main, model, texts, "--vectors", out, code=2)
    assert out.read_bytes() == kept
    run_main(predict.main, model, texts, "--vectors", out, "--replace")
    assert np.load(out).shape == (1, 32)
    (tmp_path / "out.npy.json").unlink()
    assert "no record" in run_main(predict.main, model, texts, "--vectors", out, code=2)


def test_the_nearest_texts_are_those_of_all_products(model: Path, texts: Path, tmp_path: Path) -> None:
    flags = [
        "--vectors",
        tmp_path / "out.npy",
        "--nearest",
        tmp_path / "queries.txt",
        "--out",
        tmp_path / "found",
    ]
    run_main(predict.main, model, texts, *flags)
    answers = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [answer["query"] for answer in answers] == QUERIES
    found = compute(model, [*QUERIES, *TEXTS])
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    own, others = found[: len(QUERIES)], found[len(QUERIES) :]
    for answer, scores in zip(answers, own @ others.T, strict=True):
        best = np.sort(scores)[::-1][:10]
        nearest = answer["nearest"]
        np.testing.assert_allclose([each["score"] for each in nearest], best, atol=1e-5)
        np.testing.assert_allclose([scores[each["row"]] for each in nearest], best, atol=1e-5)
        assert [each["text"] for each in nearest] == [TEXTS[each["row"]] for each in nearest]
        assert [each["rank"] for each in nearest] == [*range(1, 11)]


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
    assert "cannot be read" in run_main(predict.main, *words, code=2)
