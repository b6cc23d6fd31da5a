"""shard.py with byte-level BPE: training, text as a tokenizer sees it, other folders, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import write_wiki
from support.commands import run_main
from support.shards import run, tree
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data_prep import show, verify
from data_prep.arrow_files import map_batches, read_shard
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.source import read_vocabulary

BYTES = ("--tokenizer", "bytelevel", "--vocab-size", "500")
LINES = ["One sentence.", "It's  another: naïve 中文!", "“A third” — 1990."]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a small text and of some lines of two documents."""
    folder = tmp_path_factory.mktemp("bytes")
    write_wiki(folder / "wiki")
    (folder / "lines").mkdir()
    (folder / "lines" / "a.txt").write_text("\n".join([*LINES, "", *LINES[::-1], ""]))
    run(folder / "wiki", folder / "data", "--docs", folder / "lines", "--format", "lines=sentences", *BYTES)
    return folder / "data"


def test_shards_are_whole_and_their_tokenizer_is_that_of_transformers(made: Path) -> None:
    assert "all is right" in run_main(verify.main, made)
    manifest, vocabulary = Manifest.read(made), read_vocabulary(made)
    assert (manifest.settings.tokenizer, manifest.vocabulary.cased, len(vocabulary)) == ("bytelevel", True, 500)
    assert manifest.corpus.unknown == 0
    theirs = AutoTokenizer.from_pretrained(made)
    ids = vocabulary.encoder().encode_texts(LINES)
    assert [theirs(line, add_special_tokens=False)["input_ids"] for line in LINES] == [
        row.tolist() for row in np.split(ids.ids, ids.ends[:-1])
    ]
    assert theirs("a", "b")["input_ids"].count(vocabulary.special.sep) == 1 + vocabulary.separators == 3
    for record in manifest.sets()[ShardSet(32, 0)]:
        for row in read_shard(made / record.path).to_pylist():
            assert row["pieces"][0] == vocabulary.special.cls
            assert row["pieces"][-1] == row["pieces"][row["boundary"] - 1] == vocabulary.special.sep


def test_a_document_has_the_ids_of_its_sentences_joined_by_blanks(made: Path) -> None:
    [kept] = [record for record in Manifest.read(made).kept if record.source == "lines"]
    rows = map_batches(made / kept.path).get_batch(0)["sentences"].to_pylist()
    pipeline = Tokenizer.from_file(str(made / "tokenizer.json"))
    for sentences, lines in zip(rows, (LINES, LINES[::-1]), strict=True):
        joined = pipeline.encode(" ".join(lines), add_special_tokens=False).ids
        assert [id for sentence in sentences for id in sentence] == joined
        assert len(sentences) == len(lines)


@pytest.mark.slow
def test_workers_do_not_matter_and_documents_are_taken_as_they_are(made: Path, tmp_path: Path) -> None:
    lines = ("--docs", made.parent / "lines", "--format", "lines=sentences")
    run(made.parent / "wiki", tmp_path / "two", *lines, *BYTES, "--workers", "2")
    assert tree(tmp_path / "two") == tree(made)
    said = run_main(_shard, "--from", made, "--out", tmp_path / "from", "--lengths", "32", "64", "--duplicates", "2")
    assert "is ready" in said
    examples = [f"length-{length}/duplicate-{n}/shard-00000.arrow" for length in (32, 64) for n in (0, 1)]
    ours, theirs = tree(made), tree(tmp_path / "from")
    assert [theirs[name] for name in examples] == [ours[name] for name in examples]
    assert Manifest.read(tmp_path / "from").settings.tokenizer == "bytelevel"


def test_words_are_masked_whole_and_shown_as_text(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "words"
    run_main(
        *(_shard, "--from", made, "--out", out, "--lengths", "64", "--duplicates", "1"),
        *("--masking", "whole-word", "--pairs", "none"),
    )
    continues = read_vocabulary(out).continues
    for row in read_shard(out / "length-64/duplicate-0/shard-00000.arrow").to_pylist():
        masked = {mask["position"] for mask in row["masked"]}
        text = list(row["pieces"])
        for mask in row["masked"]:
            text[mask["position"]] = mask["piece"]
        for place in range(2, len(text) - 1):
            assert not continues[text[place]] or (place in masked) == (place - 1 in masked)
    document = run_main(show.main, made, "--document", "200")
    assert all(line in document for line in LINES)
    example = run_main(show.main, made, "--length", "64")
    assert "→<mask>" in example
    assert "Ġ" not in example
    run_main(show.main, made, "--report")
    assert "Ġ" not in (made / "report.html").read_text()


def _shard(arguments: list[str]) -> int:
    from data_prep import shard

    return shard.main(arguments)


def test_what_cannot_be_is_refused(made: Path, wiki: Path, tmp_path: Path) -> None:
    WordPiece((*SPECIAL, *"abc"), cased=False).write(tmp_path / "words")
    refused: list[tuple[list[object], str]] = [
        (["--tokenizer", "sentencepiece"], "--tokenizer sentencepiece: there is bytelevel, wordpiece"),
        (["--tokenizer", "bytelevel", "--vocab-size", "200"], "special pieces and bytes alone need 261; take more"),
        ([*BYTES, "--vocab", tmp_path / "words"], f"vocabulary of --vocab {tmp_path}/words is WordPiece; leave it out"),
        (["--tokenizer", "wordpiece", "--vocab", made], f"of --vocab {made} is byte-level BPE; leave it out"),
        (["--vocab", made, "--extend", "9"], "--extend: byte-level BPE spells every word with the pieces that it has"),
    ]
    for words, message in refused:
        assert message in run(wiki, tmp_path / "out", *words, code=2)
    assert "--tokenizer was bytelevel, now " in run(
        made.parent / "wiki", made, "--docs", made.parent / "lines", "--format", "lines=sentences", code=2
    )


def test_a_vocabulary_of_bytes_is_used_again(made: Path, wiki: Path, tmp_path: Path) -> None:
    run(wiki, tmp_path / "out", "--vocab", made)
    ours, theirs = Manifest.read(tmp_path / "out"), Manifest.read(made)
    assert (ours.vocabulary, ours.settings.tokenizer) == (theirs.vocabulary, "bytelevel")
    assert isinstance(read_vocabulary(tmp_path / "out"), KIND.vocabulary)
