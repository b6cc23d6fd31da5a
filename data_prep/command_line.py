"""Where the settings of shard.py come from: flags, and the TOML file that they may name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import tyro

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, read_settings
from data_prep.common.toml_text import Key
from data_prep.settings import CUTTING, READING, REPEATED, Settings, find_faults, spell_flag


def parse_settings(arguments: list[str]) -> Settings:
    """Reads the settings from the command line and the TOML file it may name; reports all faults of them at once."""
    usual, config = _read_defaults(arguments), (tyro.conf.FlagCreatePairsOff,)
    settings = tyro.cli(Settings, args=arguments, default=usual, prog="shard.py", config=config)
    if faults := [*find_faults(settings), *_list_needing_text(settings, _find_flags(arguments))]:
        raise UserError("\n".join(faults))
    return settings


def _list_needing_text(s: Settings, given: set[str]) -> list[str]:
    """Lists what is asked of documents that are in pieces already, though it needs their text, as flag or in a file."""
    if not s.origins:
        return []
    usual, why = Settings(), dict.fromkeys(CUTTING, "the documents of --from are in pieces already")
    if not s.sources:
        why |= dict.fromkeys(READING, "the documents of --from are read already; it is for --docs beside them")
    asked = [name for name in why if spell_flag(name) in given or getattr(s, name) != getattr(usual, name)]
    return [f"{spell_flag(name)} needs the text: {why[name]}" for name in asked]


def _find_flags(arguments: list[str]) -> set[str]:
    """Finds the flags among the words of a command line."""
    return {argument.partition("=")[0].replace("_", "-") for argument in arguments}


def _read_defaults(arguments: list[str]) -> Settings:
    """Reads the settings that flags then replace: those of the file that --config names, if any."""
    path: str | None = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else next(iter(arguments[at + 1 :]), None)
    if path is None:
        return Settings()
    anew: dict[str, Any] = {name: () for name in REPEATED if spell_flag(name) in _find_flags(arguments)}
    return read_config(Path(path)).model_copy(update=anew)


def read_config(path: Path) -> Settings:
    """Reads the settings of a TOML file, whose keys are the names of the flags, with - or _."""
    return read_settings(Form(Settings, flag="--config"), path, find_faults=lambda _: [], add=_name_as_flags)


def _name_as_flags(raw: dict[str, Any]) -> dict[Key, str]:
    """Spells the keys of a file as the settings are called here; returns what is wrong with them."""
    names = {key: "origins" if key == "from" else key.replace("-", "_") for key in raw}
    given, twice = {names[key]: value for key, value in raw.items()}, Counter(names.values())
    raw.clear()
    raw |= {key: value for key, value in given.items() if key != "config"}
    faults: dict[Key, str] = {
        (name,): f": is there twice, as {' and '.join(key for key in names if names[key] == name)}"
        for name, count in twice.items()
        if count > 1
    }
    return faults | ({("config",): ": a file of settings cannot name another one"} if "config" in given else {})
