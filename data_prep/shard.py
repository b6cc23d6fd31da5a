#!/usr/bin/env python3
"""Turns text into training shards.

    python data_prep/shard.py --docs wiki/
    mpirun -n 16 python data_prep/shard.py --docs wiki/ books/ --out data/both

Whatever interrupts it, the same command continues it. Then `verify.py` checks the result and `show.py` prints it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import time
from functools import partial

from data_prep.common.supervision import continue_in_child, hear_signals, leave, tell_interruption

if __name__ == "__main__":
    continue_in_child()  # before libraries start threads, and are loaded by a process that only waits

from data_prep.common.capacity import room_for_workers
from data_prep.common.codes import Code
from data_prep.common.launchers import mpi_rank
from data_prep.common.progress import duration
from data_prep.common.ranks import attempt_together
from data_prep.common.terminal import open_console, run_curable
from data_prep.common.workers import open_workers
from data_prep.inspection.figures import find_warnings, make_figures_table
from data_prep.pipeline.forecast import print_forecast
from data_prep.pipeline.inputs import find_inputs
from data_prep.pipeline.pipeline import Pipeline
from data_prep.readers.sources import group_sources
from data_prep.settings import Settings, parse_settings
from data_prep.shards import WORK


def main(arguments: list[str]) -> int:
    """Runs the pipeline; returns the exit code: 0 done, 2 something that the user can cure, 130 interrupted."""
    hear_signals()
    code = run_curable(lambda: prepare(arguments))
    return tell_interruption() if code == Code.INTERRUPTED else code


def prepare(arguments: list[str]) -> None:
    """Turns the text that the arguments name into shards, or with --check forecasts that."""
    console = open_console()
    settings = attempt_together(lambda: parse_settings(arguments))
    folder = settings.out or attempt_together(lambda: name_default_folder(settings))
    if settings.check:
        if mpi_rank() == 0:
            print_forecast(find_inputs(folder, settings, console), console)
        return
    size = settings.workers or room_for_workers()
    with open_workers(size, preload=Pipeline.__module__, work=folder / WORK) as workers:
        if workers is not None:
            start = time.monotonic()
            manifest = Pipeline(find_inputs(folder, settings, console), workers, console).run()
            console.print(make_figures_table(manifest))
            console.print(f"{folder} is ready, in {duration(time.monotonic() - start)}", markup=False)
            for warning in find_warnings(manifest):
                console.print(f"warning: {warning}", markup=False, soft_wrap=True, style="yellow")


def name_default_folder(settings: Settings) -> Path:
    """Names the output folder after the sources, where the user gives none."""
    names = list(dict.fromkeys(name for name, _ in group_sources(settings.sources)))
    return Path("data") / ("-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-more")


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]))
