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
from benchmarks.peer import pad_inputs, require_packages, silence_transformers
from benchmarks.sides import SideSpec
from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Sequences
from finetuning.prediction import load
from finetuning.ragged import Ragged
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


def load_ours(folder: Path, *, numbers: Any) -> Answerer:
    """Loads our model as predict.py does."""
    torch.set_num_threads(CORES)
    model = load(folder, numbers)
    return Answerer(lambda request: model.logits(CutSequences(request)).values)


def load_transformers(folder: Path, *, numbers: str) -> Answerer:
    """Loads transformers' model. `bf16` converts the weights; `autocast` keeps them in fp32, with products in bf16."""
    require_packages("transformers")
    silence_transformers()
    from transformers import BertForSequenceClassification

    torch.set_num_threads(CORES)
    device = torch.device(find_kind())
    dtype = torch.bfloat16 if numbers == "bf16" else torch.float32
    model: Any = BertForSequenceClassification.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()

    @torch.inference_mode()
    def answer(request: Request) -> Array:
        inputs = {name: torch.from_numpy(each).to(device) for name, each in pad_inputs(request).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=numbers == "autocast"):
            logits = model(**inputs).logits
        synchronize(device)
        return np.asarray(logits.float().cpu())

    return Answerer(answer)


def load_onnx_runtime(folder: Path, *, numbers: str) -> Answerer:
    """Loads the graph of transformers' model into ONNX Runtime, with its fusions, and dynamic quantisation for int8."""
    require_packages("onnxruntime", "onnx", "onnxscript", "transformers")
    silence_transformers()
    import onnxruntime

    graph = export(folder)
    if numbers == "int8":
        from onnx import TensorProto
        from onnxruntime.quantization import QuantType, quantize_dynamic

        fused, graph = graph, folder / "int8.onnx"
        of_fusions = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(fused, graph, per_channel=True, weight_type=QuantType.QInt8, extra_options=of_fusions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = CORES
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return Answerer(lambda request: session.run(["logits"], pad_inputs(request))[0])


def export(folder: Path) -> Path:
    """Exports a transformers folder as an ONNX graph, with ONNX Runtime's fusions for BERT."""
    import torch.onnx
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import BertForSequenceClassification

    raw, fused = str(folder / "raw.onnx"), folder / "fused.onnx"
    if not fused.exists():
        model: Any = BertForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
        example = {name: torch.from_numpy(each) for name, each in pad_inputs([np.arange(9), np.arange(7)]).items()}
        axes = {name: {0: "batch", 1: "length"} for name in example}
        names: dict[str, Any] = {"input_names": list(example), "output_names": ["logits"], "dynamic_axes": axes}
        torch.onnx.export(model.eval(), (), raw, kwargs=example, **names, dynamo=False)
        heads, hidden = model.config.num_attention_heads, model.config.hidden_size
        optimize_model(raw, "bert", heads, hidden, opt_level=0).save_model_to_file(str(fused))
    return fused


def is_ours(name: str) -> bool:
    """Whether a side is one of ours."""
    return name.startswith(OURS)


NUMBERS = {
    OURS: (load_ours, ("fp32", "bf16", "int8")),
    "transformers": (load_transformers, ("fp32", "bf16", "autocast")),
    "onnxruntime": (load_onnx_runtime, ("fp32", "int8")),
}
KINDS = {
    f"{who} {numbers}": SideSpec(partial(make, numbers=numbers), prepared=who == OURS, small_steps=who == OURS)
    for who, (make, several) in NUMBERS.items()
    for numbers in several
}
"""The sides by name: a library, and the type of numbers."""
