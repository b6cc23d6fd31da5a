"""The original generator, a peer of data preparation, does what it is said to do; and the command that measures it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.generators import ExamplesJob, generate_examples, split_pieces, split_words
from benchmarks.preparation import SourceText
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import SPECIAL, Vocabulary

LETTERS = [chr(number) for number in range(33, 127)]
PIECES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing", "é", "中", "##中", "river")
VOCABULARY = Vocabulary(tuple(dict.fromkeys(PIECES)), cased=False)
SENTENCES = ["The river is long.", "Walking, the naïve 中文 reader sings!", "It ends", "a b c d e f g h i j k l"] * 6


@pytest.fixture
def job(tmp_path: Path) -> ExamplesJob:
    """Three documents."""
    VOCABULARY.write(tmp_path)
    (tmp_path / "text").write_text("\n\n".join("\n".join(SENTENCES[at:]) for at in (0, 5, 9)) + "\n")
    return ExamplesJob(tmp_path / "text", tmp_path / "vocab.txt", length=64, duplicates=2)


@given(
    st.lists(
        st.sampled_from([*LETTERS, " ", "\t", "\x00", "\u200b", "é", "É", "中", "the", "ing", "\u3000", "a" * 120])
    )
)
def test_the_tokenizer_of_the_original_gives_the_pieces_of_tokenizers(parts: list[str]) -> None:
    ids = {piece: number for number, piece in enumerate(VOCABULARY.pieces)}
    text = "".join(parts)
    pieces = [piece for word in split_words(text) for piece in split_pieces(word, ids)]
    if all(len(word) <= 100 for word in split_words(text)):  # beyond that `tokenizers` gives up earlier
        assert pieces == VOCABULARY.pipeline().encode(text, add_special_tokens=False).tokens


def test_the_original_writes_padded_examples(job: ExamplesJob, tmp_path: Path) -> None:
    count = generate_examples(job, tmp_path / "out")
    examples = []
    with (tmp_path / "out").open("rb") as file:
        for _ in range(count):
            examples.append(pickle.load(file))
        assert not file.read()
    cls, sep, mask = (VOCABULARY.pieces.index(piece) for piece in ("[CLS]", "[SEP]", "[MASK]"))
    for example in examples:
        assert {len(example[name]) for name in ("input_ids", "input_mask", "segment_ids")} == {job.length}
        size, masked = sum(example["input_mask"]), int(sum(example["masked_lm_weights"]))
        assert example["input_ids"][0] == cls
        assert example["input_ids"][size - 1] == sep
        assert masked == min(job.predictions, max(1, round(0.15 * size)))
        assert sep not in example["masked_lm_ids"][:masked]
    every = [piece for example in examples for piece in example["input_ids"]]
    assert mask in every
    assert {example["next_sentence_labels"][0] for example in examples} == {0, 1}


@pytest.mark.slow
def test_the_command_measures_all_sides_in_turns(tmp_path: Path) -> None:
    VOCABULARY.write(write_wiki(tmp_path / "wiki" / "AA", documents=60).parent.parent)
    for number, path in enumerate(sorted((tmp_path / "wiki" / "AA").iterdir())):
        path.rename(path.parent / f"wiki_{number:02}")
    options = ["--data", str(tmp_path), "--rounds", "1", "--peer-mb", "0.01", "--growth-mb", "0"]
    options += ["--run-mb", "0.01"]
    command = [sys.executable, "benchmarks/preparation.py", *options, "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["benchmark"] == "preparation"
    assert len(found["contests"]) == 2
    for contest in found["contests"].values():
        assert list(contest["sides"]) == ["cloze", "original", "tokenizers alone"]
        assert set(contest["times_as_fast_as"]) == {"original", "tokenizers alone"}


def test_a_folder_without_text_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no wiki/"):
        SourceText.find(tmp_path, tmp_path)


@pytest.mark.slow
def test_without_real_text_the_demo_corpus_is_prepared(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CLOZE_DATA"}
    options = ["--rounds", "1", "--peer-mb", "0.01", "--growth-mb", "0", "--run-mb", "0"]
    options += ["--out", str(tmp_path / "found.json")]
    command = [sys.executable, str(ROOT / "benchmarks/preparation.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["text"] == "demo"
