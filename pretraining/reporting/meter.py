"""What training does, measured without waiting for the GPU: the device adds up, and logged steps read the sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist

from pretraining.reporting.hardware import read_peak_memory, synchronize

NEWEST_SHARE = 0.3
"""How much the newest interval counts in the pace that the time left is reckoned with; older ones fade away."""


class Stopwatch:
    """Measures the time of the work alone: what happens inside `pause` is not counted."""

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._start, self._paused = clock(), 0.0
        self._pause_began: float | None = None

    def lap(self, earlier: float = 0.0) -> float:
        """Begins a new lap and returns the seconds of the one that ends. `earlier` seconds of the new lap have passed
        already, before the run was stopped."""
        now = self._clock()
        seconds, self._start, self._paused = now - self._start - self._paused, now - earlier, 0.0
        return max(seconds, 1e-9)

    def elapsed(self) -> float:
        """The seconds of the lap so far; in a pause, those before it."""
        now = self._clock() if self._pause_began is None else self._pause_began
        return now - self._start - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops for evaluation and saving; a pause within another is a part of it. What the GPU still has to do when it
        begins is counted."""
        if self._pause_began is not None:
            yield
            return
        synchronize(self._device)
        begin = self._pause_began = self._clock()
        try:
            yield
        finally:
            synchronize(self._device)
            self._paused += self._clock() - begin
            self._pause_began = None


@dataclass(frozen=True)
class Speed:
    """How fast all ranks trained in the steps between two logged ones, and what it took."""

    pieces_per_second: float
    """Real pieces, without padding."""
    padded_pieces_per_second: float
    """Pieces that a trainer with padding would count."""
    flops_utilisation: float | None
    """Useful model FLOPs, as a share of what the matrix products of all ranks could do."""
    waiting_for_data: float
    """Share of the time for which ranks waited for data."""
    peak_memory_bytes: int
    """The peak of the rank that needed most."""
    seconds_per_step: float
    """What an optimizer step took, without evaluation and saving."""
    seconds_left: float | None
    """How long the rest of the run will take; None where that is not known."""


class MeterState(TypedDict):
    """What the steps since the last logged one did on a rank, for a checkpoint: numbers that JSON keeps exactly."""

    sums: list[float]
    counts: list[float]
    steps: int
    seconds: float


