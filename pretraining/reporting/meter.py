"""What a run tells about itself: figures for each logged step, as lines of JSON, in TensorBoard and on the console.

Nothing here waits for the GPU in a step that is not logged: `Meter.add` adds up on the device, and `Meter.flush`
brings the sums of all steps since the last one, over all ranks, in one small all-reduce.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.common.progress import duration

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PACE = 0.3  # of the newest interval in the pace that the time left is reckoned with


@dataclass(frozen=True)
class StepRecord:
    """What a logged step says, of all steps since the last one logged. None: not known, or not there."""

    step: int
    """optimizer steps done, of the whole run"""
    phase: int
    """counted from 1"""
    loss: float
    """masked + next"""
    masked: float
    """masked-language-model loss of a predicted position, in nats"""
    next: float
    """next-sentence loss of a sequence, in nats"""
    masked_accuracy: float
    next_accuracy: float
    rate: float
    """learning rate"""
    gradient_norm: float | None
    """before clipping"""
    loss_scale: float | None
    """fp16 only"""
    pieces_per_second: float
    """real ones, all ranks"""
    padded_per_second: float
    """what a trainer that pads would count"""
    utilisation: float | None
    """useful model FLOPs by what the matrix products of all ranks could do"""
    waiting: float
    """share of the time in which ranks waited for data"""
    memory: int
    """bytes: the peak of the rank that needed most"""
    seconds: float
    """of an optimizer step, without evaluation and saving"""
    seconds_left: float | None


@dataclass(frozen=True)
class EvaluationRecord:
    """What the model scores on examples held out from training."""

    step: int
    phase: int
    masked: float
    next: float
    masked_accuracy: float
    next_accuracy: float
    examples: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.masked, 700.0))


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

    def step(self, waited: float = 0.0) -> None:
        """An optimizer step is done; this rank waited so many seconds for its data."""
        self._steps += 1
        self._counts[-1] += waited

    def flush(
        self,
        *,
        step: int,
        phase: int,
        rate: float,
        gradient_norm: float | torch.Tensor | None = None,
        loss_scale: float | None = None,
        flops_left: float | None = None,
    ) -> StepRecord:
        """The record of all steps since the last flush. All ranks call it at the same step, once steps were added.

        `flops_left` is all that this run still has to do, for the time left.
        """
        totals, memory, ranks = self._reduce()
        seconds = self.watch.lap()  # after the reduction, which waits for the GPU
        masked, following, masked_right, next_right, predictions, sequences = totals[:6]
        pieces, padded, flops, waited, ceiling = totals[6:]
        if flops:
            pace = seconds / flops
            self._pace = pace if self._pace is None else PACE * pace + (1 - PACE) * self._pace
        record = StepRecord(
            step=step,
            phase=phase,
            loss=_ratio(masked, predictions) + _ratio(following, sequences),
            masked=_ratio(masked, predictions),
            next=_ratio(following, sequences),
            masked_accuracy=_ratio(masked_right, predictions),
            next_accuracy=_ratio(next_right, sequences),
            rate=rate,
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


def synchronize(device: torch.device | None) -> None:
    """Waits until the GPU has done all that it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on its GPU, or in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:  # of this program alone; getrusage would begin with what the program held that started it
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def matrix_rate(device: torch.device, dtype: torch.dtype, budget: float = 0.8) -> float:
    """Floating-point operations a second of matrix products such as an encoder makes: the ceiling of a training step.

    The best of a few shapes, of each the median of its runs; takes about `budget` seconds.
    """
    shapes = [(2048, 768, 3072), (2048, 1024, 4096)]  # pieces, from, to
    if device.type == "cuda":  # more pieces at once, until all of the GPU is at work
        shapes = [(16384, 768, 3072), (16384, 1024, 4096), (8192, 4096, 4096)]
    return max(_product_rate(device, dtype, shape, budget / len(shapes)) for shape in shapes)


