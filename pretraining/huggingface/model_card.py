"""Makes model cards: the README.md of an exported or fine-tuned model, with sizes, data, recipe and scores.

Settings of speed, safety and logging are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jinja2
from huggingface_hub import ModelCardData, metadata_load

from data_prep.common.errors import quote
from data_prep.common.toml_text import toml_text
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import Kind, TaskHead, count_parameters
from pretraining.data.corpora import Corpora
from pretraining.huggingface.config import name_own_type
from pretraining.huggingface.weights import find_auto_class, is_theirs, list_weights
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import MINIMAL_PAIRS, RETRIEVAL, find_objective
from pretraining.reporting.records import EvaluationRecord

SETTINGS = ("language", "cased", "duplicates", "masking", "mask_rate", "pairs", "weight")
"""The settings of the data that a card contains."""
SIMILARITY = "sentence-similarity"
USES: dict[Kind, tuple[str, str]] = {
    "classes": ("text-classification", "one label of a text or a pair"),
    "labels": ("text-classification", "any of several labels of a text or a pair"),
    "score": ("text-classification", "a number for a text or a pair"),
    "choice": ("multiple-choice", "which of several texts goes on best"),
    "spans": ("question-answering", "where in a text the answer to a question is"),
    "tags": ("token-classification", "a tag for every word"),
    "embeddings": (SIMILARITY, "vectors that are close for texts that belong together"),
}
"""The use of each kind of head on the hub, and its output."""
HELD_OUT = ", held out"
"""Suffix of the names of held-out examples."""


@dataclass(frozen=True)
class DataSummary:
    """Summary of the shards that a model was trained on, stored with checkpoints."""

    sources: Mapping[str, int]
    """Number of documents of each source of the text."""
    pieces: int
    """Pieces of the whole text."""
    examples: Mapping[str, int]
    """Number of examples of each length, and of held-out ones."""
    settings: Mapping[str, Any]
    """The values of `SETTINGS`; None: not given."""
    vocabulary: str
    """SHA-256 of the vocabulary."""
    fingerprint: str
    """Identifies the content of the shards: equal for the same text and settings."""

    corpora: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sources, pieces and fingerprint of each corpus with a name."""

    @classmethod
    def from_corpora(cls, corpora: Corpora) -> DataSummary:
        """Summarises shards by their manifests; of settings that differ between corpora, only the language is kept."""
        examples, sources, by_corpus, languages = dict[str, int](), dict[str, int](), {}, dict[str, str]()
        settings: dict[str, list[Any]] = {name: [] for name in SETTINGS}
        for part in corpora.parts:
            own = part.manifest.corpus
            by_corpus[part.name] = {
                "sources": own.documents_by_source,
                "pieces": own.pieces,
                "fingerprint": part.manifest.fingerprint,
            }
            for source, count in own.documents_by_source.items():
                sources[source] = sources.get(source, 0) + count
            for shards in part.manifest.figures:
                name = str(shards.length) + (HELD_OUT if shards.validation else "")
                examples[name] = examples.get(name, 0) + shards.examples
            for name, values in settings.items():
                values.append(getattr(part.manifest.settings, name, None))
            language = part.manifest.settings.language or {}
            languages |= {part.name: language} if isinstance(language, str) else language
        common = {name: each[0] for name, each in settings.items() if each[0] != {} and each == each[:1] * len(each)}
        return cls(
            sources=sources,
            pieces=sum(part.manifest.corpus.pieces for part in corpora.parts),
            examples=examples,
            settings={**({"language": languages} if languages else {}), **common},
            vocabulary=corpora.common.vocabulary.sha256,
            fingerprint=corpora.fingerprint,
            corpora=by_corpus if corpora.is_named else {},
        )

    def as_json(self) -> dict[str, Any]:
        """Converts the summary to JSON, without corpora where none has a name."""
        return {name: value for name, value in asdict(self).items() if name != "corpora" or value}

    def length_for(self, length: int) -> int:
        """Finds the length of the stored examples that a phase of this length reads."""
        stored = {int(name.removesuffix(HELD_OUT)) for name in self.examples}
        return min((longer for longer in stored if longer >= length), default=length)