class Meter:
    """Adds up what the steps between two logged ones did, on this rank and then over all.

    What training adds up, it names itself: `sums` are what its model gives for a batch, `counts` what they are divided
    by. The meter itself counts pieces, with and without padding, and FLOPs.
    """

    def __init__(
        self,
        device: torch.device,
        sums: Sequence[str],
        counts: Sequence[str],
        ceiling: float | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """`ceiling` is this rank's `measure_flops`; all ranks give one or none does."""
        self._device, self._ceiling = device, ceiling
        self.watch = watch or Stopwatch(device)
        self._sum_names, self._count_names = tuple(sums), (*counts, "pieces", "padded", "flops", "waited")
        taken = {*sums} & {*self._count_names, "ceiling"}
        assert not taken, f"{taken}: what the meter counts itself; name the sums of an objective otherwise"
        self._pace: float | None = None  # seconds for a FLOP of all ranks together
        self._earlier = 0.0  # seconds that a restored interval had
        self.learning_rate = 0.0
        """The learning rate of the last step."""
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(len(self._sum_names), dtype=torch.float64, device=self._device)
        self._counts = dict.fromkeys(self._count_names, 0.0)
        self.steps = 0
        """Optimizer steps since the interval began."""

    def add(self, sums: Sequence[torch.Tensor], **counts: float) -> None:
        """Adds a micro-batch of this rank: its sums as the model gives them, left where they are, and its counts."""
        self._sums += torch.stack([value.detach().double() for value in sums])
        for name, count in counts.items():
            self._counts[name] += count

    def step(self, learning_rate: float, waited: float = 0.0) -> None:
        """Counts an optimizer step at this learning rate, for whose data this rank waited so many seconds."""
        self.learning_rate = learning_rate
        self.steps += 1
        self._counts["waited"] += waited

    def state(self) -> MeterState:
        """What the interval has so far."""
        return {
            "sums": self._sums.tolist(),
            "counts": list(self._counts.values()),
            "steps": self.steps,
            "seconds": self.watch.elapsed(),
        }

    def restore(self, states: Sequence[MeterState], rank: int, ranks: int) -> None:
        """Goes on from what the ranks of a checkpoint had added up; other ranks than then give it all to the first."""
        same_ranks = len(states) == ranks
        for state in [states[rank]] if same_ranks else states if rank == 0 else []:
            self._sums += torch.tensor(state["sums"], dtype=torch.float64, device=self._device)
            for name, count in zip(self._count_names, state["counts"], strict=True):
                self._counts[name] += count
        self.steps, self._earlier = states[0]["steps"], states[0]["seconds"]

    def begin(self) -> None:
        """Begins to count time, on top of what a checkpoint had of the interval."""
        self.watch.lap(self._earlier)
        self._earlier = 0.0

    def estimate(self, flops_left: float | None, seconds_left: float | None) -> tuple[float | None, float | None]:
        """Returns the pieces a second of the interval, None before its first step, and the seconds left.

        They are estimates from what the host of this rank knows, as if all ranks had as many pieces: neither the GPU
        nor another rank is waited for.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        seconds, flops = self.watch.elapsed(), ranks * self._counts["flops"]
        pace = seconds / flops if self._pace is None and flops else self._pace
        if flops_left is not None and pace is not None:
            seconds_left = flops_left * pace
        return ranks * self._counts["pieces"] / seconds if self.steps else None, seconds_left

    def flush(
        self, flops_left: float | None = None, seconds_left: float | None = None
    ) -> tuple[dict[str, float], Speed]:
        """Returns the totals of the interval by their names, and its speed, and begins the next.

        All ranks call it at the same step, once steps were added. `flops_left` is all that this run still has to do;
        `seconds_left` is given instead where the clock decides.
        """
        totals, memory, ranks = self._reduce()
        seconds = self.watch.lap()  # after the reduction, which waits for the GPU
        flops, ceiling = totals["flops"], totals.pop("ceiling")
        if flops:
            pace = seconds / flops
            self._pace = pace if self._pace is None else NEWEST_SHARE * pace + (1 - NEWEST_SHARE) * self._pace
        if flops_left is not None and self._pace is not None:
            seconds_left = flops_left * self._pace
        speed = Speed(
            pieces_per_second=totals["pieces"] / seconds,
            padded_pieces_per_second=totals["padded"] / seconds,
            flops_utilisation=flops / seconds / ceiling if ceiling else None,
            waiting_for_data=min(1.0, totals["waited"] / (seconds * ranks)),
            peak_memory_bytes=memory,
            seconds_per_step=seconds / max(self.steps, 1),
            seconds_left=seconds_left,
        )
        self._clear()
        return totals, speed

    def _reduce(self) -> tuple[dict[str, float], int, int]:
        """Totals over ranks, the largest memory of a rank, and how many ranks there are, in one small all-reduce."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        memory = torch.zeros(ranks, dtype=torch.float64)  # a place for each rank: their sum is all, not a sum
        memory[dist.get_rank() if ranks > 1 else 0] = read_peak_memory(self._device)
        counts = torch.tensor([*self._counts.values(), self._ceiling or 0.0], dtype=torch.float64)
        vector = torch.cat([self._sums, torch.cat([counts, memory]).to(self._device)])
        if ranks > 1:
            dist.all_reduce(vector)
        values: list[float] = vector.tolist()
        names = (*self._sum_names, *self._count_names, "ceiling")
        return dict(zip(names, values[:-ranks], strict=True)), int(max(values[-ranks:])), ranks
