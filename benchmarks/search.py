#!/usr/bin/env python3
"""Measures search by vectors beside search by words: which passages are found, before and after minutes of training.

    python benchmarks/search.py
    python benchmarks/search.py --model runs/mini

The tests: the paragraphs of XQuAD's English questions among all of its paragraphs, and the pairs of held-out documents
of Wikipedia (both from the folder that CLOZE_DATA names). Encoders are trained on SQuAD's questions, without XQuAD's
articles, and on pairs of the other documents. Every ranking is scored by evaluate.py's code. Each row is written at
once; the same command goes on after a stop, and measures nothing twice. all-MiniLM-L6-v2 takes part where its folder
is in build/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.finetuning_sides import MINILM, SQUAD
from benchmarks.measure import ROOT, ResultsFile, find_data_folder, run_command
from benchmarks.recipe_scores import run_script
from benchmarks.tables import show, summarise_search
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.launchers import World
from data_prep.common.supervision import hear_signals
from data_prep.readers import text_pairs as pairs
from finetuning.running.base import Base, find_model
from pretraining.processes.group import choose_device
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.retrieval import BEST, Retrieval

XQUAD = "squad/xquad-dev-v1.1.json"
FILES = 50
"""Files of Wikipedia that are read, of half a MB each: ten minutes of training read no more."""
MINUTES = 10
"""Minutes of each training."""
REPEATS = 3
"""Times that each question of SQuAD is in the training data, of which titles and passages are most."""
SCORED = 500
"""Pairs of dev on which a trained model is scored at its end."""
PROBE_STEPS, BATCH = 20, 64
"""Steps by whose speed the number of steps that fill the minutes is found, and pairs of a step."""
RATES = {"mini": "5e-4", "MiniLM": "5e-5"}
"""Learning rates of models with and without vectors that were trained before."""
Rank = Callable[[Retrieval], Array]
"""Ranks the passages of a test; returns the rows of the best of each query."""


@dataclass(frozen=True)
class SearchScores:
    """Measures search by vectors beside search by words."""

    model: Path = ROOT / "build" / "search-mini"
    """A pre-trained mini: a run or an exported folder."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results, by hardware)."""


def read_squad(path: Path) -> Iterator[tuple[str, pairs.Pair]]:
    """Yields the questions of a file of SQuAD with their paragraphs, and the titles of their articles."""
    for article in read_json(path)["data"]:
        for paragraph in article["paragraphs"]:
            context = " ".join(paragraph["context"].split())
            yield from ((article["title"], (one["question"].strip(), context)) for one in paragraph["qas"])


def write_data(folder: Path, data: Path) -> dict[str, Any]:
    """Writes the test on XQuAD and the training task below a folder that has the pairs of Wikipedia; returns counts."""
    tested = [*read_squad(data / XQUAD)]
    titles = {title for title, _ in tested}
    pairs.write_retrieval(folder / "xquad", [pair for _, pair in tested])
    asked = [*map(pairs.spell_pair, (pair for title, pair in read_squad(data / SQUAD) if title not in titles))]
    train, dev = ((folder / "wiki" / name).read_bytes().splitlines(keepends=True) for name in (pairs.TRAIN, pairs.DEV))
    pairs.write_file(folder / pairs.TRAIN, REPEATS * asked + train)
    pairs.write_file(folder / pairs.DEV, dev[:SCORED])
    pairs.write_file(folder / pairs.TASK, [pairs.TASK_TEXT.encode()])
    return {"SQuAD": len(asked), "times": REPEATS, "Wikipedia": len(train)}


def rank_by_bm25(retrieval: Retrieval) -> Array:
    """Ranks by BM25, as bm25s computes it by default, without English stop words."""
    import bm25s

    passages, index = [text for _, block in retrieval.read_blocks() for text in block], bm25s.BM25()
    cut = partial(bm25s.tokenize, stopwords="en", show_progress=False)
    index.index(cut(passages), show_progress=False)
    found = index.retrieve(cut([*retrieval.queries]), k=min(BEST, len(passages)), show_progress=False)
    ranking = retrieval.start_ranking()
    ranking.add_ranking(*map(np.asarray, found))
    return ranking.rows


