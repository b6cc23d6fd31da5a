"""shard.py with the vocabulary of a model that exists, as it is and with words of the text, and with byte-level BPE."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import write_wiki
from support.base_models import write_bert
from support.commands import run_main
from support.shards import command, make, run, tree
from support.website import Site, publish_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data_prep import show, verify
from data_prep.arrow_files import map_batches, read_shard
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary

pytest_plugins = ["support.website"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters(cased: bool) -> Vocabulary:
    """A vocabulary that cuts every word into letters."""
    alphabet = LETTERS + CAPITALS * cased
    return WordPiece((*SPECIAL, ".", *alphabet, *(f"##{letter}" for letter in alphabet)), cased)


@pytest.mark.parametrize("cased", [False, True])
def test_a_folder_gives_its_pieces_and_its_casing(wiki: Path, tmp_path: Path, cased: bool) -> None:
    """And shards give their vocabulary to others."""
    bert, out, second = write_bert(tmp_path / "bert", letters(cased)), tmp_path / "out", tmp_path / "second"
    case = "with case and accents" if cased else "in lower case"
    assert f"vocabulary: {58 + 52 * cased} pieces of {bert}, {case}" in run(wiki, out, "--vocab", bert)
    assert read_vocabulary(out) == letters(cased)
    manifest = Manifest.read(out)
    assert manifest.settings.cased == cased
    assert manifest.given_vocabulary == manifest.vocabulary.sha256 == letters(cased).sha256
    assert (manifest.vocabulary_source, manifest.corpus.unknown) == ("bert", 0)
    run(write_wiki(tmp_path / "more", documents=40, seed=2), second, "--vocab", out)
    assert Manifest.read(second).vocabulary == manifest.vocabulary
    assert Manifest.read(second).settings.cased == cased


@pytest.mark.slow
def test_words_are_added_the_same_by_any_workers(wiki: Path, tmp_path: Path) -> None:
    bert, out = write_bert(tmp_path / "bert", letters(cased=True)), tmp_path / "1"
    words = ["--vocab", bert, "--extend", "12"]
    assert "12 words added to 110 pieces: " in run(wiki, out, *words)
    run(wiki, tmp_path / "2", *words, "--workers", "2")
    assert tree(tmp_path / "2") == tree(out)
    manifest = Manifest.read(out)
    assert (manifest.vocabulary.size, manifest.vocabulary.base_size) == (122, 110)
    assert manifest.given_vocabulary == letters(cased=True).sha256
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (bert, out))
    old, new = before.get_vocab(), after.get_vocab()
    assert {piece: new[piece] for piece in old} == old
    added = read_vocabulary(out).pieces[110:]
    assert [after(word, add_special_tokens=False).input_ids for word in added] == [[110 + n] for n in range(12)]
    assert "--extend was 12, now 13" in run(wiki, out, *words, "--extend", "13", code=2)
    assert "--extend was 12, now 0" in run(wiki, out, "--vocab", bert, code=2)
    said = run(wiki, tmp_path / "many", *words, "--extend", "100000")
    number = len(read_vocabulary(tmp_path / "many")) - 110
    assert f"; {number:,} of 100,000 words asked for added\n" in said


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_a_name_on_the_hub(wiki: Path, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    publish_model(site, "owner/bert", write_bert(tmp_path / "bert", letters(cased=True)))
    out = tmp_path / "out"
    done = subprocess.run(command(wiki, out, "--vocab", "owner/bert"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Manifest.read(out).vocabulary_source == "owner/bert"
    assert read_vocabulary(out).cased
    assert not [request for request in site.requests if "safetensors" in request.path]
    done = subprocess.run(command(wiki, out, "--vocab", "owner/nothing"), capture_output=True, text=True)
    assert done.returncode == 2
    where = f"--vocab owner/nothing: no such folder here; as a name on the hub: {site.url}/owner/nothing"
    assert f"{where}: no such model there (is it OWNER/NAME?)" in done.stderr
    (tmp_path / "full").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "full" / "cache"))
    done = subprocess.run(command(wiki, out, "--vocab", "owner/bert"), capture_output=True, text=True)
    assert done.returncode == 2
    cure = "cannot be written: make room there, or name another folder in HF_HOME"
    assert f"{tmp_path}/full/cache: {cure}" in done.stderr


BYTES = ("--tokenizer", "bytelevel", "--vocab-size", "500")
LINES = ["One sentence.", "It's  another: naïve 中文!", "“A third” — 1990."]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a small text and of some lines of two documents."""
    folder = tmp_path_factory.mktemp("bytes")
    write_wiki(folder / "wiki", documents=60)
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
    ours = [row.tolist() for row in np.split(ids.ids, ids.ends[:-1])]
    assert [theirs(line, add_special_tokens=False)["input_ids"] for line in LINES] == ours
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


