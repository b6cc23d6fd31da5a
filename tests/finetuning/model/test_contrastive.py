"""Losses of vectors, and their gradients in the whole encoder, are those of sentence-transformers, in one pass, in
micro-batches and over ranks; equal texts are never negatives of each other."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.base_models import write_bert
from support.marks import slow
from support.processes import made_once, spawn
from support.tasks import CUTTER, VOCABULARY
from support.training import connect_ranks
from support.transformers_models import COUNTERPARTS, write_wordpiece
from torch import Tensor

from data_prep.vocabulary.source import read_vocabulary
from finetuning.model import contrastive
from finetuning.model.contrastive import Contrast, VectorModel, compare_passages, compute_contrast
from finetuning.model.heads import compute_logits
from finetuning.running.batches import TrainingBatches
from finetuning.settings import EmbeddingSettings, FineTuning
from finetuning.tasks.embeddings import EmbeddingItems, number_texts
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.engine.step import Seeds, seed_step
from pretraining.huggingface.folders import read_encoder, read_fine_tuned, write_fine_tuned
from pretraining.huggingface.pooling import Pooling
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.huggingface.weights import export_weights
from pretraining.model.batch import CPU
from pretraining.processes.group import disconnect, place
from pretraining.scoring.embedding import Embedder

ITEMS, WITHIN = 11, 1e-5
COLUMNS = [[f"{word} {number:02} {number * number}" for number in range(ITEMS)] for word in "qphx"]
SCORES = np.array([0.1, 3, 2, 2, 5, 0.1, -1, 4, 4, 4, 2.5], np.float32)[:, None]
HEAD = TaskHead("embeddings")
Case = tuple[int, dict[str, Any], Callable[[Any, Any], Any]]


def ranking(model: Any, losses: Any, **options: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model, **options)


def both_ways(model: Any, losses: Any) -> Any:
    return ranking(model, losses, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")


CASES: dict[str, Case] = {
    "pairs": (2, {}, ranking),
    "two hard negatives": (4, {}, ranking),
    "cached": (3, {}, lambda model, losses: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)),
    "a temperature": (2, {"temperature": 0.2}, lambda model, losses: ranking(model, losses, scale=5.0)),
    "symmetric": (3, {"symmetric": True}, both_ways),
    "widths": (
        3,
        {"widths": (8, 3)},
        lambda model, losses: losses.MatryoshkaLoss(model, ranking(model, losses), [32, 8, 3]),
    ),
    "scores": (1, {}, lambda model, losses: losses.CoSENTLoss(model)),
}
"""By name: texts of an item, or 1 for two with a score; our settings; the loss of sentence-transformers."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory.getbasetemp(), "encoder", lambda place: write_bert(place, VOCABULARY))


def make_items(choices: int) -> EmbeddingItems:
    texts = tuple(COLUMNS[: max(choices, 2)])
    return EmbeddingItems(CUTTER, 64, texts, SCORES if choices == 1 else number_texts(texts))


