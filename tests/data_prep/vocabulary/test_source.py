"""Vocabularies of folders: their pieces and their casing, however the folder says it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.commands import assert_refusal
from transformers import BertTokenizer

from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.source import find_vocabulary, read_vocabulary, shorten_name

LOWER = (*SPECIAL, "[unused1]", "a", "##b", "river")
MIXED = (*LOWER, "River")
GONE = object()
CONFIG = "tokenizer_config.json"
LACKS = ["", "vocab.txt", "tokenizer.json", CONFIG, f"vocab.txt {CONFIG}", f"tokenizer.json {CONFIG}"]
"""Files that a folder may lack, whose rest still says all."""


def written(folder: Path, pieces: tuple[str, ...], cased: bool) -> Path:
    WordPiece(pieces, cased).write(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A vocabulary in lower case."""
    return written(tmp_path / "bert", LOWER, cased=False)


def change(path: Path, *keys: str, value: Any = GONE) -> None:
    """Sets a value of a JSON file; without a value the key goes."""
    content = table = json.loads(path.read_text())
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    if value is GONE:
        del table[keys[-1]]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize("lacks", LACKS)
def test_a_folder_says_its_pieces_and_its_casing(tmp_path: Path, cased: bool, lacks: str) -> None:
    folder = written(tmp_path / "bert", MIXED if cased else LOWER, cased)
    for name in lacks.split():
        (folder / name).unlink()
    assert read_vocabulary(folder) == WordPiece(MIXED if cased else LOWER, cased)


def test_the_config_comes_before_the_normaliser(folder: Path) -> None:
    change(folder / CONFIG, "do_lower_case", value=False)
    assert read_vocabulary(folder).cased
    change(folder / CONFIG, "do_lower_case")
    assert not read_vocabulary(folder).cased


OTHERWISE = r"""
tokenizer_config.json | strip_accents | false | strip_accents = false
tokenizer_config.json | tokenize_chinese_chars | false | tokenize_chinese_chars = false
tokenizer_config.json | tokenizer_class | "BertJapaneseTokenizer" | by BertJapaneseTokenizer; only
tokenizer_config.json | word_tokenizer_type | "mecab" | finds words by mecab
tokenizer.json | normalizer strip_accents | false | strip_accents = false
tokenizer.json | normalizer type | "Sequence" | normalizer.type = "Sequence"
tokenizer.json | pre_tokenizer | {"type": "Split"} | pre_tokenizer.type = "Split"
tokenizer.json | model continuing_subword_prefix | "" | continuing_subword_prefix = ""; only nothing
tokenizer.json | model max_input_chars_per_word | 5 | max_input_chars_per_word = 5; only nothing
tokenizer.json | model unk_token | "x" | model.unk_token = "x"
tokenizer.json | normalizer clean_text | false | normalizer.clean_text = false; only nothing
tokenizer.json | added_tokens | [{"content": "<ent>", "special": false}] | whole in every text .added_tokens
tokenizer.json | model type | "Unigram" | "Unigram"; only WordPiece and byte-level BPE
bytes/tokenizer.json | model type | "Unigram" | model.type = "Unigram"; only WordPiece and byte-level BPE are known
bytes/tokenizer.json | normalizer | {"type": "Lowercase"} | normalizer.type = "Lowercase"; only nothing or "NFC"
bytes/tokenizer.json | pre_tokenizer | {"type": "Metaspace"} | pre_tokenizer.type = "Metaspace"; only "ByteLevel"
bytes/tokenizer.json | pre_tokenizer | null | pre_tokenizer.type = null; only "ByteLevel"
bytes/tokenizer.json | pre_tokenizer use_regex | false | pre_tokenizer.use_regex = false
bytes/tokenizer.json | model end_of_word_suffix | "</w>" | model.end_of_word_suffix = "</w>"
bytes/tokenizer.json | model ignore_merges | true | model.ignore_merges = true
bytes/tokenizer.json | model merges | [["Ġ", "notthere"]] | no byte-level BPE: .*; copy it again
bytes/tokenizer.json | model vocab | {"a": 0, "b": 1} | no byte-level BPE
bytes/tokenizer.json | model merges | 5 | no byte-level BPE
"""
"""A file, a key in it, its value in JSON, and what is said of it."""
BYTES = KIND.train(Counter(dict.fromkeys("the river there".split(), 9)), 270, cased=True)


@pytest.mark.parametrize("row", OTHERWISE.strip().split("\n"))
def test_what_cuts_text_otherwise_is_refused(row: str, tmp_path: Path) -> None:
    name, keys, value, message = row.split(" | ")
    written(tmp_path, LOWER, cased=False)
    BYTES.write(tmp_path / "bytes")
    change(tmp_path / name, *keys.split(), value=json.loads(value))
    assert_refusal(message, read_vocabulary, (tmp_path / name).parent)


