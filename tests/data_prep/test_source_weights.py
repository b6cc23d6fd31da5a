"""Documents are there as often as the weights of their sources say, for training alone."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import SEED, all_rows, corpus_of, pool_of
from support.shards import SHORT, make, tell, tree, write_rows, write_sources

from data_prep.arrow_files import map_batches
from data_prep.examples.pairs import plan_segments
from data_prep.examples.sifting import GROUP, draw_times
from data_prep.shards import DOCUMENTS, MANIFEST, Manifest


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that name two texts, and settings."""
    return ["--docs", *write_sources(tmp_path_factory.mktemp("texts")), *SHORT, "--validation", "0.1"]


def rows(folder: Path) -> list[tuple[str, str]]:
    """Lists source and id of every row of the table of documents."""
    table = map_batches(folder / DOCUMENTS).read_all()
    return list(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def once(docs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("once") / "out", *docs)


@pytest.mark.slow
def test_documents_are_repeated_and_those_held_out_there_once(docs: list[str], once: Path, tmp_path: Path) -> None:
    """Of a weight of 2.5, half of the documents are there three times; of 0.5, half of them are left out."""
    words = ["--weight", "more=2.5", "--weight", "wiki=0.5"]
    weighed = make(tmp_path / "weighed", *docs, *words)
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
    assert counts["more", 3] == math.floor(0.5 * (90 - held_out) + 0.5)
    wiki_held_out = before.validation_documents - held_out
    assert counts["wiki", 1] - wiki_held_out == math.floor(0.5 * (150 - wiki_held_out) + 0.5)
    figures = {one.set: one for one in Manifest.read(weighed).figures}
    same = {one.set: one for one in Manifest.read(once).figures}
    validation = next(one for one in figures if one.validation)
    assert figures[validation].text == same[validation].text  # what is held out is the same, and there once
    assert Manifest.read(weighed).settings.weight == {"more": 2.5, "wiki": 0.5}
    assert tree(make(tmp_path / "two", *docs, *words, "--workers", "2")) == tree(weighed)


def test_a_weight_of_one_changes_nothing(docs: list[str], once: Path, tmp_path: Path) -> None:
    weighed, plain = tree(make(tmp_path / "weighed", *docs, "--weight", "more=1")), tree(once)
    assert {name for name in plain if plain[name] != weighed.get(name)} == {MANIFEST}


@pytest.mark.parametrize(("weight", "left"), [("3.7", 74), ("0.125", 3)])
def test_just_the_share_that_is_asked_for_is_there_whatever_the_seed(tmp_path: Path, weight: str, left: int) -> None:
    """A half is rounded up."""
    words = " ".join(f"word{number}" for number in range(20)).split()
    docs = write_rows(tmp_path / "a.jsonl", [" ".join(words[: 2 + number]) + "." for number in range(20)])
    found = []
    for seed in (1, 2):
        asked = ["--docs", docs, *SHORT, "--validation", "0", "--weight", f"a={weight}", "--seed", seed]
        found.append(Counter(rows(make(tmp_path / str(seed), *asked))))
    assert [one.total() for one in found] == [left] * 2
    assert all(times - int(float(weight)) in (0, 1) for one in found for times in one.values())
    assert len({tuple(sorted(one.items())) for one in found}) > 1


@given(
    st.integers(1, 3 * GROUP), st.floats(0.01, 4), st.integers(0, 99), st.lists(st.integers(0, 3 * GROUP), max_size=5)
)
def test_files_do_not_change_what_is_drawn(total: int, weight: float, seed: int, ends: list[int]) -> None:
    whole = draw_times(seed, weight, 0, total, total)
    assert whole.sum() == math.floor(total * weight + 0.5)
    assert set(whole.tolist()) <= {int(weight), int(weight) + 1}
    bounds = [0, *sorted(end for end in ends if end < total), total]
    parts = [draw_times(seed, weight, start, total, end - start) for start, end in pairwise(bounds)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_what_takes_turns_in_the_order_is_drawn_alike() -> None:
    """Where documents of two topics take turns, half of the documents have half of either."""
    drawn = draw_times(7, 0.5, 0, 40_000, 40_000)
    assert [abs(int(drawn[start::2].sum()) - 10_000) < 300 for start in (0, 1)] == [True, True]


def test_weights_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One sentence. And another one.\n")
    said = tell(tmp_path / "out", "--docs", tmp_path / "one.txt", *SHORT, "--weight", "one=0.000001", code=2)
    assert "--weight: leaves no document for training; take larger weights" in said


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 50))
def test_the_rows_of_a_document_are_never_partners(times: list[int], duplicate: int) -> None:
    """However much of the corpus they are, as long as there is another document; one that is there once may be its own
    partner after ten draws, as in the original."""
    corpus = corpus_of([[3, 4, 3]] * sum(times))._replace(books=np.repeat(np.arange(len(times)), times))
    plan = plan_segments(corpus, all_rows(corpus), pool_of(corpus), 16, duplicate, SEED, 0.0)
    drawn = plan.partner >= 0
    repeated = np.repeat(times, times)[plan.row[drawn]] > 1
    same = corpus.books[plan.row[drawn]] == corpus.books[plan.partner[drawn]]
    assert not (same & repeated).any()
