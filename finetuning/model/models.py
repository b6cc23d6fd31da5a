"""Finds the model that `--model` names, reports doubts about it, and reads its fine-tuned weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from data_prep.common.errors import SharedError, UserError
from data_prep.vocabulary.vocabulary import Vocabulary, has_capitals
from finetuning.results import MODEL
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.huggingface import folders
from pretraining.huggingface.config import GENERIC
from pretraining.huggingface.folders import CONFIG, WEIGHTS, list_sentence_files, read_head
from pretraining.huggingface.model_card import BaseSummary
from pretraining.model.shape import Sees
from pretraining.processes.group import gather, place

PLACES = ("runs/*/export", "exported/*", "build/*/export", "build/*")
RUNS = "runs"
"""The default folder of results."""


def find_model(name: str | None = None, sees: Sees | None = None) -> StoredModel:
    """Finds the model that `--model` names; by default the newest exported one. All ranks call it together. `sees`: the
    way in which it reads."""
    return StoredModel.open(name or str(find_newest_export()), sees=sees)


def list_notes(model: StoredModel) -> list[str]:
    """Lists notes for the user: doubts about the vocabulary, and files and rows that are left out."""
    notes = list_vocabulary_doubts(model.name, model.vocabulary)
    if files := list_sentence_files(model.folder):
        notes.append(f"{model.name}: {', '.join(files)}, for vectors of sentences, are left out of what is written")
    if spare := model.rows - model.shape.vocabulary:
        notes.append(f"{model.name}: {spare:,} rows of its embeddings that belong to no piece are left out")
    return notes


def summarize_model(model: StoredModel) -> BaseSummary:
    """Summarizes a model for the card of one that starts from it; its name also names the folder of results. A model
    that was fine-tuned here is named after its base and task: runs/mini/glue/sst2/model is mini-sst2."""
    found, folder = model.summary(), model.folder.resolve()
    if model.head is None or model.on_hub or folder.name != MODEL:
        return found
    task, out = folder.parent, folder.parent.parent
    named = out.parent if out.parent.parent.name == RUNS else out
    return replace(found, name=f"{named.name}-{task.name}") if named.name else found


def read_fine_tuned(model: StoredModel, wanted: TaskHead | None = None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Reads the weights of a fine-tuned model with its head, and returns notes for the user.

    Outputs are reordered to the labels of the `wanted` head, which must have the same names.
    """
    head = get_fine_tuned_head(model)
    weights = model.cut_embeddings(folders.read_fine_tuned(model.fetch_weights())[2])
    return (weights, ()) if wanted is None else order_outputs(wanted, head, weights, model.name)


def get_fine_tuned_head(model: StoredModel) -> TaskHead:
    """Returns the head that a model was fine-tuned with; UserError where it has none."""
    if model.head is None:
        raise UserError(f"{model.name}: not fine-tuned for a task: name a folder that fine-tuning has written")
    return model.head


def find_newest_export() -> Path:
    """Finds the newest model in `PLACES` without a task head, by the time of its weights. Rank 0 looks, if ranks are
    connected."""
    newest: Path | None = None
    if place()[0] == 0:
        found = {path.parent for pattern in PLACES for path in Path().glob(f"{pattern}/{WEIGHTS}")}
        whole = [each for each in found if (each / CONFIG).is_file() and not each.name.startswith(".")]
        newest_first = sorted(whole, key=lambda folder: ((folder / WEIGHTS).stat().st_mtime_ns, folder), reverse=True)
        newest = next((folder for folder in newest_first if read_head(folder) is None), None)
    name = gather(None if newest is None else str(newest))[0]
    if name is None:
        raise SharedError(
            f"--model: none is named, and there is no exported model here, in {', '.join(PLACES[:2])} or build/*\n"
            "name a folder of transformers, a run or a name on the Hugging Face hub: --model DIR\n"
            "or make one of a folder of text:\n"
            "    python data_prep/shard.py --docs FOLDER\n"
            "    python pretraining/train.py --recipe bert_mini --data data/FOLDER --out runs/NAME\n"
            "    python pretraining/export.py runs/NAME --out exported/NAME"
        )
    return Path(name)


def list_vocabulary_doubts(name: str, vocabulary: Vocabulary) -> list[str]:
    """Lists signs that a vocabulary and its casing do not belong together."""
    capitals, last = has_capitals(vocabulary.pieces), Path(name).name.lower()
    if vocabulary.cased != capitals:
        doubt = "text is put into lower case, but there are pieces with capitals, which it never matches"
        trained, switch = "with case", "false"
        if vocabulary.cased:
            doubt = "text keeps its capitals, but no piece has one, so that words with capitals are unknown"
            trained, switch = "in lower case", "true"
        cure = f"write do_lower_case = {switch} into its tokenizer_config.json"
        return [f"{name}: {doubt}: if the model was trained on text {trained}, {cure}"]
    if "cased" in last and vocabulary.cased == ("uncased" in last):
        does = "keeps its case" if vocabulary.cased else "is put into lower case"
        return [f"{name}: text {does}, as its tokenizer_config.json says; its name says otherwise"]
    return []


def order_outputs(
    wanted: TaskHead, head: TaskHead, weights: Mapping[str, Tensor], name: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Reorders the outputs of a fine-tuned model to a task's labels, and returns notes for the user."""
    order, notes = find_order(wanted, head, name)
    if order is None:
        return dict(weights), notes
    return {**weights, **{f"head.{end}": weights[f"head.{end}"][order] for end in ("weight", "bias")}}, notes


def find_order(wanted: TaskHead, head: TaskHead, name: str) -> tuple[list[int] | None, tuple[str, ...]]:
    """Finds the order of a fine-tuned model's outputs that matches a task's labels by name, ignoring case.

    None for a head without labels, and for generic names of transformers (LABEL_0), which are taken in the task's
    order, with a note.
    """
    if head.kind != wanted.kind:
        raise UserError(f"{name}: was fine-tuned for {head.kind}, but this task asks for {wanted.kind}")
    if not wanted.labels:
        return None, ()
    ours, theirs = (list(each.labels) for each in (wanted, head))
    if sorted(ours) != sorted(theirs):
        ours, theirs = ([label.casefold() for label in each] for each in (ours, theirs))
    lists = f"{name} has the labels {', '.join(head.labels)}, the task has {', '.join(wanted.labels)}"
    if sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours):
        return [theirs.index(label) for label in ours], ()
    if len(ours) == len(theirs) and all(GENERIC.fullmatch(label) for label in head.labels):
        return None, (f"{lists}: taken in this order",)
    raise UserError(f"{lists}: only those of the same names can be used")
