"""shard.py leaves near copies out where that is asked for, of real text as it is right."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import sentence
from scipy import sparse
from support.near_copies import mark
from support.sharding import SETTINGS, interrupted_at, run, tree

from data_prep import shard, verify
from data_prep.arrow_files import map_batches
from data_prep.common.arrays import Array
from data_prep.near_copies.finding import FOUND
from data_prep.near_copies.shingles import Texts, read_texts
from data_prep.origins import find_origins, take_file
from data_prep.shards import NEAR_REPORT, Manifest
from data_prep.vocabulary.vocabulary import load_vocabulary
from data_prep.work import TokensRecord, WorkFolder

NUM_ORIGINALS = 300


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes texts, a near copy of each third, in which the last word is another, and a true copy of each tenth."""
    draw = random.Random(1)
    originals = [" ".join(sentence(draw) for _ in range(12)) for _ in range(NUM_ORIGINALS)]
    near = [f"{text[:-1]} indeed." for text in originals[::3]]
    path = tmp_path_factory.mktemp("docs") / "x.jsonl"
    texts = [*originals, *near, *originals[::10]]
    path.write_text("".join(json.dumps({"id": str(number), "text": one}) + "\n" for number, one in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def expected(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes shards without near copies, undisturbed and with one worker."""
    out = tmp_path_factory.mktemp("expected") / "out"
    assert run(docs, out, "--near-copies", "0.8") == 0
    return out


def ids(folder: Path) -> list[int]:
    return [int(row["id"]) for row in map_batches(folder / "documents.arrow").read_all().to_pylist()]


def test_near_copies_are_left_out_counted_and_shown(
    docs: Path, expected: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ids(expected) == [*range(NUM_ORIGINALS)]
    corpus = Manifest.read(expected).corpus
    assert (corpus.documents, corpus.near_copies, corpus.copies) == (NUM_ORIGINALS, 130, None)
    with (expected / NEAR_REPORT).open(newline="") as file:
        assert all(int(row["earlier id"]) < NUM_ORIGINALS <= int(row["id"]) for row in csv.DictReader(file))
    assert verify.main([str(expected)]) == 0
    capfd.readouterr()
    assert run(docs, tmp_path / "both", "--near-copies", "0.8", "--drop-copies") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "copies 30 left out, as an earlier document has their text" in said
    assert f"near copies 100 left out: 80% in common with an earlier one; see {NEAR_REPORT}" in said
    assert ids(tmp_path / "both") == ids(expected)


def test_changed_examples_of_near_copies_are_noticed(expected: Path, tmp_path: Path) -> None:
    shutil.copytree(expected, tmp_path / "out")
    (tmp_path / "out" / NEAR_REPORT).write_text("nothing\n")
    assert verify.main([str(tmp_path / "out")]) == 1


def test_two_workers_write_the_same_bytes(docs: Path, expected: Path, tmp_path: Path) -> None:
    assert run(docs, tmp_path / "out", "--near-copies", "0.8", "--workers", "2") == 0
    assert tree(tmp_path / "out") == tree(expected)


@pytest.mark.parametrize("step", ["candidates", "distinct"])
def test_a_run_that_is_interrupted_goes_on(step: str, docs: Path, expected: Path, tmp_path: Path) -> None:
    with interrupted_at(step):
        assert run(docs, tmp_path / "out", "--near-copies", "0.8") == 130
    assert run(docs, tmp_path / "out", "--near-copies", "0.8") == 0
    assert tree(tmp_path / "out") == tree(expected)


def test_documents_that_were_kept_lose_the_same(docs: Path, expected: Path, tmp_path: Path) -> None:
    assert run(docs, tmp_path / "documents", "--documents-only") == 0
    options = ["--workers", "1", *SETTINGS[: SETTINGS.index("--vocab-size")], "--shard-size", "128KB"]
    folders = ["--from", str(tmp_path / "documents"), "--out", str(tmp_path / "out")]
    assert shard.main([*folders, *options, "--near-copies", "0.8"]) == 0
    assert Manifest.read(tmp_path / "out").fingerprint == Manifest.read(expected).fingerprint


@pytest.mark.usefixtures("expected")  # by which all is compiled, so that what is interrupted is the run itself
def test_near_copies_are_looked_for_anew_where_the_text_changed(docs: Path, tmp_path: Path) -> None:
    more = tmp_path / "docs"
    more.mkdir()
    lines = docs.read_text().splitlines(keepends=True)
    (more / "1.jsonl").write_text("".join(lines[:NUM_ORIGINALS]))
    out = tmp_path / "out"
    with interrupted_at("examples"):
        assert run(more, out, "--near-copies", "0.8") == 130
    assert WorkFolder(out).is_finished(FOUND)
    (more / "2.jsonl").write_text("".join(lines[NUM_ORIGINALS:]))
    assert run(more, out, "--near-copies", "0.8") == 0
    assert Manifest.read(out).corpus.near_copies == 130
    assert run(more, tmp_path / "fresh", "--near-copies", "0.8") == 0
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_forecast_tells_of_the_search(docs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(docs, tmp_path / "out", "--near-copies", "0.8", "--check") == 0
    said = capfd.readouterr().out
    assert all(f"\n{step} " in said for step in ("signatures", "candidates", "near copies"))
    assert not (tmp_path / "out").exists()


def nearest_of(texts: Iterable[Texts], continues: Array) -> Array:
    """Finds how near the nearest earlier document is, from the sets of all groups of five words."""
    numbers: dict[tuple[int, ...], int] = {}
    rows, documents, count = [], [], 0
    for text in texts:
        start = 0
        for end in text.ends.tolist():
            pieces = text.pieces[start:end]
            begins = np.flatnonzero(~continues[pieces] | (np.arange(len(pieces)) == 0))
            words = [tuple(word.tolist()) for word in np.split(pieces, begins[1:])]
            known = np.array([numbers.setdefault(word, len(numbers) + 1) for word in words], np.int32)
            known = np.pad(known, (0, max(0, 5 - len(known))))
            rows.append(np.lib.stride_tricks.sliding_window_view(known, 5))
            documents.append(np.full(len(rows[-1]), count))
            start, count = end, count + 1
    packed = np.ascontiguousarray(np.concatenate(rows)).view("V20").ravel()
    _, shingles = np.unique(packed, return_inverse=True)
    places = np.concatenate(documents), shingles
    sets = sparse.csr_matrix((np.ones(len(shingles), np.int32), places))
    sets.data[:] = 1
    return nearest_rows(sets)


def nearest_rows(sets: sparse.csr_matrix) -> Array:
    """Compares each row, a set, with all rows before it; finds the largest Jaccard index of each."""
    sizes, nearest = np.diff(sets.indptr), np.zeros(sets.shape[0])
    columns = sets.T.tocsr()
    for first in range(0, len(sizes), 500):
        common = (sets[first : first + 500] @ columns).tocoo()
        later, earlier = common.row + first, common.col
        indices = np.where(earlier < later, common.data / (sizes[later] + sizes[earlier] - common.data), 0)
        np.maximum.at(nearest, later, indices)
    return nearest


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_real_documents_lose_those_of_the_exact_answer(threshold: float, real_data: Path, tmp_path: Path) -> None:
    kept = ["--out", str(tmp_path / "kept"), "--vocab", str(real_data / "vocab.txt"), "--documents-only"]
    assert shard.main(["--docs", str(real_data / "wiki" / "AA"), *kept]) == 0
    tokens: list[TokensRecord] = []
    for task in find_origins([str(tmp_path / "kept")]).make_tasks(tmp_path, "fail"):
        if sum(record.documents for record in tokens) < 20_000:
            tokens.append(take_file(task))
    vocabulary = load_vocabulary(tmp_path / "kept" / "vocab.txt", cased=False)
    vocabulary.write(tmp_path)
    found = mark(tmp_path, tokens, threshold, vocabulary=vocabulary)
    nearest = nearest_of((read_texts(tmp_path / record.path) for record in tokens), vocabulary.continues)
    assert len(nearest) >= 20_000
    truth = np.flatnonzero(nearest >= threshold)
    assert len(truth) > 500
    assert np.isin(truth, found).mean() >= 0.95
    assert np.isin(found, truth).all()
