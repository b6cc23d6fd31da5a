"""Folders of transformers, out and in: the names and sizes of its weights, its config, its files.

    BERT/
      config.json              the sizes, as transformers' BertConfig names them
      model.safetensors        the weights of BertForPreTraining; read also in parts, or from pytorch_model.bin
      vocab.txt  tokenizer.json  tokenizer_config.json
      README.md                the model card

Ours differ from theirs in three ways: query, key and value are one weight, rows of the vocabulary are padded, and the
decoder of the masked head is the word embeddings themselves, never a copy. Nothing else knows their names, and
transformers itself is not needed. Nothing that is read is ever executed: safetensors, or torch.load of tensors alone.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.files import UNFINISHED, read_json, replacing, write_json
from data_prep.vocabulary.vocabulary import TOKENIZER, VOCABULARY, Vocabulary, load_vocabulary
from pretraining.model.shape import Shape

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
TOKENIZER_CONFIG = "tokenizer_config.json"
FILES = (CONFIG, WEIGHTS, VOCABULARY, TOKENIZER, TOKENIZER_CONFIG, CARD)
OLD_WEIGHTS = "pytorch_model.bin"
INDEX = ".index.json"
REPLACED = ".old"

HEADS = {"pooler": "bert.pooler.", "masked_head": "cls.predictions.", "next_head": "cls.seq_relationship."}
"""what a checkpoint may lack, each as a whole: the first part of our names, and what theirs begin with"""
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""weights that some versions store twice; both must be the same"""
OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
"""settings of a config with the values that our encoder computes; where a config does not say, it means the first"""
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
}
RATES = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "epsilon": "layer_norm_eps",
}
"""our names of the numbers in a config, and theirs"""
DEFAULTS = {field.name: field.default for field in fields(Shape) if field.default is not MISSING}
LISTED = 10  # names in a message


