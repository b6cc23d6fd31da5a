"""Folders of transformers, out and in: the names and sizes of its weights, its config, its files.

    BERT/
      config.json              the sizes, as transformers' BertConfig names them
      model.safetensors        the weights of BertForPreTraining, of BertForMaskedLM where the model has no
                               next-sentence head, or of a model that was fine-tuned; read also in parts, or from
                               pytorch_model.bin; what is written here has its checksum in it, and those of all other
                               files but the model card, which is for people to edit
      vocab.txt  tokenizer.json  tokenizer_config.json
      README.md                the model card
      task.json                what was fine-tuned here: what must be known to use it, besides its config

Ours differ from theirs in three ways: query, key and value are one weight, rows of the vocabulary are padded, and the
decoder of the masked head is the word embeddings themselves, never a copy. Nothing else knows their names, and
transformers itself is not needed. Nothing that is read is ever executed: safetensors, or torch.load of tensors alone.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.files import absence, read_table, replaced_name, replacing, unfinished_name, write_json
from data_prep.vocabulary import source
from data_prep.vocabulary.vocabulary import TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, Vocabulary
from pretraining.huggingface.config import make_config, parse_head, parse_shape
from pretraining.huggingface.weights import (
    ARCHITECTURES,
    LISTED,
    TaskHead,
    check_finite,
    export_weights,
    has_pairs,
    import_weights,
)
from pretraining.huggingface.weights_file import read_weights, write_weights
from pretraining.model.shape import Shape

CONFIG, WEIGHTS, CARD, TASK = "config.json", "model.safetensors", "README.md", "task.json"
FILES = (CONFIG, WEIGHTS, VOCABULARY, TOKENIZER, TOKENIZER_CONFIG, CARD, TASK)
OF_SENTENCES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
"""What sentence-transformers lays beside an encoder that gives vectors of sentences. It is never copied: how pieces
become a vector was trained together with the weights, which are others after training; and of a folder that is exported
anew the heads of pre-training are what is checked, which say nothing of such vectors."""
OLD_WEIGHTS = "pytorch_model.bin"
PARTS = [unfinished_name(Path(name)).name for name in FILES]
INDEX = ".index.json"
SMALL = 1 << 20
"""Up to this many weights beyond the files' size a model is built: then the first faulty weight is named instead."""


def read_folder(folder: Path) -> tuple[Shape, dict[str, Tensor], tuple[str, ...]]:
    """Reads the sizes and weights in a folder of transformers, and names the weights that it lacks.

    Only whole heads may be missing. A model with neither pooler nor next-sentence head does not lack them: it is one
    without next-sentence prediction.
    """
    shape, weights = read_shape(folder), _read_weights(folder)
    shape = replace(shape, pairs=has_pairs(weights))
    state, missing = import_weights(weights, shape, str(folder))
    return shape, state, missing


