"""What results say, as tables and charts: for report.py's page, and in short for README and docs/measurements.md.

A benchmark whose JSON has `contests` with `sides` gets a row for each side; whatever else a file holds becomes tables
by its shape, so that a new benchmark needs no code here. No ratio is worked out: those of the JSON come from `Turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.svg import bars, curves

Results = Mapping[str, Any]
TIMES = "times_as_fast_as"
APART = "not in turns"
"""Stands where a ratio would, had both sides taken turns in one run."""
DEVICES = ("nodes", "processes", "ranks", "gpus")


@dataclass(frozen=True)
class Block:
    """A table, or a chart: rows under a head, or a drawing."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    svg: str = ""

    def markdown(self) -> str:
        """The table as a page of documentation has it; nothing of a chart."""
        lines = [self.head, ["---"] * len(self.head), *self.rows] if self.head else []
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

    def html(self) -> str:
        """With the table in a box of its own, which scrolls where the screen is narrow."""
        title = f"<h4>{escape(self.title)}</h4>" if self.title else ""
        if self.svg:
            return title + self.svg
        lines = "".join(f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in self.rows)
        head = "".join(f"<th>{escape(word)}</th>" for word in self.head)
        return f"{title}<div class=box tabindex=0><table><tr>{head}</tr>{lines}</table></div>"


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
    return name.replace("_per_s", "/s").replace("/second", "/s").replace("_", " ").replace("mb/s", "MB/s")


def matrix(title: str, rows: Sequence[Results]) -> Block:
    """A table of records."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[cell(row.get(name), name) for name in names] for row in rows]
    return Block(title, [titled(name) for name in names], lines)


def middle(value: Any) -> float:
    """The median of a spread, or the number itself."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def ratio(contest: Results, side: str) -> str:
    """How many times as fast we are as a side; refused where the JSON does not have both of one run."""
    if side == "cloze":
        return ""
    both = {"cloze", side} <= contest["sides"].keys() and side in contest.get(TIMES, {})
    return cell(contest[TIMES][side]) if both else APART


def blocks_of(results: Results) -> list[Block]:
    """All that a file of results says."""
    found = {name: value for name, value in results.items() if name not in ("format", "benchmark", "environment")}
    special = {"finetuning": finetuning, "downstream": downstream, "curve": curve, "gradients": gradients}
    return list(special.get(results["benchmark"], by_shape)(found))


def by_shape(found: Results, title: str = "") -> Iterator[Block]:
    """Tables of anything: what is one value, then what is many."""
    single = {name: value for name, value in found.items() if is_cell(value)}
    if single:
        yield Block("", (title or "figure", ""), [(titled(name), cell(each, name)) for name, each in single.items()])
    for name, value in found.items():
        words = f"{title}, {titled(name)}" if title else titled(name)
        if name in single or not value:
            continue
        records = value if isinstance(value, list) else value.values()
        flat = all(
            isinstance(each, Mapping) and not is_cell(each) and all(map(is_cell, each.values())) for each in records
        )
        if isinstance(value, list):
            yield from speeds(words, value)
            yield matrix(words, value)
        elif all(isinstance(each, Mapping) and "sides" in each for each in records):
            yield from contests(value)
        elif flat:
            yield matrix(words, [{"": key, **row} for key, row in value.items()])
        else:
            yield from by_shape(value, words)


def speeds(title: str, rows: Sequence[Results]) -> Iterator[Block]:
    """A plot of records that say how fast so many devices are."""
    device = next((name for name in DEVICES if all(name in row for row in rows)), None)
    named = {"measured": "sequences_per_second", "ideal": "ideal"}
    if device and all("sequences_per_second" in row for row in rows):
        series = {name: [(row[device], middle(row[key])) for row in rows if key in row] for name, key in named.items()}
        yield Block(title, svg=curves(series, title, device, "sequences/s", log=True))


