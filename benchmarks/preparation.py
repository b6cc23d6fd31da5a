#!/usr/bin/env python3
"""Measures data preparation: speed against `tokenizers` alone, scaling, growth with the corpus, memory.

    python benchmarks/preparation.py

Reads real text from the folder that CLOZE_DATA names, and keeps its numbers in benchmarks/results/preparation.json.
"""

from __future__ import annotations

import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import DATA, RESULTS, SHARD, alternate, environment, median_ratio, write_results
from data_prep.common.workers import open_workers
from data_prep.pipeline import LIBRARIES, Pipeline
from data_prep.readers import READERS
from data_prep.readers.reader import Options, Problems
from data_prep.readers.splitting import split_sentences
from data_prep.settings import Settings
from data_prep.vocabulary.vocabulary import load_vocabulary

BATCH = 1000  # sentences that the peer is given at a time


@dataclass(frozen=True)
class Preparation:
    """Measures data preparation on real text."""

    data: Path = DATA
    """Folder with wiki/ (WikiExtractor's output), books/ and vocab.txt."""
    rounds: int = 3
    """Alternating runs of which the median is taken."""
    growth_mb: tuple[int, ...] = (10, 20, 40, 80)
    """Sizes of the corpora on which memory and time are watched, besides all of the data."""


def prepare(data: Path, docs: list[str], workers: int, **more: Any) -> Callable[[], Any]:
    """A whole run of shard.py in this process, from files to shards."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as out, open_workers(workers, preload=Pipeline.__module__) as pool:
            assert pool is not None
            settings = Settings(docs=(tuple(docs),), vocab=str(data / "vocab.txt"), **more)
            Pipeline(Path(out), settings, pool, Console(file=io.StringIO())).run()

    return run


def sentences_of(folder: Path) -> list[str]:
    """The same sentences that shard.py cuts into pieces."""
    reader, options = READERS["wikiextractor"], Options(Problems("fail"))
    spans = itertools.chain.from_iterable(reader.spans(path, 1 << 24) for path in sorted(folder.iterdir()))
    documents = itertools.chain.from_iterable(reader.read(span, options) for span in spans)
    return [sentence for document in documents for sentence in split_sentences("en", document.passages)]


def against_tokenizers(settings: Preparation) -> dict[str, Any]:
    """One worker against `encode_batch` alone; and what each further duplicate or length adds."""
    wiki = settings.data / "wiki/AA"
    sentences = sentences_of(wiki)
    pipeline = load_vocabulary(settings.data / "vocab.txt", cased=False).pipeline()

    def tokenizers_alone() -> None:
        for at in range(0, len(sentences), BATCH):
            pipeline.encode_batch(sentences[at : at + BATCH], add_special_tokens=False)

    def ours(lengths: tuple[int, ...], duplicates: int) -> Callable[[], Any]:
        return prepare(settings.data, [str(wiki)], 1, lengths=lengths, duplicates=duplicates)

    ours((128, 512), 1)()  # compiles
    seconds = alternate(
        {
            "tokenizers": tokenizers_alone,
            "one set": ours((128,), 1),
            "five duplicates": ours((128,), 5),
            "two lengths": ours((128, 512), 1),
        },
        settings.rounds,
    ).seconds
    alone = seconds["tokenizers"]
    megabytes = sum(len(each.encode()) for each in sentences) / 1e6

    def added(name: str, sets: int) -> float:
        shares = [(b - a) / sets / c for a, b, c in zip(seconds["one set"], seconds[name], alone, strict=True)]
        return statistics.median(shares)

    return {
        "text_mb": round(megabytes, 1),
        "tokenizers_mb_per_s": round(megabytes / statistics.median(alone), 2),
        "rate_against_tokenizers": round(median_ratio(alone, seconds["one set"]), 2),
        "further_duplicate_share_of_tokenization": round(added("five duplicates", 4), 3),
        "further_length_share_of_tokenization": round(added("two lengths", 1), 3),
        "seconds": {name: [round(each, 2) for each in values] for name, values in seconds.items()},
    }


def scaling(settings: Preparation) -> dict[str, Any]:
    """Two workers against one, with the settings that shard.py has by itself."""
    docs = [str(settings.data / "wiki")]
    seconds = alternate(
        {"1": prepare(settings.data, docs, 1), "2": prepare(settings.data, docs, 2)}, settings.rounds
    ).seconds
    return {
        "two_workers_against_one": round(median_ratio(seconds["1"], seconds["2"]), 2),
        "seconds": {name: [round(each, 2) for each in values] for name, values in seconds.items()},
    }


def growth(settings: Preparation) -> list[dict[str, Any]]:
    """Memory and time of a run with two workers, for corpora of growing size; the last trains its own vocabulary."""
    files = sorted((settings.data / "wiki").rglob("wiki_*"))
    rows = []
    for megabytes in settings.growth_mb:
        sizes = itertools.accumulate(path.stat().st_size for path in files)
        count = sum(1 for size in sizes if size <= megabytes * 1e6) + 1
        with tempfile.TemporaryDirectory() as folder:
            for number, path in enumerate(files[:count]):
                (Path(folder) / f"{number:04}").symlink_to(path.resolve())
            rows.append(watched([folder], settings.data / "vocab.txt"))
    everything = [str(settings.data / "wiki"), str(settings.data / "books")]
    return [*rows, watched(everything, settings.data / "vocab.txt"), watched(everything, None)]


def watched(docs: list[str], vocabulary: Path | None) -> dict[str, Any]:
    """Runs shard.py and watches the memory of each of its processes."""
    paths = [path for each in docs for path in Path(each).rglob("*")]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(SHARD), "--docs", *docs, "--out", f"{out}/d", "--workers", "2"]
        command += ["--vocab", str(vocabulary)] if vocabulary else []
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for each in family(process.pid):
                try:
                    peaks[each.pid] = max(peaks.get(each.pid, 0), each.memory_info().rss)
                except psutil.Error:
                    continue
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        assert process.returncode == 0
    workers = [peak for pid, peak in peaks.items() if pid != process.pid]
    return {
        "text_mb": round(size / 1e6, 1),
        "vocabulary": "given" if vocabulary else "trained",
        "seconds": round(seconds, 1),
        "mb_per_s": round(size / 1e6 / seconds, 2),
        "worker_peak_mb": round(max(workers) / 1e6),
        "main_peak_mb": round(peaks[process.pid] / 1e6),
    }


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Preparation, args=arguments, prog="preparation.py")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if not (settings.data / "wiki").is_dir():
        console.print(f"error: {settings.data} has no wiki/: set CLOZE_DATA to a folder of real text, or give --data")
        return 2
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results: dict[str, Any] = {"environment": environment([*LIBRARIES])}
    results["one_worker"] = one = against_tokenizers(settings)
    console.print(f"all of one length and duplicate, against encode_batch alone: {one['rate_against_tokenizers']} x")
    console.print(f"  a further duplicate: {one['further_duplicate_share_of_tokenization']:.1%} of encode_batch's time")
    console.print(f"  a further length:    {one['further_length_share_of_tokenization']:.1%}")
    results["scaling"] = scaling(settings)
    console.print(f"two workers against one: {results['scaling']['two_workers_against_one']} x")
    results["growth"] = growth(settings)
    table = Table(
        "text MB", "vocabulary", "seconds", "MB/s", "peak MB of a worker", "peak MB of the main process", box=None
    )
    for row in results["growth"]:
        table.add_row(*map(str, row.values()))
    console.print(table)
    console.print(f"kept in {write_results(RESULTS / 'preparation.json', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
