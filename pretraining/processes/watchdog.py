"""One rank that fails, dies or hangs ends the run on all ranks, and is named.

    with Watch(world, hang=1800.0, run=folder) as watch:
        for batch in batches:
            compute(batch)
            watch.mark()             # before this rank waits for the others
            dist.all_reduce(...)
            with watch.pause():      # long work without a mark
                evaluate(...)

beats.py finds out which rank it is. On GPUs, a mark counts when the GPU has come to it: the host runs ahead.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.common.errors import LostError, SharedError
from data_prep.common.launchers import World
from data_prep.common.supervision import exit_now
from pretraining.processes.beats import Beat, LapTimer, RankMonitor
from pretraining.processes.ending import Code, Outcome, explain_interruption, find_outcome, identify_start, report_end
from pretraining.processes.gpu_faults import note_gpu_failure
from pretraining.processes.group import open_stores, wait_for_all
from pretraining.processes.meeting import uses_agent_store
from pretraining.processes.signing import SignedStore

HOST = torch.device("cpu")
RANK_0_GONE = "rank 0 has ended, or its machine is gone"
TORCHRUN_GONE = "torchrun has ended on the machine of rank 0, or that machine is gone"

BEATS_A_SECOND = 500
"""How many beats the store of rank 0 hears at most, beside its training: where there are more ranks, they beat more
slowly. Each beat is two requests, which are 50 microseconds of a processor."""


class Marks:
    """Counts the marks of a rank. Of a GPU those that it has come to: it counts them itself, and copies the number into
    the host's memory, so that a thread which reads it there calls nothing of CUDA, where it might have to wait."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._copied = torch.zeros((), dtype=torch.int64, pin_memory=device.type != "cpu")

    def add(self) -> None:
        self._copied.copy_(self._count.add_(1), non_blocking=True)

    @property
    def reached(self) -> int:
        return int(self._copied)


