#!/usr/bin/env python3
"""Measures search by vectors beside search by words: which passages are found, before and after minutes of training.

    python benchmarks/search.py
    python benchmarks/search.py --model runs/mini

The tests: the paragraphs of XQuAD's English questions among all of its paragraphs, and the pairs of held-out documents
of Wikipedia (both from the folder that CLOZE_DATA names). Encoders are trained on SQuAD's questions, without XQuAD's
articles, and on pairs of the other documents that have no passage of XQuAD. Every ranking is scored by evaluate.py's
code. Each row is written at once; the same command goes on after a stop, and measures nothing twice.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.embedding_sides import MINILM
from benchmarks.finetuning_sides import SQUAD
from benchmarks.measure import ROOT, ResultsFile, find_data_folder, run_command
from benchmarks.recipe_scores import run_script
from benchmarks.tables import show, summarise_search
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, replacing
from data_prep.common.launchers import World
from data_prep.common.supervision import hear_signals
from data_prep.readers.text_pairs import DEV, HELD_OUT, TASK, TASK_TEXT, TRAIN, Pair, spell_pair, write_retrieval
from finetuning.running.base import compute_checksum, find_model
from pretraining.processes.group import choose_device
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.retrieval import BEST, Retrieval

XQUAD = "squad/xquad-dev-v1.1.json"
WORDS = 8
"""A pair of Wikipedia with so many words in a row of XQuAD is not trained on."""
REPEATS = 3
"""Times that each question of SQuAD is in the training data, of which titles and passages are most."""
SCORED = 500
"""Pairs of dev on which a trained model is scored at its end."""
PROBE_STEPS, BATCH = 30, 64
"""Steps by whose speed the number of steps that fill the minutes is found, and pairs of a step."""
RATES = {"mini": "5e-4", "MiniLM": "5e-5"}
"""Learning rates of models with and without vectors that were trained before."""
Rank = Callable[[Retrieval], Array]
"""Ranks the passages of a test; returns the rows of the best of each query."""


@dataclass(frozen=True)
class Search:
    """Measures search by vectors beside search by words."""

    model: Path = ROOT / "build" / "search-mini"
    """A pre-trained mini: a run or an exported folder."""
    minilm: Path = MINILM
    """A folder of all-MiniLM-L6-v2, which is left out where it is not there."""
    minutes: float = 10.0
    """Minutes of each training."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results, by hardware)."""


def read_squad(path: Path) -> Iterator[tuple[str, Pair]]:
    """Yields the questions of a file of SQuAD with their paragraphs, and the titles of their articles."""
    for article in read_json(path)["data"]:
        for paragraph in article["paragraphs"]:
            context = " ".join(paragraph["context"].split())
            yield from ((article["title"], (one["question"].strip(), context)) for one in paragraph["qas"])


def list_runs_of_words(text: str) -> set[str]:
    """Lists all WORDS words of a text that follow each other."""
    words = text.lower().split()
    return {" ".join(words[begin : begin + WORDS]) for begin in range(len(words) - WORDS + 1)}


def write_data(folder: Path, data: Path) -> dict[str, Any]:
    """Writes the test on XQuAD and the training task below a folder that has the pairs of Wikipedia; returns counts."""
    tested = [*read_squad(data / XQUAD)]
    titles, known = {title for title, _ in tested}, set().union(*(list_runs_of_words(each[1]) for _, each in tested))
    write_retrieval(folder / "xquad", (pair for _, pair in tested))
    asked = [pair for title, pair in read_squad(data / SQUAD) if title not in titles]
    counts = {"SQuAD": len(asked), "times": REPEATS, "Wikipedia": 0, "left out": 0}
    with replacing(folder / TRAIN) as train, (folder / "wiki" / TRAIN).open("rb") as pairs:
        train.writelines(REPEATS * [*map(spell_pair, asked)])
        for line in pairs:
            row = json.loads(line)
            is_known = not known.isdisjoint(list_runs_of_words(row["question"]) | list_runs_of_words(row["passage"]))
            counts["left out" if is_known else "Wikipedia"] += 1
            train.write(b"" if is_known else line)
    with replacing(folder / DEV) as dev, (folder / "wiki" / DEV).open("rb") as pairs:
        dev.writelines(islice(pairs, SCORED))
    (folder / TASK).write_text(TASK_TEXT)
    return counts


def read_passages(retrieval: Retrieval) -> list[str]:
    """Reads all passages of a test."""
    return [text for _, block in retrieval.blocks() for text in block]


def rank_by_bm25(retrieval: Retrieval) -> Array:
    """Ranks by BM25, as bm25s computes it by default, without English stop words."""
    import bm25s

    passages, index = read_passages(retrieval), bm25s.BM25()
    cut = partial(bm25s.tokenize, stopwords="en", show_progress=False)
    index.index(cut(passages), show_progress=False)
    asked = cut([*retrieval.queries])
    return np.asarray(index.retrieve(asked, k=min(BEST, len(passages)), show_progress=False)[0])


