"""Reads vocabularies: from a vocab.txt, or from a folder that has one with its casing.

A folder of transformers, of shards or of a run has one; so has a model on the Hugging Face hub, by its name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from data_prep.common.codes import CHECKPOINT, IN_A_RUN
from data_prep.common.errors import UserError
from data_prep.common.files import absence, read_table
from data_prep.common.hub import find_folder
from data_prep.vocabulary.vocabulary import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    Vocabulary,
    check_pieces,
    load_vocabulary,
)

FILES = (VOCABULARY, TOKENIZER, TOKENIZER_CONFIG)
KINDS = ("BertTokenizer", "BertTokenizerFast")
"""Classes of transformers that cut text as it is cut here."""
GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that cut text as tokenizer.json says."""
STEPS = {
    ("normalizer", "type"): "BertNormalizer",
    ("pre_tokenizer", "type"): "BertPreTokenizer",
    ("model", "type"): "WordPiece",
    ("model", "continuing_subword_prefix"): "##",
}
"""Values of tokenizer.json with which text is cut as it is here."""
NORMALIZER = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
"""Keys of the normaliser in tokenizer.json, and the same keys in tokenizer_config.json."""


def find_vocabulary(given: str, cased: bool) -> Vocabulary:
    """Finds the vocabulary that --vocab names; `cased` is whether the user wants case to be kept.

    A vocab.txt says nothing of case, so the user does. Everything else says it, and the user cannot contradict.
    """
    path = Path(given)
    if path.is_file() and path.suffix == ".json":
        raise UserError(f"--vocab {given}: name its folder, {path.parent}, or a {VOCABULARY}")
    if path.is_file() or path.suffix == ".txt":
        return _read_file(path, cased)
    try:
        vocabulary = read_vocabulary(find_folder(given, FILES))
    except UserError as error:
        raise UserError(f"--vocab {error}") from error
    if cased and not vocabulary.cased:
        raise UserError(f"--cased: the vocabulary of --vocab {given} is for text in lower case; leave out --cased")
    return vocabulary


def _read_file(path: Path, cased: bool) -> Vocabulary:
    """Reads a vocab.txt; where it has capitals, somebody must have said what becomes of those of the text."""
    vocabulary = load_vocabulary(path, cased)
    if cased or not has_capitals(vocabulary.pieces):
        return vocabulary
    if path.name == VOCABULARY and path.with_name(TOKENIZER_CONFIG).is_file():
        return read_vocabulary(path.parent)
    raise UserError(
        f"--vocab {path}: has pieces with capital letters, which text in lower case never matches: add --cased, or "
        f"name a folder that has it beside a {TOKENIZER_CONFIG}"
    )


def shorten_name(given: str) -> str:
    """Shortens the source of a vocabulary for a manifest: a path to its last part; the name of a model stays."""
    return Path(given).resolve().name if Path(given).exists() else given


def read_vocabulary(folder: Path) -> Vocabulary:
    """Reads the vocabulary of a folder of transformers, of shards, of a run or of a checkpoint, with its casing."""
    folder = find_vocabulary_folder(folder)
    tables = (folder / TOKENIZER, folder / TOKENIZER_CONFIG)
    tokenizer, config = (read_table(path) if path.is_file() else {} for path in tables)
    if (folder / VOCABULARY).is_file():
        pieces = load_vocabulary(folder / VOCABULARY, cased=False).pieces
    elif tokenizer:
        pieces = _read_pieces(tokenizer, folder / TOKENIZER)
    else:
        raise UserError(
            f"{folder}: neither {VOCABULARY} nor {TOKENIZER}: copy them from where the model comes from, "
            "since its weights mean nothing without its pieces"
        )
    _check_kind(folder, tokenizer, config)
    if "model" in tokenizer and (others := _read_pieces(tokenizer, folder / TOKENIZER)) != pieces:
        raise UserError(
            f"{folder}: {_describe_difference(pieces, others)}: copy both again from where the model comes from"
        )
    normalizer = _read_part(tokenizer, "normalizer", folder / TOKENIZER) or {}
    said = {new: normalizer.get(old) for old, new in NORMALIZER.items()}
    says = {name: value for table in (said, config) for name, value in table.items() if value is not None}
    lower = says.get("do_lower_case", not has_capitals(pieces))
    needed = {"strip_accents": lower, "tokenize_chinese_chars": True}
    for name in (name for name, value in needed.items() if says.get(name, value) != value):
        where = " in text that keeps case" if name == "strip_accents" and not lower else ""
        how = f"{name} = {json.dumps(says[name])}{where}"
        raise UserError(f"{folder}: cuts text with {how}; here accents go with case, and Chinese is cut apart")
    return Vocabulary(pieces, cased=not lower)


def _check_kind(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises UserError where a folder's tokenizer is not BERT's, so that its pieces would stand for other text."""
    known = KINDS + GENERAL * ("model" in tokenizer)
    if (kind := config.get("tokenizer_class")) not in (None, *known):
        raise UserError(f"{folder / TOKENIZER_CONFIG}: cuts text by {kind}; only {KINDS[0]} is known here")
    if (words := config.get("word_tokenizer_type", "basic")) != "basic":
        raise UserError(f"{folder / TOKENIZER_CONFIG}: finds words by {words}; only as {KINDS[0]} does is known here")
    for (step, key), needed in STEPS.items() if "model" in tokenizer else ():
        part = _read_part(tokenizer, step, folder / TOKENIZER) or {"type": None}
        if (says := part.get(key, needed)) != needed:
            how = f"{step}.{key} = {json.dumps(says)}"
            raise UserError(f"{folder / TOKENIZER}: cuts text with {how}; only {needed} is known here")


def find_vocabulary_folder(folder: Path) -> Path:
    """Finds the folder with the vocabulary: this one, or that of the run that it is or belongs to."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: {absence(folder, 'folder')}")
    if any((folder / name).is_file() for name in (VOCABULARY, TOKENIZER)):
        return folder
    run = folder.resolve().parent.parent if (folder / CHECKPOINT).exists() else folder
    return run / IN_A_RUN if (run / IN_A_RUN).is_dir() else folder


def _read_part(tokenizer: dict[str, Any], step: str, path: Path) -> dict[str, Any]:
    """Reads the settings of a step from a tokenizer.json; empty where it has none."""
    part = tokenizer.get(step) or {}
    if not isinstance(part, dict):
        raise UserError(f"{path}: {step} is {json.dumps(part)[:40]}, not a table of names and values")
    return part


def _read_pieces(tokenizer: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Reads the pieces of a tokenizer.json, in the order of their ids."""
    ids = _read_part(tokenizer, "model", path).get("vocab")
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        raise UserError(f"{path}: no model.vocab that gives ids to pieces")
    pieces = tuple(sorted(ids, key=ids.__getitem__))
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"{path}: the ids of its pieces are not 0, 1, 2, …")
    return check_pieces(pieces, path)


def _describe_difference(pieces: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Describes the first difference between the pieces of vocab.txt and of tokenizer.json."""
    if len(pieces) != len(others):
        return f"{VOCABULARY} has {len(pieces):,} pieces, {TOKENIZER} {len(others):,}"
    number = next(number for number, (one, other) in enumerate(zip(pieces, others, strict=True)) if one != other)
    return f"piece {number} is {pieces[number]!r} in {VOCABULARY}, {others[number]!r} in {TOKENIZER}"


def has_capitals(pieces: tuple[str, ...]) -> bool:
    """Tells whether a piece has a letter that text in lower case never has; special pieces stand in brackets."""
    return any(not piece.startswith("[") and piece != piece.lower() for piece in pieces)