def find_gradients(
    folder: Path, choices: int, settings: dict[str, Any], micro: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a global batch of all items, and the gradients of this rank's items in the weights."""
    shape, weights = read_encoder(folder)
    model = VectorModel(shape, Pooling(normalizes=True)).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    (batches, _) = next(
        TrainingBatches(make_items(choices), FineTuning(batch=ITEMS, micro_batch=micro), *place()).iterate(0)
    )
    engine: Any = SimpleNamespace(forward=model, model=model, device=CPU)
    contrast = Contrast(engine, EmbeddingSettings(**settings), batches, Seeds(1, 1))
    total = 0.0
    for batch in batches.micro:
        loss = contrast.loss_of(model(batch), batches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()
    }
    return total, export_weights(gradients, shape, HEAD)


def find_theirs(folder: Path, case: Case) -> tuple[float, dict[str, Tensor]]:
    """The same by sentence-transformers."""
    library: Any = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    Pooling(normalizes=True).write(folder, 32, 64)
    model = library.SentenceTransformer(str(folder), device="cpu").eval()
    features = [model.tokenize(list(column)) for column in COLUMNS[: max(case[0], 2)]]
    loss = case[2](model, losses)(features, torch.from_numpy(SCORES[:, 0]))
    loss.backward()
    weights = dict(model[0].auto_model.named_parameters(prefix="bert"))
    return loss.item(), {name: each.grad for name, each in weights.items() if "pooler" not in name}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro", [None, 4], ids=["one pass", "two passes"])
def test_losses_and_gradients_are_those_of_sentence_transformers(name: str, micro: int | None, folder: Path) -> None:
    choices, settings, _ = CASES[name]
    loss, gradients = find_gradients(folder, choices, settings, micro)
    wanted, theirs = find_theirs(folder, CASES[name])
    assert loss == pytest.approx(wanted, abs=WITHIN)
    assert_same(gradients, theirs, WITHIN)


def compute_on_rank(folder: Path) -> list[tuple[float, dict[str, Tensor]]]:
    connect_ranks()
    found = [
        find_gradients(folder, choices, settings, micro)
        for choices, settings, _ in (CASES["two hard negatives"], CASES["scores"])
        for micro in (None, 2, 4)
    ]
    disconnect()
    return found


@pytest.mark.parametrize("ranks", [2, slow(ITEMS + 1)])
def test_negatives_are_those_of_all_ranks(ranks: int, folder: Path) -> None:
    """Also where a rank has no items of its own."""
    done = spawn(ranks, compute_on_rank, folder)
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * ranks
    for number, of_ranks in enumerate(zip(*(rank.result for rank in done), strict=True)):
        choices, settings, _ = CASES["two hard negatives" if number < 3 else "scores"]
        wanted, theirs = find_gradients(folder, choices, settings)
        assert sum(loss for loss, _ in of_ranks) == pytest.approx(wanted, abs=1e-6)
        sums = {name: sum(gradients[name] for _, gradients in of_ranks) for name in theirs}
        assert_same(sums, theirs, 1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_passes_draw_the_same_dropout(device: str, folder: Path) -> None:
    """On a GPU also in attention, which draws by PyTorch's generator there, in the order of the micro-batches."""
    shape, weights = read_encoder(folder)
    model, seen = VectorModel(shape, Pooling(normalizes=True)), list[Tensor]()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.to(device, torch.bfloat16).register_forward_hook(lambda _, __, output: seen.append(output.logits.detach()))
    batches, _ = next(TrainingBatches(make_items(3), FineTuning(batch=ITEMS, micro_batch=4)).iterate(0))
    engine: Any = SimpleNamespace(forward=model, model=model, device=torch.device(device))
    Contrast(engine, EmbeddingSettings(), batches, Seeds(1, 1))
    for seeds in (Seeds(1, 1), Seeds(2, 2)):
        seed_step(engine, seeds)
        for batch in batches.micro:
            model(batch.to(engine.device))
    first, second, other = zip(*[iter(seen)] * len(batches.micro), strict=True)
    assert [*map(torch.equal, first, second)] == [True] * len(first)
    assert [*map(torch.equal, first, other)] == [False] * len(first)


def test_equal_texts_are_no_negatives_of_each_other() -> None:
    """Of a question: its own passage where it occurs again, its own text, and the passages of an equal question, but
    not the hard negatives of that one."""
    draw = torch.Generator().manual_seed(1)
    vectors = torch.randn(4, 3, 8, generator=draw)
    texts = torch.tensor([[0, 1, 2], [0, 3, 4], [5, 1, 6], [7, 8, 0]], dtype=torch.float64)
    cosines = torch.nn.functional.normalize(vectors, dim=2)
    of_first = [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2)]  # not (1, 1), (2, 1) and (3, 2)
    logits = torch.stack([cosines[0, 0] @ cosines[place] for place in of_first]) / 0.05
    rows = slice(0, 1)
    found = compare_passages(cosines, texts, rows, EmbeddingSettings()) * len(vectors)
    assert found.item() == pytest.approx(-logits.log_softmax(0)[0].item(), rel=1e-5)
    back = torch.stack([cosines[0, 1] @ cosines[place, 0] for place in (0, 3)]) / 0.05  # not 1 and 2
    found = 2 * compare_passages(cosines, texts, rows, EmbeddingSettings(symmetric=True)) * len(vectors) - found
    assert found.item() == pytest.approx(-back.log_softmax(0)[0].item(), rel=1e-5)


def test_blocks_of_questions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, texts = torch.randn(9, 3, 8), torch.arange(27).view(9, 3).double()
    wanted = compute_contrast(vectors, texts, EmbeddingSettings(symmetric=True))
    monkeypatch.setattr(contrastive, "ROWS", 4)
    for one, other in zip(compute_contrast(vectors, texts, EmbeddingSettings(symmetric=True)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], within: float) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert largest > 0.01
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=within * max(largest, 1), msg=name)


@pytest.mark.parametrize("name", ["bert", *(slow(name) for name in COUNTERPARTS if name != "bert")])
def test_a_folder_of_every_architecture_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    """Also where the class of transformers would take the segments that a tokenizer tells for pieces."""
    library: Any = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    transformers.AutoModel.from_config(COUNTERPARTS[name][1]()).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "task.json").write_text("{}")
    shape, head, weights = read_fine_tuned(tmp_path / "theirs")
    write_wordpiece(tmp_path / "pieces", shape.vocabulary)
    vocabulary, pooling = read_vocabulary(tmp_path / "pieces"), Pooling("last", normalizes=True)
    write_fine_tuned(tmp_path / "ours", shape, head, weights, vocabulary, "", {}, 32, pooling)
    found = verify_fine_tuned(tmp_path / "ours", shape, head, weights, compute_logits, vocabulary.special)
    assert (head, [*found]) == (HEAD, ["Cloze", "transformers"])
    texts = ["a b", "c " * 40, "d"]
    ours = Embedder.open(StoredModel.open(str(tmp_path / "ours")), CPU).compute(texts)
    theirs = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=WITHIN)
