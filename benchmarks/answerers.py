"""Sides of the inference benchmark: a fine-tuned model by our code, transformers or ONNX Runtime.

A request has sequences of pieces; the answer is their logits. Sequences come without padding. Sides that need it pad to
the longest of the request, which counts in their seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contests import OURS
from benchmarks.peer import find_missing_packages, pad_inputs, silence_transformers
from benchmarks.sides import SideSpec
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Cutter, Encoded, Ragged, Sequences
from finetuning.prediction import FineTuned, load
from pretraining.devices import find_kind
from pretraining.reporting.hardware import synchronize

Request = Sequence[Array]
"""Sequences of pieces."""
CORES = 2
"""Threads of each side."""


@dataclass(frozen=True)
class Replies:
    """The logits of all requests, and the seconds of each request."""

    logits: Array
    seconds: list[float]


@dataclass(frozen=True)
class Answerer:
    """A model that answers requests."""

    answer: Callable[[Request], Array]

    def answer_all(self, requests: Sequence[Request]) -> Replies:
        """Answers requests one after another, without pauses."""
        logits, seconds = [], []
        for request in requests:
            start = time.perf_counter()
            logits.append(self.answer(request))
            seconds.append(time.perf_counter() - start)
        return Replies(np.concatenate(logits), seconds)


@dataclass(frozen=True)
class CutSequences:
    """Sequences of pieces as items of a task."""

    request: Request

    def __len__(self) -> int:
        return len(self.request)

    def encode(self, numbers: Array) -> Encoded:
        """The model's input of these sequences."""
        pieces = Ragged.from_rows([self.request[number] for number in numbers.tolist()])
        return Encoded(Sequences(pieces, pieces.lengths), None)


def load_ours(folder: Path, *, numbers: Any, graphs: bool = True) -> Answerer:
    """Loads our model as predict.py does, or without CUDA graphs."""
    torch.set_num_threads(CORES)
    model = load(folder, numbers, graphs=graphs)
    assert isinstance(model, FineTuned)
    return Answerer(lambda request: model.logits(CutSequences(request)).values)


def load_theirs(folder: Path, *packages: str, **given: Any) -> Any:
    """Loads transformers' model, for a peer that needs these packages."""
    if absent := find_missing_packages("transformers", *packages):
        raise UserError(f"not installed: {', '.join(absent)}; nothing is compared with it")
    silence_transformers()
    from transformers import BertForSequenceClassification

    torch.set_num_threads(CORES)
    model: Any = BertForSequenceClassification.from_pretrained(folder, **given)
    return model.eval()


def make_tensors(request: Request) -> dict[str, torch.Tensor]:
    """Makes padded inputs of a request."""
    return {name: torch.from_numpy(each) for name, each in pad_inputs(request).items()}


def load_transformers(folder: Path, *, numbers: str) -> Answerer:
    """Loads transformers' model, with its weights in fp32 or bf16."""
    device = torch.device(find_kind())
    model = load_theirs(folder, dtype=torch.bfloat16 if numbers == "bf16" else torch.float32).to(device)

    @torch.inference_mode()
    def answer(request: Request) -> Array:
        logits = model(**{name: each.to(device) for name, each in make_tensors(request).items()}).logits
        synchronize(device)
        return np.asarray(logits.float().cpu())

    return Answerer(answer)


def cut_into_pieces(texts: Sequence[str], vocabulary: Vocabulary, longest: int) -> list[Array]:
    """Cuts texts into sequences of pieces."""
    cutter = Cutter(vocabulary)
    pieces = cutter.lay_out(cutter.cut_texts(texts), None, longest).pieces
    return [pieces.row(number) for number in range(len(texts))]


def load_onnx_runtime(folder: Path, *, numbers: str) -> Answerer:
    """Loads the graph of transformers' model into ONNX Runtime, with its fusions, and dynamic quantisation for int8. It
    computes on a GPU if there is one."""
    graph = export(folder)
    import onnxruntime

    if numbers == "int8":
        from onnx import TensorProto
        from onnxruntime.quantization import QuantType, quantize_dynamic

        fused, graph = graph, folder / "int8.onnx"
        of_fusions = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(fused, graph, per_channel=True, weight_type=QuantType.QInt8, extra_options=of_fusions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = CORES
    provider = f"{find_kind().upper()}ExecutionProvider"
    session = onnxruntime.InferenceSession(str(graph), options, providers=[provider])
    if provider not in session.get_providers():
        raise UserError(f"onnxruntime has no {provider} here")
    return Answerer(lambda request: session.run(["logits"], pad_inputs(request))[0])


def export(folder: Path) -> Path:
    """Exports a transformers folder as an ONNX graph, with ONNX Runtime's fusions for BERT."""
    model = load_theirs(folder, "onnxruntime", "onnx", "onnxscript", attn_implementation="eager")
    from onnxruntime.transformers.optimizer import optimize_model

    raw, fused = str(folder / "raw.onnx"), folder / "fused.onnx"
    if not fused.exists():
        example = make_tensors([np.arange(9), np.arange(7)])
        axes = {name: {0: "batch", 1: "length"} for name in example}
        names: dict[str, Any] = {"input_names": list(example), "output_names": ["logits"], "dynamic_axes": axes}
        torch.onnx.export(model, (), raw, kwargs=example, **names, dynamo=False)
        heads, hidden = model.config.num_attention_heads, model.config.hidden_size
        optimize_model(raw, "bert", heads, hidden, opt_level=0).save_model_to_file(str(fused))
    return fused


def is_ours(name: str) -> bool:
    """Whether a side is one of ours."""
    return name.startswith(OURS)


SIDES = {
    f"{who} {numbers}": SideSpec(partial(make, numbers=numbers), prepared=who == OURS, small_steps=who == OURS)
    for who, make, several in (
        (OURS, load_ours, ("fp32", "bf16", "int8")),
        ("transformers", load_transformers, ("fp32", "bf16")),
        ("onnxruntime", load_onnx_runtime, ("fp32", "int8")),
    )
    for numbers in several
}
"""The sides by name: a library, and the type of numbers."""
SIDES[NO_GRAPHS := f"{OURS}, no graphs, bf16"] = SideSpec(partial(load_ours, numbers="bf16", graphs=False), True, True)
ON_GPU = ("cloze fp32", "cloze bf16", NO_GRAPHS, "transformers bf16")
ON_CPU = tuple(name for name in SIDES if name != NO_GRAPHS)
"""The sides that take part on a device: products in 8 bits are for CPUs, CUDA graphs for GPUs."""
