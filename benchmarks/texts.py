"""Text to measure on: shards, sentences and words.

Real text is in the folder that CLOZE_DATA names; without it, the built-in corpus is used.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import ROOT, SHARD, find_data_folder
from data_prep.common.errors import UserError
from data_prep.shards import MANIFEST

if TYPE_CHECKING:
    from data_prep.vocabulary.vocabulary import Vocabulary

BUILD = ROOT / "build"
DEMO = BUILD / "demo"
"""The shards of `make demo`."""
DEMO_FILES, DEMO_PIECES = 400, 8000
LENGTHS = ("--lengths", 128, 512, 1024)


def make_shards(out: Path, *words: object, duplicates: int = 1) -> Path:
    """Makes shards by shard.py with these arguments, unless they exist. Raises UserError if it fails."""
    command = [sys.executable, str(SHARD), *map(str, words), "--duplicates", str(duplicates), "--out", str(out)]
    if not (out / MANIFEST).exists():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{out}: no shards could be made:\n{done.stdout[-500:]}{done.stderr[-1000:]}")
    return out


def make_demo(say: Callable[[str], None]) -> Path:
    """Makes shards of the built-in corpus, as `make demo` does, unless they exist."""
    if not (DEMO / MANIFEST).exists():
        say(f"shards of the built-in corpus are made in {DEMO.relative_to(ROOT)}, once")
    return make_shards(DEMO, "--docs", "demo", "--vocab-size", 8192, duplicates=2)


def find_shards(given: Path | None, say: Callable[[str], None]) -> Path:
    """Returns the given shards; else makes shards of real text if there is any, or of the built-in corpus."""
    data = find_data_folder()
    if given is not None:
        if not (given / MANIFEST).exists():
            raise UserError(f"{given}: no shards there (no {MANIFEST}); make them with data_prep/shard.py")
        return given
    if not (data / "wiki").is_dir():
        say(f"{DEMO}: the corpus that is built in (real text: CLOZE_DATA)")
        return make_demo(say)
    some = data / "wiki/AA"  # 45 MB are enough
    words = ("--docs", some if some.is_dir() else data / "wiki", "--vocab", data / "vocab.txt", *LENGTHS)
    out = BUILD / f"benchmark-wiki-{zlib.crc32(' '.join(map(str, words)).encode()):08x}"
    if not (out / MANIFEST).exists():
        say(f"{out}: made now, of {words[1]}")
    return make_shards(out, *words)


def read_demo_sentences() -> Iterator[str]:
    """Yields sentences of the documentation strings of this Python."""
    from data_prep.readers.formats import demo

    for path in demo.files()[:DEMO_FILES]:
        for _, text in demo.DOCSTRING.findall(path.read_bytes().decode(errors="ignore")):
            for passage in demo.prose(text):
                yield from (sentence for sentence in re.split(r"(?<=[.!?]) ", passage) if len(sentence) > 1)


def read_sentences(say: Callable[[str], None], most: int) -> tuple[str, list[str]]:
    """Reads the first sentences of SST-2's dev, otherwise of the demo corpus; returns their source, too."""
    path = find_data_folder() / "glue" / "SST-2" / "dev.tsv"
    if path.is_file():
        return "SST-2", [row.partition("\t")[0] for row in path.read_text().splitlines()[1 : 1 + most]]
    say(f"{path} is not there: sentences are those of the demo corpus")
    return "demo corpus", list(itertools.islice(read_demo_sentences(), most))


def choose_vocabulary() -> Vocabulary:
    """Returns the published vocabulary if CLOZE_DATA has it, else one trained on the demo corpus."""
    from data_prep.vocabulary.kinds.wordpiece import KIND
    from data_prep.vocabulary.source import find_vocabulary

    if (given := find_data_folder() / "vocab.txt").is_file():
        return find_vocabulary(str(given), cased=False)
    words = Counter(word for each in read_demo_sentences() for word in re.findall(r"\w+|[^\w\s]", each.lower()))
    return KIND.train(words, DEMO_PIECES, cased=False)


def write_demo_task(folder: Path) -> None:
    """Writes sentences of the demo corpus in the format of SST-2, with two arbitrary classes, below a folder of
    tasks."""
    task = folder / "glue" / "SST-2"
    task.mkdir(parents=True)
    sentences = [sentence for sentence in read_demo_sentences() if "\t" not in sentence]
    rows = [f"{sentence}\t{number % 2}\n" for number, sentence in enumerate(sentences)]
    for name, some in (("train", rows), ("dev", rows[:64])):
        (task / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *some]))
