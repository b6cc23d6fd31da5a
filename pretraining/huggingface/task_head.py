"""What stands on an encoder that was fine-tuned for a task: which kind of head, and what its outputs mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["classes", "labels", "score", "choice", "spans", "tags"]
"""One class of several, several labels at once, a number, one of several texts, a stretch of the text, a tag a word."""
KINDS: tuple[Kind, ...] = get_args(Kind)
ARCHITECTURES: dict[Kind, str] = {
    "classes": "BertForSequenceClassification",
    "labels": "BertForSequenceClassification",
    "score": "BertForSequenceClassification",
    "choice": "BertForMultipleChoice",
    "spans": "BertForQuestionAnswering",
    "tags": "BertForTokenClassification",
}
"""The classes of transformers that have the same heads."""


@dataclass(frozen=True)
class TaskHead:
    """A linear layer that makes of hidden states what a task asks for, with the names of its outputs."""

    kind: Kind
    labels: tuple[str, ...] = ()
    """The names of classes, labels or tags, in the order of the outputs; the other kinds have none."""

    @property
    def outputs(self) -> int:
        """How many numbers it gives for a sequence, for a text to choose, or for a piece."""
        return {"score": 1, "choice": 1, "spans": 2}.get(self.kind, len(self.labels))

    @property
    def has_pooler(self) -> bool:
        """Whether it sees [CLS] through BERT's pooler; otherwise it sees the pieces themselves."""
        return self.kind not in ("spans", "tags")

    @property
    def architecture(self) -> str:
        """Names the class of transformers that has the same head."""
        return ARCHITECTURES[self.kind]
