#!/usr/bin/env python3
"""Makes a folder that transformers loads from a run.

    python pretraining/export.py runs/mini --out exported/mini

Also from a folder of transformers, which comes out with today's names and as safetensors. What is written is read back,
by us and by transformers where it is installed, and must compute the same logits before it takes its name.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from data_prep.common.terminal import open_console, run_curable
from pretraining.training.exporting import export


@dataclass(frozen=True)
class Export:
    """Makes a folder that transformers loads from a run, and checks that it computes the same."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or of transformers."""
    out: Path
    """Folder to write; an earlier export of the same model in it is renewed."""
    checkpoint: str | None = None
    """Name of the checkpoint (default: the last)."""
    average: int | None = None
    """Average the weights of this many last checkpoints."""
    vocabulary: Path | None = None
    """Folder with the vocabulary: shards or an earlier export (default: the one that the run knows)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the numbers that are written."""
    licence: str | None = None
    """Licence of the model, for its card, as the hub spells it: apache-2.0 (default: that of the recipe)."""
    replace: bool = False
    """Replace an export of another model."""
    sees: Literal["both", "before"] | None = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: both)."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = tyro.cli(Export, args=arguments, prog="export.py", config=(tyro.conf.FlagCreatePairsOff,))
    return run_curable(lambda: export_and_print(wanted))


def export_and_print(wanted: Export) -> None:
    """Exports the model, and prints what was written."""
    dtype = getattr(torch, wanted.dtype)
    vocabulary, replace = wanted.vocabulary, wanted.replace
    of_model = (wanted.checkpoint, vocabulary, dtype, wanted.licence, replace, wanted.average, wanted.sees)
    done = export(wanted.run, wanted.out, *of_model)
    open_console(soft_wrap=True).print(str(done), markup=False)
    if done.warning:
        open_console(stderr=True, soft_wrap=True).print(f"warning: {done.warning}", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
