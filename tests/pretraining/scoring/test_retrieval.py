"""Vectors equal those of sentence-transformers; retrieval is scored as by trec_eval and by sentence-transformers."""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.base_models import write_bert
from support.commands import run_main
from support.transformers_models import PIECES

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining import evaluate
from pretraining.checkpoint.models import StoredModel
from pretraining.huggingface.pooling import Pooling
from pretraining.scoring import retrieval as module
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.retrieval import Retrieval, compute_metrics

CPU = torch.device("cpu")
MINILM = os.environ.get("CLOZE_MINILM")
Grades = Mapping[str, Mapping[str, int]]
TEXTS = ["word1 word2", "", "abc", "word3 " * 60, "word4 word5 q ?", "word1"] + [f"word{n % 42} a b" for n in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("retrieval") / "model", WordPiece(PIECES, cased=False))


def write_folder(folder: Path, queries: Mapping[str, str], corpus: Mapping[str, str], grades: Grades) -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("queries", queries), ("corpus", corpus)):
        rows = [json.dumps({"_id": key, "title": "", "text": text}) + "\n" for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    rows = [f"{query}\t{key}\t{grade}\n" for query, found in grades.items() for key, grade in found.items()]
    (folder / "qrels" / "test.tsv").write_text("".join(["query-id\tcorpus-id\tscore\n", *rows]))
    return folder


@pytest.mark.parametrize("pooling", [None, Pooling("mean", True), Pooling("cls"), Pooling("last", True)])
def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path, pooling: Pooling | None) -> None:
    folder = write_bert(tmp_path / "model", WordPiece(PIECES, cased=False))
    if pooling is not None:
        pooling.write(folder, 32)
    assert_same_vectors(str(folder))


@pytest.mark.skipif(MINILM is None, reason="CLOZE_MINILM names no folder of all-MiniLM-L6-v2")
def test_vectors_of_minilm_equal_those_of_sentence_transformers() -> None:
    assert_same_vectors(str(MINILM))