class Watch:
    """Surrounds the work of the ranks, so that none waits for ever in an all-reduce for one that fails, dies or hangs.

    A thread of every rank writes a beat into the store each `every` seconds or more, and looks whether a failure is
    written there: a rank that fails writes its message, and ends all ranks with it. Rank 0 hears the beats of all
    ranks, rank 1 those of rank 0, and a `RankMonitor` tells them who is gone, after `silence` seconds without a beat,
    and who hangs, after `hang` seconds without a mark of any rank (not before the first mark, nor while one is in
    `pause`). That is a failure like others, but ends with its own code and leaves the stacks of all ranks in `run`.

    Silence has a second detector in `_await_answers`, for the store itself: a thread that waits for an answer of a
    stopped rank 0 hears no beats, and cannot notice that.
    """

    FAILURE, SEEN, BEAT = "failure", "seen", "beat"

    def __init__(
        self,
        world: World,
        every: float = 1.0,
        silence: float = 60.0,
        hang: float = 1800.0,
        run: Path | None = None,
        device: torch.device = HOST,
    ) -> None:
        every = max(every, min(world.size / BEATS_A_SECOND, silence / 6))
        assert silence > 5 * every, "a beat may be late"
        self._world, self._every, self._silence, self._run = world, every, silence, run
        self._marks = Marks(device if world.size > 1 else HOST)
        self._pauses, self._rounds, self._lost, self._asked = 0, 0, "", False
        # Rank 1 hears rank 0 because the store, which may be torchrun's, does not end with it.
        self._heard = {0: range(world.size), 1: range(1)}.get(world.rank, range(0))
        self._monitor = RankMonitor(every, silence, math.inf if world.rank else hang)
        self._stopped = threading.Event()
        self._ending = threading.RLock()
        """the right to end the process; the thread that has it never gives it back"""

    def mark(self) -> None:
        """Says that the work advances. Best called where this rank begins to wait for the others: then the rank that
        they wait for is the one with fewer marks."""
        self._marks.add()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Surrounds work that takes long without a mark. Ranks that die are still noticed."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __enter__(self) -> Watch:
        if self._world.size > 1:
            _signal_pipe()
            self._start = identify_start(self._world, self._run)
            self._store, self._thread_store = open_stores()
            if self._world.rank == 0:  # a first beat of every rank, so that one that never gives another is missed
                for rank in range(self._world.size):
                    self._store.set(self._beat_key(rank), json.dumps(Beat()))
            self._thread = threading.Thread(target=self._keep_watch, daemon=True, name="watch")
            self._thread.start()
            if self._world.rank > 0 and not (uses_agent_store() and self._world.one_machine):
                threading.Thread(target=self._await_answers, daemon=True, name="answers").start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._world.size == 1:
            return
        error = note_gpu_failure(error, self._run)
        if isinstance(error, LostError):
            error = error.__cause__ or error  # the error of the operation
        if error is None:
            try:
                wait_for_all()  # still watched: a rank that fails now does not keep this one here
            except RuntimeError as lost:
                self._wait_to_be_ended(lost)
        elif isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            self._wait_to_be_ended(error)  # of an operation of all ranks; gloo's errors have no type of their own
        elif isinstance(error, KeyboardInterrupt):
            self._report_failure(explain_interruption(error, self._world.rank))
        elif not isinstance(error, SharedError):
            outcome = find_outcome(error, self._world.rank)
            if outcome.code == Code.MISTAKE:
                outcome = outcome._replace(reason="".join(traceback.format_exception(error)))
            self._report_failure(outcome)
        self._stopped.set()
        self._thread.join(1)  # the next watch has its connection to the store alone

    def _wait_to_be_ended(self, error: RuntimeError) -> None:
        """Ends this rank, which another one has left alone in an operation. The next beat says so, and rank 0 finds out
        who it was and ends all; this rank speaks for itself only if that does not happen."""
        self._lost = str(error).splitlines()[0]
        time.sleep(2 * self._silence)
        outcome = Outcome(Code.RANK_LOST, str(LostError(error)), self._world.rank)
        heard = self._report_failure(outcome)
        with self._ending:
            report_end(outcome, self._world, self._run, self._start, rank_0_missing=not heard)
            exit_now(outcome.code)

    def _report_failure(self, own: Outcome) -> bool:
        """Writes the failure of this rank where all ranks look, and returns whether rank 0 hears it. It does not come
        back if another rank failed first, because then the own failure only follows from that one."""
        try:
            first = self._write_failure(own, self._store)
        except dist.DistError:
            return False  # rank 0 is gone, and the store with it: the threads of the other ranks notice that
        finally:
            self._stopped.set()
        if first != own:
            self._end(first, self._store)
        self._leave(self._store)
        return True

    def _write_failure(self, own: Outcome, store: SignedStore) -> Outcome:
        """The failure that ends the run: this one, unless another was written before."""
        return Outcome(*json.loads(store.claim(self.FAILURE, json.dumps(own))))

    def _keep_watch(self) -> None:
        """Gives beats and looks for failures, in a thread, until the work has ended."""
        timer, store = LapTimer(3 * self._every), self._thread_store
        try:
            while not self._stopped.wait(self._every):
                self._rounds = time.monotonic_ns()  # so that it grows from watch to watch as well
                if failure := store.get(self.FAILURE):
                    return self._end(Outcome(*json.loads(failure)), store)
                beat = Beat(self._rounds, self._marks.reached, self._pauses > 0, self._lost)
                store.set(self._beat_key(self._world.rank), json.dumps(beat))
                with suppress(BlockingIOError):
                    self._asked = signal.SIGTERM in os.read(_signal_pipe(), 4096) or self._asked
                if self._heard:
                    if self._asked and (self._lost or uses_agent_store()):
                        self._monitor.shorten_silence(bool(self._lost))
                    told = store.get_all([self._beat_key(rank) for rank in self._heard])
                    beats = [Beat(*json.loads(text or "[]")) for text in told]
                    self._monitor.add(dict(zip(self._heard, beats, strict=True)), timer.lap())
                    self._end_if_a_rank_failed()
        except dist.DistError:
            if self._outlives_rank_0():
                self._leave_without_rank_0()

    def _beat_key(self, rank: int) -> str:
        return f"{self.BEAT}/{rank}"

    def _await_answers(self) -> None:
        """Ends this process where the store keeps silent, in a thread: a rank 0 that is stopped, or a machine without
        power, closes no connection, and the thread of the beats would wait for it."""
        timer, rounds, silent = LapTimer(3 * self._every), -1, 0.0
        while not self._stopped.wait(self._every):
            passed = timer.lap()
            silent, rounds = silent + passed if rounds == self._rounds else 0.0, self._rounds
            if silent >= self._silence:
                self._leave_without_rank_0()

    def _outlives_rank_0(self) -> bool:
        """Whether this rank still works although the store has ended. At a good end, a rank that gets little of the
        processor may leave its work seconds after rank 0, and is given that time."""
        deadline = time.monotonic() + self._silence / 4
        while not self._lost and time.monotonic() < deadline and not self._stopped.wait(self._every):
            pass
        return not self._stopped.is_set()

    def _leave_without_rank_0(self) -> None:
        why, alone = (TORCHRUN_GONE, self._world.one_machine) if uses_agent_store() else (RANK_0_GONE, False)
        with self._ending:
            report_end(Outcome(Code.RANK_LOST, why, self._world.rank), self._world, self._run, self._start, not alone)
            exit_now(Code.RANK_LOST)

    def _end_if_a_rank_failed(self) -> None:
        """Ends all ranks if one of them is gone or hangs."""
        rank_0_gone = RANK_0_GONE if self._monitor.list_silent() else None
        failure = rank_0_gone if self._world.rank else self._monitor.find_failure()
        if failure is not None:
            own = Outcome(Code.RANK_LOST, failure, self._world.rank)
            with self._ending:  # a failure of the main thread that comes now waits, and is heard as the second
                first = self._write_failure(own, self._thread_store)
                self._end(first, self._thread_store, found_here=first == own)

    def _end(self, failure: Outcome, store: SignedStore, found_here: bool = False) -> None:
        """Ends this process for a failure of the run. If it is the main thread's own, that thread is ending it."""
        with self._ending:
            if failure.rank != self._world.rank or found_here:
                report_end(failure, self._world, self._run, self._start, rank_0_missing=found_here)
                self._leave(store)
                exit_now(failure.code)

    def _leave(self, store: SignedStore) -> None:
        """Says that this rank knows why it ends; rank 0 waits until all that live have said so."""
        store.leave(self.SEEN, self._world.rank, {*range(self._world.size)} - {*self._monitor.list_late()})


@cache
def _signal_pipe() -> int:
    """A pipe into which the system writes the signals that come from now on, while the main thread waits for a GPU too,
    when it hears of none; called first by that thread."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading
