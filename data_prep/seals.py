"""Detects changes to a manifest: the fingerprint of the data, and a checksum of the whole content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from data_prep.common.errors import DamageError
from data_prep.common.files import json_bytes, read_json
from data_prep.common.languages import DEFAULT
from data_prep.settings import NO_FORMULAS, Fact, Settings, list_by

NOT_IN_THE_FINGERPRINT = ("fingerprint", "versions", "vocabulary_source", "checksum", "kept", "kept_format", "origins")
"""Keys of a manifest that describe no content of the shards."""
FILTERED_REPORT = "filtered.csv"  # some documents that filters left out; shards of kept documents have none
USUAL = Settings().record_values()
UNUSED: dict[str, Any] = {name: USUAL.get(name) for name in (*list_by(Fact.LATER), *NO_FORMULAS)}
"""Settings that are in the fingerprint only where they are used, with the values that leave them unused."""
FOLLOWING = ("text", "own", "lost_parted", "parted")
"""Figures of a set of shards that are not in the fingerprint, since they follow from its settings and text."""
TOLD = ("no_text", "characters", "unknown_characters")
"""Figures of the corpus that are not in the fingerprint: they are of text that was read, not of what shards have."""
WITHOUT_FIELDS = ("mediawiki", "wikiextractor", "sentences", "text", "demo")
"""Formats of 1.0 without fields, whose fingerprints never had --text-field; those of all other formats have it."""


def seal(content: dict[str, Any]) -> None:
    """Adds the fingerprint of the data and the checksum of the whole content to a manifest."""
    content["fingerprint"] = make_fingerprint(content)
    content["checksum"] = hash_content(content)


def require_seal(path: Path) -> None:
    """Raises DamageError where a manifest was changed after it was written, even if it means the same."""
    content = read_json(path)
    fits = content["fingerprint"] in (make_fingerprint(content), make_fingerprint(content, field_as_given=True))
    if not fits or content.get("checksum") != hash_content(content) or path.read_bytes() != json_bytes(content):
        raise DamageError(f"{path}: its fingerprint, its checksum or its form does not fit what it says: it was edited")


def hash_content(content: dict[str, Any]) -> str:
    """Hashes a manifest, without its checksum."""
    return hashlib.sha256(json_bytes({key: value for key, value in content.items() if key != "checksum"})).hexdigest()


def make_fingerprint(content: dict[str, Any], field_as_given: bool = False) -> str:
    """Hashes the part of a manifest that describes the content of the shards, with their checksums.

    Of `text_field` it takes what a reader used; older versions took it as it was given.
    """
    parts = {key: value for key, value in content.items() if key not in NOT_IN_THE_FINGERPRINT}
    settings = name_language(parts["settings"])
    if "text_field" in settings and not field_as_given:
        settings["text_field"] = _used_field(settings["text_field"], parts["sources"])
    parts["settings"] = {name: said for name, said in settings.items() if name not in UNUSED or said != UNUSED[name]}
    parts["corpus"] = {name: said for name, said in parts["corpus"].items() if name not in TOLD}
    parts["files"] = [file for file in parts["files"] if file["path"] != FILTERED_REPORT]
    parts["sources"] = [{name: said for name, said in file.items() if name != "content"} for file in parts["sources"]]
    parts["sets"] = [{name: said for name, said in one.items() if name not in FOLLOWING} for one in parts["sets"]]
    return hashlib.sha256(json_bytes(parts)).hexdigest()


def _used_field(given: Any, sources: list[dict[str, Any]]) -> Any:
    """Names the field that texts were taken from: by source where there are several, the default where none was."""
    named = given if isinstance(given, dict) else {"": given}
    fielded = (file["source"] for file in sources if file["format"] not in WITHOUT_FIELDS)
    used = {source: named.get(source, named.get("")) for source in fielded}
    fields = list(used.values())
    return (used if any(field != fields[0] for field in fields) else fields[0]) if fields else "text"


def name_language(settings: dict[str, Any]) -> dict[str, Any]:
    """Fills in the default language in recorded settings without one."""
    return {**settings, "language": settings.get("language") or DEFAULT}
