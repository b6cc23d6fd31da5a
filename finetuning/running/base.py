"""What a run begins with: its task, settings and folder, and the initial model of all runs, which `--model` names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.common.errors import SharedError, UserError
from data_prep.vocabulary.vocabulary import Vocabulary, has_capitals
from finetuning.inputs import Items
from finetuning.model.contrastive import VectorModel
from finetuning.model.features import LAST_FOUR, EncoderWeights, FeatureModel
from finetuning.model.heads import TaskModel
from finetuning.results import BASELINE, MODEL, RESULTS, Baseline, Begun
from finetuning.scale import ScoreScale
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel, cut_rows
from pretraining.huggingface import folders
from pretraining.huggingface.config import GENERIC
from pretraining.huggingface.folders import CONFIG, WEIGHTS, read_head
from pretraining.huggingface.model_card import BaseSummary
from pretraining.huggingface.pooling import Pooling
from pretraining.model.shape import HEAD, Sees, Shape
from pretraining.processes.group import gather, place
from pretraining.scoring.embedding import find_pooling

PLACES = ("runs/*/export", "exported/*", "build/*/export", "build/*")
RUNS = "runs"
"""The default folder of results."""
SAMPLED = 1024
"""Numbers of each weight that enter a checksum."""
UNKNOWN = Begun()


@dataclass(frozen=True)
class Run:
    """A run of a task, with its settings, its seed and its folder."""

    task: Task
    settings: FineTuning
    folder: Path
    begun: Begun = UNKNOWN
    """The settings, model and data that determine its outcome."""
    trains: bool = True
    """Whether it trains a model, rather than scoring one as it is."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_done(self) -> bool:
        return (self.folder / RESULTS).exists()

    def find_baseline(self) -> Baseline | None:
        """Reads the baseline of its task; None if there is none, or one of other data, or the settings leave it out."""
        found = None if self.settings.no_baseline else Baseline.read(self.folder.parent / BASELINE)
        return found if found and found.data == self.begun.data else None


