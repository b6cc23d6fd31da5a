"""The beginning of every command: what it needs is there, and signals and streams behave as its user expects.

Each entry calls `begin` before it imports anything else of the project. A Python that is too old reads the entry and
this file before it can be told so: both keep to the syntax of 3.6, and leave `from __future__ import annotations` out.
"""

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv"
OURS = ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")
OLDEST = (3, 10)
"""The Python that Cloze needs at least."""
CURE = 2  # the exit code for what a user can mend


def begin(oldest: "tuple[int, int]" = OLDEST, ends_with_reader: bool = False, ends_with_ctrl_c: bool = False) -> None:
    """Ends the process in one line where Python is too old, now, or a package is missing, once it is imported.

    Modules are found beside the entry, whatever the current folder or PYTHONPATH has. Streams that are closed (`>&-`)
    read and write nothing. All signals are heard, also where whoever started the process blocks them, as the srun of
    Slurm 25.05 does with SIGCHLD. Output has `?` for what a terminal has no character for. Output that nobody reads
    any more is dropped and the work goes on; a command that only prints `ends_with_reader` instead, without a word.
    One that only reads `ends_with_ctrl_c` as silently, from here on, unless whoever started it ignores Ctrl-C.
    """
    require_python(oldest)
    open_closed_streams()
    sys.excepthook = tell_missing
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with suppress(OSError):  # of a stream that has become another file
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if ends_with_reader:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    else:
        from data_prep.common.unread import drop_unread

        drop_unread()
    if ends_with_ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_closed_streams() -> None:
    """Leads those of the three standard streams nowhere that are closed, so that no other file gets their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def require_python(oldest: "tuple[int, int]" = OLDEST) -> None:
    """Ends the process where its Python is older."""
    if sys.version_info[:2] < oldest:
        this, needed = (".".join(map(str, version)) for version in (sys.version_info[:2], oldest))
        _end_with_cure(f"{sys.executable} is Python {this}, and this needs {needed} or newer")


def tell_missing(kind: "type[BaseException]", error: BaseException, trace: object) -> None:
    """Ends the process in one line for a package that is not installed or a file of ours that cannot be there, and
    tells all other errors as Python does."""
    from data_prep.common.errors import UserError

    if issubclass(kind, UserError):
        _end(str(error))
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if issubclass(kind, ModuleNotFoundError) and package not in ("", *OURS):
        _end_with_cure(f"{sys.executable} has no package {package}")
    sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]


def is_own() -> bool:
    """Whether this Python is that of the environment which the Makefile makes."""
    return Path(sys.prefix).resolve() == OWN


def _end_with_cure(fault: str) -> None:
    """Says what is wrong with this Python, and which one to take."""
    cure = "make .venv/installed PYTHON=python3.12 installs all into .venv (any Python from 3.10 on)"
    if is_own():
        cure = f"make clean-venv removes .venv, then {cure}"
    elif (OWN / "bin" / "python").exists():
        cure = f"first  . {os.path.relpath(str(OWN))}/bin/activate"
    _end(f"{fault}; {cure}")


def _end(fault: str) -> None:
    """Ends the process with what is wrong."""
    sys.stderr.write(f"error: {fault}\n")
    sys.stderr.flush()
    os._exit(CURE)


if __name__ == "__main__":  # the Makefile asks whether it can make or fill an environment with this Python
    require_python()
    if find_spec("pip") is None and is_own():
        _end_with_cure(f"{sys.executable} has no package pip")
