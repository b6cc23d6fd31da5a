"""The counts of words that a vocabulary is trained from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from data_prep.arrow_files import write_batches
from data_prep.readers.extraction import SCHEMA
from data_prep.vocabulary import tokens
from data_prep.vocabulary.vocabulary import LONGEST_WORD, build_text_rules


def test_words_too_many_to_keep_are_dropped_from_the_rarest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 4)
    paths = []
    for number, counts in enumerate([{"a": 5, "b": 1, "c": 1}, {"d": 3, "e": 1}, {"b": 1, "a": 1}]):
        batch = pa.record_batch([list(counts), list(counts.values())], schema=tokens.COUNTS_SCHEMA)
        write_batches(tmp_path, str(number), tokens.COUNTS_SCHEMA, [batch])
        paths.append(tmp_path / str(number))
    assert tokens.add_up(paths) == {"a": 6, "d": 3, "b": 1}


@pytest.mark.parametrize("cased", [False, True])
def test_words_are_counted_as_the_library_splits_the_text(cased: bool, tmp_path: Path) -> None:
    sentences = [
        "The naïve–reader, THE reader",
        "Ελλάς: ελλας",
        "中文 and it's naïve",
        "\u00a0NAIVE the",
        "é" * 101,
        "",
    ] * 3
    columns = [["a", "b"], ["", ""], [sentences[:7], sentences[7:]]]
    write_batches(tmp_path, "documents/a.arrow", SCHEMA, [pa.record_batch(columns, schema=SCHEMA)])
    record = tokens.count_part(tokens.PartTask(tmp_path, "documents/a.arrow", 1, cased))
    normalizer, pre_tokenizer = build_text_rules(cased)
    split = (pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(sentence)) for sentence in sentences)
    expected = Counter(word for parts in split for word, _ in parts if len(word) <= LONGEST_WORD)
    assert list(tokens.add_up([tmp_path / record.files[0].path]).items()) == list(expected.items())
