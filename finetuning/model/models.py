"""What `--model` names: a run, a checkpoint, any BERT folder of transformers, or a name on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.vocabulary.source import has_capitals
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.results import MODEL
from pretraining.checkpoint.models import FoundModel
from pretraining.huggingface.config import GENERIC
from pretraining.huggingface.folders import (
    CONFIG,
    WEIGHTS,
    files_of_sentences,
    read_encoder,
    read_fine_tuned,
    read_head,
)
from pretraining.huggingface.model_card import BaseSummary
from pretraining.huggingface.weights import TaskHead, count_segments, list_weights
from pretraining.model.shape import Shape
from pretraining.processes.errors import SharedError
from pretraining.processes.group import gather

PLACES = ("runs/*/export", "exported/*", "build/*/export", "build/*")
RUNS = "runs"
"""The folder for results where none is named."""
WORD = "embeddings.word.weight"


@dataclass(frozen=True)
class Model:
    """A model to fine-tune or to predict with, whose weights are read when they are asked for.

    Where ranks are connected, all of them ask together.
    """

    found: FoundModel
    """what it is called, where it is, and what is known of its training"""
    shape: Shape
    """its sizes, with a row of the embeddings for every piece and no more; heads of pre-training are not counted"""
    head: TaskHead | None
    """what it was fine-tuned for; None where for nothing"""
    notes: tuple[str, ...] = ()
    """lines for the user: doubts about the vocabulary, rows that belong to no piece"""

    @property
    def vocabulary(self) -> Vocabulary:
        """The pieces that text must be cut into."""
        return self.found.vocabulary

    def summary(self) -> BaseSummary:
        """What is told of it by a model that began with it, and what the folder for its results is called: a model that
        was fine-tuned here as its own beginning and the task, so that runs/mini/glue/sst2/model is mini-sst2."""
        found, folder = self.found.summary(), self.found.folder.resolve()
        if self.head is None or found.on_hub or folder.name != MODEL:
            return found
        task, out = folder.parents[:2]
        named = out.parent if out.parents[1].name == RUNS else out
        return replace(found, name=f"{named.name}-{task.name}")

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Those of the encoder, and of the pooler where it has one that was trained."""
        if not self.found.is_checkpoint:
            return self._cut(read_encoder(self.found.with_weights())[1])
        weights = self.found.read_checkpoint()
        wanted = {weight.ours for weight in list_weights(self.shape, "none")}
        if count_segments(weights) == 1 < self.shape.segments:  # no pairs, which alone train a pooler
            wanted -= {"pooler.weight", "pooler.bias"}
        return self._cut({name: weight for name, weight in weights.items() if name in wanted})

    @property
    def has_pooler(self) -> bool:
        """Whether [CLS] goes through a pooler that was trained."""
        return "pooler.weight" in self.weights

    def read_fine_tuned(self, wanted: TaskHead | None = None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Reads the weights with those of the head it was fine-tuned with, and gives lines for the user.

        The outputs are put in the order of the labels of the `wanted` head, which must be the same by their names.
        """
        head = self._fine_tuned_head()
        weights = self._cut(read_fine_tuned(self.found.with_weights())[2])
        return (weights, ()) if wanted is None else in_order_of(wanted, head, weights, self.found.name)

    def require_outputs_of(self, wanted: TaskHead) -> None:
        """Refuses, before any weights are read, a model that was not fine-tuned for what this head says."""
        find_order(wanted, self._fine_tuned_head(), self.found.name)

    def _fine_tuned_head(self) -> TaskHead:
        if self.head is None:
            raise UserError(f"{self.found.name}: not fine-tuned for a task: name a folder that fine-tuning has written")
        return self.head

    def _cut(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leaves out the rows of the embeddings that belong to no piece."""
        if self.shape.vocabulary == self.found.shape.vocabulary:
            return weights
        rows = torch.zeros(self.shape.padded_vocabulary, self.shape.hidden)
        rows[: self.shape.vocabulary] = weights[WORD][: self.shape.vocabulary]
        return {**weights, WORD: rows}


def find_model(name: str | None = None) -> Model:
    """Finds what `--model` names; the newest exported model where it names nothing. All ranks call it together."""
    found = FoundModel.open(name or str(newest_export()))
    shape = replace(found.shape.encoder, vocabulary=len(found.vocabulary))
    notes = doubts(found.name, found.vocabulary)
    if files := files_of_sentences(found.folder):
        notes.append(f"{found.name}: {', '.join(files)}, for vectors of sentences, are left out of what is written")
    head = None if found.is_checkpoint else read_head(found.folder)
    if spare := found.shape.vocabulary - shape.vocabulary:
        notes.append(f"{found.name}: {spare:,} rows of its embeddings that belong to no piece are left out")
    return Model(found, shape, head, tuple(notes))


def newest_export() -> Path:
    """The model for no task that was last exported in this folder; rank 0 looks, where ranks are connected."""
    newest = _newest_here()
    if dist.is_initialized():
        newest = gather(newest)[0]
    if newest is None:
        raise SharedError(
            f"--model: none is named, and there is no exported model here, in {', '.join(PLACES[:2])} or build/*\n"
            "name a folder of transformers, a run or a name on the Hugging Face hub: --model DIR\n"
            "or make one of a folder of text:\n"
            "    python data_prep/shard.py --docs FOLDER\n"
            "    python pretraining/train.py --recipe bert_mini --data data/FOLDER --out runs/NAME\n"
            "    python pretraining/export.py runs/NAME --out exported/NAME"
        )
    return newest


def _newest_here() -> Path | None:
    """The newest of the models in `PLACES`, by the time of their weights; what was fine-tuned is left out."""
    folders = {folder for pattern in PLACES for folder in Path().glob(pattern)}
    models = [
        folder
        for folder in folders
        if not folder.name.startswith(".") and all((folder / name).is_file() for name in (CONFIG, WEIGHTS))
    ]
    newest_first = sorted(models, key=lambda folder: ((folder / WEIGHTS).stat().st_mtime_ns, folder), reverse=True)
    return next((folder for folder in newest_first if read_head(folder) is None), None)


def doubts(name: str, vocabulary: Vocabulary) -> list[str]:
    """Says where a vocabulary and its casing do not look as if they belonged together."""
    capitals, last = has_capitals(vocabulary.pieces), Path(name).name.lower()
    if vocabulary.cased and not capitals:
        return [
            f"{name}: text keeps its capitals, but no piece has one, so that words with capitals are unknown: if the "
            "model was trained on text in lower case, write do_lower_case = true into its tokenizer_config.json"
        ]
    if capitals and not vocabulary.cased:
        return [
            f"{name}: text is put into lower case, but there are pieces with capitals, which it never matches: if the "
            "model was trained on text with case, write do_lower_case = false into its tokenizer_config.json"
        ]
    if "cased" in last and vocabulary.cased == ("uncased" in last):
        does = "keeps its case" if vocabulary.cased else "is put into lower case"
        return [f"{name}: text {does}, as its tokenizer_config.json says; its name says otherwise"]
    return []


def in_order_of(
    wanted: TaskHead, head: TaskHead, weights: Mapping[str, Tensor], name: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Puts the outputs of a fine-tuned model into the order of a task's labels, and gives lines for the user."""
    order, notes = find_order(wanted, head, name)
    if order is None:
        return dict(weights), notes
    return {**weights, **{f"head.{end}": weights[f"head.{end}"][order] for end in ("weight", "bias")}}, notes


def find_order(wanted: TaskHead, head: TaskHead, name: str) -> tuple[list[int] | None, tuple[str, ...]]:
    """The outputs of a fine-tuned model in the order of a task's labels, by their names; case does not matter.

    None where they are in it. Names that transformers gives where nobody has are taken in the order of the task, which
    is told.
    """
    if head.kind != wanted.kind:
        raise UserError(f"{name}: was fine-tuned for {head.kind}, but this task asks for {wanted.kind}")
    if not wanted.labels:
        return None, ()
    ours, theirs = ([label.casefold() for label in each.labels] for each in (wanted, head))
    lists = f"{name} has the labels {', '.join(head.labels)}, the task has {', '.join(wanted.labels)}"
    if sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours):
        return [theirs.index(label) for label in ours], ()
    if len(ours) == len(theirs) and all(GENERIC.fullmatch(label) for label in head.labels):
        return None, (f"{lists}: taken in this order",)
    raise UserError(f"{lists}: only those of the same names can be used")
