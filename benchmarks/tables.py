"""What results say, as tables on the console and in docs/.

Most files of results have contests, whose sides took turns. No ratio is worked out here: `Turns` has made those of the
JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console

Results = Mapping[str, Any]
ALONG = ("real_pieces_per_second", "share_of_ceiling", "share_of_ceiling_computed", "mb_per_s")
"""Figures of our side that stand beside the ratios."""
PAIRS = (
    ("fp32", "transformers fp32"),
    ("bf16", "transformers bf16"),
    ("bf16", "transformers autocast"),
    ("int8", "transformers bf16"),
    ("fp32", "onnxruntime fp32"),
    ("int8", "onnxruntime int8"),
)
"""Our sides and the peers that they are compared with in short, where several sides are ours."""


@dataclass(frozen=True)
class ResultTable:
    """Rows under a head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as a page of documentation has it."""
        rows = [f"| {' | '.join(word.replace('|', '/') for word in row)} |" for row in (self.head, *self.rows)]
        title = f"{self.title}:\n\n" if self.title else ""
        return title + "\n".join([rows[0], "| --- " * len(self.head) + "|", *rows[1:]])


def show(console: Console, tables: Iterable[ResultTable]) -> None:
    """Prints tables."""
    for table in filter(lambda each: each.rows, tables):
        if table.title:
            console.print(table.title, markup=False)
        made = rich.table.Table(*table.head, box=None)
        for row in table.rows:
            made.add_row(*row)
        console.print(made)


def show_contest(console: Console, name: str, contest: Results) -> None:
    """Prints a contest that has just ended: the medians of every side, and how many times as fast we are."""
    rows = []
    for side, figures in contest.get("sides", {}).items():
        shown = {figure: value for figure, value in figures.items() if is_cell(value)}
        medians = {figure: value["median"] if isinstance(value, Mapping) else value for figure, value in shown.items()}
        rows.append({"side": side, **medians})
    show(console, [matrix(name, rows), matrix("times as fast", [times(contest)])])


def cell(value: Any, name: str = "") -> str:
    """A value in words: shares in percent, a spread as its median with the lowest and the highest."""
    if isinstance(value, Mapping):
        ends = [cell(value[end], name) for end in ("lowest", "highest") if end in value]
        return cell(value["median"], name) + (f" ({' to '.join(ends)})" if ends else "")
    if isinstance(value, list):
        return ", ".join(map(cell, value)) if len(value) <= 6 else f"{len(value)} values"
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if "share" in name and 0.001 <= abs(value) <= 1:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def is_cell(value: Any) -> bool:
    """Whether one cell of a table holds this."""
    if isinstance(value, Mapping):
        return "median" in value
    return not isinstance(value, list) or not any(isinstance(each, Mapping | list) for each in value)


def titled(name: str) -> str:
    """The name of a figure as a page has it."""
    words = name.replace("_per_s", "/s").replace("/second", "/s").replace("_", " ")
    return re.sub(r"\b[mg]b\b", lambda unit: unit[0].upper(), words)


def matrix(title: str, rows: Sequence[Results]) -> ResultTable:
    """A table of records."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[cell(row.get(name), name) for name in names] for row in rows]
    return ResultTable(title, [titled(name) for name in names], lines)


def middle(value: Any) -> float:
    """The median of a spread, or the number itself."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def contests_of(found: Results) -> Iterator[tuple[str, dict[str, Results]]]:
    """The contests of a file, of each model where it has several."""
    for model, each in found.get("models", {"": found}).items():
        held = {name: one for name, one in each.get("contests", each).items() if isinstance(one, Mapping)}
        if contests := {name: one for name, one in held.items() if "sides" in one or "against" in one}:
            yield model, contests


def contest_name(name: str, contest: Results) -> str:
    """`base-128` of 32 sequences in words."""
    parts = re.fullmatch(r"([a-z]+)-(\d+)(?:-auto|-\d+)?", name)
    return f"{parts[1]} at {parts[2]}, {contest['sequences']} sequences" if parts and "sequences" in contest else name


def times(contest: Results) -> dict[str, Any]:
    """How many times as fast we are as each peer that took turns with us."""
    if "against" in contest:
        against = contest["against"].items()
        kinds = {f"Trainer in {by}: {kind}": one for by, each in against for kind, one in each.items()}
        return {title: one["times_as_fast"] for title, one in kinds.items() if "times_as_fast" in one}
    if "times_as_fast" in contest:
        taken = contest["times_as_fast"]
        found = {f"{peer}, ours {ours}": taken.get(f"cloze {ours}", {}).get(peer) for ours, peer in PAIRS}
        return {title: each for title, each in found.items() if each}
    return dict(contest.get("times_as_fast_as", {}))


def in_short(found: Results) -> Iterator[ResultTable]:
    """A row for each contest: some figures of ours, and how many times as fast as the peers we are; then whole runs."""
    for model, contests in contests_of(found):
        rows = []
        for name, each in contests.items():
            taken, ours = times(each), each.get("sides", {}).get("cloze", {})
            along = {f"our {figure}": ours[figure] for figure in ALONG if figure in ours}
            own = {figure: cell(middle(value), figure) for figure, value in along.items()}
            if own or taken:
                rows.append({model or "contest": contest_name(name, each), **own, **taken})
        if rows:
            yield matrix("How many times as fast we are", rows)
    for name in ("whole_runs", "growth"):
        if found.get(name):
            yield matrix(titled(name), found[name])


def scaling(found: Results) -> Iterator[ResultTable]:
    """Efficiencies as they are, and as they would be if no process waited for another."""
    several = max(point["nodes"] for point in found["points"]) > 1
    names = ("scaling", *["nodes"] * several, "processes", "threads", "sequences")
    rows = []
    for point in found["points"]:
        counted = {name: str(point[name]) for name in names}
        shares = {name: point[name] for name in ("efficiency", "ideal", "communication")}
        percent = {name: "–" if share is None else share and f"{middle(share):.0%}" for name, share in shares.items()}
        rows.append({**counted, "sequences/s": cell(point["sequences_per_second"]), **percent})
    yield matrix("", rows)


def loader(found: Results) -> Iterator[ResultTable]:
    """How many pieces a second one rank's thread prepares."""
    rows = [{**row, "pieces_per_second": f"{middle(row['pieces_per_second']):,.0f}"} for row in found["speeds"]]
    yield matrix("", rows)


def summarise_results(found: Results) -> Iterable[ResultTable]:
    """The tables of a file of results."""
    summarise: Callable[[Results], Iterable[ResultTable]] = {"scaling": scaling, "loader": loader}.get(
        found["benchmark"], in_short
    )
    return summarise(found)
