"""Where a vocabulary is taken from: a vocab.txt, or whatever has one with its casing.

A folder of transformers, of shards or of a run has one; so has a model on the Hugging Face hub, by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.hub import find_folder
from data_prep.vocabulary.vocabulary import (
    SPECIAL,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    Vocabulary,
    check_pieces,
    load_vocabulary,
)

FILES = (VOCABULARY, TOKENIZER, TOKENIZER_CONFIG)
IN_A_RUN = "tokenizer"
"""The folder of a run that holds its vocabulary."""
NORMALIZER = "BertNormalizer"
CHECKPOINT = "checkpoint.json"
"""The file that a checkpoint of a run has; the run's folder is the second above it."""


def find_vocabulary(given: str, cased: bool) -> Vocabulary:
    """Finds the vocabulary that --vocab names; `cased` is whether the user wants case to be kept.

    A vocab.txt says nothing of case, so the user does. Everything else says it, and the user cannot contradict.
    """
    if Path(given).is_file() or Path(given).suffix == ".txt":
        return load_vocabulary(Path(given), cased)
    try:
        vocabulary = read_vocabulary(find_folder(given, FILES))
    except UserError as error:
        raise UserError(f"--vocab {error}") from error
    if cased and not vocabulary.cased:
        raise UserError(f"--cased: the vocabulary of --vocab {given} is for text in lower case; leave out --cased")
    return vocabulary


def short_name(given: str) -> str:
    """What a manifest calls the source of a vocabulary: a path by its last part, whatever lies above it elsewhere."""
    return Path(given).resolve().name if Path(given).exists() else given


def read_vocabulary(folder: Path) -> Vocabulary:
    """Reads the vocabulary of a folder of transformers, of shards, of a run or of a checkpoint, with its casing."""
    folder = folder_of_vocabulary(folder)
    tokenizer, config = (_read_table(folder / name) for name in (TOKENIZER, TOKENIZER_CONFIG))
    if (folder / VOCABULARY).is_file():
        pieces = load_vocabulary(folder / VOCABULARY, cased=False).pieces
    elif tokenizer:
        pieces = _pieces_of(tokenizer, folder / TOKENIZER)
    else:
        raise UserError(
            f"{folder}: neither {VOCABULARY} nor {TOKENIZER}: copy them from where the model comes from, "
            "since its weights mean nothing without its pieces"
        )
    normalizer = tokenizer.get("normalizer") or {}
    if (kind := normalizer.get("type", NORMALIZER)) != NORMALIZER:
        raise UserError(f"{folder / TOKENIZER}: normalises text by {kind}; only {NORMALIZER} is known here")
    says = {**_bert_settings(normalizer), **{name: value for name, value in config.items() if value is not None}}
    lower = says.get("do_lower_case", not any(_has_capital(piece) for piece in pieces))
    unknown = {"strip_accents": lower, "tokenize_chinese_chars": True}  # what would need to be so
    for name in (name for name, needed in unknown.items() if needed and says.get(name) is False):
        raise UserError(f"{folder}: cuts text with {name} = false; here accents go with case, and Chinese is cut apart")
    return Vocabulary(pieces, cased=not lower)


def folder_of_vocabulary(folder: Path) -> Path:
    """The folder itself, or the one of the run that it is or belongs to."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if any((folder / name).is_file() for name in (VOCABULARY, TOKENIZER)):
        return folder
    run = folder.resolve().parent.parent if (folder / CHECKPOINT).exists() else folder
    return run / IN_A_RUN if (run / IN_A_RUN).is_dir() else folder


def _read_table(path: Path) -> dict[str, Any]:
    """Reads a JSON file of names with values; empty where there is none."""
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a table of names and values")
    return content


def _pieces_of(tokenizer: dict[str, Any], path: Path) -> tuple[str, ...]:
    """The pieces in a tokenizer.json, in the order of their ids."""
    model = tokenizer.get("model") or {}
    ids = model.get("vocab")
    if model.get("type", "WordPiece") != "WordPiece" or not isinstance(ids, dict):
        raise UserError(f"{path}: cuts words by {model.get('type')}; only WordPiece, that of BERT, is known here")
    pieces = tuple(sorted(ids, key=ids.__getitem__))
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"{path}: the ids of its pieces are not 0, 1, 2, …")
    return check_pieces(pieces, path)


def _bert_settings(normalizer: dict[str, Any]) -> dict[str, Any]:
    """What the normaliser of a tokenizer.json says, in the words of tokenizer_config.json."""
    names = {
        "lowercase": "do_lower_case",
        "strip_accents": "strip_accents",
        "handle_chinese_chars": "tokenize_chinese_chars",
    }
    return {new: normalizer[old] for old, new in names.items() if normalizer.get(old) is not None}


def _has_capital(piece: str) -> bool:
    """Whether a piece has a letter that text in lower case never has; special pieces stand in brackets."""
    return not piece.startswith("[") and piece != piece.lower() and piece not in SPECIAL
