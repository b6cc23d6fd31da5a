"""The card of a fine-tuned model: what the hub and its readers want to know."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard
from support.task_models import HEADS, TaskModel
from support.transformers_models import SHAPE

from pretraining.huggingface.model_card import BaseSummary, read_base_model
from pretraining.huggingface.task_card import TaskProvenance, task_card
from pretraining.huggingface.weights import TaskHead

MADE = TaskProvenance(
    task="mnli",
    base=BaseSummary("google-bert/bert-base-uncased", on_hub=True),
    items={"train": 392702, "dev_matched": 9815},
    scores={"dev_matched": {"accuracy": 0.8412}},
    settings={"learning rate": 3e-5, "seed": 1},
    licence="mit",
)


def test_it_tells_what_the_model_was_made_from_and_how_good_it_is(tmp_path: Path) -> None:
    text = task_card(SHAPE, HEADS["classes"], Path("runs/base/glue/mnli"), 128, MADE)
    (tmp_path / "README.md").write_text(text)
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "text-classification")
    assert read_base_model(tmp_path / "README.md") == "google-bert/bert-base-uncased"
    for line in [
        "# BERT for mnli",
        "fine-tuned with Cloze. Made from google-bert/bert-base-uncased.",
        "| labels | contradiction, entailment, neutral |",
        "| longest sequence | 128 pieces |",
        "| train | 392,702 |",
        "| learning rate | 3e-05 |",
        "| dev_matched | accuracy | 0.8412 |",
        'model = AutoModelForSequenceClassification.from_pretrained("runs/base/glue/mnli")',
        "$ python finetuning/predict.py runs/base/glue/mnli",
    ]:
        assert line in text


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_every_kind_of_head(head: TaskHead, tmp_path: Path) -> None:
    """The class that it names is one of transformers; of a path on this machine only the last name is told."""
    made = TaskProvenance("own", BaseSummary("mini", on_hub=False), pretrained=False)
    text = task_card(SHAPE, head, tmp_path / "model", 16, made)
    kind = text.partition("import ")[2].partition(",")[0]
    assert hasattr(transformers, kind)
    assert "but not the weights, are those of mini." in text
    assert str(tmp_path) not in text
    assert "base_model" not in text
    sizes = sum(weight.numel() for weight in TaskModel(SHAPE, head).parameters())
    padding = (SHAPE.padded_vocabulary - SHAPE.vocabulary) * SHAPE.hidden
    assert f"| parameters | {sizes - padding:,} |" in text
    assert "## Scores" not in text
