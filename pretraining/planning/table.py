"""Renders the records of plans as tables: of a run, of the ZeRO stages on a cluster, and of clusters of other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration
from pretraining.planning.record import Record

UNKNOWN = "?"
SMALLER_UNITS = {"hours": ("seconds", 3600), "GB": ("MB", 1000), "kWh": ("Wh", 1000)}


def render_plan(plan: Record) -> RenderableType:
    """Renders the plan of a run: the model, the phases, the memory, the estimates, and the assumptions."""
    notes = [Text(f"- {note}") for note in plan["notes"]]
    warning: list[RenderableType] = [] if plan["warning"] is None else ["", Text(f"warning: {plan['warning']}")]
    tables = _phase_table(plan), "", _memory_table(plan), "", _estimate_table(plan), ""
    return Group(_describe_model(plan), "", *tables, *notes, *warning)


def render_cluster(cluster: Record) -> RenderableType:
    """Renders the plans of a cluster, first that of the recipe's ZeRO stage: memory, the parts of a step's time, and
    other numbers of GPUs."""
    own, *_ = cluster["stages"]
    parts = list[RenderableType]([f"{cluster['recipe']} on {own['where']}", "", _stage_table(cluster["stages"]), ""])
    if own["fits"]:
        parts += [_memory_table(own), "", _estimate_table(own), "", *(Text(f"- {note}") for note in own["notes"]), ""]
        parts += [_step_table(own), "", *cluster["advice"], "", _size_table(cluster["sizes"])]
    return Group(*parts)


def _size_table(plans: Iterable[Record]) -> Table:
    """Makes a table of the time and cost of a run on other numbers of GPUs."""
    rows = [[f"{plan['all_ranks']:,}", f"{plan['efficiency']:.1%}", *_format_planned(plan)] for plan in plans]
    return _make_table(["GPUs", "efficiency", "time", "cost"], rows)


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Makes a table without lines, the first column left-aligned, the others right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _describe_model(plan: Record) -> str:
    ranks, tensor = plan["all_ranks"], plan["tensor"]
    shared = f", {tensor} to a model" if tensor > 1 else ""
    return (
        f"{plan['parameters'] / 1e6:,.1f}M parameters: {plan['layers']} layers of {plan['hidden']}, "
        f"{plan['heads']} heads, vocabulary {plan['vocabulary']:,}; {plan['dtype']} on {ranks} "
        f"rank{'s' * (ranks > 1)}{shared}, ZeRO {plan['zero']}, {plan['optimizer']}"
    )


def _phase_table(plan: Record) -> Table:
    rows = [_phase_row(phase, plan["ranks"]) for phase in plan["phases"]]
    if len(rows) > 1:
        steps, pieces = (_format_number(plan[name]) for name in ("steps", "pieces"))
        rows.append(["in all", "", "", steps, "", pieces, "", "", _format_duration(plan["seconds"])])
    sizes = f"batch = micro x accumulated x {'data ' * (plan['tensor'] > 1)}ranks"
    columns = ["phase", "length", sizes, "steps", "learning rate", "pieces", "a sequence", "epochs", "time"]
    return _make_table(columns, rows)


def _phase_row(phase: Record, ranks: int) -> list[str]:
    name, objective, about = phase["name"], phase["objective"], "~" if phase["micro_batch_is_estimate"] else ""
    length, stored = phase["length"], phase["stored_length"]
    return [
        name if objective is None else f"{name} ({objective})",
        str(length) if length == stored else f"{length} of {stored}",  # cut out of longer examples
        f"{phase['batch']:,} = {about}{phase['micro_batch']} x {about}{phase['accumulation']} x {ranks}",
        _format_number(phase["steps"]),
        " .. ".join(f"{each:.2g}" for each in phase["learning_rates"]),
        _format_number(phase["pieces"]),
        f"{phase['pieces_a_sequence']:.1f}",
        UNKNOWN if phase["epochs"] is None else f"{phase['epochs']:,.2f}",
        _format_duration(phase["seconds"]),
    ]


def _memory_table(plan: Record) -> Table:
    stages = {each["zero"]: [size / 1e9 for size in each.values()][1:] for each in plan["memory"]}
    rows = [[_name_stage(zero, plan["zero"]), *map(_format_digits, sizes)] for zero, sizes in stages.items()]
    title = "memory of a rank, GB, an estimate"
    return _make_table([title, "weights", "gradients", "optimizer", "on the host", "+ activations", "recomputed"], rows)


def _estimate_table(plan: Record) -> Table:
    """Makes a table of what a run takes: the range and the planned value."""
    rows, columns = [], ("low", "planned", "high")
    for name, values in plan["estimates"].items():
        numbers = {each: values[each] for each in columns if each in values}
        unit = next((unit for unit in SMALLER_UNITS if unit in name and max(numbers.values()) < 0.1), "")
        smaller, size = SMALLER_UNITS.get(unit, ("", 1))
        shown = (_format_digits(size * numbers[each]) if each in numbers else "" for each in columns)
        rows.append([name.replace(unit, smaller, 1).replace("_", " "), *shown])
    return _make_table(["estimates", *columns], rows)


def _name_stage(zero: int, own: int) -> str:
    return f"ZeRO {zero}" + " (this recipe)" * (zero == own)


def _format_number(value: float | None) -> str:
    """Formats a number with thousands separators, or in millions or billions."""
    if value is None:
        return UNKNOWN
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f}"


def _format_duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _format_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _stage_table(plans: Sequence[Record]) -> Table:
    """Makes a table of the fastest micro-batches of every ZeRO stage."""
    columns, rows = ["micro x accumulated", "GB a GPU", "sequences/s", "efficiency"], []
    for plan in plans:
        cells = ["does not fit"]
        if plan["fits"]:
            choices = zip(*map(_list_choice, plan["phases"]), strict=True)
            cells = [*map("\n".join, choices), *_format_planned(plan)]
        rows.append([_name_stage(plan["zero"], plans[0]["zero"]), *cells])
    return _make_table(["fastest of each", *columns, "time", "cost"], rows)


def _list_choice(phase: Record) -> Iterator[str]:
    yield f"{phase['micro_batch']} x {phase['accumulation']}"
    yield f"{phase['bytes_of_a_rank'] / 1e9:,.1f}"
    yield f"{phase['sequences_per_second']:,.0f}"
    yield f"{phase['efficiency']:.1%}"


def _step_table(plan: Record) -> Table:
    """Makes a table of the parts of a step's time in each phase."""
    names, rows = list(plan["phases"][0]["step_seconds"]), []
    for phase in plan["phases"]:
        cells = [f"{seconds:.4f}" for seconds in phase["step_seconds"].values()]
        rows.append([phase["name"], *cells, f"{phase['steps'] or 0:,.0f}", _format_duration(phase["seconds"])])
    return _make_table(["seconds of a step", *names, "steps", "phase takes"], rows)


def _format_planned(plan: Record) -> tuple[str, str]:
    """Formats the planned time and, with a price, the cost."""
    cost = plan["estimates"].get("cost")
    return _format_duration(plan["seconds"]), "" if cost is None else f"{cost['planned']:,.0f}"
