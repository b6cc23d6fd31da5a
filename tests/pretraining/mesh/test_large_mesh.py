"""What a rank holds that shares a model: of GPT-2 of 8.3 billion weights, on a device that holds nothing, and of a
smaller one in memory."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.training import run_connected
from support.watches import MemoryWatch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from data_prep.common.files import FileRecord
from pretraining.checkpoint.reading import restore_model
from pretraining.checkpoint.record import WEIGHT, CheckpointRecord, MadeBy, write_record
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.huggingface.weights import save_tensors
from pretraining.mesh.mesh import form_mesh
from pretraining.model.encoder import Trainable
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.planning.machines import make_target
from pretraining.training.resuming import build_share

RANK, RANKS, TENSOR = 13, 512, 8


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_a_rank_of_512_has_the_shares_that_were_planned() -> None:
    recipe = load_recipe(RECIPES / "gpt2_8b.toml", [])
    shape, mesh = recipe.shape(None), form_mesh(recipe.parallel.tensor)
    assert (mesh.data_rank, mesh.data_ranks, mesh.tensor_rank, mesh.tensor_ranks) == (1, 64, 5, TENSOR)
    with torch.device("meta"):
        model = build_model(shape)
        shares = model.take_shares(mesh)
    h, found = shape.hidden, {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    wanted: dict[str, tuple[int, ...]] = {"embeddings.word.weight": (51_200 // TENSOR, h)}
    wanted |= {"embeddings.position.weight": (1024, h), "layers.71.first_norm.weight": (h,)}
    wanted |= {"layers.0.qkv.weight": (3 * h // TENSOR, h), "layers.0.qkv.bias": (3 * h // TENSOR,)}
    wanted |= {"layers.40.output.weight": (h, h // TENSOR), "layers.40.output.bias": (h,)}
    wanted |= {"layers.71.inner.weight": (4 * h // TENSOR, h), "layers.71.outer.weight": (h, 4 * h // TENSOR)}
    assert {name: found[name] for name in wanted} == wanted
    assert len(shares.divisions) == 1 + 72 * 6
    numbers = sum(weight.numel() for weight in model.parameters())
    planned = make_target(recipe, None, "v100-32", RANKS // 8, 8).plan_memory()
    assert planned.weights == 2 * numbers
    assert planned.optimizer == 12 * numbers / 64


LARGE = Shape(vocabulary=1_000, hidden=256, layers=32, heads=4, intermediate=1024, positions=64)


def build_own(checkpoint: Path | None) -> tuple[float, dict[str, Tensor]]:
    """Builds a rank's share, and draws it or reads it from a checkpoint of one rank; returns the memory that this took
    at most, and the weights."""
    mesh = form_mesh(2)
    build_share(replace(LARGE, layers=1), False, mesh).initialize(0)  # what is made once
    with MemoryWatch() as watch:
        model = build_share(LARGE, False, mesh).initialize(7 if checkpoint else 5)
        if checkpoint:
            restore_model(checkpoint, model)
    return watch.most, {name: model.shares.join(name, own.detach()) for name, own in model.named_parameters()}


def write_checkpoint(folder: Path, model: Trainable) -> None:
    """Writes the weights of a model as one rank does."""
    folder.mkdir()
    file = f"{WEIGHT}-00000-of-00001.safetensors"
    save_tensors({f"{name}:0": weight.detach().view(-1) for name, weight in model.named_parameters()}, folder / file)
    files = (FileRecord.from_file(folder, file),)
    write_record(folder, CheckpointRecord(LARGE, 1, 1.0, None, MadeBy(1, 1, "fp32"), {}, files))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["drawn", "read"])
def test_no_rank_ever_holds_a_whole_model(way: str, tmp_path: Path) -> None:
    """And the shares are those of what one rank draws."""
    whole = build_model(LARGE).initialize(5)
    size = sum(4 * weight.numel() for weight in whole.parameters())
    write_checkpoint(tmp_path / "checkpoint", whole)
    checkpoint = tmp_path / "checkpoint" if way == "read" else None
    for most, weights in run_connected(2, partial(build_own, checkpoint)):
        assert 0.3 * size < most < 0.75 * size
        for name, weight in whole.named_parameters():
            assert torch.equal(weights[name][: len(weight)], weight)
            assert not weights[name][len(weight) :].any()