def test_accents_go_with_case(tmp_path: Path) -> None:
    change(written(tmp_path, MIXED, cased=True) / CONFIG, "strip_accents", value=False)
    assert read_vocabulary(tmp_path).cased
    change(tmp_path / CONFIG, "strip_accents", value=True)
    assert_refusal("strip_accents = true; here accents go with case", read_vocabulary, tmp_path)


def test_vocabularies_of_both_kinds_are_found_by_their_content(tmp_path: Path) -> None:
    BYTES.write(tmp_path / "bytes")
    change(tmp_path / "bytes" / CONFIG, "tokenizer_class", value="BertTokenizer")
    assert find_vocabulary(str(tmp_path / "bytes"), cased=False) == BYTES
    assert find_vocabulary(str(written(tmp_path / "words", LOWER, cased=False)), cased=False).kind == "wordpiece"


def test_without_a_tokenizer_json_the_class_alone_says_the_kind(folder: Path) -> None:
    config = folder / CONFIG
    for kind in ("BertTokenizerFast", "PreTrainedTokenizerFast"):
        change(config, "tokenizer_class", value=kind)
        assert read_vocabulary(folder) == WordPiece(LOWER, cased=False)
    (folder / "tokenizer.json").unlink()
    assert_refusal("cuts text by PreTrainedTokenizerFast", read_vocabulary, folder)
    change(config, "tokenizer_class")
    assert read_vocabulary(folder) == WordPiece(LOWER, cased=False)


@pytest.mark.parametrize("cased", [False, True])
def test_what_transformers_saves_is_taken(tmp_path: Path, cased: bool) -> None:
    pieces = MIXED if cased else LOWER
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=not cased)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert read_vocabulary(tmp_path / "saved") == WordPiece(pieces, cased)


def test_what_is_no_vocabulary_is_refused(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    change(folder / "tokenizer.json", "model", "vocab", value=["a", "b"])
    assert_refusal(r"tokenizer.json: no model.vocab that gives ids", read_vocabulary, folder)
    (folder / "tokenizer.json").unlink()
    assert_refusal(r"neither vocab.txt nor tokenizer.json: copy them from where", read_vocabulary, folder)
    assert_refusal("no such folder", read_vocabulary, folder / "nowhere")


@pytest.mark.parametrize(("old", "new"), [("river\n", "rover\n"), ("river\n", ""), ("a\n##b\n", "##b\na\n")])
def test_a_vocabulary_that_its_tokenizer_contradicts_is_refused(old: str, new: str, folder: Path) -> None:
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace(old, new))
    assert_refusal("vocab.txt and tokenizer.json have other pieces: copy both again", read_vocabulary, folder)


@pytest.mark.parametrize("keys", [("model", "vocab", "river"), ("model",), ("normalizer",), ("pre_tokenizer",)])
@pytest.mark.parametrize("value", [None, "x", 1.5, [1]])
def test_parts_of_a_tokenizer_that_are_none_are_refused(keys: tuple[str, ...], value: Any, folder: Path) -> None:
    change(folder / "tokenizer.json", *keys, value=value)
    for _ in range(2):
        assert_refusal(r"tokenizer\.json: ", read_vocabulary, folder)
        (folder / "vocab.txt").unlink(missing_ok=True)


def test_a_run_and_its_checkpoints_have_the_vocabulary_of_the_run(tmp_path: Path) -> None:
    written(tmp_path / "run" / "tokenizer", MIXED, cased=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    for folder in (tmp_path / "run", checkpoint):
        assert read_vocabulary(folder) == WordPiece(MIXED, cased=True)


def test_only_a_plain_file_leaves_the_casing_to_the_user(folder: Path) -> None:
    for cased in (False, True):
        assert find_vocabulary(str(folder / "vocab.txt"), cased).cased == cased
    said = r"--cased: the vocabulary of --vocab .* is for text in lower case"
    assert_refusal(said, find_vocabulary, str(folder), cased=True)
    assert find_vocabulary(str(written(folder / "mixed", MIXED, cased=True)), cased=False).cased
    assert_refusal(r"missing.txt: no such file", find_vocabulary, str(folder / "missing.txt"), cased=False)
    said = f"--vocab {folder}/tokenizer.json: name its folder, {folder}"
    assert_refusal(said, find_vocabulary, str(folder / "tokenizer.json"), cased=False)
    names = [str(folder), "google-bert/bert-base-uncased"]  # a manifest has no paths of this machine
    assert [*map(shorten_name, names)] == [folder.name, "google-bert/bert-base-uncased"]


def test_capitals_in_a_plain_file_need_a_word_on_case(tmp_path: Path) -> None:
    """Text in lower case would never match them; a file beside it may say it, or the user does."""
    file = written(tmp_path, MIXED, cased=True) / "vocab.txt"
    assert find_vocabulary(str(file), cased=False).cased
    change(tmp_path / CONFIG, "do_lower_case", value=True)
    assert not find_vocabulary(str(file), cased=False).cased
    (tmp_path / CONFIG).unlink()
    assert_refusal(r"--vocab .*: has pieces with capitals.*: add --cased", find_vocabulary, str(file), cased=False)
    assert find_vocabulary(str(file), cased=True).cased
