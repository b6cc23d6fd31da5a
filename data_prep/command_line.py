"""Where the settings of shard.py come from: flags, and the TOML file that they may name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import tyro

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, read_settings
from data_prep.common.toml_text import Key
from data_prep.settings import Fact, Settings, find_faults, list_by, spell_flag


def parse_settings(arguments: list[str]) -> Settings:
    """Reads the settings from the command line and the TOML file it may name; reports all faults of them at once."""
    read = partial(tyro.cli, Settings, args=arguments, prog="shard.py", config=(tyro.conf.FlagCreatePairsOff,))
    settings: Settings = read()
    if settings.config is not None:
        usual, kind = read_config(settings.config), tuple[tuple[str, ...], ...]
        several = [name for name, field in Settings.model_fields.items() if field.annotation == kind]
        settings = read(default=usual.model_copy(update=dict.fromkeys(several, ())))  # tyro would add to these
        not_given = {name: getattr(usual, name) for name in several if not getattr(settings, name)}
        settings = settings.model_copy(update=not_given)
    if faults := [*find_faults(settings), *_list_needing_text(settings, arguments)]:
        raise UserError("\n".join(faults))
    return settings


def _list_needing_text(s: Settings, arguments: list[str]) -> list[str]:
    """Lists what is asked of documents that are in pieces already, though it needs their text, as flag or in a file."""
    if not s.origins:
        return []
    usual, why = Settings(), "the documents of --from are in pieces already; it is for --docs beside them"
    names = list_by(Fact.CUTS) if s.sources else list_by(Fact.CUTS, Fact.READS)
    flags = {word.partition("=")[0].replace("_", "-") for word in arguments}
    asked = [name for name in names if spell_flag(name) in flags or getattr(s, name) != getattr(usual, name)]
    return [f"{spell_flag(name)} needs the text: {why}" for name in asked]


def read_config(path: Path) -> Settings:
    """Reads the settings of a TOML file, whose keys are the names of the flags, with - or _."""
    return read_settings(Form(Settings, flag="--config"), path, find_faults=lambda _: [], add=_name_as_flags)


def _name_as_flags(raw: dict[str, Any]) -> dict[Key, str]:
    """Spells the keys of a file as the settings are called here; returns what is wrong with them."""
    given = list(raw.items())
    faults: dict[Key, str] = {}
    raw.clear()
    for key, value in given:
        name = "origins" if key == "from" else key.replace("-", "_")
        if name == "config":
            faults[(name,)] = ": a file of settings cannot name another one"
        elif name in raw:
            faults[(name,)] = ": is there twice, with - and with _"
        else:
            raw[name] = value
    return faults
