"""The original generator, a peer of data preparation, does what it is said to do; and the command that measures it."""

import io
import itertools
import pickle
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import write_wiki
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import preparation
from benchmarks.generators import ExamplesJob, OriginalGenerator
from benchmarks.measure import FORMAT, read_results, write_results
from benchmarks.preparation import Preparation
from data_prep.vocabulary.kinds.declaration import list_kinds
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece

LETTERS = [chr(number) for number in range(33, 127)]
PIECES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing", "é", "中", "##中", "river")
VOCABULARY = WordPiece(tuple(dict.fromkeys(PIECES)), cased=False)
SENTENCES = ["The river is long.", "Walking, the naïve 中文 reader sings!", "It ends", "a b c d e f g h i j k l"] * 6


OTHERS = (" ", "\t", "\x00", "\u200b", "é", "É", "中", "the", "ing", "\u3000")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ExamplesJob:
    """Three documents."""
    folder = tmp_path_factory.mktemp("original")
    VOCABULARY.write(folder)
    (folder / "text").write_text("\n\n".join("\n".join(SENTENCES[at:]) for at in (0, 5, 9)) + "\n")
    return ExamplesJob(folder / "text", folder / "vocab.txt", length=64, duplicates=2)


@given(st.lists(st.sampled_from([*LETTERS, *OTHERS]), max_size=30))  # of a longer word `tokenizers` gives up earlier
def test_the_tokenizer_of_the_original_gives_the_pieces_of_tokenizers(job: ExamplesJob, parts: list[str]) -> None:
    wanted = VOCABULARY.pipeline().encode("".join(parts), add_special_tokens=False).tokens
    assert OriginalGenerator(job).split_sentence("".join(parts)) == wanted


def test_the_original_writes_padded_examples(job: ExamplesJob, tmp_path: Path) -> None:
    count = OriginalGenerator(job).generate(tmp_path / "out")
    examples = []
    with (tmp_path / "out").open("rb") as file:
        for _ in range(count):
            examples.append(pickle.load(file))
        assert not file.read()
    cls, sep, mask = (VOCABULARY.pieces.index(piece) for piece in ("[CLS]", "[SEP]", "[MASK]"))
    for example in examples:
        assert {len(example[name]) for name in ("input_ids", "input_mask", "segment_ids")} == {job.length}
        size, masked = sum(example["input_mask"]), int(sum(example["masked_lm_weights"]))
        assert (example["input_ids"][0], example["input_ids"][size - 1]) == (cls, sep)
        assert masked == min(job.predictions, max(1, round(0.15 * size)))
        assert sep not in example["masked_lm_ids"][:masked]
    every = [piece for example in examples for piece in example["input_ids"]]
    assert mask in every
    assert {example["next_sentence_labels"][0] for example in examples} == {0, 1}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Very little text."""
    monkeypatch.setattr(preparation, "PEER_MB", (0.01,))
    monkeypatch.setattr(preparation, "RUN_MB", (0.01,))
    monkeypatch.setattr(preparation, "CUT_MB", 0.01)
    monkeypatch.setattr(preparation, "ROUNDS", 1)
    monkeypatch.setattr(preparation, "measure_growth", lambda *_: [])
    return monkeypatch


def measure(place: Path, few: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the command on the data in a folder; returns what it has measured."""
    few.setenv("CLOZE_DATA", str(place))
    preparation.run(Preparation(place / "found.json"), Console(quiet=True))
    return read_results(place / "found.json")


@pytest.mark.slow
def test_the_command_measures_all_sides_in_turns(tmp_path: Path, few: pytest.MonkeyPatch) -> None:
    VOCABULARY.write(write_wiki(tmp_path / "wiki" / "AA", documents=60).parent.parent)
    for number, path in enumerate(sorted((tmp_path / "wiki" / "AA").iterdir())):
        path.rename(path.parent / f"wiki_{number:02}")
    found = measure(tmp_path, few)
    assert (found["benchmark"], len(found["whole_runs"])) == ("preparation", 1)
    of_generators = [each for each in found["contests"].values() if "length" in each]
    assert len(of_generators) == 2
    for contest in of_generators:
        assert list(contest["sides"]) == ["cloze", "original", "tokenizers alone"]
        assert set(contest["times_as_fast_as"]) == {"original", "tokenizers alone"}


def test_encoders_take_turns_with_their_peers_and_a_peer_that_is_missing_is_named(
    tmp_path: Path, few: pytest.MonkeyPatch
) -> None:
    cut, console = dict[str, list[str]](), Console(file=io.StringIO(), width=150)

    class Peer(types.ModuleType):
        def Tokenizer(self, pipeline: Any) -> Any:  # noqa: N802
            def encode_batch(sentences: list[str], **options: bool) -> None:
                assert not any(options.values())
                cut[self.__name__] = sentences

            return types.SimpleNamespace(encode_batch=encode_batch)

    few.setenv("CLOZE_DATA", str(tmp_path))
    VOCABULARY.write(tmp_path)
    write_wiki(tmp_path / "wiki" / "AA", documents=5)
    for number, path in enumerate(sorted((tmp_path / "wiki" / "AA").iterdir())):
        path.rename(path.parent / f"wiki_{number:02}")
    list_kinds()["bytelevel"].train(Counter(), 300, True).write(tmp_path / "bpe/gpt2")
    text = preparation.SourceText.find(tmp_path)
    few.setattr(preparation, "find_missing_packages", lambda name: [name])
    assert preparation.run_cutting_contests(text, tmp_path, console) == {}
    assert "gigatoken or " in console.file.getvalue()  # type: ignore[attr-defined]
    few.setattr(preparation, "find_missing_packages", lambda name: [])
    few.setattr(preparation, "import_module", Peer)
    few.setattr(preparation, "time", Mock(process_time=Mock(side_effect=itertools.count(0.0))))
    out = tmp_path / "found.json"
    write_results(out, {"format": FORMAT, "benchmark": "preparation", "environment": {}, "contests": {"a": 1}, "b": 2})
    preparation.run(Preparation(pieces=True, out=out), console)
    kept = read_results(out)
    assert (len(kept["contests"]), kept["contests"]["a"], kept["b"]) == (3, 1, 2)
    found = preparation.run_cutting_contests(text, tmp_path, console)
    assert [list(contest["sides"]) for contest in found.values()] == [["cloze", "nanotoken"], ["cloze", "gigatoken"]]
    assert (
        cut["nanotoken"]
        == cut["gigatoken"]
        == [line.strip() for line in (tmp_path / "pieces.txt").read_text().split("\n")]
    )


@pytest.mark.slow
def test_without_real_text_the_demo_corpus_is_prepared(tmp_path: Path, few: pytest.MonkeyPatch) -> None:
    few.setattr(preparation, "RUN_MB", ())
    assert measure(tmp_path, few)["text"] == "demo"
