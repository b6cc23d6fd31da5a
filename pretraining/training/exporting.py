"""Exports a checkpoint as a folder of transformers, which is read back and compared before it takes its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from data_prep.common.outputs import making
from data_prep.common.toml_text import toml_text
from data_prep.vocabulary.source import read_vocabulary
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import count_parameters
from pretraining.checkpoint.average import Average, average_last
from pretraining.checkpoint.models import cut_rows
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import AVERAGED, EXPORT, TOKENIZER, find_checkpoint
from pretraining.checkpoint.state import RunRecord, Saved
from pretraining.data.mixing import WHOLE
from pretraining.flags import Export
from pretraining.huggingface import folders
from pretraining.huggingface.model_card import Provenance, make_model_card, read_front_matter, warn_of_classifiers
from pretraining.huggingface.verify import compute_probe, verify_export
from pretraining.huggingface.weights import list_weights, repeat_segment
from pretraining.model.shape import DROPOUT, Shape
from pretraining.objectives.declaration import choose_way, configure_objective, find_objective
from pretraining.optimizers.declaration import describe_settings
from pretraining.training.request import Branch


@dataclass(frozen=True)
class Exported:
    """The result of an export, for its last line."""

    folder: Path
    parameters: int
    differences: Mapping[str, float]
    """largest difference between logits of the source and of the exported model, by the library that read it back"""
    left_out: Sequence[str]
    """heads of the source that were not written, and why"""
    remark: str
    """how to read its logits if that is unusual, or a use that fails in transformers; empty if there is neither"""

    def __str__(self) -> str:
        largest = max(self.differences.values())
        agree = f"to {largest:.1g}" if largest else "exactly"
        told = f"exported {self.parameters:,} parameters; logits read back by {' and '.join(self.differences)} agree"
        left_out = f"; left out: {'; '.join(self.left_out)}" * bool(self.left_out)
        return f"{self.folder}: {told} {agree}{left_out}{f'. {self.remark}' * bool(self.remark)}"


@dataclass
class Exportable:
    """A model on its way from its source into a folder of transformers."""

    shape: Shape
    weights: dict[str, Tensor]
    vocabulary: Path
    """folder of its vocabulary"""
    length: int
    """longest text that it was trained on, or the limit of its tokenizer"""
    licence: str | None = None
    """licence in the recipe or the card, if any"""
    left_out: list[str] = field(default_factory=list)
    """heads and rows that are not exported, and why"""
    made: Provenance | None = None
    """how the weights were trained, if known"""


def export(wanted: Export, average: int | None = None) -> Exported:
    """Reads a model, or the average of this many last checkpoints of a run, converts it, writes it as a folder of
    transformers and compares what is read back from there; one process does it."""
    source = wanted.run if os.path.exists(wanted.run) else Branch.parse(str(wanted.run)).find()
    out, own = wanted.out.resolve(), [(source / name).resolve() for name in (EXPORT, AVERAGED)]
    with nullcontext() if out in own else making([wanted.out], "export.py", [source], wanted.replace):
        model, dtype = read_source(source, average), getattr(torch, wanted.dtype)
        special = read_vocabulary(model.vocabulary).special
        shape = choose_way(model.shape, wanted.sees, str(wanted.run))
        shape = find_architecture(shape.architecture).fit_vocabulary(shape, special)
        model.weights, heads = select_heads(shape, model.weights)
        model.left_out += [f"{heads}, which read both ways"] * bool(heads)
        for name in model.weights:
            model.weights[name] = model.weights[name].to("cpu", dtype).float()  # as read back
        logits = compute_probe(shape, model.weights, special)
        card = make_model_card(shape, wanted.out, model.length, wanted.licence or model.licence, model.made)
        with folders.replacing_folder(out) as unfinished:
            folders.write_folder(unfinished, shape, model.weights, model.vocabulary, card, dtype, model.length)
            model.weights.clear()  # not to hold two copies
            differences = verify_export(unfinished, shape, logits, special)
    remark = find_objective(shape).reading or warn_of_classifiers(shape)
    return Exported(wanted.out, count_parameters(list_weights(shape)), differences, model.left_out, remark)


def read_source(source: Path, average: int | None) -> Exportable:
    """Reads a model from a run or from a folder of transformers."""
    if not os.path.isdir(source):
        raise UserError(f"{source}: {absence(source, 'folder')}")
    return _read_transformers(source) if (source / folders.CONFIG).exists() else _read_run(source, average)


def _read_transformers(source: Path) -> Exportable:
    """Reads a folder of transformers. A pooler or next-sentence head without the other is left out, as are rows of the
    embeddings that belong to no piece."""
    shape, weights, missing = folders.read_folder(source)
    lacking, objective, left_out = sorted({name.partition(".")[0] for name in missing}), find_objective(shape), []
    if {*lacking} & {*objective.exported_heads(shape.change_learning(pairs=False))}:
        raise UserError(f"{source}: lacks {', '.join(lacking)}; only a model that {objective.learns} can be exported")
    if (surplus := shape.vocabulary - len(folders.read_pieces(source, shape, str(source)))) > 0:
        left_out.append(f"{surplus:,} rows of the embeddings, which belong to no piece")
        shape = replace(shape, vocabulary=shape.vocabulary - surplus)
        weights = cut_rows(shape, weights)
    if lacking:
        shape = shape.change_learning(pairs=False)
        weights, heads = select_heads(shape, weights)
        left_out += [f"{heads}, half of {objective.pairs_head}"] * bool(heads)
    licence, length = read_front_matter(source / folders.CARD, "license"), folders.read_length(source, shape)
    return Exportable(shape, weights, source, length, licence, left_out)


def select_heads(shape: Shape, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Selects the weights that an export of this shape has; returns the names of the heads that are left out too."""
    wanted = {weight.ours for weight in list_weights(shape)}
    heads = dict.fromkeys(name.partition(".")[0] for name in weights if name not in wanted)
    return {name: weight for name, weight in weights.items() if name in wanted}, " and ".join(heads)