def test_words_are_masked_whole_and_shown_as_text(made: Path, tmp_path: Path) -> None:
    words = ["--lengths", "64", "--duplicates", "1", "--masking", "whole-word", "--pairs", "none"]
    out = make(tmp_path / "words", "--from", made, *words)
    assert Manifest.read(out).settings.tokenizer == "bytelevel"
    continues = read_vocabulary(out).continues
    for row in read_shard(out / "length-64/duplicate-0/shard-00000.arrow").to_pylist():
        masked = {mask["position"] for mask in row["masked"]}
        text = list(row["pieces"])
        for mask in row["masked"]:
            text[mask["position"]] = mask["piece"]
        for place in range(2, len(text) - 1):
            assert not continues[text[place]] or (place in masked) == (place - 1 in masked)
    document = run_main(show.main, made, "--document", "60")
    assert all(line in document for line in LINES)
    example = run_main(show.main, made, "--length", "64")
    assert "→<mask>" in example
    assert "Ġ" not in example
    run_main(show.main, made, "--report")
    assert "Ġ" not in (made / "report.html").read_text()


def test_what_cannot_be_is_refused(made: Path, wiki: Path, tmp_path: Path) -> None:
    letters(cased=False).write(tmp_path / "words")
    refused: list[tuple[list[object], str]] = [
        (["--vocab", tmp_path / "words", "--cased"], "is for text in lower case; leave out --cased"),
        (["--vocab", tmp_path / "nowhere"], "nowhere: no such folder, and not the name of a model"),
        (["--tokenizer", "sentencepiece"], "--tokenizer sentencepiece: there is bytelevel, wordpiece"),
        (["--tokenizer", "bytelevel", "--vocab-size", "200"], "special pieces and bytes alone need 261; take more"),
        ([*BYTES, "--vocab", tmp_path / "words"], f"vocabulary of --vocab {tmp_path}/words is WordPiece; leave it out"),
        (["--tokenizer", "wordpiece", "--vocab", made], f"of --vocab {made} is byte-level BPE; leave it out"),
        (["--vocab", made, "--extend", "9"], "--extend: byte-level BPE spells every word with the pieces that it has"),
    ]
    for number, (words, message) in enumerate(refused):
        assert message in run(wiki, tmp_path / str(number), *words, code=2)
        assert "--vocab-size" in words or not (tmp_path / str(number)).exists()
    lines = ("--docs", made.parent / "lines", "--format", "lines=sentences")
    assert "--tokenizer was bytelevel, now " in run(made.parent / "wiki", made, *lines, code=2)


def test_a_vocabulary_of_bytes_is_used_again(made: Path, wiki: Path, tmp_path: Path) -> None:
    run(wiki, tmp_path / "out", "--vocab", made)
    ours, theirs = Manifest.read(tmp_path / "out"), Manifest.read(made)
    assert (ours.vocabulary, ours.settings.tokenizer) == (theirs.vocabulary, "bytelevel")
    assert isinstance(read_vocabulary(tmp_path / "out"), KIND.vocabulary)
