"""Measures training without waiting for the GPU: the device adds up, and only logged steps read the sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist

from data_prep.common.arrays import Array
from pretraining.reporting.hardware import read_peak_memory, synchronize

NEWEST_SHARE = 0.3
"""Weight of the newest interval in the moving average of the pace, from which the time left follows."""


def round_sum(value: torch.Tensor) -> torch.Tensor:
    """Rounds a sum over a micro-batch to a multiple of 2⁻¹⁶, in fp64: up to 2³⁷, such numbers are added exactly, and so
    alike in any order."""
    return value.double().mul(2.0**16).round().mul(2.0**-16)


class Stopwatch:
    """Measures time, except that inside `pause`."""

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
        """Returns the seconds of the current lap; in a pause, those before it."""
        now = self._clock() if self._pause_began is None else self._pause_began
        return now - self._start - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the watch for evaluation and saving. A pause within a pause is part of it. Waits for the GPU first, so
        that its pending work is counted."""
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
    """Speed and memory of all ranks in the steps between two logged ones."""

    pieces_per_second: float
    """Real pieces, without padding."""
    padded_pieces_per_second: float
    """Pieces with padding to the length of the phase."""
    flops_utilisation: float | None
    """Useful FLOPs of the model, as a share of the measured FLOP/s of all ranks; above 1 where other programs computed
    while they were measured."""
    waiting_for_data: float
    """Share of the time that ranks waited for data."""
    peak_memory_bytes: int
    """Peak of the rank that needed most."""
    seconds_per_step: float
    """Seconds of an optimizer step, without evaluation and saving."""
    seconds_left: float | None
    """Estimated seconds of the rest of the run; None if unknown."""


class MeterState(TypedDict, total=False):
    """Sums of a rank since the last logged step, for a checkpoint: numbers that JSON keeps exactly."""

    sums: list[float]
    counts: list[float]
    steps: int
    seconds: float
    parts: dict[str, list[float]]
    """By the parts of the data, if there are any: the sum of their losses, and the number of these."""


class Meter:
    """Adds up the figures of the steps between two logged ones, on this rank and then over all.

    `sums` names the outputs of the model for a batch, `counts` their divisors. The meter itself counts pieces, with and
    without padding, and FLOPs.
    """

    def __init__(
        self,
        device: torch.device,
        sums: Sequence[str],
        counts: Sequence[str],
        ceiling: float | None = None,
        watch: Stopwatch | None = None,
        readers: int | None = None,
        same_bits: bool = False,
        parts: Sequence[str] = (),
    ) -> None:
        """`ceiling`: the result of `measure_flops` on this rank; given on all ranks or on none. `readers`: the number
        of ranks that add batches, by default all. `same_bits`: the sums do not depend on the order of addition.
        `parts`: names of the parts of the data."""
        self._same_bits, self.parts = same_bits, parts
        self.part_losses: dict[str, float] = {}
        """The mean losses of the last interval by parts of the data, of those that it read."""
        self._device, self._ceiling, self._readers = device, ceiling, readers
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
        self._parts = torch.zeros(2, len(self.parts), dtype=torch.float64, device=self._device)
        self.steps = 0
        """Optimizer steps since the interval began."""

    def add(self, sums: Sequence[torch.Tensor], **counts: float) -> None:
        """Adds a micro-batch of this rank: the sums of the model, which stay on the device, and its counts."""
        added = torch.stack([value.detach().double() for value in sums])
        self._sums += round_sum(added) if self._same_bits else added
        for name, count in counts.items():
            self._counts[name] += count

    def add_parts(self, losses: Sequence[torch.Tensor], parts: Array) -> None:
        """Adds losses of predictions of this rank, which stay on the device, to those of their parts of the data."""
        numbers = torch.from_numpy(parts)
        where = numbers.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else numbers
        self._parts[0].index_add_(0, where, round_sum(torch.cat([*losses])))
        self._parts[1].index_add_(0, where, torch.ones_like(where, dtype=torch.float64))

    def step(self, learning_rate: float, waited: float = 0.0) -> None:
        """Counts an optimizer step, for whose data this rank waited `waited` seconds."""
        self.learning_rate = learning_rate
        self.steps += 1
        self._counts["waited"] += waited

    def state(self) -> MeterState:
        """Returns the sums of the interval so far."""
        state: MeterState = {
            "sums": self._sums.tolist(),
            "counts": list(self._counts.values()),
            "steps": self.steps,
            "seconds": self.watch.elapsed(),
        }
        if self.parts:
            state["parts"] = dict(zip(self.parts, self._parts.T.tolist(), strict=True))
        return state

    def restore(self, states: Sequence[MeterState], rank: int, ranks: int) -> None:
        """Restores the sums of the ranks of a checkpoint; if their number differs, rank 0 takes them all."""
        same_ranks = len(states) == ranks
        for state in [states[rank]] if same_ranks else states if rank == 0 else []:
            self._sums += torch.tensor(state["sums"], dtype=torch.float64, device=self._device)
            for name, count in zip(self._count_names, state["counts"], strict=True):
                self._counts[name] += count
            known = [state.get("parts", {}).get(name, [0.0, 0.0]) for name in self.parts]
            self._parts += torch.tensor(known, dtype=torch.float64, device=self._device).reshape(-1, 2).T
        self.steps, self._earlier = states[0]["steps"], states[0]["seconds"]

    def begin(self) -> None:
        """Starts the watch, on top of the restored seconds of the interval."""
        self.watch.lap(self._earlier)
        self._earlier = 0.0

    def estimate(self, flops_left: float | None, seconds_left: float | None) -> tuple[float | None, float | None]:
        """Returns the pieces a second of the interval, None before its first step, and the seconds left.

        Estimated from the counts of this rank, as if all ranks had as many pieces, without waiting for the GPU or
        other ranks.
        """
        ranks = self._readers or (dist.get_world_size() if dist.is_initialized() else 1)
        seconds, flops = self.watch.elapsed(), ranks * self._counts["flops"]
        pace = seconds / flops if self._pace is None and flops else self._pace
        if flops_left is not None and pace is not None:
            seconds_left = flops_left * pace
        return ranks * self._counts["pieces"] / seconds if self.steps else None, seconds_left

    def flush(
        self, flops_left: float | None = None, seconds_left: float | None = None
    ) -> tuple[dict[str, float], Speed]:
        """Returns the totals of the interval by name, and its speed, and begins the next interval.

        All ranks call it at the same step. `flops_left`: the operations left in the run; a run by the clock gives
        `seconds_left` instead.
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
        """Returns totals over ranks, the largest peak memory, and the number of ranks, by one small all-reduce."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        memory = torch.zeros(ranks, dtype=torch.float64)  # a place for each rank: the all-reduce gathers them
        memory[dist.get_rank() if ranks > 1 else 0] = read_peak_memory(self._device)
        counts = torch.tensor([*self._counts.values(), self._ceiling or 0.0], dtype=torch.float64)
        vector = torch.cat([self._parts.flatten(), self._sums, torch.cat([counts, memory]).to(self._device)])
        if ranks > 1:
            dist.all_reduce(vector)
        parts, values = vector[: self._parts.numel()].view(2, -1).T.tolist(), vector[self._parts.numel() :].tolist()
        self.part_losses = {name: loss / count for name, (loss, count) in zip(self.parts, parts, strict=True) if count}
        names = (*self._sum_names, *self._count_names, "ceiling")
        return dict(zip(names, values[:-ranks], strict=True)), int(max(values[-ranks:])), ranks
