"""A format and a tokenizer kind that a stranger adds are a file each: commands find, name, read and check them."""

import json
from pathlib import Path

import pytest
from support.copies import copy_packages, run_entry
from transformers import AutoTokenizer

READER = '''
"""Cards: records that begin with a line of #, their fields a line each."""
from __future__ import annotations
import re
from pathlib import Path
from data_prep.readers.cutting import ranges, records
from data_prep.readers.foreign import Foreign
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document
OLD = Foreign("a pile of old cards", "turn FILE over")
def read(span, options):
    for offset, record in records(span, re.compile(rb"\\n(#)"), options.problems, re.compile(rb"\\n\\Z")):
        text = options.problems.decode(record, span, offset)
        if text is None:
            continue
        fields = dict(line.split(": ", 1) for line in text.split("\\n")[1:] if line)
        if options.text_field not in fields:
            raise options.explain_missing_text(span.name_place(offset), {})
        yield Document(f"{Path(span.path).name}:{offset}", "", [fields[options.text_field]])
READER = Reader(
    read,
    ranges,
    suffixes=(".cards",),
    first_bytes=(b"#card\\n",),
    has_fields=True,
    find_fault=lambda path, head: OLD if b"old: " in head else None,
    describe=lambda path, text_field: ", nicely filed",
)
'''
CARDS = "".join(f"#card\nnumber: {n}\nbody: This is card {n}. It lies in box {n % 7}.\n" for n in range(400))
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
def test_a_reader_and_a_kind_of_tokenizer_are_a_file_each(tmp_path: Path) -> None:
    files = {"data_prep__readers__formats__cards": READER, "data_prep__vocabulary__kinds__characters": KIND}
    root, mine, out = copy_packages(tmp_path / "copy", **files), tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    for name in ("a.cards", "b.txt", "c.dat"):
        (mine / name).write_text(CARDS)
    (mine / "d.txt").write_text("A book, with\nlines of text.\n\nIt ends.\n")
    small = ("--lengths", "64", "--duplicates", "1", "--workers", "1")

    def shard(*words: object, code: int = 0) -> str:
        kind = ("--tokenizer", "characters", "--vocab-size", "100")
        return run_entry(root, "data_prep/shard.py", "--docs", mine, "--out", out, *kind, *small, *words, code=code)

    assert "--text-field mine=FIELD names the field" in shard(code=2)
    assert "there is cards, mediawiki, wikiextractor," in shard("--format", "deck", code=2)
    assert "3 cards (text in 'body'), 1 text, nicely" in shard("--text-field", "body")
    assert "all is right" in run_entry(root, "data_prep/verify.py", out)
    assert "→(mask)" in run_entry(root, "data_prep/show.py", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert [file["format"] for file in manifest["sources"]] == ["cards", "cards", "cards", "text"]
    assert manifest["corpus"]["documents"] == 1201
    again = ("--from", out, "--out", tmp_path / "again", "--masking", "whole-word")
    run_entry(root, "data_prep/shard.py", *again, *small)
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.convert_ids_to_tokens(theirs("a b", add_special_tokens=False)["input_ids"]) == ["a", " ", "b"]
    (mine / "e.cards").write_text("#card\nold: 1\n")
    assert "a pile of old cards" in shard("--text-field", "body", code=2)
