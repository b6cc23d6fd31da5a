"""What a run tells of itself: the figures of a logged step, and the scores of an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """What a logged step says, of all steps since the last one logged. None: not known, or not there."""

    step: int
    """optimizer steps done, of the whole run"""
    phase: int
    """counted from 1"""
    loss: float
    """masked + next_sentence"""
    masked: float
    """masked-language-model loss of a predicted position, in nats"""
    next_sentence: float
    """next-sentence loss of a sequence, in nats"""
    masked_accuracy: float
    next_sentence_accuracy: float
    learning_rate: float
    gradient_norm: float | None
    """before clipping"""
    loss_scale: float | None
    """fp16 only"""
    pieces_per_second: float
    """real ones, all ranks"""
    padded_per_second: float
    """what a trainer that pads would count"""
    utilisation: float | None
    """useful model FLOPs by what the matrix products of all ranks could do"""
    waiting: float
    """share of the time in which ranks waited for data"""
    memory: int
    """bytes: the peak of the rank that needed most"""
    seconds: float
    """of an optimizer step, without evaluation and saving"""
    seconds_left: float | None


@dataclass(frozen=True)
class EvaluationRecord:
    """What the model scores on examples held out from training."""

    step: int
    phase: int
    masked: float
    next_sentence: float
    masked_accuracy: float
    next_sentence_accuracy: float
    examples: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.masked, 700.0))
