#!/usr/bin/env python3
"""Asks a pre-trained model which sentence of minimal pairs is the good one: its grammar, without any labels.

    python finetuning/run_pairs.py --model runs/mini
    python finetuning/run_pairs.py --model exported/mini --pairs own.tsv --out results/own

The usual pairs are BLiMP's, in the folder pairs/ of data/ or of CLOZE_DATA. The same command goes on where it was
stopped; docs/evaluating.md says how a sentence is scored.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from pretraining.processes.environment import prepare_process

prepare_process(small_steps=True)

from dataclasses import dataclass
from typing import Literal

import tyro

from data_prep.common.supervision import exit_now
from data_prep.common.terminal import open_console
from finetuning.session.minimal_pairs import score_pairs
from pretraining.processes.ending import Ending


@dataclass(frozen=True)
class RunPairs:
    """Asks a pre-trained model which sentence of minimal pairs is the good one."""

    model: str | None = None
    """A run, a checkpoint, a folder of transformers with the heads of pre-training, or a name on the Hugging Face
    hub (default: the newest exported model)."""
    pairs: Path | None = None
    """Table with columns good and bad, and perhaps paradigm and phenomenon: .jsonl, .tsv, .csv or .parquet, also
    compressed (default: BLiMP)."""
    out: Path | None = None
    """Where results go (default: runs/MODEL/pairs)."""
    each: int | None = None
    """Pairs of every paradigm that are scored, the first ones (default: all)."""
    sees: Literal["both", "before"] | None = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: both)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes, in fp32."""


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    wanted = tyro.cli(RunPairs, args=arguments, prog="run_pairs.py", config=(tyro.conf.FlagCreatePairsOff,))
    with Ending() as ending:
        console = open_console(soft_wrap=True)
        score_pairs(wanted.model, wanted.pairs, wanted.each, wanted.out, wanted.device, console, wanted.sees)
    return ending.code


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
