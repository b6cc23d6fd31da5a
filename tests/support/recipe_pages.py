"""Writes docs/recipes.md and docs/finetuning-recipes.md: every key of a recipe with its meaning, values and default.

    make recipes-page

All of it comes from the settings, so that a key is described only where it is defined.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.common.reading import is_list, tables
from data_prep.common.sections import Section
from data_prep.common.toml_text import toml_value
from finetuning.settings import FineTuning
from pretraining.config.conflicts import OPEN
from pretraining.config.settings import Recipe

ROOT = Path(__file__).resolve().parents[2]
MACHINE = 1 << 31
"""Limits from here on are those of machine integers, and are left out."""
KINDS = {"object": "table", "integer": "integer", "number": "number", "boolean": "true, false", "string": "text"}
LIMITS = {"minimum": "≥{}", "exclusiveMinimum": ">{}", "maximum": "≤{}", "exclusiveMaximum": "<{}"}
"""The limits of numbers in JSON Schema, and their wording."""
OPENING = """\
<!-- Written by `make recipes-page` from pretraining/config/settings.py: change that, not this. -->

# What a recipe can say

A recipe is a TOML file. The command line overrides every value by its dotted name: `--seed 7`, `--model.size mini`,
`--phases.0.steps 100` (phases count from 0). A key that is not given has its default. Invalid values and values that
contradict each other are refused before anything begins. `recipe.toml` in a run's folder has all values of the run.
[pretraining/recipes](../pretraining/recipes) has recipes with the sources of their numbers.
"""
FINE_TUNING = """\
<!-- Written by `make recipes-page` from finetuning/settings.py: change that, not this. -->

# What a fine-tuning recipe can say

A recipe is a TOML file, or one of [finetuning/recipes](../finetuning/recipes) by its name: `--recipe glue`. The command
line overrides every value by its dotted name: `--spans.stride 64`, `--search.learning_rates "[5e-5, 3e-5]"`.
"""
DEEPSPEED = f"""\
## [deepspeed]

Settings of DeepSpeed for which recipes have no key of their own, named as in its documentation. Allowed are:

{", ".join(f"`{name}`" for name in sorted(OPEN))}
"""


def make_pages() -> dict[Path, str]:
    """Makes the pages of pre-training and of fine-tuning."""
    return {
        ROOT / "docs/recipes.md": make_page(Recipe, OPENING, {"deepspeed": DEEPSPEED}),
        ROOT / "docs/finetuning-recipes.md": make_page(FineTuning, FINE_TUNING, {}),
    }


def make_page(settings: type[Section], opening: str, others: Mapping[str, str]) -> str:
    """Makes a page of all settings; `others`: sections on tables that are not ours, by name."""
    inner = tables(settings)
    shared = [] if settings is Recipe else [name for name in inner if tables(Recipe).get(name) is inner[name]]
    values = [name for name in settings.model_fields if name not in {*inner, *others}]
    parts = [opening, "## At the top\n\n" + make_table(settings, values)]
    if shared:
        titles = ", ".join(f"`[{name}]`" for name in shared)
        parts.append(f"## Shared sections\n\n{titles} are described in [recipes.md](recipes.md).\n")
    for name in (name for name in inner if name not in shared):
        title, own = f"[[{name}]]" if is_list(settings, name) else f"[{name}]", settings.model_fields[name].default
        parts.append(make_section(title, inner[name], own if isinstance(own, Section) else None))
    return "\n".join([*parts, *others.values()])


def make_section(title: str, settings: type[Section], own: Section | None) -> str:
    """Makes a section: heading, purpose and keys; `own`: defaults if the whole table is left out."""
    about = "\n\n".join(" ".join(part.split()) for part in (settings.__doc__ or "").split("\n\n"))
    return f"## {title}\n\n{about}\n\n{make_table(settings, list(settings.model_fields), own)}"


def make_table(settings: type[Section], names: list[str], own: Section | None = None) -> str:
    """Makes a table of keys, a row each."""
    rows = [make_row(name, settings, own) for name in names]
    return "\n".join(["| key | meaning | takes | default |", "|---|---|---|---|", *rows]) + "\n"


def make_row(name: str, settings: type[Section], own: Section | None = None) -> str:
    field, schema = settings.model_fields[name], settings.model_json_schema()["properties"][name]
    meaning, value = " ".join((field.description or "").split()), getattr(own, name, field.default)
    default = "needed" if field.is_required() else "not set" if value is None else format_code(value)
    cells = [f"`{name}`", meaning, ", or ".join(describe_values(schema)), default]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def format_code(value: Any) -> str:
    """Formats a value as in a recipe."""
    return f"`{toml_value(value)}`"


def describe_values(schema: dict[str, Any]) -> Iterator[str]:
    """Describes the values of a setting, one text for each kind."""
    if "anyOf" in schema:
        for kind in schema["anyOf"]:
            yield from describe_values(kind)
    elif "enum" in schema:
        yield ", ".join(map(format_code, schema["enum"]))
    elif "const" in schema:
        yield format_code(schema["const"])
    elif schema["type"] == "array":
        items = schema.get("prefixItems", [])  # of a list of any length, every item is as `items` says
        count = f" of {len(items)}" if items else ""
        yield f"list{count}: {next(describe_values(items[0] if items else schema['items']))}"
    elif schema["type"] != "null":
        found = [
            words.format(f"{schema[key]:g}") for key, words in LIMITS.items() if schema.get(key, MACHINE) < MACHINE
        ]
        yield " ".join([KINDS[schema["type"]], " and ".join(found)]).rstrip()


if __name__ == "__main__":
    for path, page in make_pages().items():
        path.write_text(page, encoding="utf-8")
