"""Disks that are full or read-only: the run says so in one message, and what was saved stays."""

import contextlib
import dataclasses
import subprocess
from pathlib import Path

import pytest
from support.commands import wait_for
from support.faults import fill_the_disk_of_rank_1
from support.marks import slow
from support.training import ENDLESS, FEW, Place, assert_ended, assert_well, launch, train

from data_prep.common.codes import ENDED
from pretraining.checkpoint.record import FOLDER, list_finished


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("full", [False, slow(True)])
def test_a_read_only_or_full_disk_at_the_start(place: Place, disk: Path, full: bool) -> None:
    subprocess.run(["mount", "-o", "remount,size=64k" if full else "remount,ro", disk], check=True)
    if full:
        fill(disk / "other")
    going = dataclasses.replace(place, folder=disk).launch("run")
    assert_ended(going, 2, "error: ", f"cannot be written: {'No space left on device' if full else 'Read-only file'}")


def test_checkpoints_that_cannot_be_written_are_told_at_the_start(place: Place) -> None:
    (place.folder / "run").mkdir()
    (place.folder / "run" / FOLDER).symlink_to("/sys")  # where nobody makes a file
    told = f"error: {place.folder / 'run' / FOLDER}: cannot be written: "
    errors = assert_ended(place.launch("run"), 2, told)
    assert errors.count("\n") == 1
    assert not (place.folder / "run" / "metrics.jsonl").exists()


def test_a_disk_that_becomes_read_only(place: Place, disk: Path) -> None:
    going = dataclasses.replace(place, folder=disk).launch("run", *ENDLESS)
    going.reach(3)
    checkpoints = disk / "run" / FOLDER
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    read_only = ["mount", "-o", "remount,bind,ro", str(checkpoints)]
    wait_for(lambda: subprocess.call(read_only, stderr=subprocess.DEVNULL) == 0)  # a save keeps it busy
    errors = assert_ended(going, 2, "error: ", "cannot be written: Read-only file system\n")
    assert "the same command goes on from the last one" in errors
    assert "make room" not in errors
    assert list_finished(disk / "run")


@pytest.mark.slow
def test_a_disk_that_an_unfinished_checkpoint_fills(place: Place, disk: Path) -> None:
    """Ranks leave such a checkpoint if another rank has no room; the same command continues."""
    subprocess.run(["mount", "-o", "remount,size=3m", disk], check=True)
    command = dataclasses.replace(place, folder=disk).command("run", "--checkpoints.keep", "1")
    assert_well(train([*command, "--stop-after", "short"], 1))
    (disk / "run" / ENDED).unlink()  # else the next start removes it and has its room
    left = disk / "run" / FOLDER / "step-00000006-0123abcd.tmp"
    left.mkdir()
    fill(left / "weight-00000-of-00002.safetensors")
    assert_well(train(command, 1))
    assert [path.name for path in (disk / "run" / FOLDER).iterdir()] == ["step-00000008"]


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_full_disk(place: Place, disk: Path, ranks: int) -> None:
    """The checkpoint before stays, and what was begun goes."""
    subprocess.run(["mount", "-o", "remount,size=1400k", disk], check=True)  # room for two checkpoints
    command = dataclasses.replace(place, folder=disk).command("run", "--checkpoints.every", "1", "--parallel.zero", "1")
    errors = assert_ended(launch(command, ranks), 2, "cannot be written: No space left on device")
    assert "the same command goes on from the last one" in errors
    assert list_finished(disk / "run")
    if ranks == 1:  # among several, one may still write when another clears up; the next to save does it
        assert not list((disk / "run" / FOLDER).glob("*.tmp"))


def test_a_disk_that_is_full_for_one_rank_while_others_write(place: Place) -> None:
    """What the others are writing stays theirs, so that the one message names the cause; the next save clears up."""
    words = ["--checkpoints.every", "1", *FEW]
    going = place.launch("run", *words, fault=fill_the_disk_of_rank_1)
    assert_ended(going, 2, "cannot be written: No space left on device")
    place.train("run", *words)
    assert not list((place.folder / "run" / FOLDER).glob("*.tmp"))
