"""The README.md of an exported folder: sizes, data, recipe, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pretraining.model.shape import Shape


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
