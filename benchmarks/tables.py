"""What results say, as tables and charts: for report.py's page, and in short for README and docs/measurements.md.

A benchmark whose JSON has `contests` with `sides` gets a row for each side; whatever else a file holds becomes tables
by its shape, so that a new benchmark needs no code here. No ratio is worked out: those of the JSON come from `Turns`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.svg import IDEAL, bars, curves

Results = Mapping[str, Any]
APART = "not in turns"
"""Stands where a ratio would, had both sides taken turns in one run."""
DEVICES = ("processes", "ranks", "gpus", "nodes")


@dataclass(frozen=True)
class Block:
    """A table, or a chart: rows under a head, or a drawing."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    svg: str = ""

    def markdown(self) -> str:
        """The table as a page of documentation has it; nothing of a chart."""
        if not self.head:
            return ""
        rows = [f"| {' | '.join(word.replace('|', '/') for word in row)} |" for row in (self.head, *self.rows)]
        title = f"{self.title}:\n\n" if self.title else ""
        return title + "\n".join([rows[0], "| --- " * len(self.head) + "|", *rows[1:]])

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


def is_row(value: Any) -> bool:
    """Whether a row of a table holds this."""
    return isinstance(value, Mapping) and not is_cell(value) and all(map(is_cell, value.values()))


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
    if side.startswith("cloze"):
        return ""
    times = contest.get("times_as_fast", {"cloze": contest.get("times_as_fast_as", {})})  # of each of ours, or of all
    taken = {mine: peers[side] for mine, peers in times.items() if side in peers}
    both = {mine: each for mine, each in taken.items() if {mine, side} <= contest["sides"].keys()}
    return "; ".join(f"{mine.removeprefix('cloze')} {cell(each)}".strip() for mine, each in both.items()) or APART


def blocks_of(results: Results) -> list[Block]:
    """All that a file of results says."""
    found = {name: value for name, value in results.items() if name not in ("format", "benchmark", "environment")}
    special = {each.__name__: each for each in (finetuning, downstream, curve, gradients, cleanliness)}
    return list(special.get(results["benchmark"], by_shape)(found))


def by_shape(found: Results, title: str = "") -> Iterator[Block]:
    """Tables of anything: what is one value, then contests, then what is many."""
    single = {name: value for name, value in found.items() if is_cell(value)}
    if single:
        yield Block("", (title or "figure", ""), [(titled(name), cell(each, name)) for name, each in single.items()])
    held = {name: value for name, value in found.items() if isinstance(value, Mapping) and value.get("sides")}
    if held:
        yield from contests(held, title)
    for name, value in found.items():
        words = f"{title}, {titled(name)}" if title else titled(name)
        if name in single or name in held or not value:
            continue
        if isinstance(value, list):
            rows = list(filter(is_row, value))
            yield from speeds(words, rows)
            yield matrix(words, rows)
        elif all(is_row(each) for each in value.values()):
            yield matrix(words, [{"": key, **row} for key, row in value.items()])
        else:
            yield from by_shape(value, words)


def speeds(title: str, points: Sequence[Results]) -> Iterator[Block]:
    """A plot of points that say how fast so many devices are, and how fast they would be if none waited for another."""
    device = next((name for name in DEVICES if all(name in point for point in points)), None)
    if not points or device is None or not all("sequences_per_second" in point for point in points):
        return
    series: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        kind = point.get("scaling", "measured") + (f", {point['threads']} threads each" if "threads" in point else "")
        speed = middle(point["sequences_per_second"])
        series.setdefault(kind, []).append((point[device], speed))
        if point.get("ideal") and point.get("efficiency"):
            ideal = speed * middle(point["ideal"]) / middle(point["efficiency"])
            series.setdefault(f"{kind}: {IDEAL}", []).append((point[device], ideal))
    shown = {kind: line for kind, line in series.items() if len(line) > 1 or IDEAL not in kind}
    yield Block(f"{title}, sequences/s", svg=curves(shown, title, device, "sequences/s", log=True))


def contests(found: Mapping[str, Results], title: str) -> Iterator[Block]:
    """A row and a bar for each side of each contest, and where the time of ours goes."""
    names = list(dict.fromkeys(name for each in found.values() for side in each["sides"].values() for name in side))
    lines, groups = [], {}
    speed = next((name for name in names if "_per_s" in name), names[0])
    for name, each in found.items():
        for side, figures in each["sides"].items():
            words = [cell(figures.get(figure), figure) for figure in names]
            lines.append([contest_name(name, each), side, *words, ratio(each, side)])
        measured = {side: figures[speed] for side, figures in each["sides"].items() if speed in figures}
        groups[name] = [(side, middle(value), cell(middle(value))) for side, value in measured.items()]
    yield Block(f"{title}: {titled(speed)}", svg=bars(groups, titled(speed)))
    yield Block("", ["contest", "side", *map(titled, names), "ours: times as fast"], lines)
    if all("real_share_of_padded" in each for each in found.values()):  # what the batches of a model were
        yield matrix("", [{"contest": name, **dict(filter(_single, each.items()))} for name, each in found.items()])
    for part in ("parts", "profile"):
        shares = {name: each[part].items() for name, each in found.items() if each.get(part)}
        rows = [{"": name, **{key: cell(value, "share") for key, value in each}} for name, each in shares.items()]
        if rows:
            yield matrix("shares of the time of our step" + (", by kernels" if part == "profile" else ""), rows)


def _single(item: tuple[str, Any]) -> bool:
    return is_cell(item[1])