@dataclass(frozen=True)
class Base:
    """An initial model: its weights, or from scratch fresh ones of the same sizes."""

    model: StoredModel
    from_scratch: bool = False
    backward: StoredModel | None = None
    """A second, right-to-left model whose frozen features are concatenated with those of the first."""
    kept: dict[str, Mapping[str, Items]] = field(default_factory=dict, compare=False, kw_only=True)
    """The items of the task at work with their frozen activations, by checksum of the encoders, for its later runs."""

    @property
    def models(self) -> tuple[StoredModel, ...]:
        return (self.model,) if self.backward is None else (self.model, self.backward)

    def require_fit(self, settings: FineTuning) -> None:
        """Refuses settings that the model cannot fulfil, and a second model that does not match it."""
        layers, model = settings.features.layers, self.model
        for each in self.models:
            if settings.length > (most := each.shape.positions):
                raise UserError(f"length = {settings.length}: {each.name} has {most} positions; take --length {most}")
            if layers.endswith("last-four") and each.shape.layers < LAST_FOUR:
                few = f"{each.name} has {each.shape.layers} layers"
                raise UserError(f"features.layers = {layers}: {few}; take last or weighted-all")
        if self.backward is not None:
            flag, has, needs = f"--backward {self.backward.name}", self.backward.shape.layers, model.shape.layers
            if not layers:
                raise UserError(f"{flag}: stands beside another model as frozen features; add --features.layers mix")
            if model.vocabulary.sha256 != self.backward.vocabulary.sha256:
                other = f"has another vocabulary than {model.name}"
                raise UserError(f"{flag}: {other}; name two models that were trained on the same shards")
            if has != needs:
                raise UserError(f"{flag}: has {has} layers, {model.name} has {needs}; name two of as many")
        if settings.language_loss and model.shape.learns.sees != "before":
            sees = f"a piece of {model.name} sees those after it, which are to be predicted"
            raise UserError(f"language_loss: {sees}; name a model that was pre-trained with --objective.name ltr")
        if settings.language_loss and not self.from_scratch and not model.language_head:
            cure = "name the run or the export of its pre-training"
            raise UserError(f"language_loss: {model.name} has no language head; {cure}")

    def require_vectors(self, settings: FineTuning) -> None:
        """Refuses settings with which the model cannot learn vectors of texts."""
        for name in ("features.layers", "bilstm.hidden", "language_loss"):
            section, _, key = name.rpartition(".")
            if getattr(getattr(settings, section) if section else settings, key):
                raise UserError(f'{name}: kind = "embeddings" trains the vectors of the model itself; leave it out')
        if 1 in (settings.batch, *settings.search.batches):
            raise UserError("batch = 1: one row has no negatives; take --batch 64, and --micro_batch 1 to save memory")
        whole = self.model.shape.hidden
        if wide := [width for width in settings.embeddings.widths if width > whole]:
            raise UserError(f"embeddings.widths: {wide[0]}: a vector of {self.model.name} has {whole} values")

    def list_doubts(self, settings: FineTuning, vectors: bool = False) -> Iterator[str]:
        """Lists doubts for the user: sequences longer than in pre-training, and `vectors` compared in another way."""
        name, longest = self.model.name, self.model.trained
        if vectors and self.pooling.by_dot:
            yield f"{name}: its vectors were compared by dot product; here they are trained and scored by cosine"
        if settings.length > longest:
            known = f"{name}: was trained on texts of {longest} pieces at most"
            yield f"{known}; longer ones, up to --length {settings.length}, have positions that it knows nothing of"

    def build_model(
        self, head: TaskHead, settings: FineTuning, scale: ScoreScale | None = None, fresh: bool = True
    ) -> TaskModel | FeatureModel | VectorModel:
        """Builds the model of a task; a `fresh` one takes the initial weights and draws missing ones by the seed."""
        given = {"dropout": settings.dropout.hidden, "attention_dropout": settings.dropout.attention}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        shape = replace(self.model.shape, **values)
        if settings.features.layers:
            return self._build_on_features(head, shape, settings, scale)
        head = self.fit_head(head)
        recompute = settings.compute.checkpoint_activations
        model: TaskModel | VectorModel
        if head.kind == "embeddings":
            model = VectorModel(shape, self.choose_pooling(settings), recompute)
        else:
            model = TaskModel(shape, head, recompute, scale, settings.bilstm, settings.language_loss > 0)
        model.initialize(settings.seed)
        if fresh and not self.from_scratch:
            known, own = dict(self.model.encoder), model.state_dict()
            if settings.language_loss:
                known |= self.model.language_head
            model.load_state_dict({**own, **{name: weight for name, weight in known.items() if name in own}})
        return model

    def fit_head(self, head: TaskHead) -> TaskHead:
        """Returns the head of a task with the pooling of this model's architecture."""
        averages = head.has_pooler and find_architecture(self.model.shape.architecture).pooling_name != ""
        return replace(head, averages=averages)

    def _build_on_features(
        self, head: TaskHead, shape: Shape, settings: FineTuning, scale: ScoreScale | None
    ) -> FeatureModel:
        """Builds a BiLSTM on frozen encoders; the weights of an encoder that are missing are drawn by the seed."""
        encoders = [EncoderWeights(shape, self._read_encoder(self.model))]
        if self.backward is not None:
            encoders.append(EncoderWeights(self.backward.shape, self._read_encoder(self.backward)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            known = [encoder.fill_missing(settings.seed + number) for number, encoder in enumerate(encoders)]
            model = FeatureModel(known, head, settings.features, scale)
            nn.init.normal_(model.head.weight, std=HEAD.initial_range)
        return model

    @cached_property
    def pooling(self) -> Pooling:
        """How the model makes the vector of a text."""
        return find_pooling(self.model)

    def choose_pooling(self, settings: FineTuning) -> Pooling:
        """Chooses how vectors of texts are made: as the settings say, otherwise as the folder of the model does."""
        return Pooling(settings.embeddings.pooling or self.pooling.how, normalizes=True)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identifies the initial weights, in JSON: retraining under the same name changes it."""
        own = {"from_scratch": self.from_scratch, "checksum": self._checksum(self.model)}
        own |= {"sees": self.model.sees} if self.model.sees else {}
        return own if self.backward is None else {**own, "backward": self._checksum(self.backward)}

    def _checksum(self, model: StoredModel) -> str:
        return compute_checksum(model.vocabulary, model.shape, self._read_encoder(model))

    def _read_encoder(self, model: StoredModel) -> Mapping[str, Tensor]:
        return {} if self.from_scratch else model.encoder


def compute_checksum(vocabulary: Vocabulary, shape: Shape, weights: Mapping[str, Tensor]) -> str:
    """Computes a checksum of a model from a sample of each weight."""
    values = {name: value for name, value in shape.values().items() if name != "initializer_range"}
    seen = hashlib.sha256(f"{vocabulary.sha256} {values}".encode())
    for name, weight in sorted(weights.items()):
        seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
    return seen.hexdigest()[:16]


def find_model(name: str | None = None, sees: Sees | None = None) -> StoredModel:
    """Finds the model that `--model` names; by default the newest exported one. All ranks call it together. `sees`: the
    way in which it reads."""
    return StoredModel.open(name or str(find_newest_export()), sees=sees)


def list_casing_doubts(model: StoredModel) -> list[str]:
    """Lists signs that the vocabulary of a model and its casing do not belong together."""
    cased = model.vocabulary.cased
    if cased == has_capitals(model.vocabulary.pieces):
        return []
    doubt = f"text is {'not ' * cased}put into lower case, and the pieces suggest otherwise"
    cure = f"write do_lower_case = {str(cased).lower()} into its tokenizer_config.json"
    return [f"{model.name}: {doubt}; unless the model was trained so, {cure}"]


def summarize_model(model: StoredModel) -> BaseSummary:
    """Summarizes a model for the card of one that starts from it; its name also names the folder of results. A model
    that was fine-tuned here is named after its base and task: runs/mini/glue/sst2/model is mini-sst2."""
    found, folder = model.summary(), model.folder.resolve()
    if model.head is None or model.on_hub or folder.name != MODEL:
        return found
    task, out = folder.parent, folder.parent.parent
    named = out.parent if out.parent.parent.name == RUNS else out
    return replace(found, name=f"{named.name}-{task.name}") if named.name else found


def read_fine_tuned(model: StoredModel, wanted: TaskHead) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Reads the weights of a fine-tuned model, with its outputs in the order of the labels of the `wanted` head, which
    must have the same names; returns notes for the user, too."""
    order, notes = find_order(wanted, model)
    weights = cut_rows(model.shape, folders.read_fine_tuned(model.fetch_weights())[2])
    if order is not None:
        weights |= {f"head.{end}": weights[f"head.{end}"][order] for end in ("weight", "bias")}
    return weights, notes


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


def find_order(wanted: TaskHead, model: StoredModel) -> tuple[list[int] | None, tuple[str, ...]]:
    """Finds the order of a fine-tuned model's outputs that matches a task's labels by name, ignoring case.

    None for a head without labels, and for generic names of transformers (LABEL_0), which are taken in the task's
    order, with a note.
    """
    head, name = model.head, model.name
    if head is None:
        raise UserError(f"{name}: not fine-tuned for a task: name a folder that fine-tuning has written")
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
