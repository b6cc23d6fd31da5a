"""Inputs of a model with byte-level BPE, as transformers makes them: pairs, lists of words, offsets, masks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Cutter, Ragged
from pretraining.scoring.sentences import SentenceCutter

FIRST, SECOND = ["The naïve river.", "It isn't far!"], ["A bank, 1990.", "the river's bank"]


@cache
def vocabulary() -> Vocabulary:
    words = [
        word for text in (*FIRST, *SECOND) for word in (text.split()[0], *(f" {each}" for each in text.split()[1:]))
    ]
    return KIND.train(dict.fromkeys(words, 5), 320, cased=True)


def rows(found: Ragged) -> list[list[int]]:
    return [found.row(number).tolist() for number in range(len(found))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocabulary().write(tmp_path)
    return tmp_path


def test_texts_and_pairs_are_laid_out_as_by_transformers(folder: Path) -> None:
    """RoBERTa has two marks between the texts of a pair."""
    theirs, cutter = AutoTokenizer.from_pretrained(folder), Cutter(vocabulary())
    first, second = cutter.cut_texts(FIRST), cutter.cut_texts(SECOND)
    assert rows(cutter.lay_out(first, None, 64).pieces) == theirs(FIRST)["input_ids"]
    laid = cutter.lay_out(first, second, 64)
    assert rows(laid.pieces) == theirs(FIRST, SECOND)["input_ids"]
    for row, start, text in zip(rows(laid.pieces), laid.second.tolist(), SECOND, strict=True):
        assert row[start:] == theirs(text)["input_ids"][1:]
    short = theirs(FIRST, SECOND, truncation="longest_first", max_length=14)["input_ids"]
    cut = cutter.lay_out(first, second, 14).pieces
    assert cut.lengths.tolist() == [min(14, len(row)) for row in short]


def test_words_of_a_list_have_a_blank_before_each(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    theirs = AutoTokenizer.from_pretrained(folder)
    words = ["The", "river", "'s", "naïve", "bank"]
    ids = theirs(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert Cutter(vocabulary()).cut_words(words).values.tolist() == ids


def test_offsets_are_those_of_the_words_without_blanks(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ids, offsets = Cutter(vocabulary()).cut_with_offsets(FIRST)
    expected = theirs(FIRST, add_special_tokens=False, return_offsets_mapping=True)
    assert rows(ids) == expected["input_ids"]
    found = [offsets.row(number).tolist() for number in range(len(offsets))]
    assert found == [[list(each) for each in row] for row in expected["offset_mapping"]]


def test_sentences_are_scored_with_their_marks() -> None:
    special, cut = vocabulary().special, SentenceCutter(vocabulary()).cut_texts(FIRST)
    assert cut.pieces[cut.starts].tolist() == [special.cls] * 2
    assert cut.pieces[np.cumsum(cut.lengths) - 1].tolist() == [special.sep] * 2
    assert vocabulary().split_at_masks("The <mask>, or  <mask>") == ["The", ", or", ""]
