#!/usr/bin/env python3
"""Measures data preparation: speed against the original generator, growth with the corpus, memory.

    python benchmarks/preparation.py
    python benchmarks/preparation.py --pieces

The sides take turns on one core with the same text and vocabulary: shard.py, the original generator's algorithm
(generators.py, with transformers' tokenizer in Python), and `tokenizers` alone. In other contests, our encoders and
nanotoken (WordPiece) or gigatoken (byte-level BPE), where it is installed, only cut text into pieces. Reads real text
from the folder that CLOZE_DATA names, or the documentation strings of installed packages. Results go to
benchmarks/results/, a file for each kind of hardware.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import io
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import psutil
from rich.console import Console

from benchmarks.contests import OURS, Turns, alternate
from benchmarks.generators import ExamplesJob, OriginalGenerator
from benchmarks.measure import SHARD, ResultsFile, find_data_folder, run_command
from benchmarks.peer import find_missing_packages
from benchmarks.processes import pin_to_one_core
from benchmarks.tables import build_table, show, show_contest
from benchmarks.texts import choose_vocabulary
from data_prep.common.workers import Workers, open_workers
from data_prep.pipeline.inputs import find_inputs
from data_prep.pipeline.pipeline import LIBRARIES, Pipeline
from data_prep.readers.formats import demo
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Options, Problems
from data_prep.readers.splitting import split_sentences
from data_prep.settings import Settings
from data_prep.vocabulary.kinds.wordpiece import VOCABULARY, read_pieces
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary

BATCH = 1000
"""Sentences in a call of `tokenizers`."""
PEER_MB: Sequence[float] = (1, 4)
"""Sizes of the texts for comparisons with peers; our start-up weighs less in a longer text."""
RUN_MB: Sequence[float] = (20, 100)
"""Sizes of the texts for whole runs on one core."""
GROWTH_MB = (10, 20, 40, 80)
"""Sizes of the corpora for memory and time, besides all of the data."""
CUT_MB = 20
"""Size of the text that is only cut into pieces."""
OPTIONS = {"nanotoken": {"add_special_tokens": False, "parallel": False}, "gigatoken": {"parallel": False}}
"""The options of the packages that only cut text into pieces, WordPiece or byte-level BPE; each may be missing."""
FIVE = "5 duplicates"
ROUNDS = 3
"""Turns of which the median is taken: the fewest with a median, since a round takes minutes."""


@dataclass(frozen=True)
class Preparation:
    """Measures data preparation."""

    out: Path | None = None
    """File for the numbers (default: benchmarks/results/preparation-<hardware>.json)."""
    pieces: bool = False
    """Only cut text into pieces; earlier results of the rest stay."""


@dataclass(frozen=True)
class SourceText:
    """The text to prepare: real text, or the documentation strings of packages."""

    docs: tuple[str, ...]
    """Arguments of --docs."""
    files: tuple[Path, ...]
    format: str
    vocabulary: Path

    @classmethod
    def find(cls, folder: Path) -> "SourceText":
        """Finds real text, in wiki/ and books/; without any, takes the demo corpus, whose vocabulary is written into
        `folder`."""
        data = find_data_folder()
        if (data / "wiki").is_dir():
            docs = tuple(str(data / name) for name in ("wiki", "books") if (data / name).is_dir())
            files = tuple(sorted((data / "wiki").rglob("wiki_*")))
            return cls(docs, files, "wikiextractor", data / "vocab.txt")
        choose_vocabulary().write(folder / "demo")
        return cls(("demo",), tuple(demo.files()), "demo", folder / "demo" / VOCABULARY)

    def write(self, path: Path, megabytes: float) -> float:
        """Writes up to this number of MB in the format of the original generator; returns the MB written."""
        reader, options, size = list_readers()[self.format], Options(Problems("skip")), 0
        spans = itertools.chain.from_iterable(reader.spans(file, 1 << 24) for file in self.files)
        with path.open("w", encoding="utf-8") as file:
            for document in itertools.chain.from_iterable(reader.read(span, options) for span in spans):
                if size >= megabytes * 1e6:
                    break
                text = "\n".join(split_sentences("en", document.passages)) + "\n\n"
                size += len(text.encode())
                file.write(text)
        return round(size / 1e6, 1)


class PreparationRun:
    """Runs shard.py in this process, and discards the shards. Keeps the seconds of each step of the last run."""

    def __init__(self, settings: Settings, workers: int = 1) -> None:
        self._settings, self._workers = settings, workers
        self.seconds: dict[str, float] = {}

    def __call__(self) -> None:
        """Runs it once."""
        with tempfile.TemporaryDirectory() as folder, open_workers(self._workers, preload=Pipeline.__module__) as pool:
            assert pool is not None
            self.seconds = run_pipeline(Path(folder) / "out", self._settings, pool)


def run_pipeline(out: Path, settings: Settings, pool: Workers) -> dict[str, float]:
    """Runs the steps of shard.py in this process, and prints nothing; returns the seconds of each step."""
    console = Console(file=io.StringIO())
    pipeline = Pipeline(find_inputs(out, settings, console), pool, console)
    pipeline.run()
    return pipeline.runner.seconds


def select_files(files: Iterable[Path], megabytes: float) -> tuple[tuple[str, ...], float]:
    """Returns the first files that have about this number of MB, and their size in MB."""
    chosen, size = list[str](), 0
    for path in files:
        if size >= megabytes * 1e6:
            break
        chosen.append(str(path))
        size += path.stat().st_size
    return tuple(chosen), round(size / 1e6, 1)


def run_tokenizers(job: ExamplesJob) -> None:
    """Runs `tokenizers` on the text in batches, the fastest way from Python."""
    pipeline = read_pieces(job.vocabulary, cased=False).pipeline()
    with job.text.open(encoding="utf-8") as file:
        sentences = [line.strip() for line in file]
    for at in range(0, len(sentences), BATCH):
        pipeline.encode_batch(sentences[at : at + BATCH], add_special_tokens=False)


def run_contest(job: ExamplesJob, megabytes: float) -> dict[str, Any]:
    """Lets all sides take turns on one core, each from the text to its output."""
    docs = ((str(job.text),),)
    settings = Settings(
        docs=docs, format=(("sentences",),), vocab=str(job.vocabulary), lengths=(job.length,), duplicates=job.duplicates
    )
    with tempfile.TemporaryDirectory() as folder, pin_to_one_core():
        sides: dict[str, Callable[[], Any]] = {OURS: PreparationRun(settings)}
        if not find_missing_packages("transformers"):
            sides["original"] = partial(OriginalGenerator(job).generate, Path(folder) / "original")
        sides["tokenizers alone"] = partial(run_tokenizers, job)
        sides[OURS]()  # compiles
        turns = alternate(sides, ROUNDS)
    return {"length": job.length, "duplicates": job.duplicates, **describe_turns(turns, megabytes)}


def describe_turns(turns: Turns, megabytes: float) -> dict[str, Any]:
    """Describes a contest on a text: the seconds and speed of every side, and how many times as fast ours was."""
    figures = {}
    for name in turns.seconds:
        seconds = turns.summarise_side(name)
        figures[name] = {"seconds": seconds, "mb_per_s": round(megabytes / seconds["median"], 2)}
    return {"text_mb": megabytes, "sides": figures, "times_as_fast_as": turns.compute_ratios()}


def run_contests(text: SourceText, folder: Path, console: Console) -> dict[str, Any]:
    """Runs a contest for every size of text, with one duplicate and with five."""
    found = {}
    for size in PEER_MB:
        path = folder / f"{size}.txt"
        megabytes = text.write(path, size)
        for duplicates in (1, 5):
            job = ExamplesJob(path, text.vocabulary, duplicates=duplicates)
            name = f"{megabytes:g} MB, {duplicates} duplicate{'s' if duplicates > 1 else ''}"
            found[name] = run_contest(job, megabytes)
            show_contest(console, name, found[name])
    return found


def run_cutting_contests(corpus: SourceText, folder: Path, console: Console) -> dict[str, Any]:
    """Runs a contest of cutting text into pieces for each kind of vocabulary whose peer is installed; GPT-2's is in
    bpe/gpt2 of the data."""
    megabytes = corpus.write(folder / "pieces.txt", CUT_MB)
    sentences = [line.strip() for line in (folder / "pieces.txt").read_text("utf-8").split("\n")]
    gpt2, found = find_data_folder() / "bpe" / "gpt2", {}
    for package in OPTIONS:
        if find_missing_packages(package) or (package == "gigatoken" and not gpt2.is_dir()):
            console.print(f"{package} or {gpt2} is not there, so it is left out (pip install {package})", markup=False)
            continue
        vocabulary = read_vocabulary(gpt2) if package == "gigatoken" else read_pieces(corpus.vocabulary, cased=False)
        name = f"{megabytes:g} MB, {vocabulary.kind} alone"
        sides = {side: partial(time_cutting, side, vocabulary, sentences) for side in (OURS, package)}
        with pin_to_one_core():
            found[name] = describe_turns(alternate(sides, ROUNDS, warm_up=1), megabytes)  # the first turn compiles
        show_contest(console, name, found[name])
    return found


def time_cutting(side: str, vocabulary: Vocabulary, sentences: Sequence[str]) -> float:
    """Measures the CPU seconds of cutting sentences into pieces, by our encoder or a package, with empty caches."""
    if side == OURS:
        encode: Callable[[Sequence[str]], Any] = vocabulary.encoder().encode_texts
    else:
        encode = partial(import_module(side).Tokenizer(vocabulary.pipeline()).encode_batch, **OPTIONS[side])
    start = time.process_time()
    encode(sentences)
    return time.process_time() - start


def measure_growth(corpus: SourceText, folder: Path) -> list[dict[str, Any]]:
    """Measures memory and time of runs with two workers on corpora of growing size; the last trains a vocabulary."""
    rows = []
    for size in GROWTH_MB:
        text = folder / "growth" / "text.txt"
        text.parent.mkdir(exist_ok=True)
        megabytes = corpus.write(text, size)
        rows.append(watch_run([str(text)], megabytes, corpus.vocabulary))
        if megabytes < size:  # there is no more text
            return [*rows, watch_run([str(text)], megabytes, None)]
    if corpus.format == "demo":  # whose files are mostly code
        return rows
    paths = [path for each in corpus.docs for path in Path(each).rglob("*") if path.is_file()]
    everything = round(sum(path.stat().st_size for path in paths) / 1e6, 1)
    return [*rows, *(watch_run(list(corpus.docs), everything, given) for given in (corpus.vocabulary, None))]


def measure_whole_runs(corpus: SourceText, folder: Path, megabytes: float) -> dict[str, Any]:
    """Measures whole runs on a text of this size: MB a second, and ratios of runs."""
    if corpus.format == "demo":  # whose files are mostly code
        docs: tuple[str, ...] = (str(folder / "runs.txt"),)
        size = corpus.write(folder / "runs.txt", megabytes)
    else:
        docs, size = select_files(corpus.files, megabytes)
    settings = partial(Settings, lengths=(128, 512))
    of_text = partial(settings, docs=(docs,), vocab=str(corpus.vocabulary))
    once, five = PreparationRun(of_text(duplicates=1)), PreparationRun(of_text(duplicates=5))
    also_from = ("examples", "merged", "shards")  # prefixes of the steps that --from runs too
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / "kept"
        with open_workers(1, preload=Pipeline.__module__) as pool:
            assert pool is not None
            run_pipeline(kept, of_text(documents_only=True), pool)
        sides: dict[str, Callable[[], Any]] = {
            OURS: once,
            FIVE: five,
            "examples and shards": lambda: sum(
                five.seconds[step] for step in five.seconds if step.startswith(also_from)
            ),
            "from documents": PreparationRun(settings(origins=((str(kept),),), duplicates=5)),
        }
        with pin_to_one_core():
            turns = alternate(sides, ROUNDS, warm_up=1)
        both = alternate({FIVE: five, "2 workers": PreparationRun(of_text(duplicates=5), workers=2)}, ROUNDS, warm_up=1)
    return {
        "text_mb": size,
        "mb_per_s_of_a_core": round(size / turns.summarise_side(OURS)["median"], 2),
        "with_5_duplicates": round(size / turns.summarise_side(FIVE)["median"], 2),
        "from_documents_takes": turns.compute_ratio("from documents", "examples and shards"),
        "two_workers_are": both.compute_ratio(FIVE, "2 workers"),
    }


def watch_run(docs: list[str], megabytes: float, vocabulary: Path | None) -> dict[str, Any]:
    """Runs shard.py, and measures its time and the peak resident memory of each of its processes."""
    peaks: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(SHARD), "--docs", *docs, "--out", f"{out}/d", "--workers", "2"]
        command += ["--vocab", str(vocabulary)] if vocabulary else []
        start = time.perf_counter()
        process = psutil.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            with suppress(psutil.Error):  # some processes have ended
                for each in (process, *process.children(recursive=True)):
                    peaks[each.pid] = max(peaks.get(each.pid, 0), each.memory_info().rss)
            time.sleep(0.02)
        assert process.returncode == 0
        seconds = time.perf_counter() - start
    main, *workers = peaks.values()
    return {
        "text_mb": megabytes,
        "vocabulary": "given" if vocabulary else "trained",
        "seconds": round(seconds, 1),
        "mb_per_s": round(megabytes / seconds, 2),
        "worker_peak_mb": round(max(workers) / 1e6),
        "main_peak_mb": round(main / 1e6),
    }


def run(settings: Preparation, console: Console) -> None:
    """Runs all measurements, and writes the results."""
    if find_missing_packages("transformers"):
        console.print("transformers is not installed, so the original generator is left out (pip install transformers)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keeper = ResultsFile("preparation", [*LIBRARIES, *OPTIONS], settings.out)
    with tempfile.TemporaryDirectory() as place:
        console.print("finding the text and compiling; the first numbers come within a minute")
        corpus = SourceText.find(Path(place))
        if settings.pieces:
            contests = run_cutting_contests(corpus, Path(place), console)
            found = {**keeper.earlier, "contests": {**keeper.earlier.get("contests", {}), **contests}}
        else:
            found = measure(corpus, Path(place), console)
        console.print(f"kept in {keeper.keep(found)}", markup=False)


def measure(corpus: SourceText, folder: Path, console: Console) -> dict[str, Any]:
    """Runs all contests, whole runs, and runs on growing corpora."""
    console.print(f"text: {' '.join(corpus.docs)}", markup=False)
    found: dict[str, Any] = {"text": corpus.format, "contests": run_contests(corpus, folder, console)}
    found["contests"] |= run_cutting_contests(corpus, folder, console)
    found["whole_runs"] = [measure_whole_runs(corpus, folder, size) for size in RUN_MB]
    found["growth"] = measure_growth(corpus, folder)
    show(console, [build_table("whole runs", found["whole_runs"]), build_table("growth", found["growth"])])
    return found


if __name__ == "__main__":
    run_command(Preparation, run)
