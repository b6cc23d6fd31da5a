#!/usr/bin/env python3
"""Fetches the data that models are compared on: the tasks of GLUE, SQuAD 1.1 and 2.0, SWAG, or makes a small task.

    python finetuning/fetch.py glue
    python finetuning/fetch.py glue --task sst2 mrpc
    python finetuning/fetch.py squad --version 1.1
    python finetuning/fetch.py swag
    python finetuning/fetch.py demo

Whatever interrupts it, the same command continues it. The files lie where `run_glue.py`, `run_squad.py` and
`run_swag.py` look for them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions

from data_prep.common.errors import Checks, UserError, quote
from data_prep.common.files import replacing
from data_prep.common.outputs import making
from data_prep.fetching.client import Client, FetchOptions, Item, run_entry
from data_prep.fetching.servers import Hub
from data_prep.readers.formats import demo
from finetuning.files.splits import AX, AX_FOLDER, FOLDERS, normalize_name

GLUE = (*FOLDERS, AX)
"""The names of GLUE's tasks, as run_glue.py and the hub have them, and the diagnostic set."""
HUB_GLUE = "nyu-mll/glue"
SQUAD_SERVER = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
SQUAD = {
    "1.1": {
        "train-v1.1.json": "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
        "dev-v1.1.json": "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
    },
    "2.0": {
        "train-v2.0.json": "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002",
        "dev-v2.0.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    },
}
"""The SHA-256 of SQuAD's files by their version, as in Hugging Face's catalogue of data sets and in ParlAI (2.0)."""
SWAG_SERVER = "https://raw.githubusercontent.com/rowanz/swagaf/master/data"
SWAG = {
    "train.csv": "5748b51126ac255c5a6f26e1ba473b51116d6c822aeb25e63ecba282c9d0e610",
    "val.csv": "c0497b2cd7f3e6b7df995524b1853f62285d60d110d659b19545ca80b2903234",
    "test.csv": "a689a1a4e892a65ca625c1f0fcf77bcce004b59ad1caeb134ca5ec080a711cb6",
}
"""The SHA-256 of SWAG's files, as in Hugging Face's catalogue of data sets."""


@dataclass(frozen=True, kw_only=True)
class FetchGlue(FetchOptions):
    """The tasks of GLUE, from the Hugging Face hub, or from the server that HF_ENDPOINT names."""

    out: Path | None = None
    """Folder for the tasks (default: data/glue)."""
    task: tuple[str, ...] = ()
    """Tasks to fetch: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, ax (default: all)."""

    def checks(self) -> Checks:
        """Checks the names of tasks."""
        for given in self.task:
            yield normalize_name(given) in GLUE, f"--task {given}: no task of GLUE; there is {', '.join(GLUE)}"

    def fetch(self, client: Client) -> str:
        """Fetches the tasks that are not there; returns the command that fine-tunes on them."""
        out = self.out or Path("data/glue")
        names = tuple(dict.fromkeys(map(normalize_name, self.task))) or GLUE
        items = Hub(name=HUB_GLUE, config_name="*").list_items(Path())
        parts = [(item.path.parent.name, item) for item in items]
        missing = sorted({*names} - {part for part, _ in parts})
        if missing:
            raise UserError(f"{HUB_GLUE}: has no {', '.join(missing)} on this hub")
        for part, item in parts:
            if part in names:
                client.fetch(replace(item, path=out / FOLDERS.get(part, AX_FOLDER) / item.path.name))
        trained = [name for name in names if name != AX]
        chosen = ["--task", *trained] if self.task and trained else []
        return build_command("run_glue.py", chosen, self.out)


@dataclass(frozen=True, kw_only=True)
class FetchSquad(FetchOptions):
    """The files of SQuAD, from rajpurkar.github.io."""

    out: Path | None = None
    """Folder for the files (default: data/squad)."""
    version: tuple[str, ...] = tuple(SQUAD)
    """Versions to fetch."""

    def checks(self) -> Checks:
        """Checks the versions."""
        yield self.version, f"--version: at least one of {', '.join(SQUAD)}"
        for version in self.version:
            yield version in SQUAD, f"--version {version}: there is {', '.join(SQUAD)}"

    def fetch(self, client: Client) -> str:
        """Fetches the versions; returns the command that fine-tunes on the last of them."""
        for version in self.version:
            fetch_files(client, SQUAD_SERVER, SQUAD[version], self.out or Path("data/squad"))
        return build_command("run_squad.py", ["--version", self.version[-1]], self.out)


@dataclass(frozen=True, kw_only=True)
class FetchSwag(FetchOptions):
    """The files of SWAG, from the repository of its authors."""

    out: Path | None = None
    """Folder for the files (default: data/swag)."""

    def fetch(self, client: Client) -> str:
        """Fetches the files; returns the command that fine-tunes on them."""
        fetch_files(client, SWAG_SERVER, SWAG, self.out or Path("data/swag"))
        return build_command("run_swag.py", [], self.out)


def fetch_files(client: Client, server: str, files: Mapping[str, str], folder: Path) -> None:
    """Fetches files of a server, with their checksums, into a folder."""
    for name, checksum in files.items():
        client.fetch(Item(f"{server}/{name}", folder / name, checksum))


def build_command(script: str, chosen: Sequence[str], folder: Path | None) -> str:
    """Builds the command that fine-tunes on the data; it finds the default folder by itself."""
    return shlex.join(["python", f"finetuning/{script}", *chosen, *(["--data", str(folder)] if folder else [])])


TASK = "package.toml"
PYTHON = "python"
"""The label of the standard library."""
HIDDEN = "package"
"""Replaces the name of a package in a text."""
SHORTEST = 80
"""Minimum characters of a text."""
PACKAGES, COUNTS = 8, {"train": 250, "dev": 100}
"""The number of packages, those with the most texts, and of the texts of each that are trained on and scored."""
OPENING = """\
# Which package does this documentation string come from? Every word with the name of one of them is hidden as
# "package". No module of dev is in train, or in the demo corpus.
name = "package"
kind = "classes"
train = "train.jsonl"
dev = "dev.jsonl"
text = "text"
label = "package"
"""


@dataclass(frozen=True, kw_only=True)
class FetchDemo(FetchOptions):
    """A task made of the documentation strings of the installed Python packages; it needs no network.

    Training items come from the modules that the demo corpus reads, scored items from modules that it leaves out.
    """

    out: Path | None = None
    """Folder for the task (default: data/demo-task)."""
    replace: bool = False
    """Replace files of these names that something else has made."""

    def fetch(self, client: Client) -> str:
        """Writes the task; returns the command that fine-tunes on it."""
        out = self.out or Path("data/demo-task")
        with making([out / TASK, out / "train.jsonl", out / "dev.jsonl"], "fetch.py demo", [], self.replace):
            read, unread = demo.halves()
            splits = choose_splits(collect_texts(read), collect_texts(unread))
            for split, texts in splits.items():
                with replacing(out / f"{split}.jsonl") as file:
                    for package, own in texts.items():
                        rows = ({"text": text, "package": package} for text in own)
                        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
            with replacing(out / TASK) as file:
                file.write(OPENING.encode())
        client.console.print(f"{out / TASK}: {COUNTS['train']} texts of each of {', '.join(splits['train'])}")
        return f"python finetuning/run_task.py {quote(out / TASK)}"


def choose_splits(read: Mapping[str, set[str]], unread: Mapping[str, set[str]]) -> dict[str, dict[str, list[str]]]:
    """Chooses the texts of both splits, the same number for each package; no text occurs twice."""
    owners = Counter(text for half in (read, unread) for texts in half.values() for text in texts)
    halves = {
        split: {name: {text for text in texts if owners[text] == 1} for name, texts in half.items()}
        for split, half in (("train", read), ("dev", unread))
    }
    own = halves["train"]
    enough = [name for name in own if all(len(halves[split].get(name, ())) >= COUNTS[split] for split in COUNTS)]
    names = sorted(sorted(enough, key=lambda name: (-len(own[name]), name))[:PACKAGES])
    if len(names) < 2:
        raise UserError(f"{len(names)} of the installed packages have enough documentation strings, and it takes 2")
    named = build_name_pattern(names)
    return {
        split: {name: [named.sub(HIDDEN, text) for text in choose_texts(half[name], COUNTS[split])] for name in names}
        for split, half in halves.items()
    }


def collect_texts(files: Sequence[Path]) -> dict[str, set[str]]:
    """Collects by package the documentation strings of modules that are long enough, without the code in them."""
    found: dict[str, set[str]] = {}
    for path in files:
        strings = demo.DOCSTRING.findall(path.read_bytes().decode(errors="ignore"))
        texts = (" ".join(demo.prose(string)) for _, string in strings)
        found.setdefault(find_package(path), set()).update(text for text in texts if len(text) >= SHORTEST)
    return found


def find_package(path: Path) -> str:
    """Finds the package that a module belongs to."""
    places = [place for place, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
    return path.parts[places[-1] + 1].removesuffix(".py") if places else PYTHON


def build_name_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Builds a pattern for words that contain a package's import name or distribution name."""
    installed = packages_distributions()
    said = {spelled for name in names for spelled in (name, *installed.get(name, ()))}
    return re.compile(rf"\w*(?:{'|'.join(map(re.escape, sorted(said, key=len, reverse=True)))})\w*", re.IGNORECASE)


def choose_texts(texts: Iterable[str], count: int) -> list[str]:
    """Chooses `count` texts by their hashes, so that the choice depends on the texts alone."""
    return sorted(texts, key=lambda text: hashlib.blake2b(text.encode(errors="replace")).digest())[:count]


def main(arguments: list[str]) -> int:
    """Fetches what the command line asks for; returns the exit code."""
    return run_entry(
        {"glue": FetchGlue, "squad": FetchSquad, "swag": FetchSwag, "demo": FetchDemo}, arguments, "finetuning"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
