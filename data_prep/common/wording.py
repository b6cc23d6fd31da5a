"""How a value that no recipe can have is told: what is needed there, and which name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

from data_prep.common.errors import UserError
from data_prep.common.sections import Section
from data_prep.common.toml_text import Key, dotted, show_value

Kind = TypeVar("Kind")
NEEDED = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number is needed"),
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "string_type": 'a text is needed, in quotes: "…"',
    "string_too_short": "a text is needed",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table is needed"),
    "tuple_type": "a list is needed",
    "too_long": "{max_length} values are needed",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "one of {expected}",
}
"""What pydantic's kinds of errors ask for."""

USUAL_NAMES = {
    usual: ours
    for ours, names in {
        "learning_rate": "rate lr max_lr",
        "length": "max_seq_length seq_length sequence_length max_length",
        "batch": "global_batch batch_size global_batch_size train_batch_size",
        "micro_batch": "micro_batch_size per_device_train_batch_size",
        "steps": "num_train_steps max_steps total_steps",
        "epochs": "num_train_epochs num_epochs",
        "decay": "scheduler schedule lr_schedule lr_scheduler_type",
        "warmup": "warmup_proportion warmup_ratio",
        "warmup_steps": "num_warmup_steps",
        "clip": "max_grad_norm gradient_clipping grad_clip",
        "epsilon": "eps adam_epsilon",
        "zero": "stage zero_stage",
        "dtype": "bf16 fp16",
        "layers": "num_layers num_hidden_layers",
        "heads": "num_heads num_attention_heads",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "every": "save_steps eval_steps logging_steps",
    }.items()
    for usual in names.split()
}
"""What other trainers call our settings."""


def find_declared(kinds: Mapping[str, Kind], name: str, key: str, folder: str) -> Kind:
    """Finds what the module of this name in a folder declares, which a recipe or a checkpoint names by its `key`."""
    if name not in kinds:
        there = ", ".join(kinds)
        raise UserError(f'{key} = "{name}": there is {there}; put back {folder}/{name}.py, which it was')
    return kinds[name]


def explain(error: Mapping[str, Any], bare: bool, settings: type[Section]) -> str:
    """Words an error of pydantic as the text that follows the key in a message.

    `bare` where just the name was given, as one writes a switch.
    """
    kind, key, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f": unknown{_suggest(key, settings)}"
    if kind == "missing":
        return ": is missing" if isinstance(key[-1], int) else f": is missing: {_describe(key, settings)}"
    if bare:
        return f": a value is missing: --{dotted(key)} VALUE"
    if kind == "literal_error":
        context = {"expected": context["expected"].replace("'", '"').replace(" or ", ", ")}
    limits = {name: str(value).removesuffix(".0") for name, value in context.items()}
    needed = NEEDED[kind].format(**limits) if kind in NEEDED else error["msg"]
    table = tables(settings).get(str(key[-1]))  # None for one in a list of tables, which has a number
    if kind == "model_type" and table is not None and "name" in table.model_fields:
        needed += f"; did you mean {dotted((*key, 'name'))}?"
    return f" = {show_value(error['input'])}: {needed}"


def _describe(key: Key, settings: type[Section]) -> str:
    """The docstring of a setting, as part of a sentence."""
    for part in key[:-1]:
        if isinstance(part, str):
            settings = tables(settings)[part]
    text = settings.model_fields[str(key[-1])].description or ""
    return (text[:1].lower() + text[1:]).rstrip(".")


def tables(settings: type[Section]) -> dict[str, type[Section]]:
    """The tables of settings, and what the lists of tables in them have, by their names."""
    found = {}
    for name, field in settings.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)[:1]):
            if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
                found[name] = kind
    return found


def is_list(settings: type[Section], name: str) -> bool:
    """Whether a table stands in settings as often as one likes: [[phases]]."""
    return get_origin(settings.model_fields[name].annotation) is tuple


def known_keys(settings: type[Section]) -> Iterator[Key]:
    """All keys of the settings; in a list of tables those of number 0."""
    inner = tables(settings)
    for name in settings.model_fields:
        yield (name,)
        if name in inner:
            above: Key = (name, 0) if is_list(settings, name) else (name,)
            yield from ((*above, key) for key in inner[name].model_fields)


def _suggest(key: Key, settings: type[Section]) -> str:
    """The known name that was probably meant, with its full path; otherwise the names there are."""
    name, above, every = str(key[-1]), key[:-1], list(known_keys(settings))
    plain = tuple(0 if isinstance(part, int) else part for part in above)
    beside = [known for known in every if known[:-1] == plain]
    elsewhere = [known for known in every if known[:-1] != plain]
    joined = {"_".join(map(str, known)): known for known in every if len(known) > 1}
    if not above and (near := difflib.get_close_matches(name, joined, 1, 0.85)):
        return f"; did you mean {dotted(joined[near[0]])}?"  # --model-size
    for wanted, cutoff in ((USUAL_NAMES.get(name, name), 0.7), (name, 0.6)):
        for among in (beside, elsewhere):
            names = [str(known[-1]) for known in among]
            if near := difflib.get_close_matches(wanted, names, 1, cutoff):
                found = among[names.index(near[0])]
                full = (*above, found[-1]) if among is beside else found
                return f"; did you mean {dotted(full)}?"
    return f"; there is {', '.join(str(known[-1]) for known in beside)}"