@dataclass(frozen=True)
class BaseSummary:
    """Summary of the base model of a run, stored with checkpoints."""

    name: str
    """Name on the hub, or of its folder or run."""
    on_hub: bool
    """Whether it is a name on the Hugging Face hub."""
    from_hub: str | None = None
    """The model on the hub that it was made from, if known."""
    licence: str | None = None
    """Its licence, if its card or recipe names one."""
    added: int = 0
    """Number of pieces that the new vocabulary has beyond those of this model."""
    some_added: Sequence[str] = ()
    """The first of them."""

    @property
    def hub_model(self) -> str | None:
        """The model on the hub that the run goes back to; None if unknown."""
        return self.name if self.on_hub else self.from_hub

    def __str__(self) -> str:
        """Its name; of a folder, without the path on this machine."""
        return self.name if self.on_hub else Path(self.name).resolve().name


@dataclass(frozen=True)
class BranchSummary:
    """The place where a run branched off from another, stored with checkpoints."""

    run: str
    """Name of the folder of the other run."""
    step: int
    """Optimizer steps that were done there."""

    def __str__(self) -> str:
        return f"{self.run} after step {self.step:,}"


@dataclass(frozen=True)
class Provenance:
    """How the weights of a model were trained."""

    data: DataSummary
    recipe: str
    """Settings of the training, as TOML."""
    scores: EvaluationRecord | None
    """The latest validation."""
    step: int
    """Optimizer steps after which the weights were taken."""
    examples_seen: int
    """Examples of all steps."""
    dtype: str
    """The precision of the computation: bf16, fp16 or fp32."""
    optimizer: str
    """The optimizer in one line."""
    scored_length: int | None = None
    """Length of the examples of the latest validation."""
    segments: int = 2
    """Number of trained segments; all others have the embedding of the first."""
    base: BaseSummary | None = None
    """The base model; None if weights were drawn at random."""
    branch: BranchSummary | None = None
    """Where the run branched off from another; None if it did not."""
    averaged: Sequence[int] = ()
    """Steps of the checkpoints whose weights were averaged; empty for the weights of one."""


@dataclass(frozen=True)
class TaskProvenance:
    """How a fine-tuned model was made."""

    task: str
    """The name of the task."""
    base: BaseSummary
    """The model that was fine-tuned."""
    pretrained: bool = True
    """Whether its weights were used, or only its sizes and vocabulary."""
    items: Mapping[str, int] = field(default_factory=dict)
    """Items of each split: train, dev."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The scores of each split that was scored, as fractions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters by their names: learning rate, batch, epochs, seed."""
    baseline: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """The scores of a cheaper method, by its name."""


def make_model_card(shape: Shape, folder: Path, length: int, licence: str | None, provenance: Provenance | None) -> str:
    """Makes the card of a model in a folder, without its provenance if unknown.

    `length`: longest text that it was trained on, or the limit of its tokenizer.
    """
    objective, theirs, made = find_objective(shape), is_theirs(shape), provenance
    base, settings = (made.base, made.data.settings) if made else (None, {})
    facts = {"longest text it was trained on" if made else "longest text": f"{length:,} pieces"}
    if base:
        facts[f"licence of {base}, with which it began"] = base.licence or "not known"
    remarks = [objective.loading_remark(shape), warn_of_classifiers(shape)] if theirs else []
    known = {name: value for name, value in settings.items() if value is not None}
    return _render(
        "model_card.md.jinja",
        *(shape, folder, length, theirs),
        front=_write_front(shape, objective.tag, licence, base, theirs, settings.get("language")),
        facts=_list_facts(shape, count_parameters(list_weights(shape)), licence, facts),
        loaded_by=objective.auto_class(shape),
        vectors=False,
        command=None if theirs else "run_task.py TASK.toml --model",
        remarks=list(filter(None, remarks)),
        objective=objective,
        figures=(*objective.figures, MINIMAL_PAIRS, RETRIEVAL),
        base=base,
        made=made,
        data={**made.data.as_json(), "settings": known} if made else {},
    )