def describe_training(run: RunRecord, shape: Shape) -> str:
    """Describes the training so far, as TOML for the model card, without settings of speed and safety."""
    state, recipe = run.state, run.recipe.as_dict()
    begun = recipe["phases"][: state.phase + (state.phase_step > 0)]
    for number, phase in enumerate(begun):
        del phase["micro_batch"]
        stored = run.data.length_for(phase["length"])
        phase |= {"cut_out_of": stored} if stored > phase["length"] else {}
        phase |= {"steps_done": state.phase_step} if number == state.phase else {}
        read = state.corpora[number] if number < len(state.corpora) else {}
        shares = {corpus: each["first"] / WHOLE for corpus, each in read.items()}
        phase |= {"shares": shares} if shares and "mix" not in phase else {}
    dropout = {name: recipe["model"][name] for name in DROPOUT}
    settings = run.recipe.objective.model_copy(update={"name": shape.learns.objective})
    used = configure_objective(settings).used_settings(shape)
    objective = {name: value for name, value in settings.as_dict().items() if name in used}
    top: dict[str, Any] = {name: recipe[name] for name in ("seed", "steps", "hours") if name in recipe}
    return toml_text({**top, "objective": objective, "model": dropout, "phases": begun})


def _read_run(source: Path, average: int | None) -> Exportable:
    """Reads a checkpoint of a run, or the average of its last ones."""
    steps: tuple[int, ...] = ()
    if average is None:
        saved, weights = load_checkpoint(source)
        scores = saved.run.scores
    else:
        saved = Saved.read(find_checkpoint(source))
        steps, weights = average_last(source, average)
        found = Average.read(source)
        scores = found.scores if found and found.steps == steps else None
    run, shape, state = saved.run, saved.record.shape, saved.run.state
    saved.read_vocabulary()  # checks it
    if state.trained_segments == 1:
        weights = repeat_segment(weights, shape)
    weights, unknown = select_heads(shape, weights)
    made = Provenance(
        run.data,
        describe_training(run, shape),
        scores,
        step=state.step,
        examples_seen=state.examples_seen,
        dtype=saved.record.made_by.dtype,
        optimizer=describe_settings(run.recipe.optimizer),
        scored_length=run.recipe.phases[scores.phase - 1].length if scores else None,
        segments=state.trained_segments,
        base=run.base,
        branch=run.branch,
        averaged=steps,
    )
    left_out = [f"{unknown}, of which transformers knows nothing"] * bool(unknown)
    length = min(state.trained_length or shape.positions, shape.positions)
    vocabulary = saved.folder.parent.parent / TOKENIZER
    return Exportable(shape, weights, vocabulary, length, run.recipe.card.licence, left_out, made)
