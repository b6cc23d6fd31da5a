"""A model on the Hugging Face hub for all ranks: one rank a machine asks for it, and all read the same commit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from data_prep.common.errors import UserError
from data_prep.common.hub import fetch_model
from pretraining.huggingface.folders import CONFIG, INDEX, OLD_WEIGHTS, WEIGHTS
from pretraining.processes.group import gather

PARTS = "*-of-*"
"""Files of weights in parts, between the name of the whole and its ending."""


def fetch_together(name: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Fetches files of a model as `fetch_model` does; where ranks are connected, all of them call it together.

    Rank 0 finds the commit, then the first rank of every other machine fetches the same; the others find it in the
    cache. So a thousand ranks ask the hub as often as there are machines. An error is raised on all ranks alike.
    """
    if not dist.is_initialized():
        return fetch_model(name, files, revision)
    rank, is_first_here = dist.get_rank(), os.environ.get("LOCAL_RANK") == "0"
    revision = _in_turn(rank == 0, name, files, revision)
    _in_turn(is_first_here and rank > 0, name, files, revision)
    return fetch_model(name, files, revision, from_cache=True)


def _in_turn(mine: bool, name: str, files: Sequence[str], revision: str | None) -> str:
    """Fetches if it is this rank's turn, while the others wait; returns the commit. The first error is everybody's."""
    found: tuple[str | None, str | None] = (revision, None)
    if mine:
        try:
            found = fetch_model(name, files, revision).name, None
        except UserError as error:
            found = None, str(error)
    outcomes = gather(found)
    if errors := [message for _, message in outcomes if message is not None]:
        raise UserError(errors[0])
    return str(outcomes[0][0])


def fetch_weights(name: str, folder: Path) -> Path:
    """Fetches the weights of a model on the hub, of the same commit: safetensors, or what PyTorch wrote before."""
    for whole in (WEIGHTS, OLD_WEIGHTS):
        stem, _, end = whole.rpartition(".")
        found = fetch_together(name, [CONFIG, whole, f"{whole}{INDEX}", f"{stem}{PARTS}.{end}"], folder.name)
        if any((found / file).exists() for file in (whole, f"{whole}{INDEX}")):
            return found
    return folder
