"""shard.py with the vocabulary of a model that exists, as it is and with words of the text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import write_wiki
from support.base_models import write_bert
from support.hub import publish_model
from support.shards import command, run, tree
from support.website import Site
from transformers import AutoTokenizer

from data_prep.shards import Manifest
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary

pytest_plugins = ["support.website_fixtures"]

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


def test_what_cannot_be_is_refused(wiki: Path, tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert", letters(cased=False))
    for words, message in [
        (["--vocab", str(bert), "--cased"], "is for text in lower case; leave out --cased"),
        (["--vocab", str(tmp_path / "nowhere")], "nowhere: no such folder, and not the name of a model"),
    ]:
        assert message in run(wiki, tmp_path / "out", *words, code=2)
    assert not (tmp_path / "out").exists()


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
    assert (
        f"{tmp_path}/full/cache: cannot be written: make room there, or name another folder in HF_HOME" in done.stderr
    )
