"""Model cards: the README.md of a folder that is exported or fine-tuned, with sizes, data, recipe and scores.

They tell what a reader of the model wants to know. How a run was made fast, safe or watched is not in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from data_prep.common.toml_text import toml_text
from data_prep.shards import Manifest
from pretraining.huggingface.config import OWN_TYPES, SIZES, is_theirs
from pretraining.huggingface.weights import Kind, TaskHead, list_weights
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import MINIMAL_PAIRS, Figure, find_objective, num_parameters
from pretraining.reporting.records import EvaluationRecord

SETTINGS = ("language", "cased", "duplicates", "masking", "mask_rate", "pairs", "weight")
"""The settings of the data that its readers want to know."""
USES: dict[Kind, tuple[str, str]] = {
    "classes": ("text-classification", "one label of a text or a pair"),
    "labels": ("text-classification", "any of several labels of a text or a pair"),
    "score": ("text-classification", "a number for a text or a pair"),
    "choice": ("multiple-choice", "which of several texts goes on best"),
    "spans": ("question-answering", "where in a text the answer to a question is"),
    "tags": ("token-classification", "a tag for every word"),
}
"""What the hub calls the use of a head, and what it says."""
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
    """How the shards were made: the values of `SETTINGS`, None where one was not given."""
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
            settings={name: value for name in SETTINGS if (value := getattr(manifest.settings, name, None)) != {}},
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
    scores: EvaluationRecord | None
    """The latest validation."""
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


@dataclass(frozen=True)
class TaskProvenance:
    """How a fine-tuned model came to be."""

    task: str
    """The name of the task."""
    base: BaseSummary
    """The model that was fine-tuned."""
    pretrained: bool = True
    """Whether its weights were taken; otherwise only its sizes and its vocabulary were."""
    items: Mapping[str, int] = field(default_factory=dict)
    """Items of each split: train, dev."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The scores of each split that was scored, as fractions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters by their names: learning rate, batch, epochs, seed."""
    licence: str | None = None
    """The licence, as the hub spells it."""


def model_card(
    shape: Shape, folder: Path, length: int, licence: str | None = None, provenance: Provenance | None = None
) -> str:
    """Writes the card of a model that lies in a folder; how it came to be is left out where that is not known.

    `length` is the longest text that it was trained on, or that its tokenizer lets through.
    """
    objective, made = find_objective(shape), provenance
    base, language = (made.base, made.data.settings.get("language")) if made else (None, None)
    if isinstance(language, dict):  # one for each source
        language = sorted(set(language.values()))
    facts = {"longest text it was trained on" if made else "longest text": f"{length:,} pieces"}
    if base:
        facts[f"licence of {base}, with which it began"] = base.licence or "not known"
    parts = [
        _front_matter(objective.tag, licence, base, language, theirs=is_theirs(shape)),
        f"# BERT, {shape.layers} layers of {shape.hidden:,}",
        f"A BERT encoder with its {objective.described(shape)}{', pre-trained with Cloze' if made else ''}."
        + (_origin(base) if base else ""),
        _sizes(shape, num_parameters(shape), licence, facts),
        *(
            [
                _loading(objective.auto_class(shape), folder, length),
                *filter(None, [objective.loading_remark(shape), warn_of_classifiers(shape)]),
            ]
            if is_theirs(shape)
            else [_loading_here(shape), _command("run_task.py TASK.toml --model", folder)]
        ),
    ]
    if made and made.segments == 1 < shape.segments:
        parts.append(
            "No text was a pair: the second segment (`token_type_ids` of 1) was never trained, and has the embedding "
            "of the first."
        )
    if made:
        parts += [_data(made.data), _training(made)]
    if made and made.scores:
        parts.append(_validation(made.scores, made.scored_length, objective.figures))
    return "\n\n".join(parts) + "\n"


def task_card(shape: Shape, head: TaskHead, folder: Path, length: int, made: TaskProvenance) -> str:
    """Writes the card of a fine-tuned model that lies in a folder; `length` is the longest sequence in pieces."""
    use, says = USES[head.kind]
    begun = "Made from" if made.pretrained else "The sizes and the vocabulary, but not the weights, are those of"
    parameters = sum(math.prod(weight.size) for weight in list_weights(shape, head))
    theirs = is_theirs(shape, head)
    facts = {"longest sequence": f"{length:,} pieces", **({"labels": ", ".join(head.labels)} if head.labels else {})}
    parts = [
        _front_matter(use, made.licence, made.base if made.pretrained else None, theirs=theirs),
        f"# BERT for {_text(made.task)}",
        f"A BERT encoder that says {says}, fine-tuned with Cloze. {begun} {_text(made.base)}.",
        _sizes(shape, parameters, made.licence, facts),
        _loading(head.architecture.replace("Bert", "AutoModel", 1), folder, length) if theirs else _loading_here(shape),
        _command("predict.py", folder),
    ]
    scores = {split: {name: round(value, 4) for name, value in found.items()} for split, found in made.scores.items()}
    for title, told in (("Data", {"items": made.items}), ("Training", made.settings), ("Scores", scores)):
        if told:
            parts.append(f"## {title}\n\n{_toml({**told})}")
    return "\n\n".join(parts) + "\n"


