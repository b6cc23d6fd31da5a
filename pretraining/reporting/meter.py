"""What a run tells about itself: figures for each logged step, as lines of JSON, in TensorBoard and on the console.

Nothing here waits for the GPU in a step that is not logged: `Meter.add` adds up on the device, and `Meter.flush`
brings the sums of all steps since the last one, over all ranks, in one small all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pretraining.reporting.hardware import peak_memory, synchronize
from pretraining.reporting.records import StepRecord

PACE = 0.3  # of the newest interval in the pace that the time left is reckoned with


class Stopwatch:
    """The time of the work alone: what happens inside `pause` is not counted."""

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._start, self._paused = clock(), 0.0

    def lap(self) -> float:
        """Seconds since the last lap, without pauses."""
        now = self._clock()
        seconds, self._start, self._paused = now - self._start - self._paused, now, 0.0
        return max(seconds, 1e-9)

    def elapsed(self) -> float:
        """Seconds since the last lap so far."""
        return self._clock() - self._start - self._paused

    def start_earlier(self, seconds: float) -> None:
        """As if the lap had begun so long ago."""
        self._start -= seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """For evaluation and saving. What the GPU still has to do when it begins is counted."""
        synchronize(self._device)
        start = self._clock()
        try:
            yield
        finally:
            synchronize(self._device)
            self._paused += self._clock() - start


class Meter:
    """Adds up what the steps between two logged ones did, on this rank and then over all."""

    ON_DEVICE = 4  # the fields of `Losses`: masked loss, next loss, masked right, next right
    ON_HOST = 6  # predictions, sequences, pieces, padded pieces, FLOPs, seconds waited

    def __init__(self, device: torch.device, ceiling: float | None = None, watch: Stopwatch | None = None) -> None:
        """`ceiling` is this rank's `matrix_rate`; all ranks give one or none does."""
        self._device, self._ceiling = device, ceiling
        self.watch = watch or Stopwatch(device)
        self._sums = torch.zeros(self.ON_DEVICE, dtype=torch.float64, device=device)
        self._counts = [0.0] * self.ON_HOST
        self._steps = 0
        self._learning_rate = 0.0  # of the last step
        self._earlier = 0.0  # seconds that a restored interval had
        self._pace: float | None = None  # seconds for a FLOP of all ranks together

    def add(
        self, sums: Sequence[torch.Tensor], *, predictions: int, sequences: int, pieces: int, padded: int, flops: float
    ) -> None:
        """A micro-batch of this rank: its sums as the model gives them (`Losses`), left where they are."""
        self._sums += torch.stack([each.detach().double() for each in sums])
        for index, count in enumerate((predictions, sequences, pieces, padded, flops)):
            self._counts[index] += count

    @property
    def steps(self) -> int:
        """Since the last flush."""
        return self._steps

    def state(self) -> dict[str, Any]:
        """What it has added up since the last flush, for a checkpoint; numbers that JSON keeps exactly."""
        return {
            "sums": self._sums.tolist(),
            "counts": list(self._counts),
            "steps": self._steps,
            "seconds": self.watch.elapsed(),
        }

    def restore(self, states: Sequence[dict[str, Any]], rank: int, ranks: int) -> None:
        """Goes on from what the ranks of a checkpoint had added up; other ranks than then give it all to the first."""
        own, first = [states[rank]] if len(states) == ranks else [], rank == 0 and len(states) != ranks
        for state in states if first else own:
            self._sums += torch.tensor(state["sums"], dtype=torch.float64, device=self._device)
            self._counts = [a + b for a, b in zip(self._counts, state["counts"], strict=True)]
        self._steps, self._earlier = states[0]["steps"], states[0]["seconds"]

    def begin(self) -> None:
        """Time counts from now, and from what a checkpoint had of it."""
        self.watch.lap()
        self.watch.start_earlier(self._earlier)
        self._earlier = 0.0

    def step(self, learning_rate: float, waited: float = 0.0) -> None:
        """An optimizer step is done, at this learning rate; this rank waited so many seconds for its data."""
        self._learning_rate = learning_rate
        self._steps += 1
        self._counts[-1] += waited

    def flush(
        self,
        *,
        step: int,
        phase: int,
        gradient_norm: float | torch.Tensor | None = None,
        loss_scale: float | None = None,
        flops_left: float | None = None,
    ) -> StepRecord:
        """The record of all steps since the last flush. All ranks call it at the same step, once steps were added.

        `flops_left` is all that this run still has to do, for the time left.
        """
        totals, memory, ranks = self._reduce()
        seconds = self.watch.lap()  # after the reduction, which waits for the GPU
        masked, next_sentence, masked_right, next_right, predictions, sequences = totals[:6]
        pieces, padded, flops, waited, ceiling = totals[6:]
        if flops:
            pace = seconds / flops
            self._pace = pace if self._pace is None else PACE * pace + (1 - PACE) * self._pace
        record = StepRecord(
            step=step,
            phase=phase,
            loss=_ratio(masked, predictions) + _ratio(next_sentence, sequences),
            masked=_ratio(masked, predictions),
            next_sentence=_ratio(next_sentence, sequences),
            masked_accuracy=_ratio(masked_right, predictions),
            next_sentence_accuracy=_ratio(next_right, sequences),
            learning_rate=self._learning_rate,
            gradient_norm=None if gradient_norm is None else float(gradient_norm),
            loss_scale=loss_scale,
            pieces_per_second=pieces / seconds,
            padded_per_second=padded / seconds,
            utilisation=flops / seconds / ceiling if ceiling else None,
            waiting=min(1.0, waited / (seconds * ranks)),
            memory=memory,
            seconds=seconds / max(self._steps, 1),
            seconds_left=None if flops_left is None or self._pace is None else flops_left * self._pace,
        )
        self._sums.zero_()
        self._counts, self._steps = [0.0] * self.ON_HOST, 0
        return record

    def _reduce(self) -> tuple[list[float], int, int]:
        """Sums over ranks, the largest memory of a rank, and how many ranks there are."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        memory = torch.zeros(ranks, dtype=torch.float64)  # a place for each rank: their sum is all, not a sum
        memory[dist.get_rank() if ranks > 1 else 0] = peak_memory(self._device)
        counts = torch.tensor([*self._counts, self._ceiling or 0.0], dtype=torch.float64)
        vector = torch.cat([self._sums, torch.cat([counts, memory]).to(self._device)])
        if ranks > 1:
            dist.all_reduce(vector)
        totals: list[float] = vector.tolist()
        return totals[:-ranks], int(max(totals[-ranks:])), ranks


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