@dataclass(frozen=True)
class Weight:
    """A weight in both worlds."""

    ours: str
    theirs: tuple[str, ...]
    """several where ours has their rows one after another"""
    size: tuple[int, ...]
    """of ours without padding"""

    @property
    def part(self) -> tuple[int, ...]:
        """The size of each of theirs."""
        return (self.size[0] // len(self.theirs), *self.size[1:])


def list_weights(shape: Shape) -> list[Weight]:
    """Every weight of an encoder with both heads."""
    h, v = shape.hidden, shape.vocabulary
    prediction = "cls.predictions"
    weights = [
        Weight("embeddings.word.weight", ("bert.embeddings.word_embeddings.weight",), (v, h)),
        Weight("embeddings.position.weight", ("bert.embeddings.position_embeddings.weight",), (shape.positions, h)),
        Weight("embeddings.segment.weight", ("bert.embeddings.token_type_embeddings.weight",), (shape.segments, h)),
        *_affine("embeddings.norm", ["bert.embeddings.LayerNorm"], h),
    ]
    for layer in range(shape.layers):
        weights += _layer(f"layers.{layer}", f"bert.encoder.layer.{layer}", h, shape.intermediate)
    return [
        *weights,
        *_affine("pooler", ["bert.pooler.dense"], h, h),
        *_affine("masked_head.transform", [f"{prediction}.transform.dense"], h, h),
        *_affine("masked_head.norm", [f"{prediction}.transform.LayerNorm"], h),
        Weight("masked_head.bias", (f"{prediction}.bias",), (v,)),
        *_affine("next_head", ["cls.seq_relationship"], 2, h),
    ]


def _layer(ours: str, theirs: str, hidden: int, inner: int) -> list[Weight]:
    attention = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
    return [
        *_affine(f"{ours}.attention.qkv", attention, 3 * hidden, hidden),
        *_affine(f"{ours}.attention.output", [f"{theirs}.attention.output.dense"], hidden, hidden),
        *_affine(f"{ours}.attention.norm", [f"{theirs}.attention.output.LayerNorm"], hidden),
        *_affine(f"{ours}.feed_forward.inner", [f"{theirs}.intermediate.dense"], inner, hidden),
        *_affine(f"{ours}.feed_forward.output", [f"{theirs}.output.dense"], hidden, inner),
        *_affine(f"{ours}.feed_forward.norm", [f"{theirs}.output.LayerNorm"], hidden),
    ]


def _affine(ours: str, theirs: Sequence[str], rows: int, *columns: int) -> list[Weight]:
    """The weight and the bias of a linear layer, or of a norm, which has no columns."""
    return [
        Weight(f"{ours}.weight", tuple(f"{each}.weight" for each in theirs), (rows, *columns)),
        Weight(f"{ours}.bias", tuple(f"{each}.bias" for each in theirs), (rows,)),
    ]


def to_transformers(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Our weights as those that BertForPreTraining saves: no padding, no copy of the decoder. Tensors of their own."""
    weights = list_weights(shape)
    assert state.keys() == {weight.ours for weight in weights}, "not the weights of a whole model of ours"
    theirs: dict[str, Tensor] = {}
    for weight in weights:
        ours = state[weight.ours]
        assert tuple(ours.shape) == _padded(weight, shape), f"{weight.ours}: {tuple(ours.shape)}"
        parts = ours[: weight.size[0]].detach().cpu().chunk(len(weight.theirs))
        theirs.update((name, part.clone()) for name, part in zip(weight.theirs, parts, strict=True))
    return theirs


def from_transformers(
    state: Mapping[str, Tensor], shape: Shape, where: str = "these weights"
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Weights of any BERT as ours, in fp32, and the names of ours that it does not have.

    Only whole heads may be missing; whoever loads the rest gives them fresh values. Everything else is an error: a
    weight without a place, a weight of another size, a layer or half a head that is not there.
    """
    found = _with_usual_names(state, where)
    weights, faults, ours = list_weights(shape), [], {}
    places = {name: weight for weight in weights for name in weight.theirs}
    for name, (given, tensor) in found.items():
        size = tuple(tensor.shape)
        if name not in places:
            faults.append(f"{given} {size} has no place in a BERT of {shape.layers} layers with its two heads")
        elif size != places[name].part:
            faults.append(f"{given} is {size}; by the config it should be {places[name].part}")
        elif not tensor.is_floating_point():
            faults.append(f"{given} holds {tensor.dtype}; only unquantised weights can be read")
    missing = [weight for weight in weights if not all(name in found for name in weight.theirs)]
    lost = [weight for weight in missing if not _may_be_missing(weight, found)]
    faults += [f"{name} is missing" for weight in lost for name in weight.theirs if name not in found]
    _refuse(where, faults)
    for weight in weights:
        if weight not in missing:
            parts = [found[name][1] for name in weight.theirs]
            ours[weight.ours] = _stack(parts, _padded(weight, shape))
    return ours, tuple(weight.ours for weight in missing)


def _with_usual_names(state: Mapping[str, Tensor], where: str) -> dict[str, tuple[str, Tensor]]:
    """By the names that BertForPreTraining has today: the given name, for messages, and the weight."""
    found: dict[str, tuple[str, Tensor]] = {}
    for given, tensor in state.items():
        if given.split(".")[-1] == "position_ids":
            continue  # a buffer of older versions: 0, 1, 2, …
        name = given if given.startswith(("bert.", "cls.")) else f"bert.{given}"
        for old, new in OLD_ENDS.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in found:
            raise UserError(f"{where}: {found[name][0]} and {given} are the same weight; one of them is too many")
        found[name] = (given, tensor)
    for copy, name in COPIES.items():
        if copy in found:
            given, tensor = found.pop(copy)
            other = found.setdefault(name, (given, tensor))[1]
            if not torch.equal(other, tensor):
                raise UserError(
                    f"{where}: {given} {tuple(tensor.shape)} differs from {name} {tuple(other.shape)}: "
                    "a decoder of its own is not supported, only one tied to the word embeddings"
                )
    return found


def _may_be_missing(weight: Weight, found: Mapping[str, object]) -> bool:
    """Whether it is part of a head of which nothing is there."""
    prefix = HEADS.get(weight.ours.partition(".")[0])
    return prefix is not None and not any(name.startswith(prefix) for name in found)


def _stack(parts: Sequence[Tensor], size: tuple[int, ...]) -> Tensor:
    """Their rows one after another, zeros below."""
    whole = torch.zeros(size)
    rows = parts[0].shape[0]
    for number, part in enumerate(parts):
        whole[number * rows : (number + 1) * rows] = part
    return whole


def _padded(weight: Weight, shape: Shape) -> tuple[int, ...]:
    """The size of ours as the model holds it."""
    of_vocabulary = weight.ours in ("embeddings.word.weight", "masked_head.bias")
    return (shape.padded_vocabulary if of_vocabulary else weight.size[0], *weight.size[1:])


def _refuse(where: str, faults: list[str]) -> None:
    """Raises UserError if there are faults, with the first of them."""
    if faults:
        more = [f"… and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise UserError("\n".join([f"{where}: {fault}" for fault in faults[:LISTED]] + more))


def config_of(shape: Shape, pad: int, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a folder; `pad` is the id of the piece `[PAD]`."""
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "hidden_act": "gelu",
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        **{theirs: getattr(shape, ours) for ours, theirs in RATES.items()},
        "initializer_range": 0.02,
        "pad_token_id": pad,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
    }


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """The sizes that a config.json speaks of; UserError where it is of a model that ours is not."""
    faults = [
        f"{name} is {config[name]!r}; only {values[0]!r} is supported"
        for name, values in SUPPORTED.items()
        if config.get(name, values[0]) not in values
    ]
    _refuse(where, faults)  # alone, since another kind of model may have other sizes too
    sizes = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in SIZES.items()}
    rates = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in RATES.items()}
    faults += [
        f"{SIZES[ours]} is {value!r}; it should be a whole number of 1 or more"
        for ours, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    faults += [
        f"{RATES[ours]} is {value!r}; it should be a number from 0 to 1"
        for ours, value in rates.items()
        if not isinstance(value, int | float) or not 0 <= value < 1
    ]
    if not faults and sizes["hidden"] % sizes["heads"]:
        faults.append(f"hidden_size {sizes['hidden']} cannot be divided among {sizes['heads']} attention heads")
    _refuse(where, faults)
    values: dict[str, Any] = {**sizes, **{ours: float(value) for ours, value in rates.items()}}
    return Shape(**values)


def read_folder(folder: Path) -> tuple[Shape, dict[str, Tensor], tuple[str, ...]]:
    """The sizes and weights in a folder of transformers, and the names of those it lacks (see from_transformers)."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG}: not a folder of transformers")
    shape = shape_of(_read_table(folder / CONFIG), str(folder / CONFIG))
    state, missing = from_transformers(_read_weights(folder), shape, str(folder))
    return shape, state, missing


def _read_table(path: Path) -> dict[str, Any]:
    """A JSON file of names with values."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a table of names and values")
    return content


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """From the first of the files that transformers would take."""
    for name in (WEIGHTS, OLD_WEIGHTS):
        if (folder / name).is_file():
            return _read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return _read_parts(folder / (name + INDEX))
    raise UserError(
        f"{folder}: no weights: neither {WEIGHTS} nor {OLD_WEIGHTS}, whole or in parts with {WEIGHTS}{INDEX}"
    )


def _read_parts(index: Path) -> dict[str, Tensor]:
    """From several files; the index says in which one each weight is."""
    places = _read_table(index).get("weight_map")
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
    """The tensors of one file, by its ending."""
    if not path.is_file():
        raise UserError(f"{path}: missing; download the folder again")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
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
    check: Callable[[Path], None] | None = None,
) -> None:
    """Writes a folder that transformers loads, whole or not at all.

    The files of the vocabulary are those of the folder `vocabulary`: one of shards, or an earlier export. `check` sees
    the finished folder before it takes its name and the place of an earlier export; what it raises prevents that.
    """
    config, pad = _tokenizer_config(vocabulary, shape)
    weights = {name: weight.to(dtype) for name, weight in to_transformers(state, shape).items()}
    _refuse(
        str(folder),
        [f"{name} has values that are no numbers" for name, weight in weights.items() if not weight.isfinite().all()],
    )
    with _replacing_folder(folder.resolve()) as unfinished:
        write_json(unfinished / CONFIG, config_of(shape, pad, dtype))
        for name in (VOCABULARY, TOKENIZER):
            with replacing(unfinished / name) as file:
                file.write((vocabulary / name).read_bytes())
        write_json(unfinished / TOKENIZER_CONFIG, config)
        with replacing(unfinished / CARD) as file:
            file.write(card.encode())
        try:
            save_file(weights, unfinished / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{unfinished / WEIGHTS}: cannot be written: {error}") from error
        with (unfinished / WEIGHTS).open("rb") as file:
            os.fsync(file.fileno())
        if check is not None:
            check(unfinished)


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a folder of shards or of an exported one."""
    for name in (VOCABULARY, TOKENIZER, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}: name the folder of shards, or an exported one, for its vocabulary")
    return load_vocabulary(
        folder / VOCABULARY, cased=not read_json(folder / TOKENIZER_CONFIG).get("do_lower_case", True)
    )


def _tokenizer_config(vocabulary: Path, shape: Shape) -> tuple[dict[str, Any], int]:
    """What to write as tokenizer_config.json, and the id of `[PAD]`."""
    pieces = read_vocabulary(vocabulary)
    if len(pieces) != shape.vocabulary:
        raise UserError(
            f"{vocabulary / VOCABULARY}: {len(pieces):,} pieces, but the model has {shape.vocabulary:,}: "
            "not the vocabulary it was trained with"
        )
    config = _read_table(vocabulary / TOKENIZER_CONFIG)
    return {**config, "model_max_length": shape.positions}, pieces.special.pad


@contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, whose name and place it takes when it is complete."""
    unfinished, replaced = (folder.with_name(folder.name + end) for end in (UNFINISHED, REPLACED))
    try:
        for each in (folder, unfinished, replaced):
            _check_ours(each)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)  # a run was killed between the two renames below
        for each in (unfinished, replaced):
            _remove(each)
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
    """UserError unless nothing is there, or only what an export consists of."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; name a folder that is new, empty or an earlier export")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if name.removesuffix(UNFINISHED) not in FILES]:
        raise UserError(f"{folder}: would be replaced, but holds {others[0]}, which is no part of an export")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
