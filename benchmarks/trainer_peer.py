"""transformers' Trainer, the peer of fine-tuning: on the same items, from the same model folder, with our settings.

Items are cut into pieces before it begins, as its users do; that time counts for nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Items
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.huggingface.weights import TaskHead

Row = dict[str, Any]
Numbers = Literal["autocast", "fp32"]
"""What it computes in: bf16 over weights in fp32, or fp32."""


def rows_of(items: Items, kind: str, width: int = 0) -> list[Row]:
    """The items as rows of a dataset; padded to a `width`, or as long as they are."""
    encoded = items.encode(np.arange(len(items)))
    pieces, second = encoded.sequences
    rows = [_row(pieces.row(number), int(second[number]), width) for number in range(len(pieces))]
    for row, labels in zip(rows, _labels(encoded, kind), strict=False):
        row.update(labels)
    return rows


def _row(pieces: Array, second: int, width: int) -> Row:
    """A sequence, with ones where pieces are and where the second segment is."""
    segments = (np.arange(len(pieces)) >= second).astype(np.int64)
    parts = {"input_ids": pieces, "token_type_ids": segments, "attention_mask": np.ones_like(segments)}
    if width:
        return {name: np.pad(part, (0, width - len(part))).tolist() for name, part in parts.items()}
    return {name: part.tolist() for name, part in parts.items()}


def _labels(encoded: Encoded, kind: str) -> list[Row]:
    """What every item teaches; nothing where nobody knows."""
    if encoded.labels is None:
        return []
    values = encoded.labels.values.tolist()
    if kind == "spans":
        return [
            {"start_positions": first, "end_positions": last}
            for first, last in zip(values[::2], values[1::2], strict=True)
        ]
    return [{"labels": value} for value in values]


def arguments(settings: FineTuning, folder: Path, numbers: Numbers, grouped: bool, **more: Any) -> Any:
    """Our settings as the Trainer takes them."""
    import transformers

    optimizer = settings.optimizer
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        lr_scheduler_type="linear" if settings.decay == "linear" else "constant_with_warmup",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        seed=settings.seed,
        train_sampling_strategy="group_by_length" if grouped else "random",
        bf16=numbers == "autocast",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=settings.logging.every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def load_model(folder: Path, head: TaskHead, settings: FineTuning) -> Any:
    """A model of transformers for a task, with the weights of the folder."""
    import transformers

    given: dict[str, Any] = {"num_labels": head.outputs} if head.kind in ("classes", "labels", "score", "tags") else {}
    dropout, attention = settings.dropout.hidden, settings.dropout.attention
    given |= {} if dropout is None else {"hidden_dropout_prob": dropout, "classifier_dropout": dropout}
    given |= {} if attention is None else {"attention_probs_dropout_prob": attention}
    kind = getattr(transformers, head.architecture)
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()  # that the head is new is what fine-tuning means
    quiet.disable_progress_bar()
    transformers.set_seed(settings.seed)
    return kind.from_pretrained(folder, dtype=torch.float32, **given)


def make_trainer(
    task: Task,
    model: Path,
    folder: Path,
    settings: FineTuning,
    *,
    numbers: Numbers = "autocast",
    width: int = 0,
    callbacks: Sequence[Any] = (),
) -> Any:
    """The Trainer on the training items: padded to a width, or to the longest of a batch, with lengths grouped."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    collator: Any = transformers.default_data_collator if width else transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model=load_model(model, task.head, settings),
        args=arguments(settings, folder, numbers, grouped=not width),
        train_dataset=rows_of(task.train, task.head.kind, width),
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer
