#!/usr/bin/env python3
"""Scores any pre-trained model on any shards of its vocabulary or by retrieval, or lets it fill in or continue a text.

    python pretraining/evaluate.py runs/mini --data data/wiki
    python pretraining/evaluate.py runs/mini --retrieval beir/scifact
    python pretraining/evaluate.py exported/mini --fill "the capital of france is [MASK] ."
    python pretraining/evaluate.py exported/ltr --continue "the capital of"

A model is a run, a checkpoint of one, a folder of transformers with the heads of pre-training, or a name on the hub.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True, ends_with_ctrl_c=True)

    from data_prep.common.flags import print_help_if_asked
    from pretraining.flags import Evaluate

    print_help_if_asked(Evaluate, sys.argv[1:], "evaluate.py", "evaluating")  # without PyTorch

from pretraining.processes.environment import prepare_process

prepare_process()

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from data_prep.common.errors import UserError, check_all
from data_prep.common.flags import read_flags
from data_prep.common.launchers import World
from data_prep.common.terminal import open_console, run_curable
from pretraining.checkpoint.models import StoredModel
from pretraining.data.corpora import Corpora
from pretraining.flags import Evaluate
from pretraining.processes.group import choose_device
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.retrieval import Retrieval, RetrievalScores
from pretraining.scoring.sentences import Filling, continue_text, fill_masks
from pretraining.scoring.validation import ShardScores, require_vocabulary, score_shards

Answers = tuple[dict[str, ShardScores], RetrievalScores | None, list[list[Filling]], str | None]
"""The scores by corpus, the fillings of each [MASK], and the continuation, if they are asked for."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = read_flags(Evaluate, arguments, "evaluate.py", "evaluating")
    return run_curable(lambda: evaluate(wanted))


def evaluate(wanted: Evaluate) -> None:
    """Does what is asked for, and tells it."""
    given = (wanted.data or None, wanted.retrieval, wanted.fill, wanted.continue_)
    faults = ["--data, --retrieval, --fill or --continue: none is given"] if given == (None,) * len(given) else []
    numbers = {name: getattr(wanted, name) for name in ("length", "examples")}
    faults += [f"--{name} {value}: at least 1" for name, value in numbers.items() if value is not None and value < 1]
    faults += [f"--{name} needs --data" for name, value in numbers.items() if value is not None and not wanted.data]
    if faults:
        raise UserError("\n".join(faults))
    print_answers(wanted, find_answers(wanted))


def find_answers(wanted: Evaluate) -> Answers:
    """Finds what is asked for."""
    device = choose_device(wanted.device, World())
    retrieval = None if wanted.retrieval is None else Retrieval.read(wanted.retrieval)
    model, scores, found, continuation = StoredModel.open(wanted.model, sees=wanted.sees), {}, None, wanted.continue_
    fillings = [] if wanted.fill is None else fill_masks(model, wanted.fill, device)
    corpora = Corpora.read(wanted.data, together=False).parts if wanted.data else ()
    check_all(*(partial(require_vocabulary, corpus.manifest, model, corpus.folder) for corpus in corpora))
    for corpus in corpora:
        scores[corpus.name] = score_shards(model, corpus, wanted.split, wanted.length, wanted.examples, device)
    if retrieval is not None:
        embedder = Embedder.open(model, device)
        found = retrieval.score(retrieval.rank(embedder.compute, embedder.pooling.by_dot).rows)
    if continuation is not None:
        continuation = continue_text(model, continuation, device)
    return scores, found, fillings, continuation


def _as_json(
    scores: dict[str, ShardScores], retrieval: RetrievalScores | None, fillings: list[list[Filling]], said: str | None
) -> dict[str, Any]:
    """What JSON has of the answers."""
    found: dict[str, Any] = {}
    for name, each in scores.items():
        own = {key: value for key, value in asdict(each).items() if key != "said"}
        found |= {"corpora": {**found.get("corpora", {}), name: own}} if name else own
    found |= {} if retrieval is None else {"retrieval": asdict(retrieval)}
    if fillings:
        found["fillings"] = [[filling._asdict() for filling in row] for row in fillings]
    return found if said is None else {**found, "continuation": said}


def print_answers(wanted: Evaluate, found: Answers) -> None:
    """Prints the answers, for people or as JSON."""
    scores, retrieval, fillings, continuation = found
    if wanted.json:
        print(json.dumps(_as_json(*found), ensure_ascii=False, indent=1))
        return
    lines = list[str]()
    for number, row in enumerate(fillings, 1):
        lines += [f"[MASK] {number}"] * (len(fillings) > 1)
        lines += [f"{share:8.2%}  {piece}" for piece, share in row]
    for name, each in scores.items():
        asked = f"{name}: " * bool(name) + f"{each.examples:,} examples of length {each.length} ({each.split})"
        lines += [*each.notes, f"{asked}, {each.predictions:,} pieces predicted"]
        lines += ["  ".join(each.said)] * bool(each.said)
        if each.bits_per_character is not None:
            lines.append(f"{each.bits_per_character:.4f} bits a character ({each.characters:,} characters)")
    if retrieval is not None:
        asked = f"{retrieval.queries:,} queries with a relevant passage, {retrieval.passages:,} passages"
        lines += [asked, retrieval.describe()]
    lines += [] if continuation is None else [continuation]
    open_console(soft_wrap=True).print("\n".join(lines), markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
