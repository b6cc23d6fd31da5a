#!/usr/bin/env python3
"""Goes on from a BERT with another kind of text, and shows what that is worth beside beginning anew.

    python benchmarks/adapting.py

A Mini is trained on encyclopedia text (the folder that CLOZE_DATA names; or give a BERT: --base), then adapted to the
demo corpus, the documentation of Python packages: with its vocabulary, and with words of the text added to it. A model
of the same sizes is trained on the same text from scratch, with as many steps of as many sequences. All four are scored
on the same held-out documents, none of which is in the training text, by everything in them that is masked.

Scores of a piece cannot be compared over vocabularies: whole words are harder to guess than their parts, and there are
fewer of them. So there are also nats a masked character: the sum of the losses of all masked pieces, divided by the
characters that these pieces stand for (without ##; a special piece counts as one). Results go to
benchmarks/results/, in a file for each kind of hardware.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from benchmarks.measure import DATA, SHARD, mistakes_told, record, results_file, write_results
from data_prep.common.errors import UserError
from data_prep.readers import demo
from data_prep.readers.reader import Options, Problems, Span
from data_prep.shards import Manifest
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import SPECIAL
from pretraining.config.base import sizes_of
from pretraining.data.batches import validation_batches
from pretraining.data.dataset import Dataset
from pretraining.huggingface.folders import read_folder, read_shape
from pretraining.model.bert import Bert

ROOT = Path(__file__).parent.parent
TRAIN, RECIPE = ROOT / "pretraining" / "train.py", ROOT / "pretraining" / "recipes" / "adapt.toml"
LENGTH = 128
HELD_OUT = 25
"""One of so many documents is held out, chosen by its text, so that copies of it are held out with it."""
BASE = """
[model]
layers = {layers}
hidden = {hidden}
dropout = 0.0
attention_dropout = 0.0
[optimizer]
betas = [0.9, 0.98]
[[phases]]
name = "start"
length = 32
batch = 128
micro_batch = 64
steps = {steps}
learning_rate = 1e-3
warmup = 0.06
[[phases]]
name = "short"
length = 128
batch = 32
micro_batch = 16
steps = {short}
new_positions = "copied"
[evaluation]
every = 0
[logging]
every = 50
tensorboard = false
[checkpoints]
every = 0
keep = 1
"""
"""The recipe of the Mini to begin with, after bert_mini.toml: most steps on very short sequences."""


@dataclass(frozen=True)
class Adapting:
    """Adapts a BERT to another kind of text, and compares it with what it was and with one from scratch."""

    base: Path | None = None
    """Folder of a BERT to begin with (default: a Mini, trained first)."""
    data: Path = DATA
    """Folder of real text with wiki/, for the Mini."""
    files: str = "wiki/AA"
    """Which of it."""
    layers: int = 4
    """Layers of the Mini."""
    hidden: int = 256
    """Width of the Mini."""
    vocab_size: int = 8192
    """Pieces of its vocabulary."""
    base_steps: int = 1000
    """Steps of its training; a quarter as many follow on longer sequences."""
    steps: int = 400
    """Steps of adapting, and of training from scratch."""
    batch: int = 32
    """Sequences of a step."""
    learning_rate: float = 5e-4
    """Highest learning rate of adapting."""
    scratch_learning_rate: float = 1e-3
    """Highest learning rate from scratch, where larger steps serve better."""
    extend: int = 1000
    """Words to add."""
    megabytes: float = 100.0
    """Most text of the demo corpus that is used."""
    out: Path = field(default_factory=partial(results_file, "adapting"))
    """File for the results."""


@dataclass(frozen=True)
class Score:
    """What a model makes of the held-out documents."""

    masked_loss: float
    """nats a masked piece"""
    perplexity: float
    masked_accuracy: float
    nats_a_character: float
    """nats a masked character"""
    masked_pieces: int
    masked_characters: int

    def rounded(self) -> dict[str, float]:
        """As the results have it."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def command(*words: object) -> None:
    """Runs one of our commands; its errors are shown."""
    done = subprocess.run([sys.executable, *map(str, words)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"{' '.join(map(str, words))}: ended with code {done.returncode}")


def write_text(folder: Path, megabytes: float) -> tuple[Path, Path]:
    """Writes the demo corpus as two files of JSON lines: to train on, and held out."""
    paths = folder / "documentation.jsonl", folder / "held-out.jsonl"
    options, left, seen = Options(Problems("fail")), megabytes * 1e6, set()
    with paths[0].open("w") as training, paths[1].open("w") as held_out:
        for path in demo.files():
            for document in demo.read(Span(str(path), 0, path.stat().st_size), options):
                text = "\n\n".join(document.passages)
                key = hashlib.sha256(text.encode()).digest()
                if key in seen or left < 0:
                    continue
                seen.add(key)
                left -= len(text)
                line = json.dumps({"id": document.id, "text": text}) + "\n"
                (training if int.from_bytes(key[:4], "big") % HELD_OUT else held_out).write(line)
    return paths


def make_shards(text: Path, out: Path, *more: object, lengths: Iterable[int] = (LENGTH,)) -> Path:
    """Shards with one duplicate, none of them held out."""
    words = ["--docs", text, "--out", out, "--duplicates", 1, "--validation", 0, "--lengths", *lengths, *more]
    command(SHARD, *words)
    return out


def train_base(settings: Adapting, work: Path) -> Path:
    """Trains the Mini on encyclopedia text; returns its exported folder."""
    text = settings.data / settings.files
    if not text.exists():
        raise UserError(f"{text}: not there; set CLOZE_DATA, or give a BERT with --base")
    data = make_shards(text, work / "encyclopedia", "--vocab-size", settings.vocab_size, lengths=(32, LENGTH))
    sizes = {"layers": settings.layers, "hidden": settings.hidden, "short": max(1, settings.base_steps // 4)}
    (work / "base.toml").write_text(BASE.format(steps=settings.base_steps, **sizes))
    command(TRAIN, "--recipe", work / "base.toml", "--data", data, "--out", work / "base")
    return work / "base" / "export"


def train_on(settings: Adapting, data: Path, out: Path, learning_rate: float, *more: object) -> Path:
    """Trains by recipes/adapt.toml, cut to this length and budget; returns the exported folder."""
    long = max(1, settings.steps // 10)
    words = ["--phases.0.steps", max(1, settings.steps - long), "--phases.1.steps", long, "--phases.1.length", LENGTH]
    words += ["--phases.0.batch", settings.batch, "--phases.1.batch", settings.batch]
    words += ["--phases.0.learning_rate", learning_rate, "--checkpoints.every", 0, "--logging.tensorboard", "false"]
    words += ["--model.dropout", "0.0", "--model.attention_dropout", "0.0"]  # less than one epoch: nothing to overfit
    command(TRAIN, "--recipe", RECIPE, "--data", data, "--out", out, *words, *more)
    return out / "export"


@torch.inference_mode()
def score(folder: Path, held_out: Path) -> Score:
    """Scores the model of a folder on all examples of the held-out documents, in fp32."""
    shape, weights, _ = read_folder(folder)
    model = Bert(shape)
    model.load_state_dict(weights)
    model.eval()
    pieces = read_vocabulary(held_out).pieces
    sizes = torch.tensor([1 if piece in SPECIAL else len(piece.removeprefix("##")) for piece in pieces])
    loss, right, predictions, characters = 0.0, 0, 0, 0
    dataset = Dataset(held_out, Manifest.read(held_out), LENGTH)
    for batch, _ in validation_batches(dataset, 0, 1, 32):
        losses = model(batch)
        loss, right = loss + float(losses.masked), right + int(losses.masked_correct)
        predictions, characters = predictions + len(batch.labels), characters + int(sizes[batch.labels].sum())
    mean = loss / predictions
    return Score(mean, math.exp(mean), right / predictions, loss / characters, predictions, characters)


def compare(settings: Adapting, work: Path, console: Console) -> dict[str, Any]:
    """Makes and scores the four models."""
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - begin:6.0f} s  {text}", markup=False)

    say("writing text" if settings.base else f"training the model to begin with: {settings.base_steps:,} steps")
    base = settings.base or train_base(settings, work)
    text, rest = write_text(work, settings.megabytes)
    scores = {}
    for name, more in (("same", ()), ("more", ("--extend", settings.extend))):
        say(f"shards with {settings.extend:,} words more" if more else "shards with its vocabulary")
        make_shards(text, work / name, "--vocab", base, *more)
        make_shards(rest, work / f"{name}-held-out", "--vocab", work / name)
    scores["before"] = score(base, work / "same-held-out")
    sizes = [word for name, value in sizes_of(read_shape(base)).items() for word in (f"--model.{name}", value)]
    for name, data, rate, words in (
        ("after", "same", settings.learning_rate, ["--init", base]),
        ("after, with more words", "more", settings.learning_rate, ["--init", base]),
        ("from scratch", "same", settings.scratch_learning_rate, sizes),
    ):
        say(f"training: {name}")
        scores[name] = score(train_on(settings, work / data, work / name, rate, *words), work / f"{data}-held-out")
    corpora = {name: Manifest.read(work / name).content["corpus"] for name in ("same", "more", "same-held-out")}
    given = {name: value for name, value in asdict(settings).items() if not isinstance(value, Path)}
    return {
        "base": settings.base.name if settings.base else "a Mini, trained here",
        "settings": given,
        "text": {name: {key: corpus[key] for key in ("documents", "pieces")} for name, corpus in corpora.items()},
        "seconds": round(time.monotonic() - begin),
        "scores": {name: each.rounded() for name, each in scores.items()},
    }


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Adapting, args=arguments, prog="adapting.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with mistakes_told(), tempfile.TemporaryDirectory() as folder:
        found = compare(settings, Path(folder), console)
    for name, each in found["scores"].items():
        console.print(
            f"{name:<24}perplexity {each['perplexity']:8.2f}  accuracy {each['masked_accuracy']:6.1%}  "
            f"{each['nats_a_character']:.4f} nats a character"
        )
    results = record("adapting", ["torch", "deepspeed", "transformers"], found)
    console.print(f"kept in {write_results(settings.out, results)}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
