"""Losses and gradients that are no numbers: the run leaves the batch out, and is as if it had never been there."""

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.faults import BAD, Poison, all_of, stop_at
from support.marks import slow
from support.training import SAVES, SEED, Place, assert_ended, assert_same, distance, records, state, train_straight

from data_prep.common.hashing import hash_key
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import FOLDER, list_finished
from pretraining.data.batches import step_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.processes.ending import Code
from pretraining.training.skips import Skip, read_skips, write_skips

LEAPS = "--phases.0.steps 26 --guards.spike 4 --logging.every 2 --checkpoints.every 11".split()
LEAPS += ["--checkpoints.keep_at", "[23]"]
"""a run that can go back where the loss leaps, and has a checkpoint between the bad batch and the line that tells"""
BLAME = "the norm of the gradient is nan at step 3; it is not known which of 2 ranks had what made it so"


def without(place: Place, name: str, batch: int, *more: object, count: int = 1) -> Path:
    """A straight run to which a batch does not belong from the start, or several."""
    (place.folder / name).mkdir()
    write_skips(place.folder / name, [Skip(0, batch, count, "")])
    return train_straight(place, name, *more)


@pytest.fixture(scope="module")
def without_bad(shared: Place, straight: Path) -> Path:
    """The straight run without the batch that is bad in others."""
    run = without(shared, "without the bad batch", BAD, *SAVES)
    ours, theirs = state(run), state(straight)
    assert not all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return run


def in_order(place: Place, rank: int) -> list[str]:
    """The examples of the bad batch that a rank has, as they are named, micro-batch by micro-batch."""
    dataset = Dataset(Corpora.one(place.data), 32)
    order = BatchOrder(Order(int(hash_key(SEED, 0)[0]), dataset.shard_rows), batch_size=24)
    micro = step_batches(dataset, order, BAD, rank, ranks=2, count=6).micro
    return [", ".join(f"shard {shard} row {row}" for shard, row in batch.examples) for batch in micro]


def assert_left_out(run: Path, *wanted: tuple[int, int]) -> None:
    assert [(skip.phase, skip.first, skip.count) for skip in read_skips(run)] == [(0, *batches) for batches in wanted]
    assert all(isinstance(record["loss"], float) for record in records(run))


