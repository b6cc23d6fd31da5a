#!/usr/bin/env python3
"""Turns text into training shards.

    python data_prep/shard.py --docs wiki/
    mpirun -n 16 python data_prep/shard.py --docs wiki/ books/ --out data/both

Whatever interrupts it, the same command continues it. Then `verify.py` checks the result and `show.py` prints it.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from data_prep.common.errors import UserError
from data_prep.common.progress import duration
from data_prep.common.terminal import open_console
from data_prep.common.workers import Workers, mpi_rank, num_cores, open_workers, silence_other_ranks
from data_prep.inspection.figures import figures_table, warnings
from data_prep.pipeline import Pipeline
from data_prep.readers.sources import group_sources
from data_prep.settings import Settings, parse_settings


def main(arguments: list[str]) -> int:
    """Runs the pipeline; returns the exit code: 0 done, 2 something that the user can cure, 130 interrupted."""
    silence_other_ranks()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop, and say how to go on
    console, errors = open_console(), open_console(stderr=True)
    try:
        settings = parse_settings(arguments)
        if settings.check:
            if mpi_rank() == 0:
                Pipeline(settings.out or default_folder(settings), settings, Workers(None, 1), console).forecast()
            return 0
        with open_workers(settings.workers or num_cores(), preload=Pipeline.__module__) as workers:
            if workers is not None:
                start = time.monotonic()
                folder = settings.out or default_folder(settings)
                manifest = Pipeline(folder, settings, workers, console).run()
                console.print(figures_table(manifest))
                console.print(f"{folder} is ready, in {duration(time.monotonic() - start)}", markup=False)
                for warning in warnings(manifest):
                    console.print(f"warning: {warning}", markup=False, soft_wrap=True, style="yellow")
    except UserError as error:
        errors.print(f"error: {error}", markup=False, style="red" if errors.is_terminal else "", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("\ninterrupted; the same command continues where it stopped")
        return 130
    return 0


def default_folder(settings: Settings) -> Path:
    """Names the output folder after the sources, where the user gives none."""
    names = list(dict.fromkeys(name for name, _ in group_sources(settings.sources)))
    return Path("data") / ("-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-more")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if mpi_rank() == 0:
        sys.exit(code)
