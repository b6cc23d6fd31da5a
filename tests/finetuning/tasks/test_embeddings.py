"""Tasks of vectors: their columns, their figures beside those of trec_eval and scipy, and faults of their files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from support.commands import refusal
from support.tasks import CUTTER, encode, laid_out, rows

from finetuning.settings import EmbeddingSettings, FineTuning
from finetuning.tasks.embeddings import RANKED, SCORED, number_texts, rank_texts
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup

TASK = 'name = "search"\nkind = "embeddings"\ntrain = "train.tsv"\ndev = "train.tsv"\n'
PAIRS = "question\tpassage\tother\nwho\tann\tthe sea\nwhere\tin rome\tann\nwho\tbob\tthe sea\n"
SCORES = "question\tpassage\tlabel\na\tb\t-3\nc\td\t1e9\na\te\t0.5\n"


def open_task(folder: Path, toml: str = TASK, table: str = PAIRS, widths: tuple[int, ...] = ()) -> Any:
    (folder / "task.toml").write_text(toml)
    (folder / "train.tsv").write_text(table)
    settings = FineTuning(length=8, embeddings=EmbeddingSettings(widths=widths))
    return open_own(folder / "task.toml", Setup(CUTTER, settings))


def test_each_text_of_an_item_is_a_sequence(tmp_path: Path) -> None:
    task = open_task(tmp_path, TASK + 'second = ["passage", "other"]\n')
    encoded = encode(task.train, 1, 0)
    assert (len(encoded), encoded.choices, task.metric) == (2, 3, "mrr@10")
    assert laid_out(task.train, 1) == ["[CLS] where [SEP]", "[CLS] in rome [SEP]", "[CLS] ann [SEP]"]
    assert encoded.labels.values.tolist() == [3, 4, 1, 0, 1, 2]  # ann is one text, in whichever column
    assert [row.tolist() for row in task.train.measure_whole(np.array([2]))] == [5, 5, 8]
    assert "3 of 3 training rows have a text that occurs again" in task.notes[-2]
    named = PAIRS.replace("question", "q").replace("passage", "p")
    task = open_task(tmp_path, TASK + 'text = "q"\nsecond = "p"\nmetric = "ndcg@10"\n', named)
    assert (task.fields, task.metric, encode(task.train).choices) == (("q", "p"), "ndcg@10", 2)


def test_any_finite_numbers_are_scores(tmp_path: Path) -> None:
    task = open_task(tmp_path, TASK + 'label = "label"\n', SCORES)
    assert (encode(task.train).labels.values.tolist(), task.metric) == ([-3, 1e9, 0.5], "spearman")
    vectors = np.random.default_rng(1).normal(size=(3, 2, 4))
    cosines = [one @ two / np.linalg.norm(one) / np.linalg.norm(two) for one, two in vectors]
    found = task.score("dev", rows(vectors.reshape(6, 4)))
    for name, correlate in zip(SCORED, (stats.spearmanr, stats.pearsonr), strict=True):
        assert found[name] == pytest.approx(correlate(cosines, [-3, 1e9, 0.5])[0], abs=1e-6)
    assert task.estimate_certainty("dev", rows(vectors.reshape(6, 4))).spreads.keys() == {*SCORED}


@pytest.mark.parametrize(("more", "table"), [("", PAIRS), ('label = "label"\n', SCORES)])
def test_each_width_is_scored_alone(more: str, table: str, tmp_path: Path) -> None:
    task = open_task(tmp_path, TASK + more, table, widths=(2, 1))
    values = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    found, name = task.score("dev", rows(values)), task.metric
    assert found.keys() == {*task.metrics, f"{name}_2", f"{name}_1"}
    cut = [task.score("dev", rows(values[:, :width]))[name] for width in (2, 1)]
    assert [found[f"{name}_2"], found[f"{name}_1"]] == cut != [found[name]] * 2


def test_rows_with_one_passage_are_held_out_together(tmp_path: Path) -> None:
    table = "question\tpassage\n" + "".join(f"q{number}\tp{number % 5}\n" for number in range(20))
    task = open_task(tmp_path, TASK.replace('dev = "train.tsv"', "held_out = 0.3"), table)
    assert not {*task.train.texts[1]} & {*task.dev["dev"].texts[1]}
    assert "passages of dev that occur in train, which flatters the scores: 5" in open_task(tmp_path, table=table).notes


def test_figures_are_those_of_trec_eval(tmp_path: Path) -> None:
    """Equal questions are one with several passages; equal passages are one, whichever column they are in."""
    pytrec_eval: Any = pytest.importorskip("pytrec_eval")
    draw = np.random.default_rng(2)
    texts = [[f"{kind}{draw.integers(150)}" for _ in range(300)] for kind in "qpp"]
    vectors_of = {text: draw.normal(size=6) for column in texts for text in column}
    vectors_of = {text: vector / np.linalg.norm(vector) for text, vector in vectors_of.items()}
    vectors = np.array([[vectors_of[text] for text in row] for row in zip(*texts, strict=True)], np.float32)
    qrels: dict[str, dict[str, int]] = {}
    for question, passage in zip(*texts[:2], strict=True):
        qrels.setdefault(question, {})[passage] = 1
    passages = {text: vectors_of[text] for column in texts[1:] for text in column}
    ranked = {one: {text: float(vectors_of[one] @ vector) for text, vector in passages.items()} for one in qrels}
    scores = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100", "recip_rank"}).evaluate(ranked)
    found = rank_texts(number_texts(texts), vectors)
    for ours, theirs in zip(RANKED, ("recip_rank", "ndcg_cut_10", "recall_100"), strict=True):
        values = [scores[question][theirs] for question in qrels]
        wanted = [value * (ours != "mrr@10" or value > 0.099) for value in values]
        assert found[ours].tolist() == pytest.approx(wanted, abs=1e-6)
        assert 0 < np.mean(wanted) < 1
    table = "question\tpassage\n" + "".join(f"{one}\t{other}\n" for one, other in zip(*texts[:2], strict=True))
    task, outputs = open_task(tmp_path, table=table), rows(vectors[:, :2].reshape(-1, 6))
    certain = task.estimate_certainty("dev", outputs)
    each = rank_texts(number_texts(texts[:2]), vectors[:, :2])["mrr@10"]
    assert (certain.items, task.score("dev", outputs)["mrr@10"]) == (len(qrels), pytest.approx(each.mean()))
    assert certain.spreads["mrr@10"] == pytest.approx(each.std() / np.sqrt(len(each)), rel=0.2)


def test_a_model_that_gives_all_texts_one_vector_is_degenerate(tmp_path: Path) -> None:
    task, draw = open_task(tmp_path), np.random.default_rng(1)
    assert task.is_degenerate("dev", rows(np.ones((6, 4)) + 1e-6 * draw.normal(size=(6, 4))))
    assert not task.is_degenerate("dev", rows(draw.normal(size=(6, 4))))


FAULTS = {
    "an empty text": (TASK, PAIRS.replace("ann\t", "  \t"), "train.tsv:2: passage is empty"),
    "a text alone": (TASK, PAIRS + "how\n", "train.tsv:5: "),
    "no column": (TASK + 'second = "no"\n', PAIRS, "no column 'no'"),
    "no number": (TASK + 'label = "label"\n', SCORES.replace("1e9", "nan"), "train.tsv:3: the score 'nan' is not"),
    "an infinite score": (TASK + 'label = "label"\n', SCORES.replace("1e9", "inf"), "the score 'inf' is not a number"),
    "equal scores": (TASK + 'label = "label"\n', SCORES.replace("-3", "1e9").replace("0.5", "1e9"), "all scores are"),
    "another figure": (TASK + 'metric = "spearman"\n', PAIRS, "here there is mrr@10, ndcg@10, recall@100"),
    "negatives of scores": (TASK + 'label = "label"\nsecond = ["passage", "x"]\n', SCORES, "second: only kind"),
    "a column twice": (TASK + 'text = "passage"\n', PAIRS, "second: of passage, passage each should be another"),
    "one passage": (TASK, PAIRS.replace("in rome", "ann").replace("bob", "ann"), "train: no passage is wrong"),
    "one question": (TASK, PAIRS.replace("where", "who"), "train: no passage is wrong for a question"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, tmp_path: Path) -> None:
    toml, table, said = FAULTS[name]
    assert said in refusal(open_task, tmp_path, toml, table)


def test_the_page_has_every_setting() -> None:
    page = (ROOT / "docs" / "own-tasks.md").read_text()
    assert [*EmbeddingSettings.model_fields] == re.findall(r"^\| `--embeddings\.(\w+)", page, re.MULTILINE)