def rank_by_tfidf(retrieval: Retrieval) -> Array:
    """Ranks by the cosine of TF-IDF, as scikit-learn computes it by default."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    table = TfidfVectorizer()
    passages = table.fit_transform(read_passages(retrieval)).T
    asked = table.transform(retrieval.queries)
    parts = [(asked[begin : begin + 1000] @ passages).toarray() for begin in range(0, asked.shape[0], 1000)]
    return np.concatenate([np.argsort(-part, axis=1, kind="stable")[:, :BEST] for part in parts])


def rank_by_vectors(model: Path, retrieval: Retrieval) -> Array:
    """Ranks by the vectors of a model."""
    embedder = Embedder.open(find_model(str(model)), choose_device("auto", World()))
    return retrieval.rank(embedder.compute, embedder.by_dot).rows


def train(do: Callable[..., None], task: Path, minutes: float, model: Path, rate: str) -> tuple[Path, dict[str, Any]]:
    """Trains a model for some minutes by run_task.py; returns its folder, and what the training was."""
    with (task.parent / TRAIN).open("rb") as file:
        rows = sum(1 for _ in file)

    def run(name: str, steps: int) -> dict[str, Any]:
        out = task.parent / f"{model.name}-{name}"
        given = ("--epochs", steps * BATCH / rows, "--learning_rate", rate, "--batch", BATCH, "--seeds", 1)
        do("finetuning/run_task.py", task, "--model", model, "--out", out, *given)
        [found] = read_json(out / "pairs" / "results.json")["runs"].values()
        return {"folder": out / "pairs" / "model", **found}

    steps = round(60 * minutes * run("probe", PROBE_STEPS)["items_per_second"] / BATCH)
    found = run(f"{minutes:g}-minutes", max(1, steps))
    figures = {name: found[name] for name in ("steps", "seconds", "items_per_second", "dtype")}
    return found["folder"], {"batch": BATCH, "learning_rate": rate, **figures}


def make_systems(
    models: Mapping[str, Path], minutes: float, train_for: Callable[[Path, str], tuple[Path, dict[str, Any]]]
) -> dict[str, Callable[[], tuple[Rank, dict[str, Any]]]]:
    """Makes functions, by the name of a system, that return its ranking and how it was trained."""

    def rank_trained(model: Path, rate: str) -> tuple[Rank, dict[str, Any]]:
        folder, how = train_for(model, rate)
        return partial(rank_by_vectors, folder), how

    systems = {"BM25": lambda: (rank_by_bm25, {}), "TF-IDF": lambda: (rank_by_tfidf, {})}
    for name, model in models.items():
        systems[f"{name}, as it is"] = partial(lambda model: (partial(rank_by_vectors, model), {}), model)
        systems[f"{name}, trained for {minutes:g} minutes"] = partial(rank_trained, model, RATES[name])
    return systems


def measure(wanted: Search, console: Console) -> None:
    """Scores all systems, and keeps the row of each."""
    data = find_data_folder().resolve()
    if absent := [name for name in (XQUAD, SQUAD, "wiki") if not (data / name).exists()]:
        raise UserError(f"{data}: has no {', '.join(absent)}; CLOZE_DATA names the folder of texts and tasks")
    hear_signals()
    folder, keeper = ROOT / "build" / "search", ResultsFile("search", ["torch", "bm25s", "scikit-learn"], wanted.out)
    do = partial(run_script, folder, console)
    some = data / "wiki" / "AA"  # 45 MB, more than ten minutes of training read
    do("data_prep/pairs.py", "--docs", some if some.is_dir() else data / "wiki", "--out", folder / "wiki")
    counts, models = write_data(folder, data), {"mini": wanted.model, "MiniLM": wanted.minilm}
    for name, model in models.items():
        if not model.is_dir():
            console.print(f"{model}: not there, so {name} is left out", markup=False)
    models = {name: model for name, model in models.items() if model.is_dir()}
    tests = {"XQuAD": Retrieval.read(folder / "xquad"), "held-out": Retrieval.read(folder / "wiki" / HELD_OUT)}
    about = {
        "minutes": wanted.minutes,
        "training": counts,
        "tests": {name: f"{len(each.queries):,} of {len(each.places):,}" for name, each in tests.items()},
        "models": {name: checksum_model(model) for name, model in models.items()},
    }
    goes_on = all(keeper.earlier.get(name) == value for name, value in about.items())
    rows: list[Mapping[str, Any]] = list(keeper.earlier["rows"]) if goes_on else []
    systems = make_systems(models, wanted.minutes, partial(train, do, folder / TASK, wanted.minutes))
    for name in [name for name in systems if name not in {row["system"] for row in rows}]:
        rank, how = systems[name]()
        scores = {test: asdict(each.score(rank(each))) for test, each in tests.items()}
        rows.append({"system": name, **how, "scores": scores})
        keeper.keep({**about, "rows": rows}, replaces=True)
    show(console, summarise_search({"rows": rows}))
    console.print(f"kept in {keeper.path}", markup=False)


def checksum_model(folder: Path) -> str:
    """Computes the checksum of the weights, the sizes and the vocabulary of a model."""
    model = find_model(str(folder))
    return compute_checksum(model.vocabulary, model.shape, model.encoder)


if __name__ == "__main__":
    run_command(Search, measure, "search")
