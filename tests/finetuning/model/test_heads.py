"""Heads learn as those of transformers do, and GPT's language head beside them: by every piece but the first from those
before it; and gradients of word embeddings as rows: every optimizer makes the same steps as with all of the table's."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from support.base_models import MNLI, task_weights
from support.fine_tuned_models import CHOICES, LENGTHS, head_of, items_of
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks
from support.transformers_models import COUNTERPARTS, ENCODERS, SHAPE, replace_padding, tells_segments, write_wordpiece
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.vocabulary.source import read_vocabulary
from finetuning.inputs import Encoded, Ragged, Sequences
from finetuning.model.heads import TaskBatch, TaskModel, compute_logits
from finetuning.running.batches import TaskBatches, pack
from finetuning.running.loop import compute_minimised
from pretraining.architectures.weights import KINDS, Kind
from pretraining.config.settings import Optimizer, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.huggingface.folders import read_fine_tuned, write_fine_tuned
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.huggingface.weights import AUTO_CLASSES
from pretraining.model import fused
from pretraining.model.bert import BertPieceHead
from pretraining.optimizers.declaration import optimizers
from pretraining.processes.group import disconnect

STEPS, LENGTH, SECOND, ITEMS = 3, 12, 7, 4
DTYPES = ("fp32", "bf16")
BY_CLS = "modern, by [CLS]"
CASES = [
    (name, kind) if name == "bert" or kind == "classes" else slow(name, kind)
    for name in (*ENCODERS, BY_CLS)
    for kind in KINDS
]
PROBLEMS = {"classes": "single_label_classification", "labels": "multi_label_classification", "score": "regression"}


def made(kind: Kind, seed: int, config: Any) -> Encoded:
    """Items of one length, since transformers would let padding take part in the choice of a span."""
    items = items_of(kind, [LENGTH] * ITEMS, seed)
    pieces = items.sequences.pieces
    pieces = replace(pieces, values=replace_padding(pieces.values, config))
    second = SECOND if tells_segments(config) else LENGTH
    return replace(items, sequences=Sequences(pieces, np.full(len(pieces), second)))


def theirs(encoded: Encoded, kind: Kind, config: Any) -> dict[str, Any]:
    """The same items as transformers takes them."""
    rows = (ITEMS, CHOICES, LENGTH) if kind == "choice" else (ITEMS, LENGTH)
    pieces = torch.from_numpy(encoded.sequences.pieces.values.astype(np.int64)).view(rows)
    given: dict[str, Any] = {"input_ids": pieces, "attention_mask": torch.ones_like(pieces)}
    if tells_segments(config):
        given["token_type_ids"] = (torch.arange(LENGTH) >= SECOND).long().expand(rows)
    assert encoded.labels is not None
    values: Array = encoded.labels.values
    if kind == "spans":
        first, last = torch.from_numpy(values.reshape(-1, 2)).T
        return {**given, "start_positions": first, "end_positions": last}
    if kind == "tags":
        assert encoded.words is not None
        table = torch.full((ITEMS, LENGTH), -100)
        for item in range(ITEMS):
            table[item, encoded.words.row(item)] = torch.from_numpy(encoded.labels.row(item))
        return {**given, "labels": table}
    labels = torch.from_numpy(values)
    return {**given, "labels": labels.view(ITEMS, 3).float() if kind == "labels" else labels}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_three_steps_give_the_losses_of_transformers(name: str, kind: Kind, tmp_path: Path) -> None:
    """Without dropout; and what was learned is read by transformers."""
    head = replace(head_of(kind), averages=name == "modern" and head_of(kind).has_pooler)
    settings: dict[str, Any] = {"classifier_pooling": "cls"} if name == BY_CLS else {}
    if head.labels or kind == "score":
        settings |= {"num_labels": head.outputs, "id2label": dict(enumerate(head.labels or ["score"]))}
        settings |= {"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {}
    torch.manual_seed(0)
    config = COUNTERPARTS[name.partition(",")[0]][1](**settings)
    their_model = getattr(transformers, AUTO_CLASSES[kind]).from_config(config).eval()
    their_model.save_pretrained(tmp_path)
    shape, read_head, weights = read_fine_tuned(tmp_path)
    assert read_head == head
    our_model = TaskModel(shape, head)
    our_model.load_state_dict(weights)
    our_model.eval()
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (our_model, their_model)]
    for step in range(STEPS):
        encoded = made(kind, step, config)
        batch = pack(encoded, np.arange(ITEMS))
        assert encoded.labels is not None
        ours = our_model(batch).loss / len(encoded.labels.values)
        their_loss = their_model(**theirs(encoded, kind, config)).loss
        assert ours.item() == pytest.approx(their_loss.item(), rel=1e-6, abs=1e-5)
        for loss, optimizer in zip((ours, their_loss), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = our_model.state_dict()
    write_wordpiece(tmp_path / "data", shape.vocabulary)
    vocabulary = read_vocabulary(tmp_path / "data")
    write_fine_tuned(tmp_path / "out", shape, head, state, vocabulary, "a card\n", {}, LENGTH)
    readers = verify_fine_tuned(tmp_path / "out", shape, head, state, compute_logits, vocabulary.special)
    assert [*readers] == ["Cloze", "transformers"]


# GPT's auxiliary loss


ONE_WAY = replace(SHAPE, dropout=0.0, attention_dropout=0.0).change_learning(sees="before", objective="ltr")


def model_of(kind: Kind) -> TaskModel:
    return TaskModel(ONE_WAY, head_of(kind), language=True).initialize(3)


def plain(model: TaskModel, batch: TaskBatch) -> Tensor:
    """The loss of all sequences, piece by piece, by PyTorch alone."""
    head, total = model.get_submodule("masked_head"), torch.zeros(())
    assert isinstance(head, BertPieceHead)
    hidden = F.gelu(F.linear(model.encode(batch), head.transform.weight, head.transform.bias))
    inner = F.layer_norm(hidden, (SHAPE.hidden,), head.norm.weight, head.norm.bias, SHAPE.epsilon)
    logits = F.linear(inner, model.embeddings.word.weight, head.bias)[:, : SHAPE.vocabulary]
    for said, pieces in zip(*(torch.split(each, list(batch.lengths)) for each in (logits, batch.pieces)), strict=True):
        for place in range(1, len(pieces)):
            total = total - torch.log_softmax(said[place - 1], 0)[pieces[place]]
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_every_piece_but_the_first_is_predicted_as_by_pytorch_alone(kind: Kind) -> None:
    model, batch = model_of(kind), pack(items_of(kind), np.array([2, 0, 1]))
    ours = model(batch).language
    wanted = plain(model, batch)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-4)
    of_head, of_encoder = ("bias", "transform.weight"), ("embeddings.word.weight", "layers.0.attention.qkv.weight")
    weights = [model.get_parameter(name) for name in (*(f"masked_head.{name}" for name in of_head), *of_encoder)]
    gradients = torch.autograd.grad(ours, weights, retain_graph=True)
    for gradient, expected in zip(gradients, torch.autograd.grad(wanted, weights), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_share_of_it_is_added_to_the_loss_of_the_task(share: float) -> None:
    """L2 + λ · L1, each of which is a mean: of labels, and of pieces."""
    model, batch = model_of("classes"), pack(items_of("classes"), np.array([2, 0, 1]))
    output, predicted = model(batch), sum(batch.lengths) - len(batch.lengths)
    assert batch.labels is not None
    found = compute_minimised(output, TaskBatches((batch,), 3, len(batch.labels), predicted), share)
    wanted = F.cross_entropy(output.logits, batch.labels) + share * plain(model, batch) / predicted
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_learned_from_items_without_labels_nor_in_evaluation() -> None:
    model, items = model_of("classes"), items_of("classes")
    output = model(pack(items, np.arange(2), labelled=False))
    (output.loss + output.language).backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert float(model.eval()(pack(items, np.arange(len(LENGTHS)))).language) == 0


# Gradients of word embeddings as rows


def draw_batch(step: int) -> TaskBatch:
    """Texts of this rank in a step, of few words, of which some come again in the next step."""
    random = np.random.default_rng([dist.get_rank(), step])
    pieces = Ragged.from_rows([random.integers(5 * step, 5 * step + 9, size).astype(np.int32) for size in (7, 4, 12)])
    labels = Ragged(random.integers(0, 3, 3), np.arange(1, 4))
    return pack(Encoded(Sequences(pieces, pieces.lengths), labels), np.arange(3))


def trained(name: str, dtype: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The norms of the gradients of some steps, and the weights after them."""
    model: Any = TaskModel(SHAPE, MNLI)
    model.load_state_dict(task_weights(MNLI))
    settings = EngineSettings(Optimizer(name=name), Precision(dtype=dtype), Parallel(zero=1))
    engine, norms = Engine(model, settings, torch.device("cpu")), []
    for step in range(STEPS):
        engine.backward(engine.forward(draw_batch(step)).loss, last=True)
        engine.step(1e-2)
        norms.append(float(engine.gradient_norm or 0))
    return norms, [weight.clone() for _, weight in engine.weights()]


def train_on_ranks() -> dict[str, Any]:
    connect_ranks()
    found: dict[str, Any] = {}
    for way, attribute in (("rows", fused.TAKES_ROWS), ("table", "another")):
        vars(fused)["TAKES_ROWS"] = attribute
        for name, dtype in product(optimizers(), DTYPES):
            found[f"{way} {name} {dtype}"] = trained(name, dtype)
    disconnect()
    return found


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_every_optimizer_makes_the_same_steps(ranks: int) -> None:
    done = spawn(ranks, train_on_ranks, timeout=150)
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * ranks
    for found, name, dtype in product((rank.result for rank in done), optimizers(), DTYPES):
        (norms, weights), (wanted, right) = (found[f"{way} {name} {dtype}"] for way in ("rows", "table"))
        assert norms == pytest.approx(wanted, rel=1e-6), (name, dtype)
        assert len(set(norms)) == STEPS
        for weight, whole in zip(weights, right, strict=True):
            torch.testing.assert_close(weight, whole, rtol=1e-6, atol=1e-7)
