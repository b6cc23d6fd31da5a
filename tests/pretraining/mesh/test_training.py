"""The real command with ranks that share a model: what it learns, saves and exports, and what it refuses of them."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import faults, training
from support.faults import BAD, Poison, kill_at
from support.training import Place, assert_ended, assert_same, assert_same_curve, assert_well, distance, launch, train

from pretraining.checkpoint.record import AVERAGED, list_finished, read_record
from pretraining.checkpoint.state import Saved
from pretraining.data import batches
from pretraining.model.batch import PretrainingBatches
from pretraining.training.skips import read_skips

SHARED = ("--parallel.tensor", "2")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run that saves, averages, asks minimal pairs and passages, and finds a micro-batch."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    pairs.write_text("good\tbad\nThe river was long.\tThe river long was.\nThey are here.\tThey is here.\n")
    (folder := tmp_path_factory.mktemp("retrieval") / "qrels").mkdir()
    (folder / "test.tsv").write_text("query\tpassage\tgrade\n1\t2\t1\n")
    rows = [f'{{"_id": {number}, "text": "{"the river was long " * number}"}}\n' for number in range(1, 6)]
    for name in ("queries", "corpus"):
        (folder.parent / f"{name}.jsonl").write_text("".join(rows))
    asked = ["--evaluation.pairs", str(pairs), "--evaluation.retrieval", str(folder.parent)]
    asked += ["--phases.1.micro_batch", "auto"]
    return [*training.SAVES, "--checkpoints.average", "2", *asked]


@pytest.fixture(scope="module")
def run(shared: Place, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks, two of which share a model."""
    place = replace(shared, folder=tmp_path_factory.mktemp("runs"))
    output = assert_well(train(place.command("shared", *words, *SHARED), ranks=4, seconds=400))
    assert "4 ranks on cpu, 2 to a model" in output
    run = place.folder / "shared"
    for folder in (run / "export", run / AVERAGED):
        assert f"{folder}: exported" in output
    assert output.count("logits read back by Cloze and transformers agree") == 2
    return run


def test_four_ranks_that_share_models_train_as_two_that_have_whole_ones(
    place: Place, run: Path, words: list[str]
) -> None:
    """With validation, minimal pairs, and all figures: what ranks have alike counts once. Exports are the same too."""
    assert_well(train(place.command("whole", *words), ranks=2, seconds=300))
    whole = place.folder / "whole"
    assert_same_curve(run, whole, 1e-5)
    for ours, theirs in zip(*(training.records(each, "evaluation") for each in (run, whole)), strict=True):
        assert ours["scored_examples"] == theirs["scored_examples"]
        assert ours["masked_loss"] == pytest.approx(theirs["masked_loss"], rel=1e-5)
        assert ours["pairs_accuracy"] == theirs["pairs_accuracy"]
        assert ours["retrieval_mrr_10"] == theirs["retrieval_mrr_10"]
    assert distance(run, whole) < 1e-6
    assert read_record(list_finished(run)[-1]).tensor_ranks == 2
    assert Saved.read(list_finished(run)[-1]).run.leapt is None, "losses count once, and make no leap"


BOTH = (("shared", 4, SHARED), ("whole", 2, ()))
"""Four ranks that share two models, and two with whole ones."""


def assert_learned_alike(place: Place) -> None:
    assert_same_curve(place.folder / "shared", place.folder / "whole", 1e-5)
    assert distance(place.folder / "shared", place.folder / "whole") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("init", [False, True])
def test_the_objective_may_change_in_a_shared_model_and_a_base_model_is_shared(
    init: bool, place: Place, request: pytest.FixtureRequest
) -> None:
    """A phase with another objective draws the heads that are new, and leaves out those that are old."""
    words = ["--phases.0.objective", "ltr", "--objective.name", "hybrid", "--objective.causal_share", "0.5"]
    if init:
        words = ["--init", str(request.getfixturevalue("run") / "export")]
    for name, ranks, more in BOTH:
        output = assert_well(train(place.command(name, *training.SAVES, *words, *more), ranks=ranks, seconds=300))
        assert init or "anew: " in output
    assert_learned_alike(place)


@pytest.mark.slow
def test_four_ranks_that_are_killed_go_on_bit_for_bit(place: Place, run: Path, words: list[str]) -> None:
    command = place.command("killed", *words, *SHARED)
    killed = launch(command, ranks=4, fault=partial(kill_at, 4)).wait(300)
    assert all(rank.code for rank in killed)
    assert_well(train(command, ranks=4, seconds=300))
    assert_same(place.folder / "killed", run)
    assert distance(place.folder / "killed", run) == 0


@pytest.mark.slow
def test_a_bad_batch_of_a_shared_model_is_left_out(place: Place, words: list[str]) -> None:
    """The run goes back to its last checkpoint, with new engines in the same processes, and learns what ranks with
    whole models do."""
    for name, ranks, more in BOTH:
        going = launch(place.command(name, *words, *more), ranks=ranks, fault=Poison("loss", "batch"))
        assert_ended(going, 0, "the loss is nan at step 3 on rank 1")
        assert [(skip.phase, skip.first, skip.count) for skip in read_skips(place.folder / name)] == [(0, BAD, 1)]
    assert_learned_alike(place)


def read_other_labels() -> None:
    """Plants the fault that rank 3 reads other labels than rank 2, with which it shares a model."""
    read = batches.step_batches

    def read_otherwise(*arguments: object) -> PretrainingBatches:
        found: PretrainingBatches = read(*arguments)  # type: ignore[arg-type]
        first, *rest = found.micro
        return replace(found, micro=(replace(first, labels=first.labels.flip(0)), *rest))

    if os.environ["RANK"] == "3":
        faults.replace(batches, "step_batches", read_otherwise)


def test_ranks_that_read_other_batches_than_those_they_share_a_model_with_are_named(place: Place) -> None:
    going = launch(place.command("apart", *SHARED, "--logging.every", "2"), ranks=4, fault=read_other_labels)
    assert_ended(going, 2, "ranks 2, 3 share a model, but have read different batches in the steps up to 2\n")


def number_by_turns() -> None:
    """Numbers ranks on two machines by turns: 0 and 2 on one, 1 and 3 on the other."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) // 2))


def test_ranks_that_share_a_model_and_are_on_several_machines_are_refused(place: Place) -> None:
    going = launch(place.command("by-turns", *SHARED), ranks=4, fault=number_by_turns)
    assert_ended(going, 2, "ranks 0 to 1 share a model, but are on several machines")
