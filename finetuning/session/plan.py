"""What a command of fine-tuning will do, as tables: the tasks with their items and steps, and how all of it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType

from finetuning.inputs import Items
from finetuning.running.batches import TrainingBatches
from finetuning.running.search import Member
from finetuning.session.report import table_of
from finetuning.session.sharing import Sharing
from finetuning.settings import FineTuning
from finetuning.tasks.spans import Windows
from finetuning.tasks.task import Task


def plan(
    tasks: Sequence[Task], runs: Sequence[tuple[Task, Member]], settings: FineTuning, sharing: Sharing, memory: float
) -> Iterator[RenderableType]:
    """The runs that a command will make of every task, and what they have in common."""
    table = table_of("task", "kind", ">train", ">dev", ">test", ">runs", ">steps of a run")
    for task in tasks:
        members = [member for other, member in runs if other is task]
        steps = {TrainingBatches(task.train, each.settings).steps if each.trains else 0 for each in members}
        row = (task.name, task.head.kind, items_of(task.train), splits_of(task.dev), splits_of(task.test))
        table.add_row(*row, str(len(members)), " or ".join(f"{count:,}" for count in sorted(steps)))
    yield from ("", table, "")
    common = table_of("how", "")
    for name, value in described([member for _, member in runs], settings):
        common.add_row(name, value)
    s = "s" * (sharing.threads > 1)
    common.add_row("at a time", f"{sharing.jobs} of {len(runs)} runs, {sharing.threads} thread{s} each")
    common.add_row("memory of a run", f"{memory / 1e9:.1f} GB, an estimate")
    yield common


def described(members: Sequence[Member], settings: FineTuning) -> Iterator[tuple[str, str]]:
    """What is set for all runs, or what they differ in."""
    for name, field in (
        ("learning rates", "learning_rate"),
        ("batch", "batch"),
        ("epochs", "epochs"),
        ("seeds", "seed"),
    ):
        values = dict.fromkeys(getattr(member.settings, field) for member in members)
        yield name, ", ".join(f"{value:g}" for value in values)
    yield "warm-up", f"{settings.warmup:.0%} of the steps, then {settings.decay}"
    yield "length", f"{settings.length} pieces"
    yield "precision", settings.precision.dtype


def splits_of(splits: Mapping[str, Items]) -> str:
    """The items of every split of a kind, with what tells the splits apart."""
    if len(splits) < 2:
        return "".join(map(items_of, splits.values()))
    return "\n".join(f"{name.partition('_')[2] or name} {items_of(items)}" for name, items in splits.items())


def items_of(items: Items) -> str:
    """How many items there are; of questions also how many windows they are read through."""
    if isinstance(items, Windows):
        return f"{len(items.places.first) - 1:,} questions\n{len(items):,} windows"
    return f"{len(items):,}"
