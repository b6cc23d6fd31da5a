"""A small task that needs no network: which package does this documentation string come from?

Training items come from the modules that the demo corpus reads, scored items from modules that it leaves out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

from data_prep.common.errors import UserError, quote
from data_prep.common.files import replacing
from data_prep.common.outputs import making
from data_prep.fetching.client import Client, FetchOptions
from data_prep.readers.formats import demo

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
    """A task made of the documentation strings of the installed Python packages; needs no network."""

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