@pytest.mark.parametrize("what", ["loss", slow("gradient"), slow("collapse")])
def test_a_bad_batch_is_left_out(
    place: Place, without_bad: Path, what: Literal["loss", "gradient", "collapse"]
) -> None:
    """Exactly that, and for the rest the run is as if it had never been."""
    messages = {
        "loss": f"the loss is nan at step 3 on rank 1, of {in_order(place, 1)[1]}",
        "gradient": BLAME,
        "collapse": "gradients overflow up to step 3 with the smallest scale of the loss",
    }
    going = place.launch("run", *SAVES, fault=Poison(what, "batch"))
    what_then = "; the run goes back to its last checkpoint and leaves that out\n"
    errors = assert_ended(going, 0, f"warning: {messages[what]}{what_then}")
    assert errors.count("\n") == 1
    assert_left_out(place.folder / "run", (BAD, 1))
    assert read_skips(place.folder / "run")[0].reason == messages[what]
    assert_same(place.folder / "run", without_bad)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_bad_gradient_that_nobody_looks_at_in_its_step_is_left_out_too(place: Place, optimizer: str) -> None:
    """As on a GPU: AdamW moves nothing at step 3, LAMB makes the weights no numbers, and the run goes back when it
    looks, a step later."""
    more = ["--optimizer.name", optimizer, "--checkpoints.every", "4"]
    wanted = without(place, "without", BAD, *more)
    going = place.launch("run", *more, "--logging.every", "4", fault=Poison("gradient", "batch", unseen=True))
    errors = assert_ended(going, 0, "warning: the norm of the gradient is ", "; it is not known which of 2 ranks")
    assert errors.count("\n") == 1
    assert_left_out(place.folder / "run", (BAD, 1))
    assert distance(place.folder / "run", wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_bad_gradient_under_other_stages(place: Place, zero: int) -> None:
    going = place.launch("run", *SAVES, "--parallel.zero", zero, fault=Poison("gradient", "batch"))
    assert_ended(going, 0, "warning: the norm of the gradient is ", " at step 3; it is not known which of ")
    assert_left_out(place.folder / "run", (BAD, 1))
    assert [record["step"] for record in records(place.folder / "run")] == list(range(1, 9))


@pytest.mark.slow
def test_a_bad_batch_before_the_first_checkpoint(place: Place, without_bad: Path) -> None:
    """The run begins again."""
    going = place.launch("run", *SAVES, "--checkpoints.every", "0", fault=Poison("loss", "batch"))
    assert_ended(going, 0, "warning: the loss is nan at step 3 on rank 1")
    assert_same(place.folder / "run", without_bad)


@pytest.mark.slow
def test_what_was_left_out_stays_so(place: Place, without_bad: Path) -> None:
    """After a rollback the run is killed, and goes on without the fault; so does a branch from a copied checkpoint."""
    going = place.launch("run", *SAVES, fault=Poison("loss", "batch", BAD, die_at=4))
    assert {rank.code for rank in going.wait()} <= {-signal.SIGKILL, Code.RANK_LOST}
    assert_left_out(place.folder / "run", (BAD, 1))
    assert_ended(place.launch("run", *SAVES), 0)
    assert_same(place.folder / "run", without_bad)
    checkpoint = place.folder / "run" / FOLDER / "step-00000004"
    copy = shutil.copytree(checkpoint, place.folder / "copies" / checkpoint.name)
    assert_ended(place.launch("branch", *SAVES, "--branch", copy), 0)
    ours, theirs = state(place.folder / "branch"), state(without_bad)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
def test_a_fault_that_follows_the_step_ends_the_run(place: Place) -> None:
    run = place.folder / "run"
    going = place.launch("run", *SAVES, fault=Poison("loss", "step"))
    again = "3 times before, the run has gone back to a checkpoint for such a reason (guards.rollbacks = 3)"
    errors = assert_ended(going, 2, "\nerror: the loss is nan at step 3 on rank 1", again)
    assert errors.count("warning: the loss is nan at step 3 on rank 1, of shard ") == 3
    assert_left_out(run, (BAD, 1), (BAD + 1, 1), (BAD + 2, 1))
    assert [record["step"] for record in records(run)] == [1, 2]
    assert list_finished(run)[-1].name == "step-00000002"


def test_no_run_goes_back_to_where_the_loss_had_leapt(place: Place) -> None:
    """Nor on from there: the run begins anew, and so would the next one."""
    wild = "--phases.0.learning_rate 1e9 --phases.0.warmup 0 --checkpoints.every 2 --logging.every 10"
    errors = assert_ended(place.launch("run", *wild.split(), "--guards.rollbacks", 1, ranks=1), 2, "\nerror: the ")
    folder = place.folder / "run" / "checkpoints"
    for name in ("step-00000002.damaged", "step-00000002.damaged1"):
        assert f"warning: {folder / name}: saved when the loss had leapt to " in errors
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002.damaged", "step-00000002.damaged1"]


@pytest.mark.slow
def test_a_leap_too_early_to_go_back_is_told(place: Place) -> None:
    """Within the first ten lines of a phase no run goes back, and the model may be worth nothing."""
    going = place.launch("run", "--checkpoints.every", "4", fault=Poison("leap", "batch", 3))
    errors = assert_ended(going, 0, "warning: step 4: saved when the loss had leapt to ", "; lower the learning rate, ")
    assert errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_a_loss_that_leaps(place: Place, stops: bool) -> None:
    """Also where no checkpoint but that of the leap is kept, and where the run was stopped there: the next start leaves
    out the batches before it."""
    more = LEAPS if stops else [*LEAPS, "--checkpoints.keep", "1"]
    wanted = without(place, "without", 22, *more, count=2)
    if stops:
        both = partial(all_of, Poison("leap", "batch", 22), partial(stop_at, 23))
        assert_ended(place.launch("run", *more, fault=both), Code.STOPPED)
        assert list_finished(place.folder / "run")[-1].name == "step-00000023"
    going = place.launch("run", *more, fault=Poison("leap", "batch", 22))
    assert_ended(going, 0, "; the run goes back")
    assert_left_out(place.folder / "run", (22, 2))
    assert_same(place.folder / "run", wanted)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(place: Place) -> None:
    """Told once, by all ranks together; what was saved is sound."""
    wild = "--phases.0.learning_rate 1e30 --optimizer.clip 0 --checkpoints.every 1"
    cure = "lower the learning rate, lengthen its warm-up or clip the gradient"
    errors = assert_ended(place.launch("run", *wild.split()), 2, "\nerror: the ", cure)
    assert errors.count("warning: the ") == 3
    weights = [load_checkpoint(path)[1].values() for path in list_finished(place.folder / "run")]
    assert all(bool(torch.isfinite(weight).all()) for each in weights for weight in each)
