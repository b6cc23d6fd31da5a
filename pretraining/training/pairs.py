"""Scores minimal pairs at the ends of phases, to follow what a model learns of grammar.

An fp32 copy of the model is scored, so that the results equal those of run_pairs.py under any precision and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.common.toml_text import show_value
from data_prep.vocabulary.source import read_vocabulary
from pretraining.engine.engine import Engine
from pretraining.objectives.declaration import build_model
from pretraining.scoring.pairs import Asked, Pair, Tally, are_right, are_scored, list_sentences, read_pairs, take_pairs
from pretraining.scoring.sentences import Scorer, SentenceCutter

ASKED = 20
"""Number of pairs asked of each paradigm."""


def read_sample(name: str | None) -> tuple[Pair, ...]:
    """Reads the file of pairs that a recipe names and takes a sample of each paradigm; empty if it names none."""
    return () if name is None else tuple(take_pairs(read_pairs(Path(name)), ASKED))


def describe_sample(pairs: Sequence[Pair], name: str | None, data: Path, positions: int) -> list[str]:
    """Describes the sample: its size, and the pairs that cannot be scored with so many positions. Raises UserError if
    none can. `data` is the folder of the vocabulary."""
    if name is None:
        return []
    asked = Asked.from_pairs(pairs, SentenceCutter(read_vocabulary(data)).cut_texts(list_sentences(pairs)), positions)
    asked.require_telling(f"evaluation.pairs = {show_value(name)}")
    return [f"pairs that are asked at the ends of phases: {len(pairs):,}, of {name}", *asked.list_doubts()]


@torch.no_grad()
def score_pairs(engine: Engine, pairs: Sequence[Pair], data: Path, before: Callable[[], None]) -> Tally:
    """Scores pairs, divided among all ranks, which call it together. Pairs too long for the model are left out.
    `data` is the folder of the vocabulary."""
    model = build_model(engine.model.shape)
    model.load_state_dict(dict(engine.weights()))
    scorer = Scorer(model, read_vocabulary(data), engine.device)
    found = scorer.score(list_sentences(pairs), before, dist.get_rank(), dist.get_world_size())
    shared = torch.from_numpy(found).to(engine.device)
    dist.all_reduce(shared)
    scores = shared.cpu().numpy().reshape(-1, 2)
    scored = are_scored(scores)
    return Tally(int((are_right(scores) & scored).sum()), int(scored.sum()))


def describe_tally(tally: Tally) -> str:
    """The accuracy in words of the console."""
    return f"pairs {tally.accuracy:.1%} of {tally.pairs:,}"
