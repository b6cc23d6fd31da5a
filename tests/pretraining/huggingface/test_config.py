"""What a config.json says of a model whose pieces see one side, and who is told to load it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.transformers_models import SHAPE

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Special
from pretraining.huggingface import config
from pretraining.huggingface.config import make_config, parse_shape
from pretraining.model.shape import Sees, Shape
from pretraining.objectives.declaration import objectives
from pretraining.training.run import describe_loading

SPECIAL = Special(0, 1, 2, 3, 4)
SHAPES: dict[Sees, Shape] = {
    objective.sees: replace(SHAPE, objective=name, sees=objective.sees, pairs=objective.pairs != "unused")
    for name, objective in objectives().items()
}


@pytest.mark.parametrize("sees", SHAPES)
def test_a_folder_of_an_objective_that_is_gone_is_refused(sees: Sees, monkeypatch: pytest.MonkeyPatch) -> None:
    written = make_config(SHAPES[sees], SPECIAL, torch.float32)
    assert parse_shape(written, "folder") == SHAPES[sees]
    left = {name: objective for name, objective in objectives().items() if objective.sees != sees}
    monkeypatch.setattr(config, "objectives", lambda: left)
    with pytest.raises(UserError, match=rf"^folder: .*{', '.join(left)}; put back .*pretraining/objectives/"):
        parse_shape(written, "folder")


@pytest.mark.parametrize(
    ("sees", "kind"), [("both", "AutoModelForMaskedLM"), ("before", "AutoModelForCausalLM"), ("after", None)]
)
def test_nobody_is_told_to_load_what_transformers_refuses(sees: Sees, kind: str | None) -> None:
    told = describe_loading(SHAPES[sees], Path("run/export"))
    wanted = f'transformers.{kind}.from_pretrained("run/export")' if kind else "finetuning/run_task.py TASK.toml"
    assert wanted in told
    assert (kind is None) == ("transformers." not in told)
