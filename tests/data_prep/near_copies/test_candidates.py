"""Documents that share a key are paired with the first few of them, however little is in memory at a time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.near_copies import VOCABULARY, draw_corpus, write_tokens

from data_prep.arrow_files import map_batches
from data_prep.near_copies import candidates, corpus
from data_prep.near_copies.candidates import FEW, find_candidates, make_find_tasks
from data_prep.near_copies.corpus import read_parts, write_parts
from data_prep.near_copies.shingles import read_texts
from data_prep.near_copies.signatures import Banding, compute_keys, make_sign_tasks, sign

Pairs = set[tuple[int, int]]
BANDING = Banding(6, 2)


def prepare(folder: Path, num_documents: int, per_file: int) -> int:
    """Writes a corpus with its keys; returns how many keys there are."""
    documents = draw_corpus(1, num_documents // 2, num_documents // 2)
    documents[50:200:10] = [documents[40]] * 15
    write_parts(folder, write_tokens(folder, documents, per_file))
    for task in make_sign_tasks(folder, read_parts(folder), BANDING, VOCABULARY.sha256):
        sign(task)
    return BANDING.bands * num_documents


def expected(folder: Path) -> Pairs:
    """Pairs by the definition, with all keys in memory."""
    parts = read_parts(folder)
    texts = [read_texts(folder / parts.path(part)) for part in range(len(parts.paths))]
    keys = np.concatenate([compute_keys(one, VOCABULARY.continues, BANDING) for one in texts])
    having = defaultdict(list)
    for document, row in enumerate(keys.tolist()):
        for key in row:
            having[key].append(document)
    return {(later, one) for same in having.values() for later in same for one in same[:FEW] if one < later}


@pytest.mark.parametrize(
    ("keys", "stretches", "per_file"), [(1 << 19, 128, 30), (100, 128, 30), (20, 3, 17), (40, 1, 9)]
)
def test_pairs_are_the_same_however_little_is_in_memory(
    keys: int, stretches: int, per_file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "KEYS", keys)
    monkeypatch.setattr(corpus, "MOST_STRETCHES", stretches)
    num_keys = prepare(tmp_path, 240, per_file)
    assert read_parts(tmp_path).num_stretches <= stretches
    found: Pairs = set()
    for task in make_find_tasks(tmp_path, num_keys):
        [file] = find_candidates(task).files
        table = map_batches(tmp_path / file.path).read_all()
        later, earlier = (table[name].to_pylist() for name in ("later", "earlier"))
        assert later == sorted(later)
        found |= {*zip(later, earlier, strict=True)}
    assert found == expected(tmp_path)
    assert len(found) > 150
