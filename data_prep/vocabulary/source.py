"""Reads vocabularies: from a vocab.txt, or from a folder that has one with its casing.

A folder of transformers, of shards or of a run has one; so has a model on the Hugging Face hub, by its name.
"""

from __future__ import annotations

import os
from pathlib import Path

from data_prep.common.codes import CHECKPOINT, IN_A_RUN
from data_prep.common.errors import UserError
from data_prep.common.files import absence, read_table
from data_prep.common.hub import find_folder
from data_prep.vocabulary.kinds.declaration import list_kinds, recognise_kind
from data_prep.vocabulary.kinds.wordpiece import VOCABULARY, read_pieces
from data_prep.vocabulary.vocabulary import TOKENIZER, TOKENIZER_CONFIG, Vocabulary, has_capitals

FILES = (*(name for kind in list_kinds().values() for name in kind.plain), TOKENIZER, TOKENIZER_CONFIG)
"""Files that a vocabulary may be read from."""


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
    vocabulary: Vocabulary = read_pieces(path, cased)
    if cased or not has_capitals(vocabulary.pieces):
        return vocabulary
    if path.name == VOCABULARY and path.with_name(TOKENIZER_CONFIG).is_file():
        return read_vocabulary(path.parent)
    cure = f"add --cased, or name a folder that has it beside a {TOKENIZER_CONFIG}"
    raise UserError(f"--vocab {path}: has pieces with capitals, which text in lower case never matches: {cure}")


def shorten_name(given: str) -> str:
    """Shortens the source of a vocabulary for a manifest: a path to its last part; the name of a model stays."""
    return Path(given).resolve().name if Path(given).exists() else given


def read_vocabulary(folder: Path) -> Vocabulary:
    """Reads the vocabulary of a folder of transformers, of shards, of a run or of a checkpoint, with its casing."""
    folder = find_vocabulary_folder(folder)
    tokenizer = read_table(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    return recognise_kind(folder, tokenizer).read(folder, tokenizer)


def find_vocabulary_folder(folder: Path) -> Path:
    """Finds the folder with the vocabulary: this one, or that of the run that it is or belongs to."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: {absence(folder, 'folder')}")
    if any((folder / name).is_file() for name in FILES if name != TOKENIZER_CONFIG):
        return folder
    run = folder.resolve().parent.parent if (folder / CHECKPOINT).exists() else folder
    return run / IN_A_RUN if (run / IN_A_RUN).is_dir() else folder
