"""Pairs of texts of documents: held-out documents stay out of training, and what is left out is counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_wiki
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_main
from support.shards import tree

from data_prep.pairs import main
from data_prep.readers.text_pairs import LONGEST, SHORTEST, cut_passages, divide, pair_texts


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_documents(path: Path, count: int) -> list[list[str]]:
    """Writes documents of three passages, whose words name the document; returns their passages."""
    texts = [[f"{part} of document {number} " + f"word{number} " * 20 for part in range(3)] for number in range(count)]
    rows = [{"title": f"Title {number}", "text": "\n".join(text)} for number, text in enumerate(texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return texts


@given(st.lists(st.text("ab \n", max_size=3 * LONGEST), max_size=6))
def test_passages_are_the_whole_text_in_its_order(paragraphs: list[str]) -> None:
    passages = cut_passages(paragraphs)
    assert "".join("".join(passages).split()) == "".join("".join(paragraphs).split())
    assert all(SHORTEST <= len(passage) <= LONGEST + SHORTEST for passage in passages[1:])


def test_a_document_makes_pairs_of_texts_that_are_used_once() -> None:
    first, second, third = (letter * SHORTEST for letter in "abc")
    assert pair_texts("Title", [first, second, third]) == [("Title", first), (second, third)]
    assert pair_texts("", [first, second, third]) == [(first, second)]
    assert pair_texts("", [first, first]) == []
    assert pair_texts("Title", ["short"]) == []
    assert pair_texts(first, [first]) == []


@given(st.lists(st.integers(0, 9), min_size=1), st.sampled_from([0.0, 0.05, 0.5]))
def test_copies_of_a_document_are_held_out_together(numbers: list[int], share: float) -> None:
    documents = [(str(number), [(f"copy {place}", str(number))]) for place, number in enumerate(numbers)]
    halves: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for is_held_out, pairs in divide(documents, share):
        halves[is_held_out] += pairs
    texts = {half: {text for _, text in own} for half, own in halves.items()}
    assert texts[True]
    assert not texts[True] & texts[False]
    assert sorted(halves[True] + halves[False]) == sorted(pair for _, pairs in documents for pair in pairs)


def test_held_out_documents_are_a_retrieval_test_and_never_in_training(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "docs" / "a.jsonl", 400)
    said = run_main(main, "--docs", tmp_path / "docs", "--out", tmp_path / "pairs")
    train, dev = (read_rows(tmp_path / "pairs" / f"{name}.jsonl") for name in ("train", "dev"))
    words = {
        name: {word for row in rows for word in row["passage"].split()} for name, rows in (("t", train), ("d", dev))
    }
    owned = {name: {number for number in range(len(texts)) if f"word{number}" in own} for name, own in words.items()}
    assert not owned["t"] & owned["d"]
    assert len(owned["t"] | owned["d"]) == len(texts)
    assert 5 <= len(owned["d"]) <= 40
    folder = tmp_path / "pairs" / "held-out"
    queries, corpus = (
        {row["_id"]: row["text"] for row in read_rows(folder / f"{name}.jsonl")} for name in ("queries", "corpus")
    )
    qrels = [line.split("\t") for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    assert [(queries[query], corpus[passage], score) for query, passage, score in qrels] == [
        (row["question"], row["passage"], "1") for row in dev
    ]
    assert not {*queries.values()} & {*corpus.values()}
    assert f"{len(train):,} pairs for training" in said


def test_all_formats_are_read_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    write_wiki(tmp_path / "docs" / "wiki", documents=20)
    long = "A sentence of some length that goes on. " * 10
    (tmp_path / "docs" / "a.txt.gz").write_bytes(gzip.compress(f"{long}\n\n{long}more".encode()))
    pq.write_table(pa.table({"text": ["short", f"{long}\n{long}other", long]}), tmp_path / "docs" / "b.parquet")
    pq.write_table(pa.table({"words": ["x"]}), tmp_path / "docs" / "c.parquet")
    (tmp_path / "docs" / "d.pdf").write_bytes(b"%PDF-1.7")
    said = run_main(main, "--docs", tmp_path / "docs", "--out", tmp_path / "1")
    assert "1 of them without a title" in said
    assert "left out: " + str(tmp_path / "docs" / "d.pdf") in said
    assert "no text in a field 'text'; there is: words" in said
    before = tree(tmp_path / "1")
    run_main(main, "--docs", tmp_path / "docs", "--out", tmp_path / "1")
    assert tree(tmp_path / "1") == before
    (tmp_path / "1" / "train.jsonl").write_text("mine")
    assert "--replace" in run_main(main, "--docs", tmp_path / "docs", "--out", tmp_path / "1", code=2)
    run_main(main, "--docs", tmp_path / "docs", "--out", tmp_path / "1", "--replace")
    assert tree(tmp_path / "1") == before


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_text_is_refused_and_nothing_is_left(count: int, tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", count)
    (tmp_path / "b.jsonl").write_text(json.dumps({"title": "Title", "text": "short"}) + "\n")
    said = run_main(main, "--docs", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--out", tmp_path / "pairs", code=2)
    assert f"{count} documents with pairs" in said
    assert "1 documents are too short" in said
    assert not (tmp_path / "pairs").exists()
