"""Begins a run as a branch of another one: with all of its state at a checkpoint, and with phases of its own.

The checkpoint is taken into the folder of the new run, which from then on needs the other run no longer: it continues,
goes back and is exported as any run. Files of tensors get a second name, or are copied where that cannot be.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.common.locks import LOCK, find_holder
from pretraining.checkpoint.reading import UNFINISHED, find_fault
from pretraining.checkpoint.record import FOLDER, write_record
from pretraining.checkpoint.state import RunState, Saved
from pretraining.checkpoint.writing import clear_error
from pretraining.config.settings import Recipe
from pretraining.huggingface.model_card import BranchSummary
from pretraining.processes.group import gather, place
from pretraining.reporting.metrics_file import METRICS
from pretraining.reporting.run_log import find_events_folder
from pretraining.training.changes import continue_run
from pretraining.training.request import Branch, Request
from pretraining.training.skips import Skip, read_skips, write_skips


def begin_branch(request: Request, branch: Branch) -> tuple[Request, Saved]:
    """Takes a checkpoint of another run, what it logged until then and what it left out into the folder of the run.

    Returns the request with what the branch keeps of that run, and the checkpoint in its new folder with the recipe
    that it had. All ranks call it together; nothing is written where one of them finds a fault.
    """
    found = read_branch_point(branch)
    state = reopen_phase(found.run.state, found.run.recipe, request.recipe)
    state = replace(state, kept_step=state.phase_step)
    began = BranchSummary(branch.name, found.record.step)
    run = replace(found.run, state=state, branch=began, leapt=None)  # it is the user's choice, leapt or not
    request = continue_run(request, replace(found, run=run), branch)
    folder = request.out / FOLDER / f"step-{found.record.step:08}"
    if place()[0] == 0:
        known = found.run.skips  # None in older checkpoints
        every = read_skips(branch.run) if known is None else [Skip(*skip) for skip in known]
        if skips := [*list_skips_done(every, state)]:
            write_skips(request.out, skips)
        copy_log(branch.run, request.out, began)
        take_checkpoint(replace(found, run=replace(run, recipe=request.recipe)), folder)
    gather(None)
    return request, Saved(folder, found.record, run)


def require_own_branch(latest: Saved, branch: Branch, out: Path) -> None:
    """Raises UserError if the checkpoints of a run are not those of this branch."""
    own = latest.run.branch
    if own is None or own.run != branch.name or branch.step not in (None, own.step):
        was = "no branch" if own is None else f"a branch of {own}"
        raise UserError(f"--out {out}: is {was}, not the one of --branch {branch}; leave it out, or name a new folder")


def read_branch_point(branch: Branch) -> Saved:
    """Reads the checkpoint of a branch except its tensors; raises UserError if it is damaged or its run still
    trains."""
    checkpoint = branch.find()
    if holder := find_holder(branch.run / LOCK):
        cure = "wait for its end, or name a copy of the checkpoint's folder"
        raise UserError(f"--branch {branch}: {holder} is training in {branch.run}\n{cure}")
    fault = find_fault(checkpoint, *place())
    gather(None, fault and f"--branch {branch}: {fault}\nname another step, if there is one")
    return Saved.read(checkpoint)


def reopen_phase(state: RunState, before: Recipe, recipe: Recipe) -> RunState:
    """Returns the state inside the phase that was done last, if the recipe gives that phase more steps than it had;
    otherwise the state as it is."""
    last, then, now = state.phase - 1, before.phase_steps(), recipe.phase_steps()
    if last < 0 or state.phase_step or then is None or now is None or last >= len(now) or now[last] <= then[last]:
        return state
    return replace(state, phase=last, phase_step=then[last])


def list_skips_done(skips: list[Skip], state: RunState) -> Iterator[Skip]:
    """Lists the batches that were left out before a state; those after it are not known to be bad in a branch."""
    done = state.phase_step
    for skip in sorted(skips, key=lambda skip: (skip.phase, skip.first)):
        if skip.phase == state.phase and skip.first < done:
            done += skip.count
            yield skip
        elif skip.phase < state.phase:
            yield skip


def copy_log(run: Path, out: Path, began: BranchSummary) -> None:
    """Copies what a run has logged, with a note on the branch. The branch's own log leaves out what came later."""
    metrics = run / METRICS
    lines = metrics.read_bytes() if metrics.exists() else b""
    note = {"kind": "note", "step": began.step, "text": f"branch of {began}", "time": round(time.time(), 3)}
    with replacing(out / METRICS) as file:
        file.write(lines[: lines.rfind(b"\n") + 1] + json.dumps(note).encode() + b"\n")
    for events in find_events_folder(run).glob("events.*"):
        link_file(events, out / events.name)


def take_checkpoint(saved: Saved, folder: Path) -> None:
    """Makes a checkpoint of the tensors of another one, in a folder that gets its name when all is on the disk."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    with clear_error(unfinished):
        unfinished.mkdir(parents=True)
        for file in saved.record.files:
            link_file(saved.folder / file.path, unfinished / file.path)
        write_record(unfinished, replace(saved.record, caller=saved.run.as_json()))
        unfinished.rename(folder)


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where its storage cannot do that."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(os.path.realpath(source), target)
    except OSError:
        with source.open("rb") as original, replacing(target) as copy:
            shutil.copyfileobj(original, copy)