def warn_of_classifiers(shape: Shape) -> str:
    """Says why a classifier of transformers learns nothing on top of a model that it loads; empty where it learns."""
    if shape.sees != "before" or not is_theirs(shape):
        return ""
    return (
        "A classifier of transformers on top, such as `AutoModelForSequenceClassification`, reads `[CLS]`, which sees "
        "itself alone: all texts are the same to it. Fine-tune with Cloze, or read the last piece."
    )


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


def _origin(base: BaseSummary) -> str:
    """What it began with, and the pieces that were added to it."""
    text = f" Its training began with the weights of {_text(base)}."
    if base.added:
        some = ", ".join(f"`{_text(piece)}`" for piece in base.some_added)
        rest = ", …" * (len(base.some_added) < base.added)
        text += f" To its vocabulary {base.added:,} pieces were added, the last of `vocab.txt`: {some}{rest}."
    return text


def _data(data: DataSummary) -> str:
    known = {name: value for name, value in data.settings.items() if value is not None}
    return (
        "## Data\n\nDocuments of each source, examples of each length in pieces, and how they were made; the same text "
        f"and settings have the same fingerprint again:\n\n{_toml({**asdict(data), 'settings': known})}"
    )


def _training(made: Provenance) -> str:
    return (
        f"## Training\n\nThe weights are those after step {made.step:,}, which have seen {made.examples_seen:,} "
        f"examples.\n\n- optimizer: {made.optimizer}\n- precision: {made.dtype}"
        f"{'; weights are kept and gradients added up in fp32' * (made.dtype != 'fp32')}\n\n```toml\n{made.recipe}```"
    )


def _validation(scores: EvaluationRecord, length: int | None, figures: Sequence[Figure]) -> str:
    """The scores with their units and meanings."""
    rows = [
        (figure.title, figure.shown(scores.learns[figure.name]), figure.meaning)
        for figure in (*figures, MINIMAL_PAIRS)
        if figure.name in scores.learns
    ]
    held_out = f"On {scores.scored_examples:,} examples of length {length} held out from training, after "
    return (
        f"## Validation\n\n{held_out if scores.scored_examples else 'After '}"
        f"step {scores.step:,}:\n\n{_table(['score', 'value', 'what it is'], rows)}"
    )


def _sizes(shape: Shape, parameters: int, licence: str | None, more: Mapping[str, str]) -> str:
    """A table of what is told first: how large a model is, and whether it may be used."""
    own = {name: getattr(shape, name) for name in SIZES}
    facts = {"parameters": parameters, **own, "licence": licence or "not specified", **more}
    return _table(["", ""], facts.items())


def _front_matter(
    use: str, licence: str | None, base: BaseSummary | None, language: Any = None, theirs: bool = True
) -> str:
    """What the hub reads of a card: what the model is used for, its licence, and what it was made from; and, of what a
    class of transformers computes, that it does."""
    content = ModelCardData(
        library_name="transformers" if theirs else None,
        pipeline_tag=use if theirs else None,
        tags=["bert", use],
        license=licence,
        language=language,
        base_model=base.hub_model if base else None,
    )
    return f"---\n{content.to_yaml()}\n---"


def _loading(kind: str, folder: Path, length: int) -> str:
    """How a model is loaded by a class of transformers; its tokenizer cuts texts at so many pieces."""
    place = json.dumps(_place(folder), ensure_ascii=False)
    return f"""\
## Loading

```python
from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({place})
model = {kind}.from_pretrained({place})
```

With `truncation=True` the tokenizer cuts texts at {length:,} pieces."""


def _loading_here(shape: Shape) -> str:
    """Why no class of transformers loads a model."""
    stands = "last" if shape.sees == "before" else "first"
    return (
        f"## Loading\n\nNo class of transformers computes this model: a piece sees itself and the pieces {shape.sees} "
        f"it, and the {stands} one stands for its text. Its `model_type` is `{OWN_TYPES[shape.sees]}`, so that "
        "`AutoModel` refuses it, where it would compute an ordinary BERT."
    )


def _command(words: str, folder: Path) -> str:
    """How a model is used by a command of fine-tuning."""
    return f"With Cloze:\n\n```console\n$ python finetuning/{words} {_place(folder)}\n```"


def _place(folder: Path) -> str:
    """A folder as a card names it: without what lies above it on this machine."""
    return folder.name if folder.is_absolute() else str(folder)


def _toml(content: dict[str, Any]) -> str:
    """A block of Markdown with a table of TOML."""
    return f"```toml\n{toml_text(content)}```"


def _table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown."""
    cells = [[_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *cells))


def _text(value: Any) -> str:
    """A value as people read it, and safe in a table."""
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(str(value).split()).replace("|", "\\|")
