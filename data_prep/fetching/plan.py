"""A plan: all that one command of fetch.py is going to fetch, and what to do with it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.languages import RULES
from data_prep.fetching.download import Item


@dataclass(frozen=True)
class Plan:
    """All that one command fetches into one folder."""

    folder: Path
    items: list[Item]
    language: str = ""
    """The language of the text, where it is known."""

    def next_command(self) -> str:
        """Spells the command that makes shards of these files, and of no others that are in the folder."""
        ours = {item.path for item in self.items}
        others = [path for path in self.folder.rglob("*") if path.is_file() and path not in ours]
        visible = [path for path in others if not re.search(r"(^|/)[._]", str(path.relative_to(self.folder)))]
        docs = [f"{self.folder.absolute().name}={item.path}" for item in self.items] if visible else [str(self.folder)]
        code = "en" if self.language == "simple" else self.language
        language = ["--language", code] if code in RULES else []
        return shlex.join(["python", "data_prep/shard.py", "--docs", *docs, *language])
