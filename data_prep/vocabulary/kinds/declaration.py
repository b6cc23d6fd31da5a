"""What a tokenizer kind declares, and the kinds that there are: each file of this folder with a `KIND`.

Whoever reads, trains or counts for a vocabulary asks the kind; whoever has one asks the vocabulary.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from data_prep.common.sections import declared_in
from data_prep.vocabulary.vocabulary import TOKENIZER, Vocabulary

TOGETHER = 1000  # repetitions of a word handed to a trainer as one text
USUAL = "wordpiece"
"""The kind where nothing says another."""


class TokenizerKind(ABC):
    """A tokenizer kind: how its vocabularies are recognised, read and trained."""

    vocabulary: ClassVar[type[Vocabulary]]
    """The class of its vocabularies, which has its name."""
    title: ClassVar[str]
    """What messages call it."""
    model: ClassVar[str]
    """The value of model.type in a tokenizer.json of this kind."""
    plain: ClassVar[tuple[str, ...]]
    """Files that together are a vocabulary of this kind, without a tokenizer.json."""

    is_cased: ClassVar[bool] = False
    """Whether its vocabularies keep case and accents always."""
    is_extensible: ClassVar[bool] = True
    """Whether words of a text can be added to a vocabulary."""

    def load(self, folder: Path, cased: bool) -> Vocabulary:  # noqa: ARG002 - most kinds say it in their files
        """Reads the vocabulary of a folder of shards, whose manifest says whether it is cased."""
        return self.read(folder, read_table(folder / TOKENIZER))

    @abstractmethod
    def read(self, folder: Path, tokenizer: dict[str, Any]) -> Vocabulary:
        """Reads the vocabulary of a folder, given its tokenizer.json, of which nothing is there where there is none."""

    @abstractmethod
    def make_up(self, size: int, cased: bool) -> Vocabulary:
        """Makes up a vocabulary of this size, with which everything is compiled before there is a real one."""

    @abstractmethod
    def count_words(self, text: Array, ends: Array, cased: bool) -> Mapping[str, int]:
        """Counts the words that a vocabulary is trained from; sentences of `text` end at `ends`."""

    @abstractmethod
    def train(self, counts: Mapping[str, int], size: int, cased: bool) -> Vocabulary:
        """Learns a vocabulary of at most `size` pieces; the same counts give the same pieces."""


@cache
def list_kinds() -> dict[str, TokenizerKind]:
    """Lists the tokenizer kinds by their names."""
    return declared_in(__file__, __package__ or "", "KIND")


def find_kind(name: str | None) -> TokenizerKind:
    """Finds a kind by its name; the usual one for none."""
    kinds = list_kinds()
    if (name or USUAL) not in kinds:
        raise UserError(f"--tokenizer {name}: there is {', '.join(kinds)}")
    return kinds[name or USUAL]


def recognise_kind(folder: Path, tokenizer: dict[str, Any]) -> TokenizerKind:
    """Finds the kind of the vocabulary in a folder by the content of its tokenizer.json, else by its files."""
    kinds, model = list_kinds().values(), tokenizer.get("model")
    says = model.get("type", "BPE" if "merges" in model else None) if isinstance(model, dict) else None
    if says is not None:  # files of 2020, such as roberta-base's, leave it out
        for kind in kinds:
            if kind.model == says:
                return kind
        known = " and ".join(sorted(kind.title for kind in kinds))
        how = f"model.type = {json.dumps(says)}"
        raise UserError(f"{folder / TOKENIZER}: cuts text with {how}; only {known} are known here")
    for kind in kinds:
        if all((folder / name).is_file() for name in kind.plain):
            return kind
    return find_kind(USUAL)


def load_vocabulary(folder: Path, cased: bool) -> Vocabulary:
    """Reads the vocabulary of a folder of shards, whose manifest says whether it is cased."""
    usual = find_kind(USUAL)
    own = (folder / usual.vocabulary.file).is_file() or not (folder / TOKENIZER).is_file()
    return (usual if own else recognise_kind(folder, read_table(folder / TOKENIZER))).load(folder, cased)


def repeat_words(counts: Mapping[str, int]) -> Iterator[str]:
    """Repeats every word as often as it occurs, since the trainer takes texts, not counts."""
    for word in sorted(counts):
        for done in range(0, counts[word], TOGETHER):
            yield " ".join([word] * min(TOGETHER, counts[word] - done))


def read_part(tokenizer: dict[str, Any], step: str, path: Path) -> dict[str, Any]:
    """Reads the settings of a step from a tokenizer.json; empty where it has none."""
    part = tokenizer.get(step) or {}
    if not isinstance(part, dict):
        raise UserError(f"{path}: {step} is {json.dumps(part)[:40]}, not a table of names and values")
    return part


def check_steps(tokenizer: dict[str, Any], steps: Mapping[tuple[str, str], tuple[Any, ...]], path: Path) -> None:
    """Raises UserError where a tokenizer.json cuts text in another way than with the values that are known.

    Among these, None stands for a step or a key that is not there.
    """
    for (step, key), known in steps.items():
        if (says := read_part(tokenizer, step, path).get(key)) not in known:
            needed = " or ".join("nothing" if one is None else json.dumps(one) for one in known)
            raise UserError(f"{path}: cuts text with {step}.{key} = {json.dumps(says)}; only {needed} is known here")


def read_vocab(tokenizer: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Reads the pieces of a tokenizer.json, in the order of their ids."""
    ids = read_part(tokenizer, "model", path).get("vocab")
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        raise UserError(f"{path}: no model.vocab that gives ids to pieces")
    return order_pieces(ids, path)


def order_pieces(ids: Mapping[str, int], path: Path) -> tuple[str, ...]:
    """Returns the pieces of a file in the order of their ids; raises UserError where these have gaps."""
    pieces = tuple(sorted(ids, key=ids.__getitem__))
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"{path}: the ids of its pieces are not 0, 1, 2, …")
    return pieces
