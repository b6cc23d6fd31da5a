"""Small BERTs of transformers that runs begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.transformers_models import leave_out_checksums, our_weights

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.huggingface.folders import write_folder
from pretraining.model.shape import Learning, Shape
from pretraining.objectives.declaration import objectives


def write_bert(
    folder: Path,
    vocabulary: Path | Vocabulary,
    positions: int = 64,
    hidden: int = 32,
    objective: str = "mlm",
    layers: int = 2,
    **settings: Any,
) -> Path:
    """A model of few layers that learned by an objective, with the vocabulary of another folder or one of its own."""
    if isinstance(vocabulary, Vocabulary):
        source = folder.with_name(f"{folder.name}-vocabulary")
        vocabulary.write(source)
        vocabulary = source
    shape = Shape(layers, hidden, 2, 48, len(read_vocabulary(vocabulary)), positions)
    learned_by = objectives()[objective]
    learns = Learning(objective, learned_by.uses_pairs, learned_by.sees, tuple(settings.items()))
    shape = replace(shape, learns=learns)
    write_folder(folder, shape, our_weights(shape=shape), vocabulary, "a model of tests\n")
    leave_out_checksums(folder)
    return folder


def swapped(vocabulary: Vocabulary, first: int, second: int) -> Vocabulary:
    """The same pieces, two of them in each other's place."""
    pieces = list(vocabulary.pieces)
    pieces[first], pieces[second] = pieces[second], pieces[first]
    return WordPiece(tuple(pieces), vocabulary.cased)
