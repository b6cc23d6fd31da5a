"""The benchmark of search: every system is scored on the same tests, and a stop loses no row."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import write_wiki
from rich.console import Console
from support.base_models import write_bert
from support.commands import assert_refusal, run_main
from support.tasks import VOCABULARY

from benchmarks import search
from benchmarks.finetuning_sides import SQUAD
from benchmarks.measure import read_results
from benchmarks.search import SearchScores, measure, rank_by_bm25, rank_by_tfidf
from benchmarks.tables import summarise_search
from data_prep import pairs
from data_prep.common.files import write_json
from data_prep.readers.text_pairs import write_retrieval
from pretraining.scoring.retrieval import Retrieval


def write_squad(path: Path, articles: dict[str, dict[str, str]]) -> None:
    """Writes articles of paragraphs with a question each in the format of SQuAD."""
    data = [
        {
            "title": title,
            "paragraphs": [{"context": text, "qas": [{"question": asked}]} for asked, text in each.items()],
        }
        for title, each in articles.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": data}))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the text and the tasks that the benchmark reads."""
    folder = tmp_path / "data"
    write_wiki(folder / "wiki", documents=80)
    write_squad(folder / search.XQUAD, {"River": {f"where is a{n}?": f"a{n} is here" for n in range(3)}})
    write_squad(folder / SQUAD, {"River": {"is it known?": "it is"}, "Empire": {"who is he?": "b is he"}})
    monkeypatch.setenv("CLOZE_DATA", str(folder))
    monkeypatch.setattr(search, "ROOT", tmp_path)
    monkeypatch.setattr(search, "MINILM", tmp_path / "none")
    return folder


class StandIn:
    """Makes pairs as the command does, and leaves the records of trainings, which train nothing."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.epochs = fails, list[float]()

    def __call__(self, folder: Path, console: Console, script: str, *words: Any) -> None:
        if script.endswith("pairs.py"):
            run_main(pairs.main, *words)
            return
        if self.fails:
            raise KeyboardInterrupt
        self.epochs.append(words[words.index("--epochs") + 1])
        out = words[words.index("--out") + 1] / "pairs"
        run = {"items_per_second": 64.0, "steps": 60, "seconds": 60.0, "dtype": "fp32"}
        write_json(out / "results.json", {"runs": {"lr-seed1": run}})
        write_bert(out / "model", VOCABULARY, positions=128)


def test_each_system_has_a_row_and_a_stop_loses_none(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mini, out = write_bert(tmp_path / "mini", VOCABULARY, positions=128), tmp_path / "kept.json"
    wanted = SearchScores(mini, out)
    monkeypatch.setattr(search, "run_script", StandIn(fails=True))
    with pytest.raises(KeyboardInterrupt):
        measure(wanted, Console(width=200))
    assert [row["system"] for row in read_results(out)["rows"]] == [
        "BM25",
        "TF-IDF",
        "mini, as it is",
    ]
    monkeypatch.setattr(search, "rank_by_bm25", None)
    monkeypatch.setattr(search, "run_script", trains := StandIn())
    measure(wanted, Console(width=200))
    found = read_results(out)
    assert [row["system"] for row in found["rows"]][3:] == ["mini, trained for 10 minutes"]
    assert found["tests"]["XQuAD"] == "3 of 3"
    assert found["training"]["SQuAD"] == 1, "an article of the test is in the training data"
    rows = (tmp_path / "build" / "search" / "train.jsonl").read_text().splitlines()
    assert trains.epochs[1] * len(rows) == pytest.approx(600 * 64)
    assert found["rows"][0]["scores"]["XQuAD"]["scores"]["mrr_10"] == 1
    assert found["rows"][2]["scores"] == found["rows"][3]["scores"]
    assert "none: not there, so MiniLM is left out" in capsys.readouterr().out
    [table] = summarise_search(found)
    assert [*table.rows[0][:2]] == ["BM25", "1.000"]


def test_systems_by_words_rank_the_passage_with_those_words_first(tmp_path: Path) -> None:
    words = "river mountain empire water people time".split()
    write_retrieval(tmp_path, [(word, f"the {word} of {word} and {words[n - 1]}") for n, word in enumerate(words)])
    retrieval = Retrieval.read(tmp_path)
    for rank in (rank_by_bm25, rank_by_tfidf):
        assert retrieval.score(rank(retrieval)).scores["mrr_10"] == 1


def test_without_the_data_it_says_what_is_missing(data: Path) -> None:
    (data / search.XQUAD).unlink()
    assert_refusal(f"has no {search.XQUAD}", measure, SearchScores(), Console(quiet=True))
