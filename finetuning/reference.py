"""Writes docs/finetuning-recipes.md: every key of a fine-tuning recipe with its meaning, what it takes and its default.

python -m finetuning.reference
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from finetuning.settings import FineTuning
from pretraining.config import reference

PAGE = reference.PAGE.with_name("finetuning-recipes.md")
OPENING = """\
<!-- Written by `python -m finetuning.reference` from finetuning/settings.py: change that, not this. -->

# What a fine-tuning recipe can say

A recipe is a TOML file, or one of those in [finetuning/recipes](../finetuning/recipes) by its name: `--recipe glue`.
Comments there name the source of each number. The command line overrides every value by its dotted name: `--seed 7`,
`--spans.stride 64`, `--search.learning_rates "[5e-5, 3e-5]"`. A key that is not given has its default. Invalid values
are refused before anything begins, all faults at once.
"""


def page() -> str:
    """The whole page."""
    return reference.make_page(FineTuning, OPENING, {})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
