"""The page on other programs: each of its blocks is run as it stands, where its first import is installed."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from support.base_models import write_bert
from support.transformers_models import PIECES, their_model
from transformers import AutoModelForMaskedLM, BertForSequenceClassification

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining.checkpoint.models import StoredModel
from pretraining.scoring.sentences import Scorer

BLOCKS = re.findall(r"```python\n(from (\w+).*?)```", (ROOT / "docs" / "elsewhere.md").read_text(), re.DOTALL)
VOCABULARY = WordPiece(PIECES, cased=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the page names."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_bert(folder / "exported/mini", VOCABULARY)
    write_bert(folder / "exported/ltr", VOCABULARY, objective="ltr")
    their_model(BertForSequenceClassification).save_pretrained(folder / "runs/sst2/model")
    VOCABULARY.write(folder / "runs/sst2/model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("code", "module"), BLOCKS, ids=[f"{module}-{n}" for n, (_, module) in enumerate(BLOCKS)])
def test_a_block_of_the_page_runs(code: str, module: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(module)
    for needed in ["accelerate"] * ("Trainer(" in code) + ["onnxscript"] * (module == "onnxruntime"):
        pytest.importorskip(needed)
    monkeypatch.chdir(models)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found: dict[str, Any] = {}
    exec(compile(code, "docs/elsewhere.md", "exec"), found)
    if module == "sentence_transformers":
        assert found["vectors"].shape == (3, 32)
        assert os.listdir(models / "exported/mini/1_Pooling") == ["config.json"]
    if "Trainer(" in code:
        assert StoredModel.open(str(models / "trained/mini")).build_pretrained()
    if module == "onnxruntime":
        with torch.no_grad():
            theirs = AutoModelForMaskedLM.from_pretrained("exported/mini").eval()(**found["text"]).logits
        np.testing.assert_allclose(found["logits"], theirs.numpy(), atol=1e-4)


@pytest.mark.slow
def test_the_evaluation_harness_finds_the_same_likelihoods(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    evaluator, tasks = (importlib.import_module(f"lm_eval.{name}") for name in ("evaluator", "tasks"))
    draw = np.random.default_rng(0)
    words = ["word1", "word7", "abc", "q", "Word2", "?"]
    texts = [" ".join(draw.choice(words, draw.integers(1, 9))) for _ in range(40)]
    pairs = [{"sentence_good": good, "sentence_bad": bad} for good, bad in zip(texts[::2], texts[1::2], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    own = (
        f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'pairs.jsonl'}\n"
        "output_type: multiple_choice\nvalidation_split: train\ndoc_to_text: ''\ndoc_to_target: 0\n"
        "doc_to_choice: '{{[sentence_good, sentence_bad]}}'\nmetric_list:\n  - metric: acc\n"
    )
    (tmp_path / "own.yaml").write_text(own)
    name = str(models / "exported/ltr")
    options = {"pretrained": name, "prefix_token_id": VOCABULARY.special.cls, "add_bos_token": False, "device": "cpu"}
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    output = evaluator.simple_evaluate("hf", options, tasks=["own"], task_manager=manager, log_samples=True)
    theirs = [float(answer[0][0]) for sample in output["samples"]["own"] for answer in sample["resps"]]
    model = StoredModel.open(name)
    ours = Scorer(model.build_pretrained(), model.vocabulary, torch.device("cpu")).score(texts)
    np.testing.assert_allclose(theirs, ours, atol=1e-4)
