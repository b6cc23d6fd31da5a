"""The model card: the README.md of an exported folder, with sizes, data, recipe and scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.shards import Manifest
from pretraining.model.shape import Shape

SETTINGS = ("language", "cased", "duplicates", "masking", "mask_rate", "pairs")
"""The settings of the data that its readers want to know."""


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
    """How the shards were made: a value for each of `SETTINGS`."""
    vocabulary: str
    """SHA-256 of the vocabulary."""
    fingerprint: str
    """Names the content of the shards: the same text and settings have the same."""

    @classmethod
    def of(cls, manifest: Manifest) -> DataSummary:
        """Summarises a folder of shards."""
        content = manifest.content
        examples: dict[str, int] = {}
        for shards in content["sets"]:
            name = str(shards["length"]) + (", held out" if shards["validation"] else "")
            examples[name] = examples.get(name, 0) + shards["examples"]
        return cls(
            sources=content["corpus"]["documents_by_source"],
            pieces=content["corpus"]["pieces"],
            examples=examples,
            settings={name: content["settings"][name] for name in SETTINGS},
            vocabulary=content["vocabulary"]["sha256"],
            fingerprint=manifest.fingerprint,
        )


@dataclass(frozen=True)
class BaseSummary:
    """What is told of the model whose weights a run began with; a run keeps it with its checkpoints."""

    name: str
    """Its folder, run or name on the hub, as the user gave it."""
    on_hub: bool
    """Whether it is a name on the Hugging Face hub."""
    positions: int
    """How many positions were trained there, from the first on, as far as that is known."""


@dataclass(frozen=True)
class Provenance:
    """How the weights of a model came to be."""

    data: DataSummary
    recipe: Mapping[str, Any]
    """The tables of the recipe, as `Recipe.as_dict` gives them."""
    metrics: Mapping[str, float | None]
    """Scores of the validation by their names; none where there was no validation."""
    step: int
    """Optimizer steps after which the weights were taken."""
    base: BaseSummary | None = None
    """The model whose weights the run began with; None where they were drawn."""


def model_card(shape: Shape, provenance: Provenance | None = None) -> str:
    """Writes the card of a model; how it came to be is left out where that is not known."""
    language = provenance and provenance.data.settings.get("language")
    tags = ["library_name: transformers", "pipeline_tag: fill-mask", "tags:", "- bert", "- fill-mask"]
    base = provenance.base if provenance else None
    tags += [f"base_model: {base.name}"] if base and base.on_hub else []
    lines = ["---", *tags, *([f'language: "{language}"'] if language else []), "---", "", "# BERT", ""]
    lines += [
        "A BERT encoder with its masked-language and next-sentence heads"
        f"{', pre-trained with Cloze' if provenance else ''}: layers {shape.layers}, hidden size {shape.hidden:,}, "
        f"attention heads {shape.heads}, feed-forward size {shape.intermediate:,}; a vocabulary of "
        f"{shape.vocabulary:,} pieces, and texts of at most {shape.positions} of them; "
        f"{shape.num_parameters():,} parameters. Its licence is not specified."
        + (f" Training began with the weights of {_value(base.name)}." if base else ""),
        "",
        LOADING,
    ]
    if provenance is not None:
        lines += _data_section(provenance.data) + _recipe_section(provenance.recipe, provenance.step)
        if provenance.metrics:
            lines += ["## Validation", "", *_table(["metric", "value"], sorted(provenance.metrics.items())), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


LOADING = """## Loading

```python
from transformers import AutoModelForPreTraining, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForPreTraining.from_pretrained("FOLDER")
```

`AutoModel` and `AutoModelForMaskedLM` load parts of it; transformers then lists the weights of the other \
heads as unexpected, as it does for every BERT with both heads.
"""


def _data_section(data: DataSummary) -> list[str]:
    lines = ["## Data", "", *_table(["source", "documents"], data.sources.items()), ""]
    lines += [*_table(["examples of length", "number"], data.examples.items()), ""]
    text = f"{_value(data.pieces)} pieces of text. Settings: {_value(data.settings)}."
    return [*lines, text, "", f"Fingerprint of the shards: `{data.fingerprint}`.", ""]


def _recipe_section(recipe: Mapping[str, Any], step: int) -> list[str]:
    """The phases as a table, the other settings as a list."""
    phases: Sequence[Mapping[str, Any]] = recipe["phases"]
    names = list(dict.fromkeys(name for phase in phases for name in phase))
    rows = [[number, *(phase.get(name) for name in names)] for number, phase in enumerate(phases, 1)]
    lines = ["## Recipe", "", *_table(["phase", *map(_words, names)], rows), ""]
    for section, settings in recipe.items():
        if section != "phases" and settings not in (None, {}):
            lines.append(f"- {_words(section)}: {_value(settings)}")
    return [*lines, "", f"The weights are those after step {step:,}.", ""]


def _table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table of Markdown."""
    cells = [[_value(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *cells)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    """A value as people read it, and safe in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(name))} {_value(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_value, value))
    return " ".join(str(value).split()).replace("|", "\\|")
