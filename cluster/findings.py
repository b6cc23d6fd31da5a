"""Conclusions from the reports of all ranks: what a user must mend, which nodes are unfit, and warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from cluster.health import CPU, LINK, Health
from data_prep.common.terminal import make_table, open_console
from pretraining.processes.ending import Code

USERS = ("data", "device", "disk", "recipe")  # checks whose failure on all nodes is for the user to mend
SLOW, SLOW_LINK = 0.7, 0.5  # shares of the median
MANY = 16  # the number of nodes above which the table shows unfit ones alone
COLUMNS = ("node", ">ranks", "device", ">TFLOP/s", ">GB/s within", ">GB/s to others", ">GB free")


@dataclass
class Findings:
    """Conclusions from the reports of all ranks."""

    nodes: dict[str, list[Health]]  # the reports of each node
    mend: list[str] = field(default_factory=list)  # what a user must mend
    unfit: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # reasons by node
    broken: bool = False  # whether a node is worse than slow
    notes: list[str] = field(default_factory=list)

    @property
    def excluded(self) -> list[str]:
        """The nodes to leave out; none if most are unfit, which points to another cause."""
        few = 2 * len(self.unfit) <= len(self.nodes) or len(self.nodes) == 1
        return [name for name in self.nodes if name in self.unfit] if few and not self.mend else []

    @property
    def code(self) -> Code:
        return Code.CURE if self.mend else Code.RANK_LOST if self.excluded or self.broken else Code.DONE

    @property
    def is_sound(self) -> bool:
        """Whether all ranks can work together, even if slowly."""
        return not self.broken and not self.mend

    def mark_unfit(self, name: str, reason: str, broken: bool = True) -> None:
        """Marks a node as unfit."""
        self.unfit[name].append(reason)
        self.broken |= broken

    def explain(self) -> list[str]:
        """Lists all faults in words for the user."""
        told = [*self.mend, *(f"{name}: {'; '.join(reasons)}" for name, reasons in self.unfit.items())]
        if self.unfit and not self.excluded and not self.mend:
            told.append(f"{len(self.unfit)} of {len(self.nodes)} nodes are unfit, which is most: none is left out")
        return told


def compare_reports(reports: Sequence[Health]) -> Findings:
    """Compares the reports so far, which takes milliseconds for a thousand ranks."""
    found = Findings({report.node: [] for report in reports})
    for report in reports:
        found.nodes[report.node].append(report)
    find_differences(found)
    find_faults(found)
    if found.is_sound:  # a fault may be the cause of slowness
        on_cpus = reports[0].same.get("device") == CPU  # which may have other work, so that slow ones are only noted
        find_slow_devices(found, spared=on_cpus)
        find_slow_links(found)
        find_slow_inner_links(found, spared=on_cpus)
    return found


def find_differences(found: Findings) -> None:
    """Finds values that differ between nodes but must be equal. The value on most nodes counts as right."""
    values: dict[str, dict[str, str]] = defaultdict(dict)  # by name, then by node
    for name, reports in found.nodes.items():
        for what in {what: None for report in reports for what in report.same}:
            values[what][name] = " and ".join(sorted({report.same[what] for report in reports if what in report.same}))
    for what, own in values.items():
        usual, count = Counter(own.values()).most_common(1)[0]
        odd = {name: value for name, value in own.items() if value != usual}
        if odd and 2 * count <= len(own):
            shown = ", ".join(f"{value} on {name}" for name, value in own.items())
            found.mend.append(f"{what}: {shown}\nall nodes need the same")
        else:
            for name, value in odd.items():
                found.mark_unfit(name, f"{what} is {value}, and {usual} on most nodes")


def find_faults(found: Findings) -> None:
    """Finds failed checks. On all nodes some are for the user to mend; on some nodes they make these unfit."""
    failed: dict[str, dict[str, str]] = defaultdict(dict)  # by check, then by node
    for name, reports in found.nodes.items():
        for what, text in [fault for report in reports for fault in report.faults.items()]:
            failed[what][name] = text
    for what, texts in failed.items():
        if what in USERS and len(texts) == len(found.nodes):
            found.mend.append(f"{what}: {next(iter(texts.values()))}")
        elif what != LINK:  # a link fails at both ends
            for name, text in texts.items():
                found.mark_unfit(name, f"{what}: {text}")


def find_slow_devices(found: Findings, spared: bool) -> None:
    """Finds slow nodes by their slowest rank."""
    rates = {name: min(report.rate for report in reports) for name, reports in found.nodes.items()}
    usual = median(report.rate for reports in found.nodes.values() for report in reports)
    mark_slow_nodes(found, rates, SLOW, usual, "its matrix throughput is", spared)


def find_slow_links(found: Findings) -> None:
    """Finds nodes whose links are all slow: a single slow link may be the fault of either end."""
    best = {name: link for name, reports in found.nodes.items() if (link := find_best_link(reports)) is not None}
    for name in [name for name, link in best.items() if not link]:
        why = next((report.faults[LINK] for report in found.nodes[name] if LINK in report.faults), "")
        found.mark_unfit(name, f"nothing comes through to its neighbours: {why}")
    working = {name: link for name, link in best.items() if link}
    mark_slow_nodes(found, working, SLOW_LINK, median(best.values() or [0.0]), "its links reach", spared=False)


def find_slow_inner_links(found: Findings, spared: bool) -> None:
    """Finds nodes whose slowest link between two ranks is slower than that of other nodes. The links of a single node
    are compared with one another, and a slow one is only noted: its GPUs may not all be joined alike."""
    worst = {name: link for name, reports in found.nodes.items() if (link := find_inner_link(reports)) is not None}
    every = [link for reports in found.nodes.values() for report in reports for link in report.inside if link]
    usual = median(worst.values() if len(worst) > 1 else every or [0.0])
    mark_slow_nodes(found, worst, SLOW_LINK, usual, "a link between its ranks reaches", spared or len(worst) == 1)


def mark_slow_nodes(
    found: Findings, speeds: Mapping[str, float], share: float, usual: float, what: str, spared: bool
) -> None:
    """Marks nodes as unfit whose speed is below a share of the usual one; if `spared`, they are only noted."""
    for name, speed in speeds.items():
        if speed < share * usual:
            reason = f"{what} {speed / usual:.0%} of the median"
            if spared:
                found.notes.append(f"{name}: {reason}")
            else:
                found.mark_unfit(name, reason, broken=False)


def find_inner_link(reports: Sequence[Health]) -> float | None:
    """Returns the speed of the slowest link between ranks of a node; None if it has one rank."""
    return min((link for report in reports for link in report.inside if link is not None), default=None)


def find_best_link(reports: Sequence[Health]) -> float | None:
    """Returns the speed of a node's best link, each by its slowest rank; None without a neighbour."""
    links = zip(*(report.links for report in reports), strict=False)
    rounds = [[link for link in own if link is not None] for own in links]
    return max((min(own) for own in rounds if own), default=None)


