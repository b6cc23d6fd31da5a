"""Scores without labels, by the real commands: minimal pairs, and any checkpoint on any shards."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run_main
from support.training import CUT, Place, assert_refused, assert_same, assert_well, records, train
from support.transformers_models import PIECES, leave_out_checksums, their_model

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import run_pairs
from pretraining import evaluate
from pretraining import train as train_entry
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.record import list_finished
from pretraining.data.batches import validation_batches
from pretraining.model.batch import PretrainingBatch
from pretraining.processes.ending import Code
from pretraining.scoring import validation
from pretraining.scoring.pairs import are_right, list_sentences, read_pairs
from pretraining.scoring.sentences import Scorer

FIGURES = ("ndcg_10", "recall_100", "mrr_10")
TENSORBOARD = ["--logging.tensorboard", "true"]


def write_pairs(path: Path) -> Path:
    """Pairs of sentences of letters, in paradigms of unlike sizes."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(30):
        good, bad = (" ".join("".join(draw.choice([*"abcde"], 3)) for _ in range(5)) for _ in range(2))
        rows.append({"paradigm": f"p{number % 2}", "phenomenon": "x", "good": good, "bad": bad})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_retrieval(folder: Path) -> Path:
    """Queries and passages of letters, some of them graded."""
    draw = np.random.default_rng(1)
    (folder / "qrels").mkdir(parents=True)
    for name, count in (("queries", 9), ("corpus", 130)):
        texts = [" ".join("".join(draw.choice([*"abcde"], 2)) for _ in range(90)) for _ in range(count)]
        rows = [json.dumps({"_id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    graded = [(number, row) for number in range(9) for row in draw.permutation(130)[:15]]
    grades = [f"{number}\t{row}\t{draw.integers(1, 3)}\n" for number, row in graded]
    (folder / "qrels" / "test.tsv").write_text("".join(["query\tpassage\tgrade\n", *grades]))
    return folder


@pytest.fixture(scope="module")
def retrieval(shared: Place) -> Path:
    return write_retrieval(shared.folder / "retrieval")


@pytest.fixture(scope="module")
def pairs(shared: Place) -> Path:
    return write_pairs(shared.folder / "pairs.jsonl")


@pytest.fixture(scope="module")
def run(shared: Place, pairs: Path, retrieval: Path) -> Path:
    """A run that was asked about pairs and passages at the ends of its phases."""
    command = shared.command("asked", *TENSORBOARD, "--evaluation.pairs", pairs, "--evaluation.retrieval", retrieval)
    said = assert_well(train(command, 1))
    assert said.count("  pairs ") == 2
    assert "pairs that are asked at the ends of phases: 30" in said
    return shared.folder / "asked"


def test_pairs_are_asked_at_the_ends_of_phases_as_run_pairs_asks_them(run: Path, pairs: Path, tmp_path: Path) -> None:
    found = [record["pairs_accuracy"] for record in records(run, "evaluation")]
    assert len(found) == 2
    assert "minimal pairs" in (run / "export" / "README.md").read_text()
    assert run_pairs.main(["--model", str(run), "--pairs", str(pairs), "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["accuracy"] == found[-1]
    assert sum(each["right"] for each in result["paradigms"].values()) == result["right"]
    for model in (run / "export", list_finished(run)[-1]):
        assert accuracy_of(StoredModel.open(str(model)), pairs) == found[-1]


def test_retrieval_is_scored_at_the_ends_of_phases_as_evaluate_scores_it(run: Path, retrieval: Path) -> None:
    found = [[record[f"retrieval_{name}"] for name in FIGURES] for record in records(run, "evaluation")]
    assert len(found) == 2
    assert "nDCG@10" in (run / "export" / "README.md").read_text()
    for model in (run, run / "export"):
        scores = json.loads(run_main(evaluate.main, model, "--retrieval", retrieval, "--json"))["retrieval"]["scores"]
        np.testing.assert_allclose([scores[name] for name in FIGURES], found[-1], atol=1e-9)


def accuracy_of(model: StoredModel, path: Path) -> float:
    """How many of the pairs a model gets right, without the rest of the command."""
    scorer = Scorer(model.build_pretrained(), model.vocabulary, torch.device("cpu"))
    return float(are_right(scorer.score(list_sentences(read_pairs(path))).reshape(-1, 2)).mean())


@pytest.mark.slow
def test_the_answers_do_not_depend_on_ranks_nor_on_zero(run: Path, shared: Place, pairs: Path, retrieval: Path) -> None:
    """Weights are the same but for rounding, and so are the sums of two ranks."""
    asked = ["--evaluation.pairs", pairs, "--evaluation.retrieval", retrieval]
    assert_well(train(shared.command("of two", *asked, "--parallel.zero", "3", *CUT), 2))
    for name in ("pairs_accuracy", *(f"retrieval_{figure}" for figure in FIGURES)):
        expected = [record[name] for record in records(run, "evaluation")]
        assert [record[name] for record in records(shared.folder / "of two", "evaluation")] == expected


@pytest.mark.slow
def test_a_run_that_was_stopped_says_the_same(run: Path, shared: Place, pairs: Path, retrieval: Path) -> None:
    asked = ["--evaluation.pairs", pairs, "--evaluation.retrieval", retrieval]
    command = shared.command("in parts", *TENSORBOARD, *asked)
    assert_well(train([*command, "--stop-after", "short"], 1))
    assert_well(train(command, 1))
    assert_same(shared.folder / "in parts", run)


def test_pairs_that_say_nothing_or_are_not_there_are_told_before_any_work(place: Place) -> None:
    path = place.folder / "pairs.tsv"
    check = place.command("run", "--evaluation.pairs", path, "--check")
    path.write_text("good\tworse\na\tb\n")
    assert_refused(check[:-1], "no column 'bad'")
    path.write_text(f"good\tbad\na\ta\n{'a ' * 70}\tb\n")
    assert_refused(check[:-1], "none of its 2 pairs")
    assert_refused(check, "none of its 2 pairs")
    path.write_text(path.read_text() + "a\tb\n")
    said = run_main(train_entry.main, *check)
    for count in ("pairs that are asked at the ends of phases: 3", "two equal sentences: 1"):
        assert count in said
    assert "more than 64 pieces in a sentence: 1" in said


def test_a_checkpoint_scores_on_shards_what_its_run_has_scored(run: Path, shared: Place) -> None:
    words = [str(run), "--data", str(shared.data), "--length", "64", "--examples", "25", "--json"]
    found = json.loads(run_main(evaluate.main, *words))
    expected = records(run, "evaluation")[-1]
    for name, value in found["figures"].items():
        assert value == pytest.approx(expected[name], rel=1e-4)
    nats = found["figures"]["masked_loss"] * found["predictions"]
    assert found["bits_per_character"] == pytest.approx(nats / np.log(2) / found["characters"], rel=1e-6)
    assert found["predictions"] <= found["characters"]


def test_the_length_is_one_that_the_model_was_trained_on(run: Path, shared: Place, tmp_path: Path) -> None:
    """Its tokenizer says which; of shards of 32 and 64 none is so short in the last case."""
    folder = tmp_path / "model"
    shutil.copytree(run / "export", folder)
    leave_out_checksums(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    words = [str(folder), "--data", str(shared.data), "--examples", "8"]
    for trained, more, length in ((64, [], 64), (40, [], 32), (40, ["--length", "48"], 48), (20, [], 20)):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": trained}))
        said = run_main(evaluate.main, *words, *more)
        assert f"8 examples of length {length} " in said
        assert (f"was trained on, {trained} pieces" in said) == (length > trained)
    for length in (7, 65):
        assert "take 8 to 64" in run_main(evaluate.main, *words, "--length", length, code=2)


def test_where_nothing_is_predicted_nothing_is_scored(
    run: Path, shared: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where examples lose all of their masks when they are cut."""

    def without_masks(*arguments: Any) -> Iterator[tuple[PretrainingBatch, bool]]:
        for batch, counts in validation_batches(*arguments):
            yield replace(batch, chosen=batch.chosen[:0], labels=batch.labels[:0]), counts

    monkeypatch.setattr(validation, "validation_batches", without_masks)
    found = json.loads(run_main(evaluate.main, run, "--data", shared.data, "--examples", "9", "--json"))
    assert "no piece to predict" in found["notes"][0]
    assert found["figures"] == {}


def test_shards_of_another_vocabulary_are_refused(shared: Place, tmp_path: Path) -> None:
    their_model().save_pretrained(tmp_path)
    WordPiece(PIECES, cased=False).write(tmp_path)
    assert "another vocabulary" in run_main(evaluate.main, tmp_path, "--data", shared.data, code=2)


def test_a_mask_is_filled(run: Path) -> None:
    said = run_main(evaluate.main, run, "--fill", "a [MASK] b [MASK]", "--json")
    first, second = json.loads(said)["fillings"]
    assert len(first) == len(second) == 5
    assert first[0]["probability"] >= first[1]["probability"]
    for words, told in (
        (["--fill", "a b"], "no [MASK]"),
        (["--fill", "[MASK] " * 70], "64 positions"),
        ([], "none is given"),
    ):
        assert told in run_main(evaluate.main, run, *words, code=2)


def test_pairs_go_on_where_they_were_stopped(
    run: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same results; scores of another model, or of other pairs, are not taken."""
    monkeypatch.setattr(run_pairs, "PART", 8)
    score, asked, command = Scorer.score, [], (run_pairs.main, "--model", run, "--pairs", pairs, "--out")

    def interrupted(self: Scorer, texts: list[str]) -> object:
        asked.append(len(texts))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return score(self, texts)

    run_main(*command, tmp_path / "straight")
    monkeypatch.setattr(Scorer, "score", interrupted)
    assert run_pairs.main([*map(str, command[1:]), str(tmp_path / "stopped")]) == Code.INTERRUPTED
    assert "16 of 30 pairs are scored; the same command goes on" in capsys.readouterr().err
    run_main(*command, tmp_path / "stopped")
    assert asked == [16, 16, 16, 16, 12]
    kept = [(tmp_path / name / "pairs.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert kept[0] == kept[1]
    assert not (tmp_path / "stopped" / "parts").exists()
    run_main(*command, tmp_path / "stopped")
    assert len(asked) == 5
    other, words = list_finished(run)[0], command[3:]
    said = run_main(run_pairs.main, "--model", other, *words, tmp_path / "stopped", code=2)
    assert "scores of another model" in said
    others = tmp_path / "others.tsv"
    others.write_text("good\tbad\na\tb\n")
    said = run_main(*command[:4], others, "--out", tmp_path / "stopped", code=2)
    assert "or of other pairs" in said


def test_what_is_wrong_with_pairs_is_told(run: Path, tmp_path: Path) -> None:
    own, out = tmp_path / "own.tsv", tmp_path / "out"
    own.write_text(f"good\tbad\na b\ta b\nb\tc\n{'a ' * 70}\tb\n\u200b\tb\n")
    command = (run_pairs.main, "--model", run, "--out", out, "--pairs")
    assert "no piece in a sentence: 1;" in run_main(*command, own)
    result = json.loads((out / "results.json").read_text())
    assert (result["pairs"], result["equal"], result["too_long"], result["without_pieces"]) == (2, 1, 1, 1)
    assert [line["good_score"] is None for line in map(json.loads, (out / "pairs.jsonl").open())][2:] == [True, True]
    assert result["right"] <= 1
    own.write_text("good\tbad\na\t \n")
    assert "own.tsv:2: the bad sentence is empty" in run_main(*command, own, code=2)
    assert "no such file" in run_main(*command, tmp_path / "none.jsonl", code=2)
