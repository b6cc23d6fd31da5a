"""Model cards say how a model came about, with units and without what means nothing; and are cards without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import metadata_load
from support.base_models import HEADS, TaskModel
from support.records import SCORES
from support.training import Place
from support.transformers_models import SHAPE

from data_prep.common.toml_text import read_toml
from data_prep.shards import Manifest, RecordedSettings
from pretraining.architectures.weights import TaskHead
from pretraining.data.corpora import Corpora
from pretraining.huggingface import model_card
from pretraining.huggingface.model_card import BaseSummary, DataSummary, Provenance, TaskProvenance, make_task_card
from pretraining.objectives.declaration import num_parameters


@pytest.fixture(scope="module")
def manifest(shared: Place) -> Manifest:
    return Manifest.read(shared.data)


@pytest.fixture
def provenance(manifest: Manifest) -> Provenance:
    """Of a run that is done with both phases of a plain recipe."""
    trained = {"step": 120, "examples_seen": 7040, "dtype": "bf16", "optimizer": "AdamW; betas 0.9 and 0.999"}
    summary = DataSummary.from_corpora(Corpora.one(Path(), manifest))
    return Provenance(summary, "seed = 7\n", SCORES, **trained, scored_length=32)  # type: ignore[arg-type]


def card(provenance: Provenance | None, pairs: bool = True, **more: Any) -> str:
    given = {"folder": Path("runs/mine/export"), "length": 40, "licence": None, "provenance": provenance, **more}
    return model_card.make_model_card(SHAPE.change_learning(pairs=pairs), **given)


def front(text: str, folder: Path) -> dict[str, Any]:
    """What the hub reads, by its own code."""
    (folder / "README.md").write_text(text)
    return metadata_load(folder / "README.md") or {}


def test_the_hub_reads_what_it_wants_to_know(provenance: Provenance, tmp_path: Path) -> None:
    text = card(replace(provenance, base=BaseSummary("somebody/bert-base", on_hub=True)), licence="cc-by-sa-4.0")
    found = front(text, tmp_path)
    assert (found.pop("library_name"), found.pop("pipeline_tag")) == ("transformers", "fill-mask")
    assert (found.pop("license"), found.pop("base_model")) == ("cc-by-sa-4.0", "somebody/bert-base")
    assert found == {"tags": ["bert", "fill-mask"]}
    assert "began with the weights of somebody/bert-base." in text
    assert "| licence | cc-by-sa-4.0 |" in text


TOLD = f"""
| longest text it was trained on | 32 pieces |
| parameters | {num_parameters(SHAPE):,} |
- optimizer: AdamW; betas 0.9 and 0.999
- precision: bf16; weights are kept and gradients added up in fp32
after step 120, which have seen 7,040 examples.
On 1,000 examples of length 32 held out from training, after step 12,000:
| masked loss | 5.8 nats |
| next-sentence accuracy | 55.0% |
"""


def test_the_card_says_how_the_model_came_about(provenance: Provenance) -> None:
    data = replace(provenance.data, settings={**provenance.data.settings, "language": "de"})
    text = card(replace(provenance, data=data), length=32)
    assert [line for line in TOLD.strip().splitlines() if line not in text] == []
    assert "```toml\nseed = 7\n```" in text
    told = read_toml(text.partition("```toml\n")[2].partition("```")[0])
    assert (told["sources"], told["examples"]) == ({"data-text": 600}, data.examples)
    assert (told["pieces"], told["fingerprint"]) == (data.pieces, data.fingerprint)
    assert told["settings"] == {name: value for name, value in data.settings.items() if value is not None}
    assert {"language", "mask_rate", "duplicates", "pairs", "cased"} <= told["settings"].keys()


def test_the_command_that_loads_it_fits_the_heads_and_the_place(provenance: Provenance) -> None:
    assert 'AutoModelForPreTraining.from_pretrained("runs/mine/export")' in card(None)
    alone = card(replace(provenance, segments=1), pairs=False, folder=Path("/home/me/mine"))
    assert 'AutoModelForMaskedLM.from_pretrained("mine")' in alone
    assert "(`token_type_ids` of 1) was never trained, and has the embedding of the first" in alone
    assert "/home" not in alone


def test_what_is_not_known_is_not_told(provenance: Provenance, tmp_path: Path) -> None:
    """A card of nothing known is still a card."""
    data = replace(provenance.data, settings={**provenance.data.settings, "language": None})
    text, bare = card(replace(provenance, data=data, scores=None)), card(None, length=32)
    assert front(text, tmp_path).keys() == {"library_name", "pipeline_tag", "tags"}
    assert not [part for part in ("language =", "## Validation") if part in text]
    assert "| licence | not specified |" in text
    assert front(bare, tmp_path)["tags"] == ["bert", "fill-mask"]
    assert "| longest text | 32 pieces |" in bare
    assert not [part for part in ("## Data", "pre-trained with Cloze") if part in bare]


def test_all_examples_are_counted(manifest: Manifest) -> None:
    sets = [entry for entry in manifest.figures if entry.length == 32]
    training, held_out = (sum(e.examples for e in sets if e.validation == held) for held in (False, True))
    examples = DataSummary.from_corpora(Corpora.one(Path(), manifest)).examples
    assert (examples["32"], examples["32, held out"]) == (training, held_out)
    older = RecordedSettings(**{name: value for name, value in manifest.settings if name != "language"})
    assert (
        DataSummary.from_corpora(Corpora.one(Path(), manifest.model_copy(update={"settings": older}))).settings[
            "language"
        ]
        is None
    )


def test_names_from_outside_do_not_break_the_card(provenance: Provenance, tmp_path: Path) -> None:
    data = replace(provenance.data, sources={"a|b\n# c": 3}, settings={"language": "no"})
    text = card(replace(provenance, data=data, base=BaseSummary("folder: [x]\n---\n# y", on_hub=False)))
    assert '"a|b\\n# c" = 3\n' in text
    found = front(text, tmp_path)
    assert (found["language"], "base_model" in found) == ("no", False)
    assert "weights of folder: [x] --- # y." in text


def test_a_fine_tuned_model_tells_what_it_was_made_from_and_how_good_it_is(tmp_path: Path) -> None:
    base, scores = BaseSummary("google-bert/bert-base-uncased", on_hub=True), {"dev_matched": {"accuracy": 0.8412}}
    made = TaskProvenance("mnli", base, True, {"train": 392702}, scores, {"learning_rate": 3e-5, "seed": 1})
    text = make_task_card(SHAPE, HEADS["classes"], Path("runs/base/glue/mnli"), 128, made)
    assert front(text, tmp_path)["pipeline_tag"] == "text-classification"
    assert model_card.read_front_matter(tmp_path / "README.md", "base_model") == base.name
    for line in (
        "fine-tuned with Cloze. Made from google-bert/bert-base-uncased.",
        "| longest sequence | 128 pieces |",
        "learning_rate = 3e-05\n",
        "[dev_matched]\naccuracy = 0.8412\n",
        'model = AutoModelForSequenceClassification.from_pretrained("runs/base/glue/mnli")',
    ):
        assert line in text


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_every_kind_of_head_has_a_card(head: TaskHead, tmp_path: Path) -> None:
    """The class that it names is one of transformers; of a path on this machine only the last name is told."""
    made = TaskProvenance("own", BaseSummary("mini", on_hub=False), pretrained=False)
    text = make_task_card(SHAPE, head, tmp_path / "my model", 16, made)
    assert hasattr(transformers, text.partition("import ")[2].partition(",")[0])
    assert "but not the weights, are those of mini." in text
    assert "$ python finetuning/predict.py 'my model'\n" in text
    assert not [part for part in (str(tmp_path), "base_model", "## Scores") if part in text]
    sizes = sum(weight.numel() for weight in TaskModel(SHAPE, head).parameters())
    padding = (SHAPE.padded_vocabulary - SHAPE.vocabulary) * SHAPE.hidden
    assert f"| parameters | {sizes - padding:,} |" in text
