"""Cloze's folder as a user of Slurm has it, for tests of jobs."""

import re
from pathlib import Path

from conftest import ROOT


def link_scripts(folder: Path, **constants: float) -> None:
    """Makes the folder cluster/ of the project's files, with these constants in functions.sh, and without a site."""
    (scripts := folder / "cluster").mkdir(parents=True)
    for path in (ROOT / "cluster").iterdir():
        if path.name not in ("site.env", "functions.sh"):
            (scripts / path.name).symlink_to(path)
    write_functions(folder, **constants)


def write_functions(folder: Path, **constants: float) -> None:
    """Writes functions.sh with these constants in place of its own."""
    text = (ROOT / "cluster" / "functions.sh").read_text()
    for name, value in constants.items():
        text, found = re.subn(rf"(?m)^{name}=\d+", f"{name}={value}", text)
        assert found == 1, name
    (folder / "cluster" / "functions.sh").write_text(text)