def read_encoder(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Reads an encoder, with its pooler where there is one, in a folder of transformers; heads are left out."""
    shape = read_shape(folder).encoder
    return shape, import_weights(_read_weights(folder), shape, str(folder), "none")[0]


def read_fine_tuned(folder: Path) -> tuple[Shape, TaskHead, dict[str, Tensor]]:
    """Reads a model that was fine-tuned for a task, here or by transformers; what is missing of it is an error."""
    shape, head = read_shape(folder).encoder, read_head(folder)
    if head is None:
        raise UserError(f"{folder / CONFIG}: names none of {', '.join(ARCHITECTURES.values())}: not fine-tuned")
    return shape, head, import_weights(_read_weights(folder), shape, str(folder), head)[0]


def read_head(folder: Path) -> TaskHead | None:
    """Reads for which task the config of a folder says that its model was fine-tuned; None where for none."""
    return parse_head(read_table(folder / CONFIG), str(folder / CONFIG))


def read_shape(folder: Path) -> Shape:
    """Reads the sizes in a folder of transformers; which heads there are, its weights alone say."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: {absence(folder, 'folder')}")
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG}: not a folder of transformers")
    shape = parse_shape(read_table(folder / CONFIG), str(folder / CONFIG))
    size = sum(path.stat().st_size for ending in (".safetensors", ".bin") for path in folder.glob(f"*{ending}"))
    if 0 < size < shape.encoder_parameters - SMALL:  # at a byte each
        raise UserError(
            f"{folder / CONFIG}: {shape.encoder_parameters:,} weights, but the files of weights beside it have "
            f"{size:,} bytes: one of them is damaged; copy or download the folder again"
        )
    return shape


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the weights from the first of the files that transformers would take."""
    for name in (WEIGHTS, OLD_WEIGHTS):
        if (folder / name).is_file():
            return _read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return _read_parts(folder / (name + INDEX))
    raise UserError(
        f"{folder}: no weights: neither {WEIGHTS} nor {OLD_WEIGHTS}, whole or in parts with {WEIGHTS}{INDEX}"
    )


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Reads weights from several files; the index says in which one a weight is."""
    places = read_table(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: no weight_map in it")
    state: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: {name!r} is not a file beside it")
        part = _read_file(index.with_name(name))
        expected = {weight for weight, file in places.items() if file == name}
        if wrong := sorted(part.keys() ^ expected):
            raise UserError(f"{index}: {name} does not hold what the index says: {', '.join(wrong[:LISTED])}")
        state |= part
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file, whose ending says how."""
    if not path.is_file():
        raise UserError(f"{path}: missing; download the folder again")
    if path.suffix == ".safetensors":
        try:
            return read_weights(path)
        except SafetensorError as error:
            raise UserError(f"{path}: not a whole safetensors file: {error}; download or copy it again") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: damaged, or holds more than tensors, which is never executed here: where you trust it, "
            f"load it with transformers and save it as {WEIGHTS}"
        ) from error
    except Exception as error:  # whatever a damaged file makes torch raise
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
    check: Callable[[Path], None] | None = None,
) -> None:
    """Writes a folder that transformers loads, whole or not at all.

    The files of the vocabulary are those of the folder `vocabulary`: one of shards, or an earlier export. `length` is
    what the tokenizer is to cut texts to (default: the positions). `check` sees the finished folder before it takes its
    name and the place of an earlier export; what it raises prevents that.
    """
    pieces = read_vocabulary(vocabulary)
    _check_size(pieces, shape, vocabulary / VOCABULARY)
    tokenizer = read_table(vocabulary / TOKENIZER_CONFIG)
    weights = _convert_checked(folder, export_weights(state, shape), dtype)
    with _make_model_folder(folder, weights, card, check) as unfinished:
        for name in (VOCABULARY, TOKENIZER):
            with replacing(unfinished / name) as file:
                file.write((vocabulary / name).read_bytes())
        write_json(unfinished / TOKENIZER_CONFIG, {**tokenizer, "model_max_length": length or shape.positions})
        write_json(unfinished / CONFIG, make_config(shape, pieces.special, dtype))


def write_fine_tuned(
    folder: Path,
    shape: Shape,
    head: TaskHead,
    state: Mapping[str, Tensor],
    vocabulary: Vocabulary,
    card: str,
    task: Mapping[str, Any],
    length: int,
    dtype: torch.dtype = torch.float32,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Writes a fine-tuned model as a folder that transformers loads, whole or not at all, as `write_folder` does.

    `task` is what must be known to use it besides the names of its labels, and becomes task.json. Of scores all is
    written in fp32: their scale is in the head, which transformers would put into the type of all else.
    """
    dtype = torch.float32 if head.kind == "score" else dtype
    _check_size(vocabulary, shape, folder)
    weights = _convert_checked(folder, export_weights(state, shape, head), dtype)
    with _make_model_folder(folder, weights, card, check) as unfinished:
        vocabulary.write(unfinished)
        tokenizer = read_table(unfinished / TOKENIZER_CONFIG)
        write_json(unfinished / TOKENIZER_CONFIG, {**tokenizer, "model_max_length": length})
        write_json(unfinished / CONFIG, make_config(shape, vocabulary.special, dtype, head))
        write_json(unfinished / TASK, task)


def write_bare(
    folder: Path,
    weights: Mapping[str, Tensor],
    card: str,
    task: Mapping[str, Any],
    vocabulary: Vocabulary | None = None,
) -> None:
    """Writes weights that no class of transformers has, with a card and task.json, whole or not at all, and with the
    vocabulary where they need no other folder."""
    checked = _convert_checked(folder, weights, torch.float32)
    with _make_model_folder(folder, checked, card) as unfinished:
        if vocabulary is not None:
            vocabulary.write(unfinished)
        write_json(unfinished / TASK, task)


def read_task(folder: Path) -> dict[str, Any]:
    """Reads what must be known to use a fine-tuned model; empty where it was not fine-tuned here."""
    return read_table(folder / TASK) if (folder / TASK).is_file() else {}


def list_sentence_files(folder: Path) -> list[str]:
    """The files and folders by which sentence-transformers makes vectors of sentences, of those in a folder."""
    if not (folder / OF_SENTENCES[0]).is_file():
        return []
    files = [name for name in OF_SENTENCES if (folder / name).is_file()]
    return [*files, *sorted(f"{path.name}/" for path in folder.glob("[0-9]_*"))]


def _check_size(vocabulary: Vocabulary, shape: Shape, where: Path) -> None:
    """Raises UserError unless the vocabulary has a piece for every row of the embeddings."""
    if len(vocabulary) != shape.vocabulary:
        raise UserError(
            f"{where}: {len(vocabulary):,} pieces, but the model has {shape.vocabulary:,}: "
            "not the vocabulary it was trained with"
        )


def _convert_checked(folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights as they are written; UserError where some are no numbers."""
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    check_finite(str(folder), weights)
    return weights


@contextmanager
def _make_model_folder(
    folder: Path, weights: dict[str, Tensor], card: str, check: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Makes a folder for the other files of a model; it takes its name with card and weights, once `check` saw it."""
    with _replacing_folder(folder.resolve()) as unfinished:
        yield unfinished
        with replacing(unfinished / CARD) as file:
            file.write(card.encode())
        try:
            write_weights(weights, unfinished / WEIGHTS, [name for name in FILES if name not in (WEIGHTS, CARD)])
        except SafetensorError as error:
            raise UserError(f"{unfinished / WEIGHTS}: cannot be written: {error}") from error
        if check is not None:
            check(unfinished)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Reads the vocabulary of a folder of shards or of an exported one."""
    for name in (VOCABULARY, TOKENIZER, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}: name the folder of shards, or an exported one, for its vocabulary")
    return source.read_vocabulary(folder)


def read_length(folder: Path, shape: Shape) -> int:
    """Reads what the tokenizer of a folder cuts texts to; the positions of the model where it does not say, or more."""
    path = folder / TOKENIZER_CONFIG
    length = read_table(path).get("model_max_length") if path.is_file() else None
    return int(min(length, shape.positions)) if isinstance(length, int | float) and length >= 1 else shape.positions


@contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Makes a new folder beside `folder`, which takes its name and place when it is complete."""
    unfinished, replaced = unfinished_name(folder), replaced_name(folder)
    try:
        for place in (folder, unfinished, replaced):
            _check_ours(place)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)  # a run was killed between the two renames below
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
        raise UserError(f"{folder}: cannot be written: {error}") from error


def _check_ours(folder: Path) -> None:
    """Raises UserError unless nothing is there, or only what an export consists of."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; name a folder that is new, empty or an earlier export")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if name not in FILES and name not in PARTS]:
        raise UserError(f"{folder}: would be replaced, but holds {others[0]}, which is no part of an export")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
