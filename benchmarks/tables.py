"""Tables of results, for the console and docs/.

Most files of results have contests, whose sides took turns. Ratios are read from the JSON, where `Turns` computed them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console

from pretraining.scoring.retrieval import METRICS

Results = Mapping[str, Any]
ALONG = ("real_pieces_per_second", "share_of_ceiling", "mb_per_s")
"""Figures of our side that are shown beside the ratios."""
PEERS = ("transformers fp32", "transformers bf16", "onnxruntime fp32", "onnxruntime int8")
"""Peers that are compared with ours in the same numbers, if several sides are ours."""


@dataclass(frozen=True)
class ResultTable:
    """A table with a head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Formats the table as Markdown."""
        rows = [f"| {' | '.join(word.replace('|', '/') for word in row)} |" for row in (self.head, *self.rows)]
        title = f"{self.title}:\n\n" if self.title else ""
        return title + "\n".join([rows[0], "|---" * len(self.head) + "|", *rows[1:]])


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
    """Prints a contest: the medians of every side, and how many times as fast we are."""
    sides = contest.get("sides", {}).items()
    rows = [{"side": side, **{name: read_median(each) for name, each in figures.items()}} for side, figures in sides]
    show(console, [build_table(name, rows), build_table("times as fast", [list_ratios(contest)])])


def format_cell(value: Any, name: str = "") -> str:
    """Formats a value: shares in percent, a spread as its median with the lowest and the highest."""
    if isinstance(value, Mapping):
        ends = [format_cell(value[end], name) for end in ("lowest", "highest") if end in value]
        return format_cell(value["median"], name) + (f" ({'–'.join(ends)})" if ends else "")
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if "share" in name and 0.001 <= abs(value) <= 1:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_title(name: str) -> str:
    """Formats the name of a figure as the head of a column."""
    words = name.replace("_per_s", "/s").replace("/second", "/s").replace("_", " ")
    return re.sub(r"\b[mg]b\b", lambda unit: unit[0].upper(), words)


def build_table(title: str, rows: Sequence[Results]) -> ResultTable:
    """Builds a table of records, with a column for each key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[format_cell(row.get(name), name) for name in names] for row in rows]
    return ResultTable(title, [format_title(name) for name in names], lines)


