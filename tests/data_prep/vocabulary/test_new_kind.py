"""A tokenizer kind that a stranger adds is one file: shards are made, checked, shown and taken by commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import write_wiki
from support.copies import copy_packages, run_entry
from transformers import AutoTokenizer

KIND = '''
"""Every character is a piece."""
from __future__ import annotations
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from data_prep.common.files import read_table
from data_prep.vocabulary.kinds.declaration import TokenizerKind
from data_prep.vocabulary.vocabulary import TOKENIZER, TOKENIZER_CONFIG, SpecialPieces, Vocabulary

SPECIAL = SpecialPieces("(pad)", "(unk)", "(cls)", "(sep)", "(mask)")

@dataclass(frozen=True)
class Characters(Vocabulary):
    kind, file = "characters", TOKENIZER
    def list_rules(self):
        return json.dumps(self.pieces).encode()
    @property
    def special_pieces(self):
        return SPECIAL
    @cached_property
    def continues(self):
        return np.array([piece != " " and piece not in SPECIAL for piece in self.pieces])
    def spell(self, ids):
        return "".join(self.pieces[id] for id in ids)
    def pipeline(self):
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        pipeline = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL.unk))
        pipeline.pre_tokenizer = pre_tokenizers.Split(Regex("[\\\\s\\\\S]"), "isolated")
        return pipeline
    def find_replaced(self, pieces):
        return [[] for _ in pieces]
    def list_contents(self):
        full = self.pipeline()
        full.add_special_tokens([*SPECIAL])
        config = {f"{role}_token": name for role, name in SPECIAL._asdict().items()}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {TOKENIZER: full.to_str().encode(), TOKENIZER_CONFIG: json.dumps(config).encode()}

class Kind(TokenizerKind):
    vocabulary, title, model, plain = Characters, "characters", "WordLevel", ("characters",)
    is_cased, is_extensible = True, False
    def load(self, folder, cased):
        return self.read(folder, read_table(folder / TOKENIZER))
    def read(self, folder, tokenizer):
        vocab = tokenizer["model"]["vocab"]
        return Characters(tuple(sorted(vocab, key=vocab.get)), True)
    def make_up(self, size, cased):
        return Characters((*SPECIAL, *map(chr, range(0x4E00, 0x4E00 + size)))[:size], True)
    def count_words(self, text, ends, cased):
        return Counter(text.tobytes().decode())
    def train(self, counts, size, cased):
        return Characters((*SPECIAL, *sorted(counts, key=lambda one: (-counts[one], one)))[:size], True)
KIND = Kind()
'''


@pytest.mark.slow
def test_a_kind_is_one_file(tmp_path: Path) -> None:
    root = copy_packages(tmp_path / "copy", data_prep__vocabulary__kinds__characters=KIND)
    write_wiki(tmp_path / "wiki", documents=60)
    out, again = tmp_path / "out", tmp_path / "again"
    small = ("--lengths", "64", "--duplicates", "1", "--workers", "1")
    words = ("--docs", tmp_path / "wiki", "--tokenizer", "characters", "--vocab-size", "100")
    assert "is ready" in run_entry(root, "data_prep/shard.py", *words, "--out", out, *small)
    assert "all is right" in run_entry(root, "data_prep/verify.py", out)
    assert "→(mask)" in run_entry(root, "data_prep/show.py", out)
    run_entry(root, "data_prep/shard.py", "--from", out, "--out", again, *small, "--masking", "whole-word")
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.convert_ids_to_tokens(theirs("a b", add_special_tokens=False)["input_ids"]) == ["a", " ", "b"]
