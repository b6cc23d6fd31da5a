"""Reads and writes folders of transformers.

    BERT/
      config.json              the sizes, as transformers' BertConfig names them
      model.safetensors        the weights of BertForPreTraining, of BertForMaskedLM where the model has no
                               next-sentence head, or of a model that was fine-tuned; read also in parts, or from
                               pytorch_model.bin; files written here contain their checksum, and those of the other
                               files but the model card, which people may edit, and those of sentence-transformers
      vocab.txt  tokenizer.json  tokenizer_config.json
      README.md                the model card
      modules.json  1_Pooling/ 2_Normalize/  sentence_bert_config.json
                               how sentence-transformers makes the vector of a text of it: the mean of its pieces, which
                               nothing trained, or what was trained; never copied
      task.json                of a fine-tuned model: what else is needed to use it

Our weights differ from those of transformers in three ways: query, key and value are one weight, rows of the vocabulary
are padded, and the decoder of the masked head is the word embeddings themselves. transformers itself is not needed.
Nothing that is read is executed: safetensors, or torch.load with weights_only.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import DamageError, UserError, describe_failure
from data_prep.common.files import absence, read_table, replaced_name, replacing, unfinished_name, write_json
from data_prep.vocabulary.source import FILES as VOCABULARY_FILES
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import TOKENIZER_CONFIG, Vocabulary
from pretraining.architectures.declaration import count_encoder_parameters, find_architecture
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface.config import make_config, parse_head, parse_shape
from pretraining.huggingface.pooling import MODULES, VECTOR_FILES, Pooling
from pretraining.huggingface.weights import (
    LISTED,
    check_finite,
    export_weights,
    has_pairs,
    import_weights,
    is_theirs,
    read_weights,
    write_weights,
)
from pretraining.model.shape import Shape

CONFIG, WEIGHTS, CARD, TASK = "config.json", "model.safetensors", "README.md", "task.json"
FILES = (CONFIG, WEIGHTS, *VOCABULARY_FILES, CARD, TASK)
OLD_WEIGHTS = "pytorch_model.bin"
PARTS = [unfinished_name(Path(name)).name for name in FILES]
INDEX, SEGMENTS = ".index.json", "type_vocab_size"
UNUSED = "[unused"
"""Prefix of the names of BERT's spare pieces, which are in no text."""
SMALL = 1 << 20
"""Excess of weights over the size of the files up to which the weights are read, to name the first faulty one."""


def read_folder(folder: Path) -> tuple[Shape, dict[str, Tensor], tuple[str, ...]]:
    """Reads the sizes and weights in a folder of transformers; returns also the names of missing weights.

    Only whole heads may be missing. A model with neither pooler nor next-sentence head is one without next-sentence
    prediction, which lacks nothing.
    """
    shape, weights = read_shape(folder), _read_weights(folder)
    shape = shape.change_learning(pairs=has_pairs(weights, shape))
    state, missing = import_weights(weights, shape, str(folder))
    return shape, state, missing


def read_encoder(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Reads an encoder, with its pooler if there is one, but without heads, from a folder of transformers."""
    shape = read_shape(folder).encoder
    return shape, import_weights(_read_weights(folder), shape, str(folder), "none")[0]


def read_fine_tuned(folder: Path) -> tuple[Shape, TaskHead, dict[str, Tensor]]:
    """Reads a model that was fine-tuned for a task, here or by transformers; no weight may be missing."""
    shape, head = read_shape(folder).encoder, read_head(folder)
    if head is None:
        raise UserError(f"{folder / CONFIG}: names no class with the head of a task: not fine-tuned")
    return shape, head, import_weights(_read_weights(folder), shape, str(folder), head)[0]


def read_head(folder: Path) -> TaskHead | None:
    """Reads the head that the config of a folder names; None if it is not that of a task. A bare encoder has one only
    if something says how its vectors are made."""
    head = parse_head(read_table(folder / CONFIG), str(folder / CONFIG))
    is_bare = head == TaskHead("embeddings") and not any((folder / name).is_file() for name in (MODULES, TASK))
    return None if is_bare else head


def read_shape(folder: Path) -> Shape:
    """Reads the sizes in a folder of transformers; the heads follow from its weights."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: {absence(folder, 'folder')}")
    if not (folder / CONFIG).is_file():
        within = ": modules.json names a folder within: open and save it with sentence-transformers"
        said = within if (folder / MODULES).is_file() else ": not a folder of transformers"
        raise UserError(f"{folder}: no {CONFIG}{said}")
    shape = parse_shape(read_table(folder / CONFIG), str(folder / CONFIG))
    size = sum(path.stat().st_size for ending in (".safetensors", ".bin") for path in folder.glob(f"*{ending}"))
    if 0 < size < count_encoder_parameters(shape) - SMALL:  # even at one byte each
        raise UserError(
            f"{folder / CONFIG}: {count_encoder_parameters(shape):,} weights, but the files of weights beside it have "
            f"{size:,} bytes: one of them is damaged; copy or download the folder again"
        )
    return shape


