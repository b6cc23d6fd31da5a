#!/usr/bin/env python3
"""Scores predictions for SQuAD as the official scripts do, version 1.1 or 2.0 as the data is.

python finetuning/evaluate_squad.py dev-v2.0.json predictions.json --null-odds null_odds.json
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from data_prep.common.errors import UserError
from data_prep.common.flags import read_flags
from data_prep.common.sections import Removed
from data_prep.common.terminal import open_console, run_curable
from finetuning.tasks.squad_rules import Numbers, evaluate_1, evaluate_2, read_by_id, read_squad

NAMED = 3
"""Number of ids that a message names."""


@dataclass(frozen=True)
class EvaluateSquad:
    """Prints the official figures of predictions for SQuAD, version 1.1 or 2.0 as the data is."""

    removed: ClassVar = {"na_prob_thresh": Removed(1.0, "best_f1 and best_exact are those at the best thresholds")}
    data: Annotated[Path, tyro.conf.Positional]
    """The questions with their answers, SQuAD's JSON."""
    predictions: Annotated[Path, tyro.conf.Positional]
    """JSON of ids with answers; in 2.0 an empty answer says that there is none."""
    null_odds: Path | None = None
    """JSON of ids with the odds that there is no answer, for 2.0: adds the figures at the best thresholds."""


def evaluate(wanted: EvaluateSquad) -> tuple[Numbers, list[str]]:
    """Computes the figures; returns them with notes about missing or unknown ids."""
    data, given, null_odds = wanted.data, wanted.predictions, wanted.null_odds
    (version, questions), predictions = read_squad(data), read_by_id(given, str, "answers")
    asked = [question.id for question in questions]
    missing, unknown = [name for name in asked if name not in predictions], [*(predictions.keys() - {*asked})]
    notes = []
    if unknown:
        notes.append(f"{given}: {_name_ids(unknown)} no question of {data} has: left out")
    if version == "1.1":
        if null_odds:
            raise UserError(f"--null-odds: {data} is SQuAD 1.1, where every question has an answer: leave it out")
        if missing:
            notes.append(f"{given}: no answer for {_name_ids(missing)}: counted as wrong")
        return evaluate_1(questions, predictions), notes
    if missing:
        lacking = f"no answer for {_name_ids(missing)} of {data}"
        raise UserError(f'{given}: {lacking}: SQuAD 2.0 wants one for each question, "" where it has none')
    odds = read_by_id(null_odds, float, "odds") if null_odds else None
    missing = [name for name in asked if odds is not None and name not in odds]
    if missing:
        raise UserError(f"{null_odds}: no odds for {_name_ids(missing)} of {data}: every question needs them")
    return evaluate_2(questions, predictions, odds), notes


def _name_ids(ids: Sequence[str]) -> str:
    """Formats the number of ids and the first of them."""
    first = ", ".join(sorted(ids)[:NAMED])
    return f"{len(ids):,} id{'s' * (len(ids) > 1)} ({first}{', …' if len(ids) > NAMED else ''})"


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = read_flags(EvaluateSquad, arguments, "evaluate_squad.py", "finetuning")
    return run_curable(lambda: print_figures(wanted))


def print_figures(wanted: EvaluateSquad) -> None:
    """Prints the figures, with notes."""
    numbers, notes = evaluate(wanted)
    for note in notes:
        open_console(stderr=True, soft_wrap=True).print(f"note: {note}", markup=False)
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
