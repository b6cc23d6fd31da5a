"""One rank that fails, dies or hangs ends the run on all of them, and is named.

    with Watch(ranks) as watch:
        for batch in batches:
            compute(batch)
            watch.mark()             # before this rank waits for the others
            dist.all_reduce(...)
            with watch.pause():      # long work without a mark
                evaluate(...)

`Judge` says which rank it is, from what the ranks say of themselves.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from data_prep.common.errors import UserError
from pretraining.processes.group import (
    INTERRUPTED,
    SharedError,
    UnreachedError,
    as_lost,
    exit_now,
    is_lost,
    open_stores,
    uses_agent_store,
)
from pretraining.processes.judge import Beat, Judge, Stopwatch
from pretraining.processes.launchers import World

ZERO_GONE = "rank 0 has ended, or its machine is gone"
SEEN_SECONDS = 10.0  # for every rank to hear why it ends, before the store ends with rank 0


def print_error(message: str) -> None:
    """To where errors go, as an entry does."""
    print(f"error: {message}", file=sys.stderr, flush=True)


class Watch:
    """Around the work: where one rank fails, dies or hangs, no other waits for it in an all-reduce for ever.

    A rank that fails writes its message into the store. A thread of every rank looks there each `every` seconds, and
    leaves a beat of its own: a rank without one for `silence` seconds is gone. Where no rank makes a mark for `hang`
    seconds, the ranks with the fewest hang; not before the first mark, nor while any rank is within `pause`.

    All ranks end with code 2, or with 130 where a rank was interrupted. `say` prints the message, on rank 0 only and
    only if the error is not rank 0's own; where rank 0 is gone, on rank 1.
    """

    FAILURE, SEEN, BEAT = "cloze/failure", "cloze/seen", "cloze/beat"

    def __init__(
        self,
        ranks: World,
        say: Callable[[str], None] = print_error,
        every: float = 1.0,
        silence: float = 60.0,
        hang: float = 1800.0,
    ) -> None:
        assert silence > 5 * every, "a beat may be late"
        self._ranks, self._say, self._every, self._silence = ranks, say, every, silence
        self._marks, self._pauses, self._lost = 0, 0, ""
        self._rounds = 0
        # Rank 0 looks after all, and rank 1 after rank 0, whose store may be another process's.
        self._charges = {0: range(ranks.size), 1: range(1)}.get(ranks.rank, range(0))
        self._judge = Judge(every, silence, math.inf if ranks.rank else hang)
        self._stopped = threading.Event()
        self._ending = threading.RLock()
        """Held by whichever thread ends the process, which never gives it back."""

    def mark(self) -> None:
        """The work advances. Best called where this rank begins to wait for the others: then the one that they wait
        for has fewer marks."""
        self._marks += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Work that takes long without a mark. Ranks that die are still noticed."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __enter__(self) -> Watch:
        if self._ranks.size > 1:
            self._store, self._thread_store = open_stores()
            if self._ranks.rank == 0:  # before there are beats: one that never comes is missed
                count = self._ranks.size
                self._store.multi_set([self._beat_key(rank) for rank in range(count)], [Beat().encode()] * count)
            self._thread = threading.Thread(target=self._look, daemon=True, name="watch")
            self._thread.start()
            if self._ranks.rank > 0 and not (uses_agent_store() and self._ranks.one_machine):
                threading.Thread(target=self._await_answers, daemon=True, name="answers").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks.size == 1:
            return
        if isinstance(error, UnreachedError) and isinstance(error.__cause__, RuntimeError):  # as `exchange` tells it
            error = error.__cause__
        if error is None:
            try:
                dist.barrier()  # still watched: a rank that fails now does not leave us here
            except RuntimeError as lost:
                raise self._await_verdict(lost) from lost
        elif isinstance(error, RuntimeError) and is_lost(error):
            raise self._await_verdict(error) from error
        elif isinstance(error, KeyboardInterrupt):
            self.fail(INTERRUPTED)
        elif not isinstance(error, SharedError):
            self.fail(str(error) if isinstance(error, UserError) else traceback.format_exc())
        self._stopped.set()
        self._thread.join(1)  # the next watch has its connection to the store alone

    def _await_verdict(self, error: RuntimeError) -> UserError:
        """Another rank has left this one alone: tells it with the next beat, and rank 0 finds out which. Comes back
        only if nobody did."""
        lost = as_lost(error)
        self._lost = str(error).splitlines()[0]
        time.sleep(2 * self._silence)
        return SharedError(str(lost)) if self.fail(str(lost)) else lost

    def fail(self, message: str) -> bool:
        """Tells the others, and returns whether rank 0 hears it. Does not come back if another rank failed first: then
        ours follows from that."""
        own = f"{self._ranks.rank} {message}"
        try:
            first = self._store.compare_set(self.FAILURE, "", own).decode()
        except dist.DistError:
            self._stopped.set()
            return False  # rank 0 has gone, and with it the store: whoever looks there sees that
        self._stopped.set()
        if first != own:
            self._end(first, self._store)
        self._be_seen(self._store)
        return True

    def _look(self) -> None:
        """What the thread does."""
        stopwatch = Stopwatch(3 * self._every)
        try:
            while not self._stopped.wait(self._every):
                self._rounds += 1
                if self._thread_store.check([self.FAILURE]):
                    self._end(self._thread_store.get(self.FAILURE).decode(), self._thread_store)
                    return
                beat = Beat(self._rounds, self._marks, self._pauses > 0, self._lost)
                self._thread_store.set(self._beat_key(self._ranks.rank), beat.encode())
                if self._charges:
                    self._judge.hear(self._read_beats(), stopwatch.passed())
                    self._end_if_condemned()
        except dist.DistError:
            if self._outlives_rank_0():
                self._leave_without_rank_0()

    def _read_beats(self) -> dict[int, Beat]:
        keys = [self._beat_key(rank) for rank in self._charges]
        if self._ranks.rank > 0 and not self._thread_store.check(keys):  # not begun: reading would wait for it
            return dict.fromkeys(self._charges, Beat())
        return {
            rank: Beat.decode(text)
            for rank, text in zip(self._charges, self._thread_store.multi_get(keys), strict=True)
        }

    def _beat_key(self, rank: int) -> str:
        return f"{self.BEAT}/{rank}"

    def _await_answers(self) -> None:
        """Ends the process where the store is silent: a rank 0 that is stopped, or a machine without power, closes no
        connection."""
        stopwatch, rounds, silent = Stopwatch(3 * self._every), -1, 0.0
        while not self._stopped.wait(self._every):
            passed = stopwatch.passed()
            silent, rounds = silent + passed if rounds == self._rounds else 0.0, self._rounds
            if silent >= self._silence:
                self._leave_without_rank_0()

    def _outlives_rank_0(self) -> bool:
        """Whether the store's end is not the run's: at a regular one, a starved rank may leave seconds after rank 0."""
        deadline = time.monotonic() + self._silence / 4
        while not self._lost and time.monotonic() < deadline and not self._stopped.wait(self._every):
            pass
        return not self._stopped.is_set()

    def _leave_without_rank_0(self) -> None:
        with self._ending:
            if self._ranks.rank == 1:
                self._say(ZERO_GONE)
            exit_now(2)

    def _find_verdict(self) -> str | None:
        if self._ranks.rank == 0:
            return self._judge.verdict()
        return ZERO_GONE if self._judge.silent() else None

    def _end_if_condemned(self) -> None:
        """Ends all ranks for what this one's judge has found."""
        verdict = self._find_verdict()
        if verdict is None:
            return
        with self._ending:
            own = f"{self._ranks.rank} {verdict}"
            first = self._thread_store.compare_set(self.FAILURE, "", own).decode()
            if first != own:
                self._end(first, self._thread_store)
                return
            self._say(verdict)
            self._be_seen(self._thread_store)
            exit_now(2)

    def _end(self, failure: str, store: Any) -> None:
        """Ends this process for another rank's failure. Its own is another thread's, which is ending it already."""
        rank, _, message = failure.partition(" ")
        with self._ending:
            if int(rank) == self._ranks.rank:
                return
            if self._ranks.rank == 0:
                if message == INTERRUPTED:
                    print(f"\n{message}", file=sys.stderr, flush=True)
                else:
                    self._say(f"rank {rank}: {message}")
            self._be_seen(store)
            exit_now(130 if message == INTERRUPTED else 2)

    def _be_seen(self, store: Any) -> None:
        """Counts this rank among those that know. The store may live in rank 0: it stays until the others have read
        it, or are gone."""
        deadline = time.monotonic() + SEEN_SECONDS
        with suppress(dist.DistError):
            store.add(self.SEEN, 1)
            alive = self._ranks.size - len(self._judge.late())
            while self._ranks.rank == 0 and store.add(self.SEEN, 0) < alive and time.monotonic() < deadline:
                time.sleep(0.05)