def _product_rate(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], budget: float) -> float:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    repeats = 8 if device.type == "cuda" else 1  # a GPU's clock needs something to measure
    seconds: list[float] = []
    deadline = time.perf_counter() + budget
    with torch.no_grad():
        while len(seconds) < 2 or time.perf_counter() < deadline:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                torch.nn.functional.linear(left, weight)
            synchronize(device)
            seconds.append((time.perf_counter() - start) / repeats)
    return 2.0 * rows * inner * columns / median(seconds[1:])  # the first run warms up


class RunLog:
    """Where the records of a run go. On ranks other than 0 nowhere: make it there with `active=False`."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        total_steps: int,
        phases: int = 1,
        tensorboard: bool = True,
        first_step: int = 0,
        active: bool = True,
    ) -> None:
        """`total_steps` is 0 where the clock decides. `first_step` is the first that will be logged from now on: what
        the files say of it and later steps was written before a stop, and is cut away."""
        self._path, self._console = folder / METRICS, console
        self._total, self._phases, self._first, self._active = total_steps, phases, first_step, active
        self.tensorboard = tensorboard and active
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._live: Live | None = None

    def __enter__(self) -> RunLog:
        if not self._active:
            return self
        cut_metrics(self._path, self._first)
        with _as_user_error(self._path):
            self._file = self._path.open("ab")
        if self.tensorboard:
            self._writer = self._open_tensorboard()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            with _as_user_error("the console"):
                self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all; a fault in that is told unless there is an error already."""
        try:
            for close in (self._live and self._live.stop, self._writer and self._writer.close):
                if close:
                    with _as_user_error("the log"):
                        close()
            if self._file:
                with _as_user_error(self._path):
                    self._file.close()
        except UserError:
            if kind is None:
                raise

    def step(self, record: StepRecord) -> None:
        """A logged step."""
        if not self._active:
            return
        self._write("step", asdict(record))
        self._add_scalars("train", record.step, asdict(record))
        if self._live is not None:
            with _as_user_error("the console"):
                self._live.update(_panel(record, self._total, self._phases, self._console.width), refresh=True)
        else:
            self._print(step_line(record, self._total))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Scores on held-out examples."""
        if not self._active:
            return
        figures = {**asdict(record), "perplexity": record.perplexity}
        self._write("evaluation", figures)
        self._add_scalars("validation", record.step, figures)
        self._print(evaluation_line(record))

    def sync(self) -> None:
        """Puts what was written on the disk: a checkpoint that follows must not be ahead of it after a power cut."""
        if self._file is not None:
            with _as_user_error(self._path):
                os.fsync(self._file.fileno())

    def histograms(self, name: str, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Distributions, in TensorBoard alone."""
        if self._writer is None:
            return
        with _as_user_error(self._path.parent / TENSORBOARD):
            for part, numbers in values.items():
                self._writer.add_histogram(f"{name}/{part}", np.asarray(numbers), step)
            self._writer.flush()

    def say(self, text: str) -> None:
        """A line for the reader alone."""
        if self._active:
            self._print(text)

    def _print(self, text: str) -> None:
        with _as_user_error("the console"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
            self._console.file.flush()

    def _write(self, kind: str, figures: dict[str, Any]) -> None:
        assert self._file is not None, "open the log first"
        line = json.dumps({"kind": kind, **{name: _plain(value) for name, value in figures.items()}})
        with _as_user_error(self._path):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def _open_tensorboard(self) -> Any:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("TensorBoard is not installed\npip install tensorboard, or switch its logging off")
        from torch.utils.tensorboard import SummaryWriter

        folder = self._path.parent / TENSORBOARD
        with _as_user_error(folder):
            return SummaryWriter(str(folder), purge_step=self._first)

    def _add_scalars(self, group: str, step: int, figures: dict[str, Any]) -> None:
        if self._writer is None:
            return
        with _as_user_error(self._path.parent / TENSORBOARD):
            for name, value in figures.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(f"{group}/{name}", value, step)
            self._writer.flush()


@contextmanager
def _as_user_error(what: object) -> Iterator[None]:
    """A full disk or a closed pipe is told as what it is. (rich ends the program where a pipe is closed.)"""
    try:
        yield
    except (OSError, SystemExit) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "the reading end was closed"
        raise UserError(f"{what}: cannot be written: {reason}\nthe run can be continued from its checkpoint") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_metrics(path: Path, first_step: int) -> None:
    """Leaves only the lines of steps before `first_step`, so that no step is there twice when it is done again."""
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    torn = lines.pop()  # what follows the last line's end: a line that was not finished
    kept = [line for number, line in enumerate(lines, 1) if line and _step_of(path, number, line) < first_step]
    if torn or len(kept) < len(lines):
        with replacing(path) as file:
            file.writelines(line + b"\n" for line in kept)


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}:{number}: no record of a step\nrepair the line, or move the file away") from error


