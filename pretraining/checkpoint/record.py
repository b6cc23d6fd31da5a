"""The format of a checkpoint, and its record.

    RUN/checkpoints/step-00001000/
      checkpoint.json                        the record: sizes, step, checksums of the files beside it and of itself,
                                             and the caller's section; written last
      weight-00000-of-00002.safetensors      each rank's part of the fp32 weights
      exp_avg-00000-of-00002.safetensors     and of the optimizer's state, such as Adam's two averages
      exp_avg_sq-00000-of-00002.safetensors

Each tensor in a file is a slice of a parameter, called NAME:START. So a checkpoint is independent of the number of
ranks and the ZeRO stage: a reader takes the slices that its own flat tensors need. Of a parameter that ranks divided,
since they shared the model, the slices are of all shares end to end; the record says how it was divided, so that any
number of tensor ranks can join the shares and divide the whole anew. Nothing in a checkpoint is executed.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common.codes import CHECKPOINT, IN_A_RUN
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, absence, json_bytes, read_json, write_json
from pretraining.architectures.declaration import read_shape
from pretraining.config.settings import Dtype
from pretraining.mesh.cuts import Division
from pretraining.model.shape import Shape

if TYPE_CHECKING:
    from pretraining.engine.engine import LossScaler
    from pretraining.reporting.meter import MeterState

FOLDER = "checkpoints"
RECORD = CHECKPOINT
TOKENIZER = IN_A_RUN
"""The folder of a run that holds the vocabulary."""
RECIPE = "recipe.toml"
"""The file of a run with its recipe as it was understood; every start rewrites it."""
EXPORT = "export"
"""The folder of a run that its model is exported into."""
AVERAGED = "averaged"
"""The folder of a run that the average of its last checkpoints is exported into."""
AVERAGE = "average.json"
"""The file of a run on this average: its steps, and how it does on held-out examples."""
DAMAGED = "DAMAGED"
"""A file in a damaged checkpoint, with the reason."""
FORMAT = 2
"""The version of checkpoint.json; it changes when older readers would misread newer files."""
CHECKSUM = "sha256"
"""The key in checkpoint.json of the checksum of all other keys."""
NAME = re.compile(r"step-(\d{8,})")
OPTIONAL: dict[str, object] = {"late_weights": {}, "tensor_ranks": 1, "divisions": {}}
"""What the record leaves out, where it has the value here."""
WEIGHT = "weight"
"""Prefix of the names of weight files; files of the optimizer's state have the names of that state."""


@dataclass(frozen=True)
class MadeBy:
    """How the work was divided when a checkpoint was made; a later start may divide it differently."""

    ranks: int
    zero: int
    dtype: Dtype
    threads: int = 0
    """threads of a rank on a CPU, which decide how sums are rounded; 0 on a GPU or if unknown"""
    kernels: str = ""
    """result of `cpu_kernels.describe_arithmetic`; empty likewise"""


@dataclass(frozen=True)
class CheckpointRecord:
    """The record of a checkpoint: the part that every reader needs, and a section of the program that trains."""

    shape: Shape
    step: int
    """optimizer steps done"""
    optimizer_steps: float
    """steps that changed the weights; in fp16 there may be fewer"""
    loss_scaler: LossScaler | None
    made_by: MadeBy
    caller: dict[str, Any]
    """the section of the program that trains, which alone reads it"""
    files: tuple[FileRecord, ...] = ()
    rank_states: tuple[MeterState, ...] = ()
    """the measurements of every rank since the last logged step"""
    late_weights: dict[str, float] = field(default_factory=dict)
    """`late_weights` of the engine; left out of the file where there are none"""
    tensor_ranks: int = 1
    """the number of ranks that shared a model; left out where each had a whole one"""
    divisions: dict[str, Division] = field(default_factory=dict)
    """how they divided weights, by names; left out where there are none"""
    format: int = FORMAT


def read_record(checkpoint: Path) -> CheckpointRecord:
    """Reads checkpoint.json; raises DamageError if it is not as it was written."""
    path = checkpoint / RECORD
    try:
        content: Any = read_json(path)
    except FileNotFoundError:
        raise DamageError(f"{path}: missing") from None
    if not isinstance(content, dict) or not {"step", "files"} <= content.keys():
        raise DamageError(f"{path}: not the record of a checkpoint")
    if content.pop(CHECKSUM, None) != _checksum(content):
        raise DamageError(f"{path}: its SHA-256 is not the one in it: it changed after it was written")
    try:
        if content.get("format") != FORMAT:
            raise TypeError(f"format {content.get('format')}, here {FORMAT}")
        content["shape"], content["made_by"] = read_shape(content["shape"]), MadeBy(**content["made_by"])
        content["files"] = tuple(FileRecord(**file) for file in content["files"])
        content["divisions"] = {name: Division(*each) for name, each in content.get("divisions", {}).items()}
        return CheckpointRecord(**{**content, "rank_states": tuple(content["rank_states"])})
    except (KeyError, TypeError) as error:  # its checksum is right, so it is not damaged
        raise UserError(
            f"{path}: written by another version of this program ({error}); go on with the version of this program "
            "that wrote it, or begin anew in another --out folder"
        ) from error


def write_record(checkpoint: Path, record: CheckpointRecord) -> None:
    """Writes checkpoint.json with its checksum in it."""
    content = {**asdict(record), "shape": record.shape.values()}
    content = {name: value for name, value in content.items() if name not in OPTIONAL or value != OPTIONAL[name]}
    write_json(checkpoint / RECORD, {**content, CHECKSUM: _checksum(content)})


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json_bytes(content)).hexdigest()


def parse_step(checkpoint: Path) -> int:
    """Parses the step in a checkpoint's name; -1 if it is not such a name."""
    found = NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


def list_checkpoints(run: Path) -> list[Path]:
    """Lists the checkpoints of a run, the newest last; some may be damaged."""
    return sorted((path for path in (run / FOLDER).glob("step-*") if parse_step(path) >= 0), key=parse_step)


def list_finished(run: Path) -> list[Path]:
    """Lists the checkpoints of a run that are complete and not known to be damaged, the newest last."""
    return [path for path in list_checkpoints(run) if is_finished(path)]


def is_finished(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete and not known to be damaged."""
    return (checkpoint / RECORD).exists() and not (checkpoint / DAMAGED).exists()


def find_checkpoint(run: Path, name: str | None = None) -> Path:
    """Finds a checkpoint of a run by name, by default the newest. `run` may be the folder of a checkpoint itself."""
    if not os.path.isdir(run):
        raise UserError(f"{run}: {absence(run, 'folder')}")
    if (run / RECORD).exists():
        if name is not None and parse_step(Path(name)) != (step := read_record(run).step):
            raise UserError(f"{run}: is the checkpoint of step {step:,} itself, not {name}")
        return run
    there = {path.name: path for path in list_finished(run)}
    if not there:
        raise UserError(f"{run}: has no finished checkpoint")
    if name is not None and name not in there:
        raise UserError(f"{run}: no checkpoint {name}; there are {', '.join(there)}")
    return there[name or list(there)[-1]]
