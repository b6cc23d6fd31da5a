"""The counts of words that a vocabulary is trained from."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from data_prep.arrow_files import write_batches
from data_prep.vocabulary import tokens


def test_words_too_many_to_keep_are_dropped_from_the_rarest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 4)
    paths = []
    for number, counts in enumerate([{"a": 5, "b": 1, "c": 1}, {"d": 3, "e": 1}, {"b": 1, "a": 1}]):
        batch = pa.record_batch([list(counts), list(counts.values())], schema=tokens.COUNTS_SCHEMA)
        write_batches(tmp_path, str(number), tokens.COUNTS_SCHEMA, [batch])
        paths.append(tmp_path / str(number))
    assert tokens.add_up(paths) == {"a": 6, "d": 3, "b": 1}
