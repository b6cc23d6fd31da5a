"""What the parts of `make gpu` have measured: in a file that is whole after each of them, and goes along to others."""

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
"""What all numbers depend on: where the setup finds another one, parts are measured anew."""
MOST_BYTES = 16 << 20
"""Of a file that is copied: machines that are lent give no larger ones back."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class PartResults:
    """What the parts have measured."""

    def __init__(self, folder: Path, dry: bool, copies: Path | None = None):
        """`copies` is another folder that gets all that is in this one, after each part."""
        self.folder, self.path, self._copies = folder, folder / RESULTS_FILE, copies
        self.content: dict[str, Any] = read_json(self.path) if self.path.exists() else {"dry": dry, "parts": {}}
        self.parts: dict[str, Any] = self.content["parts"]
        if self.content["dry"] != dry:
            kind = "of a dry run" if self.content["dry"] else "of a GPU"
            raise UserError(f"{folder}: has results {kind}; give another folder")

    def is_done(self, part: GpuPart) -> bool:
        """Whether a part need not run again."""
        record = self.parts.get(part.name, {})
        return record.get("ended") == "done" and (part.name not in FIRST or record.get("where") == identify_machine())

    def add(self, part: GpuPart, record: dict[str, Any]) -> None:
        """Keeps what a part has measured."""
        self.parts[part.name] = record | ({"where": identify_machine()} if part.name in FIRST else {})
        write_json(self.path, self.content)
        self.copy()

    def copy(self) -> None:
        """Brings the other folder up to date."""
        if self._copies is None or self._copies.resolve() == self.folder.resolve():
            return
        self._copies.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.folder / LOG, *sorted(self.folder.glob(f"{PROFILE}/*/*/*"))):  # flat: few come far
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                shutil.copyfile(path, self._copies / path.name)

    def missing(self) -> dict[str, str]:
        """The packages that the setup has not found, and why."""
        found: dict[str, str] = self.parts.get(SETUP, {}).get("measured", {}).get("missing", {})
        return found

    def set_others_aside(self, setup: dict[str, Any]) -> bool:
        """Sets aside what was measured on another subject than what the setup has found; whether there was any."""
        subject = {name: setup.get(name) for name in SUBJECT}
        is_other: bool = self.content.get("subject", subject) != subject
        if is_other:
            aside = {"subject": self.content["subject"], "parts": dict(self.parts)}
            self.content.setdefault("earlier", []).append(aside)
            self.parts.clear()
        self.content["subject"] = subject
        return is_other


def identify_machine() -> dict[str, str]:
    """This start of this machine, and what it runs: parts that say so need not be run twice here."""
    return {
        "boot": BOOT.read_text().strip() if BOOT.exists() else "",
        "commit": find_commit(),
        "torch": version("torch"),
    }


def copy_earlier_results(earlier: Path | None, folder: Path) -> None:
    """Begins with the results of an earlier machine, where the folder has none of its own."""
    if earlier is None:
        return
    given = earlier / RESULTS_FILE if earlier.is_dir() else earlier
    if not given.is_file():
        raise UserError(f"{given}: no results there")
    if not (folder / RESULTS_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given, folder / RESULTS_FILE)
