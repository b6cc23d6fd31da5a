"""The results of the parts of `make gpu`, in a file that is written after each part and can be copied."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import FIRST, SETUP, GpuPart
from benchmarks.measure import find_commit
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

RESULTS_FILE, LOG, PROFILE = "results.json", "log.txt", "profile"
SUBJECT = ("gpu", "torch", "commit")
"""Keys of the setup on which all results depend: if one changes, all parts run again."""
MOST_BYTES = 16 << 20
"""Size limit of copied files: lent machines return no larger ones."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class PartResults:
    """The results of all parts."""

    def __init__(self, folder: Path, dry: bool, copies: Path | None = None):
        """`copies` is another folder, which gets copies of the files after each part."""
        self.folder, self.path, self._copies = folder, folder / RESULTS_FILE, copies
        self.content: dict[str, Any] = read_json(self.path) if self.path.exists() else {"dry": dry, "parts": {}}
        self.parts: dict[str, Any] = self.content["parts"]
        if self.content["dry"] != dry:
            kind = "of a dry run" if self.content["dry"] else "of a GPU"
            raise UserError(f"{folder}: has results {kind}; give another folder")

    def is_done(self, part: GpuPart) -> bool:
        """Whether a part is done."""
        record = self.parts.get(part.name, {})
        return record.get("ended") == "done" and (part.name not in FIRST or record.get("where") == identify_machine())

    def add(self, part: GpuPart, record: dict[str, Any]) -> None:
        """Adds the results of a part, and writes the file."""
        self.parts[part.name] = record | ({"where": identify_machine()} if part.name in FIRST else {})
        write_json(self.path, self.content)
        self.copy()

    def copy(self) -> None:
        """Copies the files to the other folder."""
        if self._copies is None or self._copies.resolve() == self.folder.resolve():
            return
        self._copies.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.folder / LOG, *sorted(self.folder.glob(f"{PROFILE}/*/*/*"))):  # without subfolders
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                shutil.copyfile(path, self._copies / path.name)

    def missing(self) -> dict[str, str]:
        """Returns the packages that the setup found missing, with reasons."""
        found: dict[str, str] = self.parts.get(SETUP, {}).get("measured", {}).get("missing", {})
        return found

    def set_others_aside(self, setup: dict[str, Any]) -> bool:
        """Sets results aside if the setup found another GPU, torch or commit; returns whether it did."""
        subject = {name: setup.get(name) for name in SUBJECT}
        is_other: bool = self.content.get("subject", subject) != subject
        if is_other:
            aside = {"subject": self.content["subject"], "parts": dict(self.parts)}
            self.content.setdefault("earlier", []).append(aside)
            self.parts.clear()
        self.content["subject"] = subject
        return is_other


def identify_machine() -> dict[str, str]:
    """Identifies this boot of the machine, the commit and torch."""
    return {
        "boot": BOOT.read_text().strip() if BOOT.exists() else "",
        "commit": find_commit(),
        "torch": version("torch"),
    }


def copy_earlier_results(earlier: Path | None, folder: Path) -> None:
    """Copies the results of an earlier machine, if the folder has none."""
    if earlier is None:
        return
    given = earlier / RESULTS_FILE if earlier.is_dir() else earlier
    if not given.is_file():
        raise UserError(f"{given}: no results there")
    if not (folder / RESULTS_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given, folder / RESULTS_FILE)
