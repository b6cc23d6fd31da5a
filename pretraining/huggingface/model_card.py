"""The model card: the README.md of an exported folder, with sizes, data, recipe and scores.

It tells what a reader of the model wants to know. How the run was made fast, safe or watched is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from data_prep.shards import Manifest
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Figure, find_objective, num_parameters

SETTINGS = ("language", "cased", "duplicates", "masking", "mask_rate", "pairs")
"""The settings of the data that its readers want to know."""
HELD_OUT = ", held out"
"""The end of the name of the examples of a length that are held out."""


@dataclass(frozen=True)
class DataSummary:
    """What is told of the shards that a model was trained on; a run keeps it with its checkpoints."""

    sources: Mapping[str, int]
    """Documents of each source of the text."""
    pieces: int
    """Pieces of the whole text."""
    examples: Mapping[str, int]
    """Examples of each length; those held out are counted apart."""
    settings: Mapping[str, Any]
    """How the shards were made: a value for each of `SETTINGS`, None where it was not given."""
    vocabulary: str
    """SHA-256 of the vocabulary."""
    fingerprint: str
    """Names the content of the shards: the same text and settings have the same."""

    @classmethod
    def of(cls, manifest: Manifest) -> DataSummary:
        """Summarises a folder of shards."""
        examples: dict[str, int] = {}
        for shards in manifest.figures:
            name = str(shards.length) + (HELD_OUT if shards.validation else "")
            examples[name] = examples.get(name, 0) + shards.examples
        return cls(
            sources=manifest.corpus.documents_by_source,
            pieces=manifest.corpus.pieces,
            examples=examples,
            settings={name: getattr(manifest.settings, name, None) for name in SETTINGS},
            vocabulary=manifest.vocabulary.sha256,
            fingerprint=manifest.fingerprint,
        )

    def length_for(self, length: int) -> int:
        """The length of the examples that a phase of this length reads, which are cut if they are longer."""
        stored = {int(name.removesuffix(HELD_OUT)) for name in self.examples}
        return min((longer for longer in stored if longer >= length), default=length)


@dataclass(frozen=True)
class BaseSummary:
    """What is told of the model whose weights a run began with; a run keeps it with its checkpoints."""

    name: str
    """Its name on the hub, or that of its folder or run."""
    on_hub: bool
    """Whether it is a name on the Hugging Face hub."""
    from_hub: str | None = None
    """The model on the hub that it was made from itself, where that is known."""
    licence: str | None = None
    """Its licence, where its own card or recipe names one."""
    added: int = 0
    """Pieces that the vocabulary has beyond those of this model."""
    some_added: Sequence[str] = ()
    """The first of them."""

    @property
    def hub_model(self) -> str | None:
        """The model on the hub that all began with; None where none is known."""
        return self.name if self.on_hub else self.from_hub

    def __str__(self) -> str:
        """Its name; of a folder, without what lies above it on this machine."""
        return self.name if self.on_hub else Path(self.name).resolve().name


@dataclass(frozen=True)
class Provenance:
    """How the weights of a model came to be."""

    data: DataSummary
    recipe: str
    """What it was trained with, as TOML."""
    scores: Mapping[str, float | None]
    """The latest validation, as `EvaluationRecord.figures` gives it; none where there was no validation."""
    step: int
    """Optimizer steps after which the weights were taken."""
    examples_seen: int
    """Examples of all steps."""
    dtype: str
    """The numbers that the model computed in: bf16, fp16 or fp32."""
    optimizer: str
    """What the weights were moved by, in a line."""
    scored_length: int | None = None
    """Length of the examples of the latest validation."""
    segments: int = 2
    """Segments that were trained; the embeddings of others are those of the first."""
    base: BaseSummary | None = None
    """The model whose weights the run began with; None where they were drawn."""


def model_card(
    shape: Shape, folder: Path, length: int, licence: str | None = None, provenance: Provenance | None = None
) -> str:
    """Writes the card of a model that lies in a folder; how it came to be is left out where that is not known.

    `length` is the longest text that it was trained on, or that its tokenizer lets through.
    """
    parts = [
        _front_matter(find_objective(shape).tag, licence, provenance),
        _introduction(shape, provenance),
        table(["", ""], _sizes(shape, length, licence, provenance)),
        _loading(shape, folder, length, provenance),
    ]
    if provenance is not None:
        parts += [_data(provenance.data), _training(provenance)]
        if provenance.scores:
            parts.append(_validation(provenance, find_objective(shape).figures))
    return "\n\n".join(parts) + "\n"


def read_base_model(card: Path) -> str | None:
    """The model on the hub that a card says its model was made from; None where it names none, or several."""
    return _read_front(card, "base_model")


def read_licence(card: Path) -> str | None:
    """The licence that a card names; None where it names none, or several."""
    return _read_front(card, "license")


def _read_front(card: Path, key: str) -> str | None:
    try:
        value = (metadata_load(card) or {}).get(key) if card.is_file() else None
    except Exception:  # whatever a card by anybody makes YAML raise: nothing depends on it
        return None
    return value if isinstance(value, str) else None


def _languages(said: Any) -> Any:
    """Lists the languages of a text whose sources have several; one, or none, stays as it is."""
    return sorted(set(said.values())) if isinstance(said, dict) else said


def _front_matter(tag: str, licence: str | None, provenance: Provenance | None) -> str:
    """What the hub reads of a card."""
    base = provenance.base if provenance else None
    content = ModelCardData(
        library_name="transformers",
        pipeline_tag=tag,
        tags=["bert", tag],
        license=licence,
        language=_languages(provenance.data.settings.get("language")) if provenance else None,
        base_model=base.hub_model if base else None,
    )
    return f"---\n{content.to_yaml()}\n---"


def _introduction(shape: Shape, provenance: Provenance | None) -> str:
    heads = find_objective(shape).described(shape)
    text = f"# BERT, {shape.layers} layers of {shape.hidden:,}\n\nA BERT encoder with its {heads}"
    if provenance is None:
        return f"{text}."
    return f"{text}, pre-trained with Cloze.{_origin(provenance.base) if provenance.base else ''}"


def _origin(base: BaseSummary) -> str:
    """What it began with, and the pieces that were added to it."""
    text = f" Its training began with the weights of {as_text(base)}."
    if base.added:
        some = ", ".join(f"`{as_text(piece)}`" for piece in base.some_added)
        rest = ", …" * (len(base.some_added) < base.added)
        text += f" To its vocabulary {base.added:,} pieces were added, the last of `vocab.txt`: {some}{rest}."
    return text


def _sizes(shape: Shape, length: int, licence: str | None, provenance: Provenance | None) -> Iterator[Sequence[Any]]:
    case = {True: ", with case and accents", False: ", without case and accents", None: ""}
    cased = provenance.data.settings.get("cased") if provenance else None
    used = "trained" if provenance else "used by the tokenizer"
    yield "parameters", num_parameters(shape)
    yield "layers", shape.layers
    yield "hidden size", shape.hidden
    yield "attention heads", shape.heads
    yield "feed-forward size", shape.intermediate
    yield "vocabulary", f"{shape.vocabulary:,} pieces{case[cased]}"
    yield "positions", f"{shape.positions:,}" + (f", of which {length:,} were {used}" * (length < shape.positions))
    yield "licence", licence or "not specified"
    base = provenance.base if provenance else None
    if base is not None:
        yield f"licence of {base}, with which it began", base.licence or "not known"


def _loading(shape: Shape, folder: Path, length: int, provenance: Provenance | None) -> str:
    objective = find_objective(shape)
    kind = objective.auto_class(shape)
    place = json.dumps(folder.name if folder.is_absolute() else str(folder), ensure_ascii=False)
    lines = [
        "## Loading\n",
        "```python",
        f"from transformers import {kind}, AutoTokenizer\n",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = {kind}.from_pretrained({place})",
        "```\n",
        f"With `truncation=True` the tokenizer cuts texts at {length:,} pieces.",
    ]
    if remark := objective.loading_remark(shape):
        lines.append(remark)
    if provenance is not None and provenance.segments == 1 < shape.segments:
        lines.append(
            "No text was a pair: the second segment (`token_type_ids` of 1) was never trained, and has the embedding "
            "of the first."
        )
    return "\n".join(lines)


def _data(data: DataSummary) -> str:
    made, lengths = data.settings, sorted({int(name.removesuffix(HELD_OUT)) for name in data.examples})
    examples = [
        (f"{length:,} pieces", data.examples.get(f"{length}", 0), data.examples.get(f"{length}{HELD_OUT}", 0))
        for length in lengths
    ]
    unit = "whole words" if made.get("masking") == "whole-word" else "single pieces"
    facts = [
        f"{data.pieces:,} pieces of text"
        + (f" in `{as_text(_languages(made['language']))}`" if made.get("language") else ""),
        f"{made.get('mask_rate', 0.15):.0%} of the pieces masked, {unit}, {_times(made.get('duplicates', 1))}",
        "full sentences up to the length, no pairs" if made.get("pairs") == "none" else "pairs of segments",
    ]
    return "\n\n".join(
        [
            "## Data",
            table(["source", "documents"], data.sources.items()),
            f"{'; '.join(facts)}.",
            table(["examples of at most", "for training", "held out"], examples),
            f"Fingerprint of the shards, which the same text and settings have again: `{data.fingerprint}`.",
        ]
    )


def _times(duplicates: int) -> str:
    return "once" if duplicates == 1 else f"{duplicates} times anew"


def _training(made: Provenance) -> str:
    rounded = "" if made.dtype == "fp32" else "; weights are kept and gradients added up in fp32"
    seen = f"The weights are those after step {made.step:,}, which have seen {made.examples_seen:,} examples."
    facts = f"- optimizer: {made.optimizer}\n- precision: {made.dtype}{rounded}"
    return f"## Training\n\n{seen}\n\n{facts}\n\n```toml\n{made.recipe}```"


def _validation(provenance: Provenance, figures: Sequence[Figure]) -> str:
    """The scores with their units and meanings."""
    scores = provenance.scores
    rows = []
    for figure in figures:
        if (value := scores.get(figure.name)) is not None:
            shown = f"{100 * value:.1f}%" if figure.unit == "%" else f"{value:.4g} {figure.unit}"
            rows.append([figure.title, shown, figure.meaning])
    length = f" of length {provenance.scored_length}" if provenance.scored_length else ""
    on = f"On {int(scores.get('scored_examples') or 0):,} examples{length} held out"
    return f"## Validation\n\n{on} from training, after step {scores.get('step') or 0:,}:\n\n" + table(
        ["score", "value", "what it is"], rows
    )


def table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown."""
    cells = [[as_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *cells))


def as_text(value: Any) -> str:
    """A value as people read it, and safe in a table."""
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(str(value).split()).replace("|", "\\|")