def rank_by_tfidf(retrieval: Retrieval) -> Array:
    """Ranks by the cosine of TF-IDF, as scikit-learn computes it by default."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    table, ranking = TfidfVectorizer(), retrieval.start_ranking()
    passages = table.fit_transform(text for _, block in retrieval.read_blocks() for text in block)
    products = (table.transform(retrieval.queries) @ passages.T).toarray()
    ranking.add_ranking(np.broadcast_to(np.arange(len(retrieval.places)), products.shape), products)
    return ranking.rows


def rank_by_vectors(model: Path, retrieval: Retrieval) -> Array:
    """Ranks by the vectors of a model."""
    embedder = Embedder.open(find_model(str(model)), choose_device("auto", World()))
    return retrieval.rank(embedder.compute, embedder.pooling.by_dot).rows


def train(do: Callable[..., None], task: Path, model: Path, rate: str) -> tuple[Path, dict[str, Any]]:
    """Trains a model for MINUTES by run_task.py; returns its folder, and what the training was."""
    rows = (task.parent / pairs.TRAIN).read_bytes().count(b"\n")

    def run(name: str, steps: int) -> dict[str, Any]:
        out = task.parent / f"{model.name}-{name}"
        given = ("--epochs", steps * BATCH / rows, "--learning_rate", rate, "--batch", BATCH, "--seeds", 1)
        do("finetuning/run_task.py", task, "--model", model, "--out", out, *given)
        [found] = read_json(out / "pairs" / "results.json")["runs"].values()
        return {"folder": out / "pairs" / "model", **found}

    steps = round(60 * MINUTES * run("probe", PROBE_STEPS)["items_per_second"] / BATCH)
    found = run(f"{MINUTES}-minutes", max(1, steps))
    figures = {name: found[name] for name in ("steps", "seconds", "items_per_second", "dtype")}
    return found["folder"], {"batch": BATCH, "learning_rate": rate, **figures}


def measure(wanted: SearchScores, console: Console) -> None:
    """Scores all systems, and keeps the row of each."""
    data = find_data_folder().resolve()
    absent = [name for name in (XQUAD, SQUAD, "wiki") if not (data / name).exists()]
    if absent:
        raise UserError(f"{data}: has no {', '.join(absent)}; CLOZE_DATA names the folder of texts and tasks")
    hear_signals()
    folder, keeper = ROOT / "build" / "search", ResultsFile("search", ["torch", "bm25s", "scikit-learn"], wanted.out)
    do = partial(run_script, folder, console)
    texts = sorted(path for path in (data / "wiki").rglob("*") if path.is_file())[:FILES]
    do("data_prep/pairs.py", "--docs", *texts, "--out", folder / "wiki")
    counts, models = write_data(folder, data), {"mini": wanted.model, "MiniLM": MINILM}
    for name in [name for name, model in models.items() if not model.is_dir()]:
        console.print(f"{models.pop(name)}: not there, so {name} is left out", markup=False)
    tests = {"XQuAD": Retrieval.read(folder / "xquad"), "held-out": Retrieval.read(folder / "wiki" / pairs.HELD_OUT)}
    about = {
        "minutes": MINUTES,
        "training": counts,
        "tests": {name: f"{len(each.queries):,} of {len(each.places):,}" for name, each in tests.items()},
        "models": {name: Base(find_model(str(model))).identity["checksum"] for name, model in models.items()},
    }
    goes_on = about.items() <= keeper.earlier.items()
    rows: list[dict[str, Any]] = keeper.earlier["rows"] if goes_on else []
    systems: dict[str, tuple[Rank | Path, str]] = {"BM25": (rank_by_bm25, ""), "TF-IDF": (rank_by_tfidf, "")}
    systems |= {f"{name}, as it is": (model, "") for name, model in models.items()}
    systems |= {f"{name}, trained for {MINUTES} minutes": (model, RATES[name]) for name, model in models.items()}
    for row in rows:
        del systems[row["system"]]
    for name, (source, rate) in systems.items():
        how: dict[str, Any] = {}
        if isinstance(source, Path) and rate:
            source, how = train(do, folder / pairs.TASK, source, rate)
        rank = partial(rank_by_vectors, source) if isinstance(source, Path) else source
        scores = {test: asdict(each.score(rank(each))) for test, each in tests.items()}
        rows.append({"system": name, **how, "scores": scores})
        keeper.keep({**about, "rows": rows}, replaces=True)
    show(console, summarise_search({"rows": rows}))
    console.print(f"kept in {keeper.path}", markup=False)


if __name__ == "__main__":
    run_command(SearchScores, measure, "search")
