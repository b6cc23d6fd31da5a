"""The peer of fine-tuning answers the items that it is asked, in their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from support.base_models import write_bert
from support.tasks import CUTTER, VOCABULARY

from benchmarks.trainer_peer import make_trainer, outputs_of, rows_of
from finetuning.settings import FineTuning
from finetuning.tasks.sentences import SentenceItems, SentenceTask
from pretraining.huggingface.task_head import TaskHead


def test_lengths_that_were_grouped_in_training_leave_the_answers_in_order(tmp_path: Path) -> None:
    texts = ["a b c d e f", "a", "b c d e", "b", "a c e g i", "c", "d e f", "e f"]
    labels = np.arange(len(texts), dtype=np.float32)[:, None]
    items = SentenceItems(CUTTER, 16, (texts,), labels)
    task = SentenceTask("toy", TaskHead("score"), "pearson", ("pearson",), ("text",), items, {"dev": items})
    settings = FineTuning(batch=2, epochs=1)
    trainer = make_trainer(
        task, write_bert(tmp_path / "model", VOCABULARY), tmp_path / "runs", settings, numbers="fp32"
    )
    trainer.train()
    answers = outputs_of(trainer, items, "score").values[:, 0]
    trainer.model.eval()
    with torch.no_grad():
        alone = [
            trainer.model(**{name: torch.tensor([row[name]]) for name in row if name != "labels"}).logits.item()
            for row in rows_of(items, "score")
        ]
    assert len({round(answer, 5) for answer in alone}) == len(texts), "answers that cannot be told apart"
    np.testing.assert_allclose(answers, alone, atol=1e-5)
