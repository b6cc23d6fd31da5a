"""Documents are there as often as the weights of their sources say, for training alone."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.segments import SEED, all_rows, corpus_of, pool_of
from support.sharding import tree, write_sources

from data_prep import shard
from data_prep.arrow_files import map_batches
from data_prep.examples.pairs import plan_pairs
from data_prep.shards import DOCUMENTS, MANIFEST, Manifest

ASKED = ["--lengths", "32", "--duplicates", "1", "--vocab-size", "400", "--validation", "0.1"]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_sources(tmp_path_factory.mktemp("texts"))


def make(docs: list[str], out: Path, *words: str) -> Path:
    """Makes shards with weights."""
    assert shard.main(["--docs", *docs, *ASKED, "--out", str(out), *(words or ["--workers", "1"])]) == 0
    return out


def rows(folder: Path) -> list[tuple[str, str]]:
    """Lists source and id of every row of the table of documents."""
    table = map_batches(folder / DOCUMENTS).read_all()
    return list(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True))


def test_documents_for_training_are_repeated_and_those_held_out_are_there_once(docs: list[str], tmp_path: Path) -> None:
    """Of a weight of 2.5, half of the documents are there three times; of 0.5, half of them are left out."""
    once = make(docs, tmp_path / "once", "--workers", "1")
    words = ["--weight", "more=2.5", "--weight", "wiki=0.5"]
    weighed = make(docs, tmp_path / "weighed", *words, "--workers", "1")
    runs = [(row, len(list(group))) for row, group in groupby(rows(weighed))]
    assert len({row for row, _ in runs}) == len(runs)  # the rows of a document follow each other
    assert {row for row, _ in runs} <= {*rows(once)}
    counts = Counter((source, times) for (source, _), times in runs)
    assert {source: {times for name, times in counts if name == source} for source in ("wiki", "more")} == {
        "wiki": {1},
        "more": {1, 2, 3},
    }
    corpus = Manifest.read(weighed).corpus
    before = Manifest.read(once).corpus
    assert (corpus.documents, corpus.validation_documents) == (before.documents, before.validation_documents)
    assert corpus.weighed == len(rows(weighed))
    held_out = counts["more", 1]
    assert 0.3 < counts["more", 3] / (180 - held_out) < 0.7
    assert 0.3 < counts["wiki", 1] / 300 < 0.7
    figures = {one.set: one for one in Manifest.read(weighed).figures}
    same = {one.set: one for one in Manifest.read(once).figures}
    validation = next(one for one in figures if one.validation)
    assert figures[validation].text == same[validation].text  # what is held out is the same, and there once
    assert Manifest.read(weighed).settings.weight == {"more": 2.5, "wiki": 0.5}
    assert tree(make(docs, tmp_path / "two", *words, "--workers", "2")) == tree(weighed)


def test_a_weight_of_one_changes_nothing(docs: list[str], tmp_path: Path) -> None:
    weighed = tree(make(docs, tmp_path / "weighed", "--weight", "more=1", "--workers", "1"))
    plain = tree(make(docs, tmp_path / "plain", "--workers", "1"))
    assert {name for name in plain if plain[name] != weighed.get(name)} == {MANIFEST}


def test_weights_that_leave_nothing_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("One sentence. And another one.\n")
    words = ["--docs", str(tmp_path / "one.txt"), "--weight", "one=0.000001", "--out", str(tmp_path / "out")]
    assert shard.main([*words, "--workers", "1", "--vocab-size", "100"]) == 2
    assert "--weight: leaves no document for training; take larger weights" in capfd.readouterr().err


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 50))
def test_the_rows_of_a_document_are_never_partners(times: list[int], duplicate: int) -> None:
    """However much of the corpus they are, as long as there is another document; one that is there once may be its own
    partner after ten draws, as in the original."""
    corpus = corpus_of([[3, 4, 3]] * sum(times))._replace(books=np.repeat(np.arange(len(times)), times))
    plan = plan_pairs(corpus, all_rows(corpus), pool_of(corpus), 16, duplicate, SEED, 0.0)
    drawn = plan.partner >= 0
    repeated = np.repeat(times, times)[plan.row[drawn]] > 1
    same = corpus.books[plan.row[drawn]] == corpus.books[plan.partner[drawn]]
    assert not (same & repeated).any()