def make_task_card(
    shape: Shape, head: TaskHead, folder: Path, length: int, made: TaskProvenance, widths: Sequence[int] = ()
) -> str:
    """Makes the card of a fine-tuned model in a folder; `length`: longest sequence in pieces; `widths`: how many
    first values of its vectors are of use alone."""
    use, says = USES[head.kind]
    theirs, parameters = is_theirs(shape, head), count_parameters(list_weights(shape, head))
    labels = {"labels": ", ".join(head.labels)} if head.labels else {}
    tables = {"Data": {"items": made.items}, "Training": made.settings, "Scores": _round_scores(made.scores)}
    tables |= {f"Baseline: {how}": _round_scores(found) for how, found in made.baseline.items()}
    return _render(
        "task_card.md.jinja",
        *(shape, folder, length, theirs),
        front=_write_front(shape, use, None, made.base if made.pretrained else None, theirs),
        facts=_list_facts(shape, parameters, None, {"longest sequence": f"{length:,} pieces", **labels}),
        loaded_by=find_auto_class(shape, head),
        vectors=head.kind == "embeddings",
        widths=widths,
        command="predict.py",
        says=says,
        made=made,
        tables=tables,
    )


def _round_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {split: {name: round(value, 4) for name, value in table.items()} for split, table in scores.items()}


def warn_of_classifiers(shape: Shape) -> str:
    """Returns a warning if a classifier of transformers cannot learn on top of this model; otherwise empty."""
    if shape.learns.sees != "before" or not is_theirs(shape):
        return ""
    return (
        "A classifier of transformers on top, such as `AutoModelForSequenceClassification`, reads `[CLS]`, which sees "
        "itself alone: all texts are the same to it. Fine-tune with Cloze, or read the last piece."
    )


def read_front_matter(card: Path, key: Literal["base_model", "license"]) -> str | None:
    """Reads the model on the hub that a model was made from, or its licence, from its card; None where the card names
    none, or several."""
    try:
        value = (metadata_load(card) or {}).get(key) if card.is_file() else None
    except Exception:  # any error of YAML in a foreign card: nothing depends on it
        return None
    return value if isinstance(value, str) else None


def _list_facts(shape: Shape, parameters: int, licence: str | None, more: Mapping[str, str]) -> dict[str, Any]:
    """Lists the facts of the table at the top: sizes and licence."""
    sizes = {name: value for name, value in shape.values().items() if type(value) is int}
    return {"parameters": parameters, **sizes, "licence": licence or "not specified", **more}


def _write_front(
    shape: Shape, use: str, licence: str | None, base: BaseSummary | None, theirs: bool, language: Any = None
) -> str:
    """Makes the YAML for the hub: use, licence and base model, and the library if transformers loads the model."""
    kind = find_architecture(shape.architecture)
    content = ModelCardData(
        library_name=("sentence-transformers" if use == SIMILARITY else "transformers") if theirs else None,
        pipeline_tag=use if theirs else None,
        tags=[kind.model_type or shape.architecture, use],
        license=licence,
        language=sorted(set(language.values())) if isinstance(language, dict) else language,  # one for each source
        base_model=base.hub_model if base else None,
    )
    return str(content.to_yaml())


def _render(template: str, shape: Shape, folder: Path, length: int, theirs: bool, **parts: Any) -> str:
    """Renders a template of `cards/`. Of an absolute folder only the name appears."""
    title, own_type = find_architecture(shape.architecture).title, None if theirs else name_own_type(shape)
    common = {"shape": shape, "length": length, "title": title, "own_type": own_type}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("cards"), encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    quoted = partial(json.dumps, ensure_ascii=False)
    environment.filters |= {"plain": _format, "quoted": quoted, "toml": toml_text, "word": quote}
    place = folder.name if folder.is_absolute() else str(folder)
    return environment.get_template(template).render(place=place, **common, **parts)


def _format(value: Any) -> str:
    """Formats a value in one line, with thousands separators, safe in a Markdown table."""
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(str(value).split()).replace("|", "\\|")
