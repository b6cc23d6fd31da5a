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

from data_prep.command_line import parse_settings
from data_prep.common.capacity import room_for_workers
from data_prep.common.errors import UserError
from data_prep.common.launchers import mpi_rank, mpi_size
from data_prep.common.progress import duration
from data_prep.common.ranks import attempt_together
from data_prep.common.terminal import open_console
from data_prep.common.workers import open_workers
from data_prep.inspection.figures import find_warnings, make_figures_table
from data_prep.pipeline.forecast import print_forecast
from data_prep.pipeline.inputs import find_inputs
from data_prep.pipeline.pipeline import Pipeline
from data_prep.readers.sources import group_sources
from data_prep.settings import Settings
from data_prep.shards import WORK


def main(arguments: list[str]) -> int:
    """Runs the pipeline; returns the exit code: 0 done, 2 something that the user can cure, 130 interrupted."""
    hear_signals()
    console, errors = open_console(), open_console(stderr=True)
    try:
        settings, folder = attempt_together(lambda: choose_folder(parse_settings(arguments)))
        if settings.check:
            if mpi_rank() == 0:
                print_forecast(find_inputs(folder, settings, console), console)
            return 0
        size, said = (settings.workers, "") if settings.workers else room_for_workers()
        with open_workers(size, preload=Pipeline.__module__, work=folder / WORK) as workers:
            if workers is not None:
                start = time.monotonic()
                if said and mpi_size() == 1:
                    console.print(said, soft_wrap=True)
                manifest = Pipeline(find_inputs(folder, settings, console), workers, console).run()
                console.print(make_figures_table(manifest))
                console.print(f"{folder} is ready, in {duration(time.monotonic() - start)}", markup=False)
                for warning in find_warnings(manifest):
                    console.print(f"warning: {warning}", markup=False, soft_wrap=True, style="yellow")
    except (UserError, OSError) as error:
        errors.print(f"error: {error}", markup=False, style="red" if errors.is_terminal else "", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return tell_interruption()
    return 0


def choose_folder(settings: Settings) -> tuple[Settings, Path]:
    """Gives settings back with the output folder that they name, or that is named after their sources."""
    folder = settings.out or name_default_folder(settings)
    name = str(folder)
    if name != name.encode(errors="replace").decode():
        raise UserError(f"the folder {name!r} is not named in UTF-8; give another one: --out")
    return settings, folder


def name_default_folder(settings: Settings) -> Path:
    """Names the output folder after the sources, where the user gives none."""
    names = list(dict.fromkeys(name for name, _ in group_sources(settings.sources)))
    return Path("data") / ("-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-more")


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]))
