#!/usr/bin/env python3
"""Makes an environment for `make gpu` on top of a machine's packages: its own torch is kept.

    python3 benchmarks/gpu/install.py build/gpu-venv build/gpu-wheels

The environment sees the packages of the Python that runs this, which may be an environment itself, and adds those that
are missing: from the folder of wheels if there is one, otherwise from the index. It needs Python and pip.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Mapping

from data_prep.common.errors import quote

ROOT = Path(__file__).parent.parent.parent
LOCK = ROOT / "requirements.lock"
CORE = ("deepspeed", "numpy", "pyarrow", "safetensors", "pydantic", "tyro", "rich")
"""Packages that every measurement needs, besides torch."""
TESTING = ("pytest", "pytest-timeout", "hypothesis")
"""Packages that tests need in addition."""
NEEDED = (*CORE, "transformers", "sentencex", *TESTING)
"""Packages that the parts of `make gpu` import, small enough for wheels."""
PREPARING = ("numba", "sentencex", "tokenizers")
"""Packages that making shards needs in addition."""
UNLOCKED = ("setuptools",)
"""Packages whose version depends on torch."""


def list_installed() -> dict[str, str]:
    """Lists the installed packages with their versions, by normalised name."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {normalise_name(name): version for name, version in found.items() if name}


def normalise_name(name: str) -> str:
    """Normalises the name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_versions(lines: str, has: Mapping[str, str]) -> str:
    """Returns the constraints of a lock file without installed packages, and with the installed torch."""
    free = {*has, *UNLOCKED}
    missing = [line for line in lines.splitlines() if normalise_name(re.split(r"[=\s]", line)[0]) not in free]
    return "\n".join([*missing, f"torch=={has['torch']}", ""])


def create(folder: Path) -> Path:
    """Creates an environment that sees this Python's packages and this project; returns its Python."""
    import venv  # not every Python has it

    venv.create(folder, clear=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(own) / "machine.pth").write_text("\n".join([str(ROOT), *seen, ""]))
    return python


def choose_pip_options(wheels: Path, constraints: Path, has: Mapping[str, str]) -> list[str]:
    """Returns the options of pip: with wheels, these alone, in any version."""
    if wheels.is_dir():
        constraints.write_text(f"torch=={has['torch']}\n")
        return ["--constraint", str(constraints), "--no-index", "--find-links", str(wheels), *NEEDED]
    constraints.write_text(lock_versions(LOCK.read_text(), has))
    return ["--constraint", str(constraints), *NEEDED, *PREPARING]


def main(folder: Path, wheels: Path) -> int:
    """Returns the exit code."""
    has = list_installed()
    if "torch" not in has:
        print(f"error: {sys.executable} has no torch: install one for your GPU, or name another: make gpu PYTHON=…")
        return 2
    try:
        python = create(folder)
    except ImportError as error:
        target = f"{quote(sys.executable)} -m pip install --no-index --no-deps -t build/site {quote(wheels)}/*.whl"
        print(f"error: {error}; take another Python, or do without: {target}, and PYTHONPATH=build/site:.")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        options = choose_pip_options(wheels, Path(scratch) / "constraints.txt", has)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        code = subprocess.run([*pip, "install", *options], check=False).returncode
    if code:
        where = f"{wheels} lacks a package: make gpu-wheels HAS='torch' gathers all" if wheels.is_dir() else "see above"
        print(f"error: pip could not install what is needed: {where}")
        return 2
    print(f"{folder} is ready, with torch {has['torch']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