def print_findings(found: Findings, seconds: float) -> None:
    """Prints a line for each node (of many, for the unfit ones), one for all together, and the faults."""
    console, errors = open_console(soft_wrap=True), open_console(stderr=True, soft_wrap=True)
    table, reports = make_table(*COLUMNS, padding=(0, 2, 0, 0)), list(chain(*found.nodes.values()))
    for name, own in found.nodes.items():
        if len(found.nodes) <= MANY or name in found.unfit:
            table.add_row(name, *format_figures(own))
    if len(found.nodes) > 1:
        table.add_row(f"the least of {len(found.nodes)}", *format_figures(reports))
    console.print(table)
    speed = f"all-reduce {reports[0].all_reduce / 1e9:.2f} GB/s; " if reports[0].all_reduce else ""
    console.print(f"{speed}{seconds:.1f} s in all")
    for note in found.notes + ([] if found.code else found.explain()):
        errors.print(f"warning: {note}", markup=False)
    if found.code:
        errors.print("error: " + "\n".join(found.explain()), markup=False)


def format_figures(reports: Sequence[Health]) -> list[str]:
    """Formats the figures of ranks for the table: the lowest of each."""
    inside, link = find_inner_link(reports), find_best_link(reports)
    free = [report.free for report in reports if report.free is not None]
    return [
        str(len(reports)),
        reports[0].same.get("device", "?"),
        f"{min(report.rate for report in reports) / 1e12:.3g}",
        *("" if speed is None else f"{speed / 1e9:.3g}" for speed in (inside, link)),
        f"{min(free) / 1e9:,.0f}" if free else "",
    ]