def assert_same_vectors(folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(folder, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(compute_vectors(folder, TEXTS), theirs, atol=1e-5, rtol=1e-5)


def compute_vectors(folder: str, texts: Sequence[str]) -> Array:
    return Embedder.open(StoredModel.open(folder), CPU).compute(texts)


def test_files_of_sentence_transformers_cut_texts_and_their_prompts_are_told(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model", WordPiece(PIECES, cased=False))
    Pooling().write(folder, 32)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find: ", "document": ""}}')
    with pytest.warns(UserWarning, match="prompts are not put before texts: query$"):
        short, other, long = compute_vectors(str(folder), ["a b c", "abc word1", "a b c word1"])
    assert not np.allclose(other, long)
    np.testing.assert_array_equal(short, long)


@st.composite
def judged(draw: st.DrawFn) -> tuple[Array, list[dict[str, int]], list[str]]:
    """Products of queries and passages with many ties, grades, and ids whose order is not that of their numbers."""
    queries, passages = draw(st.integers(1, 4)), draw(st.integers(1, 160))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    products = random.choice([0.1, 0.25, 0.5, 0.5000001, 0.75], (queries, passages)).astype(np.float32)
    names = [f"d{number}" for number in random.permutation(passages)]
    grades = []
    for _ in range(queries):
        chosen = random.permutation(passages)[: random.integers(1, 30)]
        found = {names[row]: int(random.integers(-1, 4)) for row in chosen}
        grades.append({**found, names[chosen[0]]: 2})
    return products, grades, names


@settings(max_examples=60, deadline=None)
@given(judged(), st.sampled_from([1, 7, 120, 4096]), st.integers(1, 3))
def test_metrics_and_ties_are_those_of_trec_eval(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Array, list[dict[str, int]], list[str]],
    block: int,
    ranks: int,
) -> None:
    products, grades, names = case
    queries = {f"q{number}": f"query {number}" for number in range(len(products))}
    qrels = dict(zip(queries, grades, strict=True))
    folder = write_folder(tmp_path_factory.mktemp("x") / "f", queries, {name: name for name in names}, qrels)
    vectors = dict(zip(queries.values(), np.eye(len(products), dtype=np.float32), strict=True))
    vectors |= {name: products[:, row] for row, name in enumerate(names)}
    retrieval = Retrieval.read(folder)

    def compute(texts: Sequence[str]) -> Array:
        return np.stack([vectors[text] for text in texts])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(module, "TOGETHER", 2 * block)
        parts = [retrieval.rank(compute, by_dot=True, place=(rank, ranks)) for rank in range(ranks)]
    merged = retrieval.start_ranking()
    for part in parts:
        merged.add_ranking(part.rows, part.scores)
    found = compute_metrics(retrieval.grades, merged.rows[:, : module.BEST])
    run = {
        query: {name: float(score) for name, score in zip(names, row, strict=True)}
        for query, row in zip(queries, products, strict=True)
    }
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100", "recip_rank"}).evaluate(run)
    np.testing.assert_allclose(found["ndcg_10"], [theirs[query]["ndcg_cut_10"] for query in queries], atol=1e-6)
    np.testing.assert_allclose(found["recall_100"], [theirs[query]["recall_100"] for query in queries], atol=1e-6)
    first = [theirs[query]["recip_rank"] for query in queries]
    np.testing.assert_allclose(found["mrr_10"], [each if each > 1 / 10.5 else 0 for each in first], atol=1e-6)


def test_scores_equal_those_of_sentence_transformers(model: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    draw = np.random.default_rng(0)
    words = [*(f"word{number}" for number in range(42)), "a", "b", "c"]
    texts = [" ".join(draw.choice(words, draw.integers(3, 12))) for _ in range(180)]
    queries = {f"q{number}": text for number, text in enumerate(texts[:30])}
    corpus = {f"d{number}": text for number, text in enumerate(texts[30:])}
    grades = {query: {f"d{number}": 1 for number in draw.permutation(150)[:4]} for query in queries}
    folder = write_folder(tmp_path / "f", queries, corpus, grades)
    out = run_main(evaluate.main, str(model), "--retrieval", str(folder), "--json")
    ours = json.loads(out)["retrieval"]
    relevant = {query: set(found) for query, found in grades.items()}
    kind: Any = InformationRetrievalEvaluator
    evaluator = kind(
        queries, corpus, relevant, mrr_at_k=[10], ndcg_at_k=[10], precision_recall_at_k=[100], accuracy_at_k=[1]
    )
    theirs = evaluator(SentenceTransformer(str(model), device="cpu"))
    for name, other in (("ndcg_10", "ndcg@10"), ("mrr_10", "mrr@10"), ("recall_100", "recall@100")):
        np.testing.assert_allclose(ours["scores"][name], theirs[f"cosine_{other}"], atol=1e-6)
    assert (ours["queries"], ours["passages"]) == (30, 150)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\tlost\t1\n", "lost"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nnobody\td1\t1\n", "nobody"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t0\n", "no query has"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\thigh\n", "high"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t1\n", "names of the columns"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t2\n", ":3: .*twice"),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n{"_id": "d1", "text": "b"}\n', "d1"),
        ("corpus.jsonl", '{"_id": "d1", "text": 7}\n', ":1"),
        ("queries.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q1", "text": "b"}\n', "q1"),
        ("queries.jsonl", '{"_id": "q1", "text": " "}\n', "no text"),
    ],
)
def test_faults_of_a_folder_are_named(tmp_path: Path, file: str, content: str, said: str) -> None:
    folder = write_folder(tmp_path / "f", {"q1": "a"}, {"d1": "b"}, {"q1": {"d1": 1}})
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=said) as raised:
        Retrieval.read(folder)
    assert file in str(raised.value)


def test_a_vector_with_nan_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"q1": "a", "q2": "b"}, {"d1": "b"}, {"q1": {"d1": 1}, "q2": {"d1": 1}})
    with pytest.raises(UserError, match="query q2"):
        Retrieval.read(folder).rank(lambda texts: np.array([[1.0], [np.nan]])[: len(texts)])


def test_a_passage_with_the_id_of_its_query_counts_only_if_it_is_graded(tmp_path: Path) -> None:
    corpus = {name: name for name in ("a", "b", "c")}
    folder = write_folder(tmp_path / "f", {"a": "a", "b": "b"}, corpus, {"a": {"c": 1}, "b": {"b": 1}})
    retrieval, vectors = Retrieval.read(folder), {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0, 0.0], "c": [0.5, 0.0, 1.0]}
    ranking = retrieval.rank(lambda texts: np.array([vectors[text] for text in texts], np.float32))
    assert retrieval.score(ranking.rows).scores == {"ndcg_10": 1, "recall_100": 1, "mrr_10": 1}


def test_what_is_left_out_is_told(model: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"q1": "abc"}, {"d1": "abc", "d2": " "}, {"q1": {"d1": 1}})
    with pytest.warns(UserWarning, match="passages without text: 1"):
        assert "±" not in run_main(evaluate.main, model, "--retrieval", folder)
    assert "--length needs --data" in run_main(evaluate.main, model, "--retrieval", folder, "--length", 5, code=2)


def test_titles_compressed_files_and_other_queries(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"q1": "a", "q2": "b"}, {"d1": "b"}, {"q1": {"d1": 1}})
    (folder / "corpus.jsonl").unlink()
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        file.write('{"_id": "d1", "title": "Head", "text": "body"}\n')
    found = Retrieval.read(folder)
    assert found.queries == ("a",)
    assert list(found.read_blocks()) == [(0, ["Head body"])]
