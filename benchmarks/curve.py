#!/usr/bin/env python3
"""Trains Cloze and transformers from the same weights on the same batches, and compares the losses.

    python benchmarks/curve.py

Both follow a recipe's learning rate, in bf16 and with dropout. The batches are real shards, made from the text in the
folder that CLOZE_DATA names (or given with --shards). Losses of every step are kept in benchmarks/results/.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from benchmarks.measure import DATA, record, results_file, write_results
from benchmarks.peer import make_shards, padded
from data_prep.shards import Manifest
from pretraining.config.overrides import load_recipe
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Recipe
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.optimizers import is_decayed
from pretraining.engine.precision import set_arithmetic
from pretraining.engine.step import Seeds, train_step
from pretraining.huggingface.config import config_of
from pretraining.huggingface.weights import to_transformers
from pretraining.model.batch import PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.processes.group import choose_device, connect, disconnect
from pretraining.processes.launchers import World

RECIPE = Path(__file__).parent.parent / "pretraining" / "recipes" / "bert_mini.toml"


@dataclass(frozen=True)
class Curve:
    """Compares the loss of Cloze and transformers, step by step."""

    recipe: Path = RECIPE
    """Recipe whose first phase is followed."""
    shards: Path | None = None
    """Folder of shards (default: made from the real text)."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    steps: int = 300
    """Steps of training; the schedule is squeezed into them."""
    smooth: int = 25
    """Steps whose mean is compared."""


def our_losses(recipe: Recipe, model: Bert, batches: list[PretrainingBatches], device: torch.device) -> list[float]:
    """The loss of each step, as the trainer does it."""
    set_arithmetic(recipe.precision, recipe.compute, device)
    engine = Engine(model, EngineSettings(recipe.optimizer, recipe.precision, compute=recipe.compute), device)
    [schedule] = build_schedules(recipe)
    found = []
    for step, global_batch in enumerate(batches):
        seeds = Seeds.of(recipe.seed, step, rank=0)
        result = train_step(engine, global_batch, schedule.learning_rate(step), seeds, pretraining_loss)
        found.append(sum(loss.item() for loss in result.losses))
    return found


def their_losses(recipe: Recipe, theirs: Any, batches: list[PretrainingBatches], device: torch.device) -> list[float]:
    """The same with transformers' model: autocast, fp32 weights, padded batches."""
    theirs.to(device).train()
    settings = recipe.optimizer
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in theirs.named_parameters():
        (decayed if is_decayed(name.replace("LayerNorm", "norm")) else others).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay, fused=True
    )
    [schedule] = build_schedules(recipe)
    found = []
    for step, global_batch in enumerate(batches):
        [batch] = global_batch.micro
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = theirs(**{name: each.to(device) for name, each in padded(batch).items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compare(settings: Curve, shards: Path, device: torch.device) -> dict[str, Any]:
    """Both curves, and how far their running means are apart."""
    from transformers import BertConfig, BertForPreTraining

    manifest = Manifest.read(shards)
    full = load_recipe(settings.recipe)
    phase = full.phases[0].model_copy(update={"steps": settings.steps, "micro_batch": full.phases[0].batch})
    recipe = full.model_copy(update={"phases": (phase,)})
    shape = recipe.model.shape(manifest.vocabulary_size)
    dataset = Dataset(shards, manifest, phase.length)
    order = BatchOrder(Order(recipe.seed, dataset.shard_rows), phase.batch)
    batches = [step_batches(dataset, order, step) for step in range(settings.steps)]
    model = Bert(shape).initialize(recipe.seed)
    theirs = BertForPreTraining(BertConfig(**config_of(shape, 0, torch.float32)))
    missing, unexpected = theirs.load_state_dict(to_transformers(model.state_dict(), shape), strict=False)
    assert not unexpected
    assert all(".decoder." in name for name in missing)  # tied
    theirs.tie_weights()
    ours = our_losses(recipe, model, batches, device)
    reference = their_losses(recipe, theirs, batches, device)
    spans = range(0, settings.steps - settings.smooth + 1, settings.smooth)
    curves = {"cloze": ours, "transformers": reference}
    means = {
        name: [round(statistics.mean(losses[at : at + settings.smooth]), 4) for at in spans]
        for name, losses in curves.items()
    }
    return {
        "recipe": settings.recipe.stem,
        "steps": settings.steps,
        "batch": phase.batch,
        "smooth": settings.smooth,
        "largest_difference_of_means": round(max(abs(a - b) for a, b in zip(*means.values(), strict=True)), 4),
        "means": means,
        "losses": {name: [round(each, 4) for each in losses] for name, losses in curves.items()},
    }


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Curve, args=arguments, prog="curve.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if settings.shards is None and not (settings.data / "wiki").is_dir():
        console.print(f"error: {settings.data} has no wiki/: set CLOZE_DATA, or give --shards or --data")
        return 2
    device = choose_device("auto", World())
    connect(World(), device)
    with tempfile.TemporaryDirectory() as folder:
        length = load_recipe(settings.recipe).phases[0].length
        shards = settings.shards or make_shards(settings.data, Path(folder) / "shards", [length])
        found = compare(settings, shards, device)
    disconnect()
    for number, pair in enumerate(zip(*found["means"].values(), strict=True)):
        end = (number + 1) * settings.smooth
        console.print(f"steps to {end:>4}: cloze {pair[0]:.4f}  transformers {pair[1]:.4f}")
    console.print(f"largest difference of these means: {found['largest_difference_of_means']}")
    results = record("curve", ["torch", "deepspeed", "transformers"], found)
    console.print(f"kept in {write_results(results_file('curve'), results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