def contests(found: Mapping[str, Results]) -> Iterator[Block]:
    """A row and a bar for each side of each contest, and where the time of ours goes."""
    names = list(dict.fromkeys(name for each in found.values() for side in each["sides"].values() for name in side))
    rows, groups = [], {}
    speed = next((name for name in names if "_per_s" in name), names[0])
    for name, each in found.items():
        for side, figures in each["sides"].items():
            words = [cell(figures.get(figure), figure) for figure in names]
            rows.append([contest_name(name, each), side, *words, ratio(each, side)])
        measured = {side: figures[speed] for side, figures in each["sides"].items() if speed in figures}
        groups[name] = [(side, middle(value), cell(middle(value))) for side, value in measured.items()]
    yield Block(titled(speed), svg=bars(groups, titled(speed)))
    yield Block("", ["contest", "side", *map(titled, names), "ours: times as fast"], rows)
    for part in ("parts", "profile"):
        if shares := [{"": name, **_shares(each[part])} for name, each in found.items() if each.get(part)]:
            yield matrix("shares of the time of our step" + (", by kernels" if part == "profile" else ""), shares)


def _shares(seconds: Mapping[str, Any]) -> dict[str, str]:
    numbers = {name: middle(value) for name, value in seconds.items() if isinstance(value, Mapping | int | float)}
    total = sum(numbers.values()) or 1
    return {name: f"{number / total:.1%}" for name, number in numbers.items()}


def contest_name(name: str, contest: Results) -> str:
    """`base-128` of 32 sequences in words."""
    size, dash, length = name.partition("-")
    return f"{size} at {length}, {contest['sequences']} sequences" if dash and "sequences" in contest else name


def throughput(found: Results) -> Iterator[Block]:
    """Our pieces a second, and how many times as fast we are, in short."""
    head = ("model", "real pieces/s", "share of the matrix rate", "times as fast as transformers")
    rows = []
    for name, each in found["contests"].items():
        ours = each["sides"]["cloze"]
        figures = cell(middle(ours["real_pieces_per_second"])), cell(middle(ours["share_of_ceiling"]), "share")
        times = (ratio(each, side) for side in ("transformers", "transformers, memory kept"))
        rows.append([contest_name(name, each), *figures, *times])
    yield Block("", [*head, "with our memory settings for both"], rows)


def finetuning(found: Results) -> Iterator[Block]:
    """How many times as fast as transformers' Trainer we are, in training and in prediction."""
    for model, each in found["models"].items():
        rows = []
        for name, contest in each["contests"].items():
            sides = {f"{kind}, {numbers}": (kind, numbers) for kind in ("training", "prediction") for numbers in HONEST}
            against = contest["against"]
            row = {title: against.get(numbers, {}).get(kind, {}) for title, (kind, numbers) in sides.items()}
            rows.append({model: name, **{title: figures.get("times_as_fast") for title, figures in row.items()}})
        yield matrix("", rows)


HONEST = ("autocast", "fp32")
"""How the Trainer computes where a user has it do its best."""


def downstream(found: Results) -> Iterator[Block]:
    """Scores in hundredths on real tasks, beside the same model without pre-training and beside the Trainer."""
    titles = {"pre-trained": "pre-trained", "from scratch": "from scratch", "transformers": "Trainer, pre-trained"}
    rows = []
    for task, each in found["parts"].items():
        row = {"task": task, "score": each["pre-trained"]["metric"]}
        for side, title in titles.items():
            low, high = (100 * end for end in each[side].get("spread", (0, 0)))
            row[title] = f"{100 * each[side]['median']:.1f}" if "median" in each[side] else ""
            row[title] += f" ({low:.1f} to {high:.1f})" if high > low else ""
        rows.append(row)
    yield matrix("", rows)


def gradients(found: Results) -> Iterator[Block]:
    """How many times as fast as DeepSpeed's ways with gradients ours is, in steps of several kinds."""
    ways = dict.fromkeys(way for each in found["contests"].values() for way in each[TIMES])
    times = {way: {name: each[TIMES].get(way) for name, each in found["contests"].items()} for way in ways}
    yield matrix("", [{"DeepSpeed's way": way, **row} for way, row in times.items()])


def curve(found: Results) -> Iterator[Block]:
    """Losses of two sides from the same weights on the same batches."""
    series = {side: list(enumerate(losses, 1)) for side, losses in found["losses"].items()}
    yield Block("", svg=curves(series, "losses", "step", "loss"))
    yield from by_shape({name: value for name, value in found.items() if is_cell(value)})


SHORT: dict[str, Callable[[Results], Iterable[Block]]] = {
    **{each.__name__: each for each in (throughput, finetuning, downstream, gradients)},
    "preparation": blocks_of,
}
"""What pages of documentation have of a benchmark."""
