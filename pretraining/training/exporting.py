"""Exports a checkpoint as a folder of transformers, which is read back and compared before it takes its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import replace as change
from pathlib import Path
from typing import Any

import torch
from pydantic_core import PydanticCustomError
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
from pretraining.config.settings import check_licence
from pretraining.huggingface import folders
from pretraining.huggingface.model_card import Provenance, make_model_card, read_front_matter, warn_of_classifiers
from pretraining.huggingface.verify import compute_probe, verify_export
from pretraining.huggingface.weights import list_weights, repeat_segment
from pretraining.model.shape import DROPOUT, Sees, Shape
from pretraining.objectives.declaration import choose_way, configure_objective, find_objective
from pretraining.optimizers.declaration import describe_settings


@dataclass(frozen=True)
class Exported:
    """The result of an export, for its last line."""

    folder: Path
    parameters: int
    difference: float
    """largest difference between logits of the source and of the exported model"""
    readers: tuple[str, ...]
    """libraries that read it back"""
    left_out: str = ""
    """heads and files of the source that were not written, and why"""
    remark: str = ""
    """how to read its logits if that is unusual, or a use that fails in transformers; empty if there is neither"""
    warning: str = ""
    """a doubt about the licence; empty where there is none"""

    def __str__(self) -> str:
        readers = " and ".join(self.readers)
        agree = f"to {self.difference:.1g}" if self.difference else "exactly"
        left_out = f"; left out: {self.left_out}" * bool(self.left_out)
        return (
            f"{self.folder}: exported {self.parameters:,} parameters; logits read back by {readers} agree {agree}"
            f"{left_out}{f'. {self.remark}' * bool(self.remark)}"
        )


@dataclass(frozen=True)
class Exportable:
    """A model to export, and how it was made."""

    shape: Shape
    weights: Mapping[str, Tensor]
    vocabulary: Path
    """folder of its vocabulary"""
    length: int
    """longest text that it was trained on, or the limit of its tokenizer"""
    licence: str | None = None
    """licence in the recipe or the card, if any"""
    left_out: str = ""
    """heads and files that are not exported, and why"""
    made: Provenance | None = None
    """how the weights were trained, if known"""

    def read_as(self, shape: Shape) -> Exportable:
        """Returns the model with this direction of attention, without the heads that do not go with it."""
        weights, heads = select_heads(shape, self.weights)
        left_out = [self.left_out] * bool(self.left_out) + [f"{heads}, which read both ways"] * bool(heads)
        return change(self, shape=shape, weights=weights, left_out="; ".join(left_out))


def export(
    source: Path,
    out: Path,
    checkpoint: str | None = None,
    vocabulary: Path | None = None,
    dtype: torch.dtype = torch.float32,
    licence: str | None = None,
    replace: bool = False,
    average: int | None = None,
    sees: Sees | None = None,
) -> Exported:
    """Writes a run's checkpoint, the last one by default, as a folder of transformers; one process does it.

    `average`: number of last checkpoints whose weights are averaged instead. `licence` goes into the model card
    (default: the recipe's). `replace` permits replacing another model in `out`. `sees`: the way in which it reads
    (default: that of its objective).
    """
    _require_licence(licence)
    is_own = out.resolve() in ((source / name).resolve() for name in (EXPORT, AVERAGED))  # written by the run itself
    read = [source] if vocabulary is None else [source, vocabulary]
    results: list[tuple[str, float]] = []
    with nullcontext() if is_own else making([out], "export.py", read, replace):
        model = read_source(source, checkpoint, average, vocabulary)
        model = model.read_as(choose_way(model.shape, sees, str(source)))
        vocabulary = vocabulary or model.vocabulary
        pieces = read_vocabulary(vocabulary)
        if model.made and model.made.data.vocabulary != pieces.sha256:
            raise UserError(
                f"{vocabulary}: not the vocabulary that the model was trained with; name its folder: --vocabulary"
            )
        weights, model = dict(model.weights), change(model, weights={})
        for name in weights:
            weights[name] = weights[name].to("cpu", dtype).float()  # as read back
        shape = find_architecture(model.shape.architecture).fit_vocabulary(model.shape, pieces.special)
        wanted = compute_probe(shape, weights, pieces.special)

        def check(folder: Path) -> None:
            weights.clear()  # not to hold two copies
            results.extend(verify_export(folder, shape, wanted, pieces.special))

        card = make_model_card(shape, out, model.length, licence or model.licence, model.made)
        folders.write_folder(out, shape, weights, vocabulary, card, dtype, model.length, check)
    readers, differences = zip(*results, strict=True)
    warning = _warn_of_licence(model, licence)
    remark = find_objective(shape).reading or warn_of_classifiers(shape)
    parameters = count_parameters(list_weights(shape))
    return Exported(out, parameters, max(differences), readers, model.left_out, remark, warning)


def _require_licence(licence: str | None) -> None:
    """Raises UserError for a licence that the hub would not read."""
    try:
        if licence is not None:
            check_licence(licence)
    except PydanticCustomError as error:
        raise UserError(f"--licence {licence}: {error}") from None


def _warn_of_licence(model: Exportable, licence: str | None) -> str:
    """Returns a warning if the card names another licence than that of the model or of its base model."""
    base = model.made.base if model.made else None
    theirs = base.licence if base else model.licence
    ours, whose = licence or model.licence, f"{base}, with which it began," if base else "the model that was exported"
    if ours is None or theirs is None or ours == theirs:
        return ""
    return f"the licence of this model is {ours}, and that of {whose} is {theirs}: see whether it permits that"


def read_source(
    source: Path, checkpoint: str | None, average: int | None = None, vocabulary: Path | None = None
) -> Exportable:
    """Reads a model from a run or from a folder of transformers, whose vocabulary may lie in another one."""
    if not os.path.isdir(source):
        raise UserError(f"{source}: {absence(source, 'folder')}")
    given = {"checkpoint": checkpoint, "average": average}
    options = [f"--{name} {value}" for name, value in given.items() if value is not None]
    if not (source / folders.CONFIG).exists():
        if len(options) > 1:
            raise UserError(f"{' '.join(options)}: give one of them; an average is that of the last checkpoints")
        return _read_run(source, checkpoint, average)
    if options:
        raise UserError(f"{options[0]}: {source} is a folder of transformers, which has no checkpoints")
    return _read_transformers(source, vocabulary or source)


def _read_transformers(source: Path, vocabulary: Path) -> Exportable:
    """Reads a folder of transformers. A pooler or next-sentence head without the other is left out, as are rows of the
    embeddings that belong to no piece."""
    shape, weights, missing = folders.read_folder(source)
    lacking = list(dict.fromkeys(name.partition(".")[0] for name in missing))
    objective = find_objective(shape)
    unpaired = shape.change_learning(pairs=False)
    if {*lacking} & {*objective.exported_heads(unpaired)}:
        raise UserError(f"{source}: lacks {', '.join(lacking)}; only a model that {objective.learns} can be exported")
    left_out = []
    if (surplus := shape.vocabulary - len(folders.read_pieces(vocabulary, shape, str(source)))) > 0:
        left_out.append(f"{surplus:,} rows of the embeddings, which belong to no piece")
        shape, unpaired = (change(each, vocabulary=each.vocabulary - surplus) for each in (shape, unpaired))
        weights = cut_rows(shape, weights)
    if lacking:
        shape = unpaired
        weights, heads = select_heads(shape, weights)
        left_out += [f"{heads}, half of {objective.pairs_head}"] * bool(heads)
    if files := folders.list_sentence_files(source):
        left_out.append(f"{', '.join(files)}, for vectors of sentences")
    licence, length = read_front_matter(source / folders.CARD, "license"), folders.read_length(source, shape)
    return Exportable(shape, weights, source, length, licence, "; ".join(left_out))


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
    dropout = {name: recipe["model"][name] for name in DROPOUT}
    settings = run.recipe.objective.model_copy(update={"name": shape.learns.objective})
    used = configure_objective(settings).used_settings(shape)
    objective = {name: value for name, value in settings.as_dict().items() if name in used}
    top: dict[str, Any] = {name: recipe[name] for name in ("seed", "steps", "hours") if name in recipe}
    return toml_text({**top, "objective": objective, "model": dropout, "phases": begun})


def _read_run(source: Path, checkpoint: str | None, average: int | None) -> Exportable:
    steps: tuple[int, ...] = ()
    if average is None:
        saved, weights = load_checkpoint(source, checkpoint)
    else:
        saved = Saved.read(find_checkpoint(source))
        steps, weights = average_last(source, average)
    run, shape = saved.run, saved.record.shape
    state, scores = run.state, run.scores
    if average is not None:
        found = Average.read(source)
        scores = found.scores if found and found.steps == steps else None
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
    left_out = f"{unknown}, of which transformers knows nothing" * bool(unknown)
    length = min(state.trained_length or shape.positions, shape.positions)
    vocabulary = saved.folder.parent.parent / TOKENIZER
    return Exportable(shape, weights, vocabulary, length, run.recipe.card.licence, left_out, made)