def step_line(record: StepRecord, total: int) -> str:
    """One line, for files and pipes: at most 140 columns for the numbers that runs have. `total` is 0 by the clock."""
    parts = [
        f"{record.step:>{len(str(total))}}/{total}" if total else f"{record.step:>6}",
        f"loss {record.loss:.4f}",
        f"masked {record.masked:.4f} {record.masked_accuracy:5.1%}",
        f"next {record.next:.4f} {record.next_accuracy:5.1%}",
        f"rate {record.rate:.2e}",
        *_optional(record),
        f"{number(record.pieces_per_second)} pieces/s",
        *([] if record.utilisation is None else [f"use {record.utilisation:.0%}"]),
        f"wait {record.waiting:.0%}",
        *([] if record.seconds_left is None else [f"{duration(record.seconds_left)} left"]),
    ]
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    return (
        f"validation {record.step}: masked {record.masked:.4f} {record.masked_accuracy:.1%}"
        f"  perplexity {record.perplexity:.2f}  next {record.next:.4f} {record.next_accuracy:.1%}"
    )


def _optional(record: StepRecord) -> list[str]:
    """Gradient norm and loss scale, where there are any."""
    norm = [] if record.gradient_norm is None else [f"norm {record.gradient_norm:.2f}"]
    return norm + ([] if record.loss_scale is None else [f"scale {record.loss_scale:g}"])


def _panel(record: StepRecord, total: int, phases: int, width: int) -> Group:
    """Three lines that change in place, for terminals of 80 columns and more."""
    head = Table.grid(padding=(0, 1))
    left = "" if record.seconds_left is None else f"{duration(record.seconds_left)} left"
    phase = f"phase {record.phase} of {phases}  " if phases > 1 else ""
    if total:
        title = f"{phase}step {record.step:,} of {total:,}"
        bar = ProgressBar(total, record.step, width=max(10, min(40, width - len(title) - len(left) - 10)))
        head.add_row(title, bar, f"{record.step / total:.0%}", left)
    else:
        head.add_row(f"{phase}step {record.step:,} ", left)
    losses = (
        f"  loss {record.loss:.4f}   masked {record.masked:.4f} ({record.masked_accuracy:.1%} right)"
        f"   next {record.next:.4f} ({record.next_accuracy:.1%} right)"
    )
    speed = [
        f"rate {record.rate:.2e}",
        *_optional(record),
        f"{number(record.pieces_per_second)} pieces/s",
        *([] if record.utilisation is None else [f"use {record.utilisation:.0%}"]),
        f"wait {record.waiting:.0%}",
        f"{record.memory / 1e9:.1f} GB",
    ]
    return Group(head, _cropped(losses), _cropped("  " + "  ".join(speed)))


def _cropped(line: str) -> Text:
    return Text(line, no_wrap=True, overflow="ellipsis")


def number(value: float) -> str:
    """Three figures and a unit: 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            value /= size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{value:.0f}"
