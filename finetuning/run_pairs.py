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

import tyro

from data_prep.common.supervision import exit_now
from data_prep.common.terminal import open_console
from finetuning.session.minimal_pairs import RunPairs, score_pairs
from pretraining.processes.ending import Ending


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    wanted = tyro.cli(RunPairs, args=arguments, prog="run_pairs.py", config=(tyro.conf.FlagCreatePairsOff,))
    with Ending() as ending:
        score_pairs(wanted, open_console(soft_wrap=True, markup=False))
    return ending.code


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
