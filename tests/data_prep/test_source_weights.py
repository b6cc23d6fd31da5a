"""Documents are there as often as the weights of their sources say, for training alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_main
from support.segments import SEED, all_rows, corpus_of, pool_of
from support.shards import tree, write_sources

from data_prep import shard
from data_prep.arrow_files import map_batches
from data_prep.examples.pairs import plan_segments
from data_prep.examples.sifting import GROUP, draw_times
from data_prep.shards import DOCUMENTS, MANIFEST, Manifest

ASKED = ["--lengths", "32", "--duplicates", "1", "--vocab-size", "400", "--validation", "0.1"]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_sources(tmp_path_factory.mktemp("texts"))


def tell(docs: list[str], out: Path, *words: str) -> str:
    """Makes shards with weights; returns what is said."""
    return run_main(shard.main, "--docs", *docs, *ASKED, "--out", out, "--workers", "1", *words)


def make(docs: list[str], out: Path, *words: str) -> Path:
    tell(docs, out, *words)
    return out


def rows(folder: Path) -> list[tuple[str, str]]:
    """Lists source and id of every row of the table of documents."""
    table = map_batches(folder / DOCUMENTS).read_all()
    return list(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def once(docs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(docs, tmp_path_factory.mktemp("once") / "out")


@pytest.mark.slow
def test_documents_are_repeated_and_those_held_out_there_once(docs: list[str], once: Path, tmp_path: Path) -> None:
    """Of a weight of 2.5, half of the documents are there three times; of 0.5, half of them are left out."""
    words = ["--weight", "more=2.5", "--weight", "wiki=0.5"]
    weighed = make(docs, tmp_path / "weighed", *words)
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
    assert counts["more", 3] == math.floor(0.5 * (180 - held_out) + 0.5)
    wiki_held_out = before.validation_documents - held_out
    assert counts["wiki", 1] - wiki_held_out == math.floor(0.5 * (300 - wiki_held_out) + 0.5)
    figures = {one.set: one for one in Manifest.read(weighed).figures}
    same = {one.set: one for one in Manifest.read(once).figures}
    validation = next(one for one in figures if one.validation)
    assert figures[validation].text == same[validation].text  # what is held out is the same, and there once
    assert Manifest.read(weighed).settings.weight == {"more": 2.5, "wiki": 0.5}
    assert tree(make(docs, tmp_path / "two", *words, "--workers", "2")) == tree(weighed)


def test_a_weight_of_one_changes_nothing(docs: list[str], once: Path, tmp_path: Path) -> None:
    weighed, plain = tree(make(docs, tmp_path / "weighed", "--weight", "more=1")), tree(once)
    assert {name for name in plain if plain[name] != weighed.get(name)} == {MANIFEST}


@pytest.mark.parametrize(("weight", "left"), [("0.5", 10), ("3.7", 74), ("0.12", 2), ("0.125", 3)])
def test_just_the_share_that_is_asked_for_is_there_whatever_the_seed(tmp_path: Path, weight: str, left: int) -> None:
    """A half is rounded up."""
    words = " ".join(f"word{number}" for number in range(20)).split()
    texts = [" ".join(words[: 2 + number]) + "." for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    common = ["--docs", str(tmp_path / "a.jsonl"), "--vocab-size", "100", "--validation", "0", "--lengths", "32"]
    found = []
    for seed in ("1", "2", "3"):
        out = tmp_path / seed
        words = ["--weight", f"a={weight}", "--duplicates", "1", "--workers", "1", "--seed", seed, "--out", str(out)]
        run_main(shard.main, *common, *words)
        found.append(Counter(rows(out)))
    assert [one.total() for one in found] == [left] * 3
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
    words = ["--docs", str(tmp_path / "one.txt"), "--weight", "one=0.000001", "--out", str(tmp_path / "out")]
    assert "--weight: leaves no document for training; take larger weights" in run_main(
        shard.main, *words, "--workers", "1", "--vocab-size", "100", code=2
    )


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