def read_pieces(folder: Path, shape: Shape, name: str) -> Vocabulary:
    """Reads the vocabulary of a model with this shape, which messages call `name`. Raises UserError if it has too many
    pieces, or if transformers would take pieces of a text for padding and give them no positions."""
    pieces = read_vocabulary(folder)
    if len(pieces) > shape.vocabulary:
        raise UserError(f"{name}: {len(pieces):,} pieces, but the model has only {shape.vocabulary:,}")
    padding, pad = find_architecture(shape.architecture).find_padding(shape), pieces.special.pad
    if padding is None or padding == pad or padding >= len(pieces) or pieces.pieces[padding].startswith(UNUSED):
        return pieces
    raise UserError(
        f"{name}: pad_token_id is {padding} in {CONFIG}, so transformers counts no position for "
        f"{pieces.pieces[padding]!r}, but the tokenizer pads with {pieces.pieces[pad]!r}, {pad}; copy the "
        f"tokenizer of the model's training into the folder, or train the model anew with pad_token_id {pad}"
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the weights from the file that transformers would prefer."""
    for name in (WEIGHTS, OLD_WEIGHTS):
        if (folder / name).is_file():
            return _read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return _read_parts(folder / (name + INDEX))
    raise UserError(
        f"{folder}: no weights: neither {WEIGHTS} nor {OLD_WEIGHTS}, whole or in parts with {WEIGHTS}{INDEX}"
    )


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Reads weights from several files by their index."""
    places = read_table(index).get("weight_map")
    if not isinstance(places, dict) or not all(Path(str(name)).name == name for name in places.values()):
        raise UserError(f"{index}: its weight_map does not name files beside it")
    state: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        part = _read_file(index.with_name(name))
        expected = {weight for weight, file in places.items() if file == name}
        if wrong := sorted(part.keys() ^ expected):
            raise UserError(f"{index}: {name} does not hold what the index says: {', '.join(wrong[:LISTED])}")
        state |= part
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file in the format of its suffix."""
    try:
        if path.suffix == ".safetensors":
            return read_weights(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: damaged, or holds more than tensors, which is never executed here: where you trust it, "
            f"load it with transformers and save it as {WEIGHTS}"
        ) from error
    except DamageError:
        raise
    except Exception as error:  # any error that is raised for a damaged file
        raise UserError(f"{path}: cannot be read: {error}; download or copy it again") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: not a dictionary of weights")
    return state


def write_folder(
    folder: Path,
    shape: Shape,
    state: Mapping[str, Tensor],
    vocabulary: Path,
    card: str,
    dtype: torch.dtype = torch.float32,
    length: int | None = None,
) -> None:
    """Writes a pre-trained model into a folder, as transformers loads it.

    `vocabulary`: folder of the vocabulary's files, of shards or an earlier export. `length`: limit of the tokenizer
    (default: the positions).
    """
    pieces = read_vocabulary(vocabulary)
    assert len(pieces) == shape.vocabulary, "not the vocabulary that it was trained with"
    there = [name for name in pieces.list_contents() if (vocabulary / name).is_file()]
    files = {**pieces.list_contents(), **{name: (vocabulary / name).read_bytes() for name in there}}
    tables = {CONFIG: make_config(shape, pieces.special, dtype)}
    _write_files(folder, files, length or shape.positions, tables, export_weights(state, shape), card, dtype)
    if is_theirs(shape):
        Pooling().write(folder, shape.hidden)


def write_fine_tuned(
    folder: Path,
    shape: Shape,
    head: TaskHead,
    state: Mapping[str, Tensor],
    vocabulary: Vocabulary,
    card: str,
    task: Mapping[str, Any],
    length: int,
    pooling: Pooling | None = None,
) -> None:
    """Writes a fine-tuned model into a folder, as transformers loads it; `length`: limit of the tokenizer. `pooling`:
    how its vectors are made, for sentence-transformers.

    `task`: what is needed to use it besides the names of its labels, written as task.json.
    """
    assert len(vocabulary) == shape.vocabulary, "not the vocabulary that it was trained with"
    tables = {CONFIG: make_config(shape, vocabulary.special, torch.float32, head), TASK: task}
    _write_files(folder, vocabulary.list_contents(), length, tables, export_weights(state, shape, head), card)
    if pooling is not None:
        pooling.write(folder, shape.hidden, length)


def write_bare(
    folder: Path, weights: Mapping[str, Tensor], card: str, task: Mapping[str, Any], vocabulary: Vocabulary | None
) -> None:
    """Writes weights that no class of transformers has into a folder, with a card and task.json; with the vocabulary if
    they need no other folder."""
    _write_files(folder, vocabulary.list_contents() if vocabulary else {}, None, {TASK: task}, weights, card)


def _write_files(
    folder: Path,
    files: Mapping[str, bytes],
    length: int | None,
    tables: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    card: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the files of a model; the weights last, with the checksums of the others.

    `files`: those of the vocabulary. `length`: limit of its tokenizer; None if there is none.
    """
    check_finite(str(folder), weights, dtype)
    for name, content in {**files, CARD: card.encode()}.items():
        with replacing(folder / name) as file:
            file.write(content)
    if length is not None:
        tokenizer = read_table(folder / TOKENIZER_CONFIG)
        if SEGMENTS not in tables[CONFIG]:  # GPT-2 would take segments for pieces
            tokenizer["model_input_names"] = ["input_ids", "attention_mask"]
        write_json(folder / TOKENIZER_CONFIG, {**tokenizer, "model_max_length": length})
    for name, table in tables.items():
        write_json(folder / name, dict(table))
    write_weights(weights, folder / WEIGHTS, [name for name in FILES if name not in (WEIGHTS, CARD)], dtype)


def read_task(folder: Path) -> dict[str, Any]:
    """Reads task.json of a fine-tuned model; empty if it was not fine-tuned here."""
    return read_table(folder / TASK) if (folder / TASK).is_file() else {}


def read_length(folder: Path, shape: Shape) -> int:
    """Reads the limit of a folder's tokenizer, at most the positions of the model."""
    path = folder / TOKENIZER_CONFIG
    length = read_table(path).get("model_max_length") if path.is_file() else None
    return int(min(length, shape.positions)) if isinstance(length, int | float) and length >= 1 else shape.positions


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder beside that of a model, which replaces it at the end; after an error the old one stays.
    Raises UserError where it cannot be written, or holds files that no model has."""
    folder = folder.resolve()
    unfinished, replaced = unfinished_name(folder), replaced_name(folder)
    try:
        for place in (folder, unfinished, replaced):
            _check_ours(place)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)  # the program was killed between the two renames below
        for left in (unfinished, replaced):
            _remove(left)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            if folder.exists():
                folder.rename(replaced)
            try:
                unfinished.rename(folder)
            except OSError:
                if replaced.exists():
                    replaced.rename(folder)
                raise
        finally:
            _remove(unfinished)
        _remove(replaced)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {describe_failure(error)}") from error


def _check_ours(folder: Path) -> None:
    """Raises UserError if there is a file, or a folder with files that an export does not have."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; name a folder that is new, empty or an earlier export")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if name not in (*FILES, *PARTS, *VECTOR_FILES)]:
        raise UserError(f"{folder}: would be replaced, but holds {others[0]}, which is no part of an export")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
