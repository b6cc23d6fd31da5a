"""Signals: SIGTERM, SIGUSR1 and a first Ctrl-C save and stop; a second Ctrl-C ends at once."""

import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support import faults
from support.commands import wait_for
from support.marks import slow
from support.training import ENDLESS, SAVES, Place, assert_ended, assert_same, contents, records, stopped_at

from pretraining.checkpoint.record import list_finished
from pretraining.processes.ending import INTERRUPTION, Code
from pretraining.processes.stopping import ECHO_SECONDS, STOPPING

SAVED = "after step 3, and saved"


def test_a_signal_to_one_rank_and_a_ctrl_c_to_all_stop_in_good_order(place: Place) -> None:
    """What a launcher makes of one key press counts once: SIGINT to each process, and SIGTERM after it."""
    ctrl_c = ((signal.SIGINT,), (signal.SIGINT,), (signal.SIGTERM,))
    stops = (2, ((signal.SIGTERM, 1),), Code.STOPPED, "a signal"), (4, ctrl_c, Code.INTERRUPTED, "Ctrl-C")
    for step, signals, code, cause in stops:
        gate = place.folder / f"gate-{step}"
        going = place.launch("run", *SAVES, fault=partial(faults.hold_before, step, gate))
        wait_for(gate.with_suffix(".held").exists)
        for each in signals:
            going.signal(*each)
        gate.touch()
        told = f"stopped by {cause} after step {{}}, and saved; the same command continues from there\n"
        assert assert_ended(going, code) == told.format(going.step)
        assert going.done()[0].output.count(STOPPING) == (cause == "Ctrl-C")
        assert list_finished(place.folder / "run")[-1].name == f"step-{going.step:08}"


@pytest.mark.slow
def test_more_signals_during_the_save_change_nothing(place: Place, straight: Path) -> None:
    command = ["run", *SAVES, "--checkpoints.every", "0"]
    step, gate = place.folder / "step", place.folder / "save"
    holds = partial(faults.all_of, partial(faults.hold_before, 4, step), partial(faults.hold_saves_from, 1, gate))
    going = place.launch(*command, fault=holds)
    wait_for(step.with_suffix(".held").exists)
    going.signal(signal.SIGTERM)
    step.touch()
    wait_for(gate.with_suffix(".held").exists)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        going.signal(number)
    gate.touch()
    going.wait()  # only then rank 0 has told of its last step
    assert_ended(going, Code.STOPPED, f"stopped by a signal after step {going.step}, and saved")
    assert list_finished(place.folder / "run")[-1].name == f"step-{going.step:08}"
    place.train(*command)
    assert_same(place.folder / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("come", [1, 2])
def test_a_run_that_is_stopped_while_it_starts(place: Place, straight: Path, come: int) -> None:
    """While rank 0 waits for the others to come, at once; while they make the model, before the first step is done."""
    run = stopped_at(straight, place.folder / "run", 6)
    before = {path: contents(path) for path in list_finished(run)}
    (run / "lock").unlink()
    gate = place.folder / "gate"
    held = gate.with_suffix(".held")
    fault = partial(faults.mark_meeting, held) if come == 1 else partial(faults.hold_start, gate)
    going = place.launch("run", *SAVES, fault=fault, come=come)
    wait_for(held.exists)
    going.signal(signal.SIGTERM)
    gate.touch()
    message = INTERRUPTION if come == 1 else "stopped by a signal after step 6, and saved; the same command continues"
    assert assert_ended(going, Code.STOPPED).strip().startswith(message)
    assert {path: contents(path) for path in before} == before
    assert_ended(place.launch("run", *SAVES), 0)
    assert_same(run, straight)


@pytest.mark.parametrize(("step", "said"), [slow(1, "in the first step; the same command begins anew"), (4, SAVED)])
def test_a_signal_does_not_wait_for_the_rest_of_a_step(place: Place, straight: Path, step: int, said: str) -> None:
    """A step of many micro-batches is given up, and done again by the next start with the same bits; where it is the
    first, that start begins anew."""
    run = place.folder / "run"
    going = place.launch("run", *SAVES, fault=partial(faults.signal_within_step, step))
    assert_ended(going, Code.STOPPED, f"by a signal {said}")
    assert len(list_finished(run)) == step - 1
    place.train("run", *SAVES)
    assert_same(run, straight)


def test_a_second_ctrl_c_ends_at_once(place: Place) -> None:
    gate = place.folder / "gate"
    going = place.launch("run", *ENDLESS, fault=partial(faults.hold_saves_from, 2, gate))
    wait_for(gate.with_suffix(".held").exists)
    going.signal(signal.SIGINT)
    wait_for(lambda: STOPPING in going.done()[0].output)
    time.sleep(ECHO_SECONDS + 0.2)
    assert going.goes_on(), "it saves"
    going.signal(signal.SIGINT)
    assert assert_ended(going, Code.INTERRUPTED).strip() == INTERRUPTION


def test_ctrl_c_before_the_first_step_ends_at_once(place: Place) -> None:
    gate = place.folder / "gate"
    going = place.launch("run", fault=partial(faults.hold_start, gate))
    wait_for(gate.with_suffix(".held").exists)
    going.signal(signal.SIGINT)
    assert assert_ended(going, Code.INTERRUPTED).strip() == INTERRUPTION


EVALUATING = ["--evaluation.every", "3", "--checkpoints.every", "3", "--checkpoints.keep", "9", "--phases.0.steps", "7"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7])
def test_a_signal_does_not_wait_for_an_evaluation(place: Place, step: int) -> None:
    """It is given up, and made up by the next start; so is one that a kill has made of no account."""
    place.train("straight", *EVALUATING, ranks=1)
    command, run = ["run", *EVALUATING], place.folder / "run"
    going = place.launch(*command, ranks=1, fault=partial(faults.signal_within_evaluation, step))
    assert_ended(going, Code.STOPPED, f"stopped by a signal after step {step}, and saved")
    assert going.done()[0].output.count(f"saved {run}/checkpoints/step-{step:08}") == 1
    assert [record["step"] for record in records(run, "evaluation")] == [done for done in (3, 6) if done < step]
    killed = place.launch(*command, ranks=1, fault=partial(faults.kill_at, step + 2))
    assert [rank.code for rank in killed.wait()] == [-signal.SIGKILL]
    place.train(*command, ranks=1)
    assert_same(run, place.folder / "straight")