def read_median(value: Any) -> float:
    """Returns the median of a spread, or the number itself."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def list_contests(found: Results) -> Iterator[tuple[str, dict[str, Results]]]:
    """Yields each model of a file with its contests; the model is empty if the file has no models."""
    for model, each in found.get("models", {"": found}).items():
        held = {name: one for name, one in each.get("contests", each).items() if isinstance(one, Mapping)}
        if contests := {name: one for name, one in held.items() if "sides" in one or "against" in one}:
            yield model, contests


def name_contest(name: str, contest: Results) -> str:
    """Formats the name of a contest, such as base-128 with 32 sequences."""
    parts = re.fullmatch(r"([a-z:]+)-(\d+)(?:-auto|-\d+)?", name)
    model = parts and parts[1].replace(":", " ")
    return f"{model} at {parts[2]}, {contest['sequences']} sequences" if parts and "sequences" in contest else name


def list_ratios(contest: Results) -> dict[str, Any]:
    """Returns how many times as fast we are as each peer of a contest."""
    if "against" in contest:
        against = contest["against"].items()
        kinds = {f"Trainer in {by}: {kind}": one for by, each in against for kind, one in each.items()}
        return {title: one["times_as_fast"] for title, one in kinds.items() if "times_as_fast" in one}
    if "times_as_fast" in contest:
        taken = contest["times_as_fast"]
        found = {peer: taken.get(f"cloze {peer.split()[-1]}", {}).get(peer) for peer in PEERS}
        return {title: each for title, each in found.items() if each}
    return dict(contest.get("times_as_fast_as", {}))


def summarise_contests(found: Results) -> Iterator[ResultTable]:
    """Yields a table of contests, our figures and the ratios to peers; then of whole runs without their steps."""
    for model, contests in list_contests(found):
        rows = []
        for name, each in contests.items():
            taken, ours = list_ratios(each), each.get("sides", {}).get("cloze", {})
            along = {f"our {figure}": ours[figure] for figure in ALONG if figure in ours}
            own = {figure: format_cell(read_median(value), figure) for figure, value in along.items()}
            if own or taken:
                rows.append({model or "contest": name_contest(name, each), **own, **taken})
        if rows:
            yield build_table("", rows)
    for name in ("whole_runs", "growth"):
        if rows := [{key: row[key] for key in row if "per" in key or key[-2:] != "_s"} for row in found.get(name, ())]:
            yield build_table(format_title(name), rows)


def summarise_scaling(found: Results) -> Iterator[ResultTable]:
    """Yields the table of efficiencies and of the share of communication."""
    several = max(point["nodes"] for point in found["points"]) > 1
    shared = max(point.get("tensor", 1) for point in found["points"]) > 1
    names = ("scaling", *["nodes"] * several, "processes", *["tensor"] * shared, "threads", "sequences")
    rows = []
    for point in found["points"]:
        row = {name: str(point[name]) for name in names}
        row["sequences/s"] = format_cell(point["sequences_per_second"])
        for name in ("efficiency", "communication"):
            row[name] = "–" if point[name] is None else point[name] and f"{read_median(point[name]):.0%}"
        rows.append(row)
    yield build_table("", rows)


def summarise_recipe_scores(found: Results) -> Iterator[ResultTable]:
    """Yields a row with the training by a recipe and its scores."""
    training = found["training"]
    row = {
        "recipe": found["recipe"],
        "steps": training["steps"],
        "minutes": training["minutes"],
        "at the usual speed": training["minutes_at_the_median_speed_of_each_phase"],
        "BLiMP": f"{found['pairs']['accuracy']:.1%} ± {found['pairs']['spread']:.1%}",
    }
    if (task := found.get("stsb")) is not None and task["median"] is not None:
        scores = sorted(score for score in task["runs"].values() if score is not None)
        each = ", ".join(f"{100 * score:.1f}" for score in scores)
        row[f"STS-B dev, {task['metric']}"] = f"{100 * task['median']:.1f} ({each})"
    yield build_table("", [row])


def summarise_search(found: Results) -> Iterator[ResultTable]:
    """Yields the scores of each system on each test."""
    rows = []
    for row in found["rows"]:
        tests = {test: each["scores"] for test, each in row["scores"].items()}
        named = {f"{test}: {METRICS[name]}": value for test, each in tests.items() for name, value in each.items()}
        rows.append({"system": row["system"], **{name: f"{value:.3f}" for name, value in named.items()}})
    yield build_table("", rows)


def summarise_mixtures(found: Results) -> Iterator[ResultTable]:
    """Yields the scores of each mixture, averaged over its seeds, with those of each seed."""
    mixtures: dict[int, list[Results]] = {}
    for row in found["rows"]:
        mixtures.setdefault(row["wiki"], []).append(row)
    rows = []
    for share, runs in sorted(mixtures.items(), reverse=True):
        figures = {"BLiMP, %": [100 * run["pairs"]["accuracy"] for run in runs]}
        for name in runs[0]["held_out"]:
            figures[f"loss on {name}"] = [run["held_out"][name]["masked_loss"] for run in runs]
        row = {"Wikipedia : books": f"{share} : {100 - share}"}
        for name, values in figures.items():
            places = 1 if "%" in name else 3
            each = ", ".join(f"{value:.{places}f}" for value in values)
            row[name] = f"{sum(values) / len(values):.{places}f} ({each})"
        rows.append(row)
    yield build_table("", rows)


def summarise_results(found: Results) -> Iterable[ResultTable]:
    """Yields the tables of a file of results."""
    functions: dict[str, Callable[[Results], Iterable[ResultTable]]] = {
        "scaling": summarise_scaling,
        "optimizers": lambda found: [build_table(f"On {found['size']}", found["rows"])],
        "same_bits": lambda found: [build_table("", found["rows"])],
        "recipe_scores": summarise_recipe_scores,
        "search": summarise_search,
        "mixtures": summarise_mixtures,
        "loading": lambda found: [build_table("", found["rows"])],
        "demo": lambda found: [build_table("Validation of the demo", found["scored"])],
    }
    return functions.get(found["benchmark"], summarise_contests)(found)
