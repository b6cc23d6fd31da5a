"""Writes and reads the folders of fine-tuned models: transformers' format where it has a class, otherwise our own.

For a BiLSTM on frozen features, the folder has the BiLSTM's weights alone; the encoder stays in its own folder or on
the hub, and is identified by its checksum. For a BiLSTM that was trained with its encoder, the folder has all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.features import FeatureModel
from finetuning.model.heads import TaskModel, compute_logits
from finetuning.results import MODEL, PREDICTIONS, ModelScores
from finetuning.running.base import Base, Run, find_model, summarize_model
from finetuning.running.outputs import Outputs
from finetuning.settings import BiLstm, Features, FineTuning
from pretraining.architectures.declaration import read_shape
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.huggingface.folders import CONFIG, WEIGHTS, read_task, replacing_folder, write_bare, write_fine_tuned
from pretraining.huggingface.model_card import TaskProvenance, make_task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.huggingface.weights import check_finite, read_weights
from pretraining.model.shape import PIECE_HEAD, Shape

TOLD = ("learning_rate", "batch", "epochs", "warmup", "seed")
"""Settings listed in a model card."""
CARD = """# {task}: {what}

{said} Ask it with
`python finetuning/predict.py`, or `finetuning.prediction.load`.
"""


def keep_model(
    run: Run, base: Base, shape: Shape, trained: Mapping[str, Tensor], kept: ModelScores, outputs: Outputs
) -> None:
    """Writes the predictions of a run, and its model with these scores as a folder of transformers, or as one of ours
    where transformers has no class."""
    task, settings = run.task, run.settings
    weights = task.scale.fold_into_head(dict(trained))
    weights = {name: weight for name, weight in weights.items() if not name.startswith(f"{PIECE_HEAD}.")}
    for split, output in outputs.items():
        task.write_predictions(split, output, run.folder / PREDICTIONS)
    use = {"task": task.name, **task.describe_use(next(iter(outputs.values())))}
    if settings.features.layers or settings.bilstm.hidden:
        _write_without_class(run, base, shape, weights, use)
    else:
        _write_fine_tuned(run, base, shape, weights, use, kept)


def _write_fine_tuned(
    run: Run, base: Base, shape: Shape, weights: Mapping[str, Tensor], use: Mapping[str, Any], kept: ModelScores
) -> None:
    """Writes a folder of transformers, and checks that it reads back with the same logits."""
    head, settings, vocabulary = base.fit_head(run.task.head), run.settings, base.model.vocabulary
    baseline = run.find_baseline()
    made = TaskProvenance(
        run.task.name,
        summarize_model(base.model),
        pretrained=not base.from_scratch,
        items={"train": len(run.task.describe_split("train")), **kept.items},
        scores=kept.scores,
        settings={name: getattr(settings, name) for name in TOLD},
        baseline={baseline.how: baseline.scores} if baseline else {},
    )
    widths = settings.embeddings.widths
    card = make_task_card(shape, head, run.folder.parent / MODEL, settings.length, made, widths)
    with replacing_folder(run.folder / MODEL) as unfinished:
        pooling = base.choose_pooling(settings) if head.kind == "embeddings" else None
        write_fine_tuned(unfinished, shape, head, weights, vocabulary, card, use, settings.length, pooling)
        verify_fine_tuned(unfinished, shape, head, weights, compute_logits, vocabulary.special)


def _write_without_class(
    run: Run, base: Base, shape: Shape, weights: Mapping[str, Tensor], use: Mapping[str, Any]
) -> None:
    """Writes a model that transformers has no class for: a BiLSTM on frozen features, or with its encoder."""
    head, settings, name = run.task.head, run.settings, summarize_model(base.model).name
    content = {**use, "kind": head.kind, "labels": head.labels}
    if settings.features.layers:
        content |= {
            "features": settings.features.model_dump(mode="json"),
            "seed": settings.seed,
            "base": {**base.identity, "name": _find_lasting_name(base.model)},
        }
        if base.backward is not None:
            content["backward"] = _find_lasting_name(base.backward)
        what, vocabulary = f"a BiLSTM on frozen features of {name}", None
        said = "Its weights alone, which transformers cannot load; task.json says what they stand on."
    else:
        content |= {"bilstm": settings.bilstm.model_dump(mode="json"), "shape": shape.values()}
        what, vocabulary = f"{name} with a BiLSTM on top", base.model.vocabulary
        said = "Fine-tuned together. transformers has no class for it; task.json has its sizes."
    with replacing_folder(run.folder / MODEL) as unfinished:
        write_bare(unfinished, weights, CARD.format(task=run.task.name, what=what, said=said), content, vocabulary)


def has_no_class(folder: Path) -> bool:
    """Tells whether a folder has a model that transformers has no class for."""
    task = {} if (folder / CONFIG).exists() else read_task(folder)
    return "features" in task or "bilstm" in task


def refuse_without_class(name: str | None) -> None:
    """Refuses a `--model` with a BiLSTM, which can be asked but not trained further or scored again."""
    if name is not None and has_no_class(Path(name)):
        said = "a model with a BiLSTM is scored in its own training; predict.py asks it more"
        raise UserError(f"--model {name}: {said}; to train, name the model that it was trained on")


def read_without_class(folder: Path) -> tuple[TaskModel | FeatureModel, TaskHead, Vocabulary]:
    """Reads a model that transformers has no class for; for frozen features, reads the encoder from its own folder."""
    task = read_task(folder)
    with _report_damage(folder):
        head = TaskHead(task.get("kind", "tags"), tuple(task["labels"]))
        trained = read_weights(folder / WEIGHTS)
    if "features" in task:
        made, vocabulary = _read_features(folder, task, head)
    else:
        with _report_damage(folder):
            made = TaskModel(read_shape(task["shape"]), head, bilstm=BiLstm.model_validate(task["bilstm"]))
        vocabulary = read_vocabulary(folder)
    if made.state_dict().keys() != trained.keys():
        raise UserError(f"{folder / WEIGHTS}: not the weights that task.json tells of; fine-tune it anew")
    check_finite(str(folder / WEIGHTS), trained)
    made.load_state_dict(trained)
    return made, head, vocabulary


@contextmanager
def _report_damage(folder: Path) -> Iterator[None]:
    """Turns the errors of a damaged folder into a UserError with its cure."""
    try:
        yield
    except (KeyError, TypeError, ValidationError, SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{folder}: cannot be read: {error}; fine-tune it anew") from error


def _read_features(
    folder: Path, task: Mapping[str, Any], head: TaskHead
) -> tuple[TaskModel | FeatureModel, Vocabulary]:
    """Builds the model on frozen features that task.json describes, with its encoder."""
    with _report_damage(folder):
        known, scratch = task["base"], task["base"]["from_scratch"]
        features = {name: task["features"][name] for name in Features.model_fields}  # older folders have others too
        settings = FineTuning.model_validate({"seed": task["seed"], "features": features})
        names = [known["name"], *([task["backward"]] if "backward" in task else [])]
    try:
        base = Base(find_model(names[0], known.get("sees")), scratch, *map(find_model, names[1:]))
    except UserError as error:
        raise UserError(f"{folder}: stands on a model that is not there; put it back\n{error}") from error
    checksums = [base.identity.get(key) != known.get(key) for key in ("checksum", "backward")]
    if any(checksums):
        changed = names[checksums.index(True)]
        raise UserError(f"{folder}: {changed} is not the model that it learned on; put that one back")
    model = base.build_model(head, settings)
    assert isinstance(model, FeatureModel)
    return model, base.model.vocabulary


def _find_lasting_name(model: StoredModel) -> str:
    """Returns a name by which the model is found from any working directory."""
    return model.name if model.on_hub else str(model.folder.resolve())
