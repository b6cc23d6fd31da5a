"""Fine-tuned folders: ours load in transformers, those of transformers load here, with names of labels and logits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.base_models import HEADS, MNLI, compute_logits, task_weights
from support.commands import assert_refusal
from support.transformers_models import PIECES, SHAPE, change_config, change_weights, same, their_model
from torch import Tensor

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface import folders, verify
from pretraining.huggingface.folders import read_encoder, read_fine_tuned, read_folder, read_task, write_fine_tuned
from pretraining.huggingface.pooling import Pooling
from pretraining.huggingface.weights import AUTO_CLASSES, name_class

VOCABULARY = WordPiece(PIECES, cased=False)
TASK = {"length": 16, "pair": True}
OURS = SHAPE.change_learning(pairs=False)


def write(folder: Path, head: TaskHead = MNLI, weights: dict[str, Tensor] | None = None) -> Path:
    write_fine_tuned(folder, SHAPE, head, weights or task_weights(head), VOCABULARY, "a card\n", TASK, 16)
    return folder


def check(folder: Path, head: TaskHead, weights: dict[str, Tensor]) -> None:
    """Verifies a folder, by two readers."""
    found = verify.verify_fine_tuned(folder, SHAPE, head, weights, compute_logits, VOCABULARY.special)
    assert [*found] == ["Cloze", "transformers"]


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_there_and_back(head: TaskHead, tmp_path: Path) -> None:
    weights = task_weights(head)
    out = write(tmp_path / "out", head, weights)
    check(out, head, weights)
    shape, found, state = read_fine_tuned(out)
    assert (shape, found) == (OURS, head)
    assert same(state, weights)
    assert (read_task(out), read_task(tmp_path)) == (TASK, {})
    auto = getattr(transformers, AUTO_CLASSES[head.kind])
    model, report = auto.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == name_class(OURS, head)
    assert not any(report.values())
    if head.labels:
        assert tuple(model.config.id2label[number] for number in range(len(head.labels))) == head.labels
        assert [model.config.label2id[label] for label in head.labels] == list(range(len(head.labels)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("a", "b")["input_ids"] == [PIECES.index(piece) for piece in "[CLS] a [SEP] b [SEP]".split()]
    assert tokenizer.model_max_length == 16


NAMES, MANY = {0: "no", 1: "yes", 2: "perhaps"}, "multi_label_classification"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"id2label": NAMES}, TaskHead("classes", ("no", "yes", "perhaps"))),
        ({}, TaskHead("classes", ("LABEL_0", "LABEL_1"))),
        ({"id2label": NAMES, "problem_type": MANY}, TaskHead("labels", ("no", "yes", "perhaps"))),
        ({"num_labels": 1}, TaskHead("score")),
        ({"num_labels": 1, "problem_type": "regression"}, TaskHead("score")),
        ({}, TaskHead("choice")),
        ({}, TaskHead("spans")),
        ({"id2label": NAMES}, TaskHead("tags", ("no", "yes", "perhaps"))),
    ],
)
def test_folders_of_transformers(settings: dict[str, Any], wanted: TaskHead, tmp_path: Path) -> None:
    their_model(getattr(transformers, name_class(OURS, wanted)), **settings).save_pretrained(tmp_path)
    shape, head, weights = read_fine_tuned(tmp_path)
    assert (shape, head) == (OURS, wanted)
    check(tmp_path, head, weights)


def test_a_bare_encoder_makes_vectors_only_where_something_says_how(tmp_path: Path) -> None:
    their_model(transformers.BertModel).save_pretrained(tmp_path)
    assert folders.read_head(tmp_path) is None
    Pooling().write(tmp_path, OURS.hidden)
    assert folders.read_head(tmp_path) == TaskHead("embeddings")


def test_labels_are_in_the_order_of_their_ids_and_without_names_they_are_counted(tmp_path: Path) -> None:
    head = TaskHead("tags", tuple(f"tag {number}" for number in range(12)))
    assert read_fine_tuned(write(tmp_path / "out", head))[1] == head
    change_config(write(tmp_path / "out"), id2label=None, label2id=None, num_labels=3)
    assert read_fine_tuned(tmp_path / "out")[1] == TaskHead("classes", ("LABEL_0", "LABEL_1", "LABEL_2"))


POOLED = {"BertModel", "BertForPreTraining", "BertForSequenceClassification", "BertForMultipleChoice"}


@pytest.mark.parametrize(
    "kind", [*sorted(POOLED), "BertForMaskedLM", "BertForQuestionAnswering", "BertForTokenClassification"]
)
def test_the_encoder_is_read_from_under_any_head(kind: str, tmp_path: Path) -> None:
    """Models for questions had a pooler in 2019, which their head does not see."""
    theirs = their_model(getattr(transformers, kind))
    theirs.save_pretrained(tmp_path)
    shape, weights = read_encoder(tmp_path)
    assert shape == OURS
    encoder = {name for name in weights if name.startswith(("embeddings.", "layers."))}
    assert weights.keys() - encoder == ({"pooler.weight", "pooler.bias"} if kind in POOLED else set())
    given = theirs.state_dict()
    [word] = [name for name in given if name.endswith("word_embeddings.weight")]
    assert torch.equal(weights["embeddings.word.weight"][:99], given[word])
    if kind == "BertForQuestionAnswering":
        pooler = {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
        change_weights(tmp_path, lambda state: state.update(pooler))
        found = read_fine_tuned(tmp_path)[2]
        assert torch.equal(found["head.weight"], given["qa_outputs.weight"])
        assert ("pooler.weight" in found, "pooler.weight" in read_encoder(tmp_path)[1]) == (False, True)


def test_heads_that_nobody_asks_for_may_be_anything(tmp_path: Path) -> None:
    """Of a decoder of its own, half a head or a head of another size, the encoder knows nothing."""
    their_model().save_pretrained(tmp_path)
    wanted = read_encoder(tmp_path)[1]
    strange = {"cls.predictions.decoder.weight": torch.ones(104, 32), "classifier.weight": torch.ones(7, 9)}
    change_weights(tmp_path, lambda state: (state.update(strange), state.pop("cls.seq_relationship.bias")))
    assert same(read_encoder(tmp_path)[1], wanted)
    assert_refusal("decoder of its own", read_folder, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bert.pooler.dense.bias"), r"bert\.pooler\.dense\.bias is missing"),
        (lambda state: state.pop("bert.embeddings.LayerNorm.bias"), r"embeddings\.LayerNorm\.bias is missing"),
        (lambda state: state.update({"adapter.weight": torch.ones(3)}), r"adapter\.weight \(3,\) has no place"),
        (lambda state: state.update({"bert.pooler.dense.bias": torch.ones(3)}), r"should be \(32,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    change_weights(write(tmp_path / "out"), change)
    for read in (read_encoder, read_fine_tuned):
        assert_refusal(message, read, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["BertForPreTraining"]}, "names no class with the head of a task: not fine-tuned"),
        ({"architectures": None}, "not fine-tuned"),
        ({"architectures": 5}, "not fine-tuned"),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"0": "O"}}, r"is \(3, 32\); .* be \(1, 32\)"),
        ({"architectures": ["BertForQuestionAnswering"]}, r"qa_outputs\.weight is missing"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label should name the labels 0, 1, 2"),
        ({"id2label": ["a", "b", "c"]}, "id2label should name"),
        ({"id2label": {}}, "id2label should name"),
        ({"id2label": None, "num_labels": "3"}, "or num_labels count them"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'; it should be one of single_label_classification"),
        ({"problem_type": "regression"}, "a regression of 3 numbers at once"),
    ],
)
def test_configs_that_do_not_fit_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    change_config(write(tmp_path / "out"), **values)
    assert_refusal(message, read_fine_tuned, tmp_path / "out")


def shake(out: Path, name: str, value: float) -> None:
    change_weights(out, lambda state: state[name].add_(value * torch.randn(state[name].shape)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: shake(out, "bert.encoder.layer.1.output.dense.bias", 0.01), "classes logits .* by Cloze differ"),
        (lambda out: shake(out, "classifier.bias", math.nan), "no numbers"),
        (lambda out: change_config(out, id2label={"0": "entailment", "1": "contradiction", "2": "no"}), "were read"),
    ],
)
def test_what_changed_on_its_way_is_noticed(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    change(write(tmp_path / "out"))
    assert_refusal(message, check, tmp_path / "out", MNLI, task_weights(MNLI))


@pytest.mark.parametrize("head", [HEADS[name] for name in ("classes", "spans")], ids=lambda h: h.kind)
def test_transformers_has_its_say(head: TaskHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that we make in writing and again in reading: only transformers can notice it."""
    out, name = write(tmp_path / "out", head), "qa_outputs.bias" if head.kind == "spans" else "classifier.bias"
    monkeypatch.setattr(verify, "read_fine_tuned", lambda _: (OURS, head, task_weights(head)))
    change_weights(out, lambda state: state[name].add_(0.01))
    assert_refusal(f"{head.kind} logits read back by transformers differ", check, out, head, task_weights(head))
    change_weights(out, lambda state: state.pop(name))
    assert_refusal(f"transformers reports .*{name}", check, out, head, task_weights(head))


def test_what_fails_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    broken = task_weights(MNLI)
    broken["head.bias"][1] = float("inf")
    write(tmp_path / "out")
    assert_refusal(r"classifier\.bias has values that are no numbers", write, tmp_path / "out", MNLI, broken)
    assert same(read_fine_tuned(tmp_path / "out")[2], task_weights(MNLI))
