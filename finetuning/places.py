"""What the commands of fine-tuning write, by name: those who write it and those who look for it agree here.

OUT/plan.json                  the runs that the last command was to make, by task
OUT/results.json               all tasks
OUT/sst2/
  results.json                 all runs, the best, median and spread
  model/                       the best model: a folder of transformers
  predictions/                 what it says of dev and test
  lr5e-05-seed1/               one run
    begun.json                 what it depends on: settings, model and data
    results.json               its scores, once it is done; before that there are its checkpoints
"""

from __future__ import annotations

from pathlib import Path

BEGUN, RESULTS, MODEL, PREDICTIONS = "begun.json", "results.json", "model", "predictions"
PLAN = "plan.json"


def predictions_file(folder: Path, split: str, ending: str) -> Path:
    """The file of this folder with the answers to a split."""
    return folder / f"predictions_{split}{ending}"