def contest_name(name: str, contest: Results) -> str:
    """`base-128` of 32 sequences in words."""
    parts = re.fullmatch(r"([a-z]+)-(\d+)", name)
    return f"{parts[1]} at {parts[2]}, {contest['sequences']} sequences" if parts and "sequences" in contest else name


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
            if not any(
                "times_as_fast" in figures for kinds in contest["against"].values() for figures in kinds.values()
            ):
                continue  # we were alone
            sides = {f"{kind}, {numbers}": (kind, numbers) for kind in ("training", "prediction") for numbers in HONEST}
            against = contest["against"]
            row = {title: against.get(numbers, {}).get(kind, {}) for title, (kind, numbers) in sides.items()}
            rows.append({model: name, **{title: figures.get("times_as_fast") for title, figures in row.items()}})
        yield matrix("", rows)


HONEST = ("autocast", "fp32")
"""How the Trainer computes where a user has it do its best."""


PAIRS = {
    "fp32": ("cloze fp32", "transformers fp32"),
    "bf16": ("cloze bf16", "transformers bf16"),
    "bf16, against autocast": ("cloze bf16", "transformers autocast"),
    "int8, against its bf16": ("cloze int8", "transformers bf16"),
    "fp32, against ONNX Runtime": ("cloze fp32", "onnxruntime fp32"),
    "int8, against ONNX Runtime": ("cloze int8", "onnxruntime int8"),
}
"""Which of the answers to requests are compared in short."""


def inference(found: Results) -> Iterator[Block]:
    """How many times as many sentences a second we answer as others do."""
    for model, each in found["models"].items():
        rows = []
        for name, contest in each.items():
            if is_cell(contest) or "times_as_fast" not in contest:
                continue
            times = contest["times_as_fast"]
            taken = {title: times.get(mine, {}).get(peer) for title, (mine, peer) in PAIRS.items()}
            rows.append(
                {model: name, **{title: cell(middle(value)) if value else "" for title, value in taken.items()}}
            )
        yield matrix("", rows)


def scaling(found: Results) -> Iterator[Block]:
    """Efficiencies as they are, and as they would be if no process waited for another."""
    rows = []
    for point in found["points"]:
        row = {title: str(point[name]) for title, name in COUNTED.items()}
        row["sequences/s"] = cell(point["sequences_per_second"])
        shares = {
            name: point[name] and f"{middle(point[name]):.0%}" for name in ("efficiency", "ideal", "communication")
        }
        rows.append({**row, **shares})
    yield matrix("", rows)


COUNTED = {"scaling": "scaling", "processes": "processes", "threads of each": "threads", "sequences": "sequences"}


def calibration(found: Results) -> Iterator[Block]:
    """How far the model of costs is from what was measured: time by who made the steps, memory by size and stage."""
    foretold = [row for row in found.get("steps", {}).get("rows", []) if not row["calibrates"]]
    rows = []
    for side in dict.fromkeys(row["side"] for row in foretold):
        errors = [row["error"] for row in foretold if row["side"] == side]
        mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
        rows.append(
            {
                "time of": MADE.get(side, side),
                "steps": len(errors),
                "mean error": f"{mean:.1%}",
                "worst": f"{worst:+.1%}",
            }
        )
    yield matrix("", rows)
    sizes: dict[str, dict[str, Any]] = {}
    for row in found.get("memory", {}).get("rows", []):
        size = sizes.setdefault(row["size"], {f"memory, {row['dtype']}": row["size"]})
        size[f"ZeRO {row['zero']}"] = f"{row['planned'] / row['peak'] - 1:+.1%}"
    yield matrix("", list(sizes.values()))


MADE = {
    "process": "one process with all threads",
    "thread": "one process with one thread",
    "ranks": "two processes with one thread that join their gradients",
}


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
    ways = dict.fromkeys(way for each in found["contests"].values() for way in each["times_as_fast_as"])
    times = {way: {name: each["times_as_fast_as"].get(way) for name, each in found["contests"].items()} for way in ways}
    yield matrix("", [{"DeepSpeed's way": way, **row} for way, row in times.items()])


def curve(found: Results) -> Iterator[Block]:
    """Losses of two sides from the same weights on the same batches."""
    series = {side: list(enumerate(losses, 1)) for side, losses in found["losses"].items()}
    yield Block("", svg=curves(series, "losses", "step", "loss"))
    yield from by_shape({name: value for name, value in found.items() if is_cell(value)})


def cleanliness(found: Results) -> Iterator[Block]:
    """Passages with holes, by whose rules dumps are read."""
    rows = []
    for name, dump in found["dumps"].items():
        for side, each in dump["sides"].items():
            counts = {
                "passages": each["passages"],
                "with a hole": each["with_holes"],
                "per 1,000": each["per_thousand"],
            }
            lost = "{lost} of {templates}".format_map(each["by_source"])
            rows.append({"dump": name.partition(".")[0], "read by": side, **counts, "templates lost": lost})
    yield matrix("", rows)


def parts(found: Results) -> Iterator[Block]:
    """Runs with more and more parts, what a part and a byte take, and what that makes of larger texts."""
    yield matrix("Runs", found["parts"])
    yield matrix("Milliseconds of a core that a part takes by itself", found["core_ms_of_a_part"])
    yield matrix("Seconds of a core for a GB of text", found["core_seconds_of_a_gb"])
    yield matrix("Whole runs", found["sums"])
    yield matrix("The steps of one of them", [row for row in found["arithmetic"] if row["text"] == "1 TB"])


SHORT: dict[str, Callable[[Results], Iterable[Block]]] = {
    **{
        each.__name__: each
        for each in (throughput, finetuning, inference, scaling, calibration, downstream, gradients, cleanliness, parts)
    },
    "preparation": blocks_of,
}
"""What pages of documentation have of a benchmark."""
