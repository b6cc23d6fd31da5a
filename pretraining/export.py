#!/usr/bin/env python3
"""Makes a folder that transformers loads from a run.

    python pretraining/export.py runs/mini --out exported/mini

Also from a folder of transformers, which comes out with today's names and as safetensors. What is written is read back,
by us and by transformers where it is installed, and must compute the same logits before it takes its name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining.data.batches import Batch
from pretraining.huggingface.folders import CONFIG, read_folder, read_vocabulary, write_folder
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape

TOLERANCE, RELATIVE = 1e-4, 1e-5
"""how far logits may be apart, and so much more for the largest of them: sums in another order differ by that"""
PREDICTIONS = 16  # positions of each test sequence whose logits are compared

Logits = tuple[Tensor, Tensor]  # (m, vocabulary) of the masked head, (s, 2) of the next-sentence head


@dataclass(frozen=True)
class Export:
    """Makes a folder that transformers loads from a run, and checks that it computes the same."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of transformers."""
    out: Path
    """Folder to write; an earlier export in it is replaced."""
    checkpoint: str | None = None
    """Name of the checkpoint (default: the last)."""
    vocabulary: Path | None = None
    """Folder with the vocabulary: shards or an earlier export (default: the one that the run knows)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the numbers that are written."""


@dataclass(frozen=True)
class Exported:
    """What came of an export."""

    folder: Path
    parameters: int
    difference: float
    """the largest between logits of the source and of what was written"""
    readers: tuple[str, ...]
    """who read it back"""

    def __str__(self) -> str:
        readers = " and ".join(self.readers)
        return f"{self.folder}: exported {self.parameters:,} parameters; logits read back by {readers} agree " + (
            f"to {self.difference:.1g}" if self.difference else "exactly"
        )


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    wanted = tyro.cli(Export, args=arguments, prog="export.py", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        done = export(wanted.run, wanted.out, wanted.checkpoint, wanted.vocabulary, getattr(torch, wanted.dtype))
    except UserError as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    console.print(str(done), markup=False)
    return 0


def export(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    vocabulary: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exported:
    """Writes a run's checkpoint, the last one by default, as a folder of transformers; one process does it."""
    shape, state, metadata = _read_source(run, checkpoint)
    if vocabulary is None and "vocabulary" not in metadata:
        raise UserError(f"{run}: does not say where its vocabulary is; name the folder of its shards: --vocabulary")
    vocabulary = vocabulary or Path(metadata["vocabulary"])
    _check_vocabulary(vocabulary, metadata)
    written = {name: weight.to("cpu", dtype).float() for name, weight in state.items()}  # as they will be read
    results: list[tuple[str, float]] = []
    card = model_card(shape, metadata)
    write_folder(
        out,
        shape,
        state,
        vocabulary,
        card,
        dtype,
        check=lambda folder: results.extend(verify_export(folder, shape, written)),
    )
    readers, differences = zip(*results, strict=True)
    return Exported(out, shape.num_parameters(), max(differences), readers)


def _read_source(run: Path, checkpoint: str | None) -> tuple[Shape, dict[str, Tensor], dict[str, Any]]:
    """Sizes and weights, and what is known of their making: see model_card; "vocabulary" names a folder with one."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    if not (run / CONFIG).exists():
        from pretraining.checkpoint.reading import (
            load_weights,  # late: it loads DeepSpeed, for which --help need not wait
        )

        found: tuple[Shape, dict[str, Tensor], dict[str, Any]] = load_weights(run, checkpoint)
        return found
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {run} is a folder of transformers, which has no checkpoints")
    shape, state, missing = read_folder(run)
    if missing:
        heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in missing))
        raise UserError(f"{run}: lacks {heads}; only a model with both heads can be exported")
    return shape, state, {"vocabulary": str(run)}


def _check_vocabulary(folder: Path, metadata: Mapping[str, Any]) -> None:
    """UserError unless it is the one that the model was trained with, where that is known."""
    expected = metadata.get("data", {}).get("vocabulary")
    if read_vocabulary(folder).sha256 != expected and expected is not None:
        raise UserError(f"{folder}: not the vocabulary that the model was trained with; name its folder: --vocabulary")


def verify_export(folder: Path, shape: Shape, state: Mapping[str, Tensor]) -> list[tuple[str, float]]:
    """Reads a written folder back into fresh models and compares their logits with those of its source.

    Returns who read it, and the largest difference; raises UserError if one is larger than it may be.
    """
    batch = probe(shape)
    wanted = _our_logits(shape, state, batch)
    read_shape, read_state, missing = read_folder(folder)
    if read_shape != shape or missing:
        raise UserError(f"{folder}: not exported: {read_shape} was read back, without {missing}; wanted {shape}")
    results = [("Cloze", _difference(folder, "Cloze", wanted, _our_logits(read_shape, read_state, batch)))]
    theirs = _their_logits(folder, batch)
    if theirs is not None:
        results.append(("transformers", _difference(folder, "transformers", wanted, theirs)))
    return results


def probe(shape: Shape) -> Batch:
    """A few sequences of random pieces, the same ones always: one as long as the model takes, and shorter ones."""
    draw = np.random.default_rng(0)
    lengths = [shape.positions, max(shape.positions // 3, 1), min(shape.positions, 7)]
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    halves = np.repeat(lengths, lengths) // 2
    segments = (positions >= halves) * min(1, shape.segments - 1)
    chosen = [
        start + np.unique(np.linspace(0, length - 1, PREDICTIONS).astype(int))
        for start, length in zip(starts, lengths, strict=False)
    ]
    where = np.concatenate(chosen)
    return Batch(
        pieces=torch.from_numpy(draw.integers(0, shape.vocabulary, starts[-1])),
        segments=torch.from_numpy(segments.astype(np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts.astype(np.int32)),
        chosen=torch.from_numpy(where),
        labels=torch.from_numpy(draw.integers(0, shape.vocabulary, len(where))),
        random_next=torch.zeros(len(lengths), dtype=torch.int64),
        lengths=tuple(lengths),
        examples=np.zeros((len(lengths), 2), np.int64),
    )


@torch.inference_mode()
def _our_logits(shape: Shape, state: Mapping[str, Tensor], batch: Batch) -> Logits:
    with torch.random.fork_rng(devices=[]):  # a trainer that goes on draws as if nothing had been
        model = Bert(shape)
    model.load_state_dict(state)
    model.eval()
    masked, next_sentence = model.heads(model.encode(batch), batch)
    return masked, next_sentence


@torch.inference_mode()
def _their_logits(folder: Path, batch: Batch) -> Logits | None:
    """By transformers itself, sequence by sequence; None where it is not installed."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = transformers.BertForPreTraining.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # whatever it finds wrong
        raise UserError(f"{folder}: not exported: transformers cannot load it: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if faults := {name: found for name, found in report.items() if found}:
        raise UserError(f"{folder}: not exported: transformers reports {faults}")
    model.eval()
    masked, next_sentence = [], []
    starts = batch.starts.tolist()
    for start, end in pairwise(starts):
        pieces, segments = batch.pieces[None, start:end], batch.segments[None, start:end]
        output = model(input_ids=pieces, token_type_ids=segments, attention_mask=torch.ones_like(pieces))
        chosen = batch.chosen[(batch.chosen >= start) & (batch.chosen < end)] - start
        masked.append(output.prediction_logits[0, chosen])
        next_sentence.append(output.seq_relationship_logits)
    return torch.cat(masked), torch.cat(next_sentence)


def _difference(folder: Path, reader: str, wanted: Logits, found: Logits) -> float:
    """The largest difference of two models' logits; UserError if it is larger than rounding explains."""
    largest = 0.0
    for name, ours, theirs in zip(("masked", "next-sentence"), wanted, found, strict=True):
        allowed = TOLERANCE + RELATIVE * float(ours.abs().max())
        difference = float((ours - theirs).abs().max())
        if not difference <= allowed:  # so that NaN is refused
            raise UserError(
                f"{folder}: not exported: {name} logits read back by {reader} differ from the source's by "
                f"{difference:.3g}, more than {allowed:.3g}; an earlier export is left as it was"
            )
        largest = max(largest, difference)
    return largest


def summarise_data(manifest: Manifest) -> dict[str, Any]:
    """What a model card says of a folder of shards; a run keeps it with its checkpoints."""
    content = manifest.content
    examples: dict[str, int] = {}
    for shards in content["sets"]:
        name = str(shards["length"]) + (", held out" if shards["validation"] else "")
        examples[name] = examples.get(name, 0) + shards["examples"]
    settings = content["settings"]
    return {
        "sources": content["corpus"]["documents_by_source"],
        "pieces": content["corpus"]["pieces"],
        "examples": examples,
        "settings": {
            name: settings[name] for name in ("language", "cased", "duplicates", "masking", "mask_rate", "pairs")
        },
        "vocabulary": content["vocabulary"]["sha256"],
        "fingerprint": manifest.fingerprint,
    }


def model_card(shape: Shape, metadata: Mapping[str, Any]) -> str:
    """The README.md of an exported folder.

    `metadata` may have: "data" (from summarise_data), "recipe" (with its "phases", a list of tables), "metrics" (of the
    validation, by name) and "progress" (with the "step"). What it does not have is left out.
    """
    data, recipe, metrics = (metadata.get(name) or {} for name in ("data", "recipe", "metrics"))
    language = data.get("settings", {}).get("language")
    tags = ["library_name: transformers", "pipeline_tag: fill-mask", "tags:", "- bert", "- fill-mask"]
    lines = ["---", *tags, *([f'language: "{language}"'] if language else []), "---", "", "# BERT", ""]
    lines += [
        "A BERT encoder with its masked-language and next-sentence heads"
        f"{', pre-trained with Cloze' if recipe else ''}: layers {shape.layers}, hidden size {shape.hidden:,}, "
        f"attention heads {shape.heads}, feed-forward size {shape.intermediate:,}; a vocabulary of "
        f"{shape.vocabulary:,} pieces, and texts of at most {shape.positions} of them; "
        f"{shape.num_parameters():,} parameters. Its licence is not specified.",
        "",
    ]
    lines += _loading()
    lines += _data_section(data) + _recipe_section(recipe, metadata.get("progress"))
    if metrics:
        lines += ["## Validation", "", *_table(["metric", "value"], metrics.items()), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _loading() -> list[str]:
    return [
        "## Loading",
        "",
        "```python",
        "from transformers import AutoModelForPreTraining, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'model = AutoModelForPreTraining.from_pretrained("FOLDER")',
        "```",
        "",
        "`AutoModel` and `AutoModelForMaskedLM` load parts of it; transformers then lists the weights of the other "
        "heads as unexpected, as it does for every BERT with both heads.",
        "",
    ]


def _data_section(data: Mapping[str, Any]) -> list[str]:
    if not data:
        return []
    lines = ["## Data", "", *_table(["source", "documents"], data.get("sources", {}).items()), ""]
    lines += [*_table(["examples of length", "number"], data.get("examples", {}).items()), ""]
    settings = _value(data.get("settings", {}))
    text = f"{_value(data.get('pieces'))} pieces of text. Settings: {settings}."
    return [*lines, text, "", f"Fingerprint of the shards: `{data.get('fingerprint')}`.", ""]


def _recipe_section(recipe: Mapping[str, Any], progress: Mapping[str, Any] | None) -> list[str]:
    """The phases as a table, the other settings as a list."""
    if not recipe:
        return []
    phases: Sequence[Mapping[str, Any]] = recipe.get("phases", ())
    names = list(dict.fromkeys(name for phase in phases for name in phase))
    lines = ["## Recipe", ""]
    if phases:
        rows = [[number, *(phase.get(name) for name in names)] for number, phase in enumerate(phases, 1)]
        lines += [*_table(["phase", *map(_words, names)], rows), ""]
    for section, settings in recipe.items():
        if section != "phases" and settings not in (None, {}):
            lines.append(f"- {_words(section)}: {_value(settings)}")
    if progress:
        lines += ["", f"The weights are those after step {progress['step']:,}."]
    return [*lines, ""]


def _table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table of Markdown."""
    cells = [[_value(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *cells)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    """Readable, and safe in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(name))} {_value(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_value, value))
    return " ".join(str(value).split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
