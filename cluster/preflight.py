#!/usr/bin/env python3
"""Checks in seconds whether the nodes of a job are fit to train, and names those that are not.

    srun python cluster/preflight.py --data data/wiki --out runs/base --recipe bert_base_lamb

with the ranks of the training that follows; or under torchrun or mpirun, or alone. The exit code is 0 if all is well, 2
if the user must mend something first, and 76 if nodes are broken or slower than the others: RUN/preflight/exclude names
them, so that the next start leaves them out. RUN/preflight/JOB-RESTART.json has all figures.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from socket import gethostname
from typing import Any, ClassVar

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import torch.distributed as dist

from cluster import health
from cluster.findings import Findings, compare_reports, print_findings
from cluster.health import INSIDE, LINK, Health
from data_prep.common.errors import UserError
from data_prep.common.files import patience, replacing, write_json
from data_prep.common.flags import read_flags_and_rest
from data_prep.common.launchers import World, find_world
from data_prep.common.reading import peek_device
from data_prep.common.sections import Removed
from data_prep.common.supervision import exit_now
from data_prep.common.terminal import open_console
from data_prep.shards import MANIFEST
from pretraining.config.overrides import FORM
from pretraining.data.corpora import split_word
from pretraining.engine.precision import choose_dtype
from pretraining.flags import Train
from pretraining.processes.ending import Code, Ending, Outcome
from pretraining.processes.gpu_faults import EXCLUDE
from pretraining.processes.group import NCCL_ENDS, choose_device, connect, default_threads, disconnect, gather
from pretraining.processes.watchdog import RANK_0_GONE, Watch
from pretraining.reporting.hardware import measure_flops
from pretraining.training.origin import count_recorded_phases
from pretraining.training.request import find_earlier

FOLDER = EXCLUDE.parent  # of reports
STORAGE = {"data", "disk"}
AGAIN_SECONDS, FEW = 5.0, 3  # pause between checks of storage, and their number while only some nodes miss it
PATIENCE, LIMIT = 120.0, 30.0  # seconds after which nodes that do not answer are named, and those of a check


@dataclass(frozen=True)
class Preflight:
    """Checks whether nodes are fit to train. Values of the recipe can be given as --section.key VALUE."""

    data: tuple[str, ...]
    """Folder of shards, or several: wiki=data/wiki books=data/books."""
    out: Path
    """Folder of the run."""
    recipe: Path | None = None
    """The recipe of the training that follows, which says how much room checkpoints need."""
    branch: str | None = None
    """The checkpoint of another run that it goes on from."""
    removed: ClassVar[Mapping[str, Removed]] = {"patience": Removed(120.0, "a job never gave another one")}


class NodeWatch(Watch):
    """Ends all ranks if one dies, as in training, and reports its node to be left out."""

    def __init__(self, world: World, names: Sequence[str], out: Path):
        super().__init__(world, every=min(1.0, PATIENCE / 40), silence=PATIENCE / 4)
        self._names, self._out = names, out

    def _end(self, failure: Outcome, store: Any, found_here: bool = False) -> None:
        if found_here:
            nodes = self._leave_out(self._monitor.list_late(), failure.reason)
            failure = failure._replace(reason=": ".join([*nodes, failure.reason]))
        super()._end(failure, store, found_here)

    def _leave_without_rank_0(self) -> None:
        if self._world.rank == 1:
            self._leave_out([0], RANK_0_GONE)
        super()._leave_without_rank_0()

    def _leave_out(self, ranks: Sequence[int], reason: str) -> list[str]:
        found = Findings({name: [] for name in self._names})
        for rank in ranks:
            found.mark_unfit(self._names[rank], reason)
        write_report(self._out, found)
        return found.excluded


def inspect_nodes(wanted: Preflight, overrides: Sequence[str], world: World) -> Code:
    """Runs all checks together with the other ranks. Each rank gets all reports, and draws the same conclusions."""
    start = time.monotonic()
    torch.set_num_threads(default_threads(world))
    # By gloo, since GPUs may not work.
    connect(world, torch.device("cpu"), PATIENCE, PATIENCE, wanted.out)
    names = gather(os.environ.get("SLURMD_NODENAME") or gethostname())
    report = Health(names[world.rank])
    with NodeWatch(world, names, wanted.out):
        device = check_rank(report, wanted, overrides, world)
        reports = recheck_storage(report, wanted, overrides, world)
        if compare_reports(reports).is_sound:
            try_network(report, device, names)
            reports = gather_reports(report)
        found = compare_reports(reports)
        if world.rank == 0:
            print_findings(found, time.monotonic() - start)
        if world.rank in [rank for rank, own in enumerate(reports) if own.free is not None][:1]:
            write_report(wanted.out, found)
    if found.code == Code.DONE:
        disconnect()
    return found.code


def check_rank(report: Health, wanted: Preflight, overrides: Sequence[str], world: World) -> torch.device:
    """Checks this rank and its node, on all ranks at the same time; returns the device of this rank."""
    run, choice = partial(report.run_check, time.monotonic() + LIMIT), peek_device(FORM, wanted.recipe, overrides)
    if world.local_rank == 0:
        check_storage(report, run, wanted, overrides, world)
    device = run("device", lambda: choose_device(choice, world)) or torch.device("cpu")
    report.rate = run("matrix throughput", lambda: measure_flops(device, choose_dtype("auto", device))) or 0.0
    gpus = run("GPU", lambda: health.describe_gpu(report, device))
    if gpus:  # after the matrix products, when it is hot
        report.same["device"] = gpus
    return device


def check_storage(report: Health, run: Any, wanted: Preflight, overrides: Sequence[str], world: World) -> None:
    """Checks what all nodes share: the run's folder, the code and the data."""
    report.free = free = run("disk", lambda: health.try_disk(wanted.out))
    report.same |= run("code", health.describe_code) or {}
    corpora, recipe = run("data", lambda: health.check_data(wanted.data)), wanted.recipe
    if corpora:
        report.same["data"] = corpora.fingerprint[:12]
    if free is not None and corpora and recipe:
        check = partial(health.check_recipe, free, recipe, overrides, corpora, world.size, world.local_size)
        run("recipe", lambda: check(count_recorded_phases(find_earlier(wanted.out, wanted.branch))))
    places = [split_word(word)[1] / MANIFEST for word in wanted.data]
    report.gone = "data" in report.faults and not all(map(os.path.exists, places))


def recheck_storage(report: Health, wanted: Preflight, overrides: Sequence[str], world: World) -> list[Health]:
    """Repeats the checks of data and disk while they fail on some nodes: shared storage vanishes and returns for all
    nodes, but not at the same moment. If all nodes have lost it, the job waits. Returns all reports."""
    checks, parted, reports = 0, 0, gather_reports(report)
    while any(STORAGE & own.faults.keys() for own in reports):
        seeing = {own.node for own in reports} - {own.node for own in reports if own.gone}
        parted = parted + 1 if seeing else 0  # consecutive checks at which some nodes saw the data
        if parted > FEW or (not seeing and checks * AGAIN_SECONDS >= patience(0)):
            break
        checks += 1
        time.sleep(AGAIN_SECONDS)
        if world.local_rank == 0:
            report.faults = {part: text for part, text in report.faults.items() if part not in STORAGE}
            check_storage(report, partial(report.run_check, time.monotonic() + LIMIT), wanted, overrides, world)
        reports = gather_reports(report)
    return reports


def gather_reports(own: Health) -> list[Health]:
    """Gathers the reports of all ranks, which call this together."""
    return [Health(**report) for report in gather(asdict(own))]


def try_network(report: Health, device: torch.device, names: Sequence[str]) -> None:
    """Exchanges data with other ranks of the node, which may share a model with it, and with neighbouring nodes; then
    joins an all-reduce of all ranks unless an exchange failed.

    All ranks begin a round together. The work of an exchange does not depend on the number of ranks.
    """
    group, fine = None, True
    if device.type == "cuda":
        os.environ.update(dict.fromkeys(NCCL_ENDS, "0"))  # torch would end the rank that is to name another
        group = dist.new_group(backend="nccl", timeout=timedelta(hours=1))
    rank, alone = dist.get_rank(), len({*names}) == len(names)  # alone: a node has one rank, and no links within
    rounds = [] if alone else [(INSIDE, report.inside, other) for other in health.find_neighbours(names, rank)]
    rounds += [(LINK, report.links, other) for other in health.find_partners(names, rank)]
    for what, speeds, other in rounds:
        run, speed = partial(report.run_check, time.monotonic() + LIMIT), None
        if other is not None:
            speed = run(what, partial(health.exchange, other, device, group)) or 0.0
        speeds.append(speed)
        fine = 0.0 not in gather(speed) and fine
    if fine and len(names) > 1:
        joined = report.run_check(time.monotonic() + LIMIT, "all-reduce", partial(health.reduce_all, device, group))
        report.all_reduce = joined or report.all_reduce


def write_report(out: Path, found: Findings) -> None:
    """Writes the report of this start and the nodes that the next one leaves out."""
    ranks = [asdict(report) for own in found.nodes.values() for report in own]
    job, restart = os.environ.get("SLURM_JOB_ID", "local"), os.environ.get("SLURM_RESTART_COUNT", "0")
    content = {"code": found.code, "excluded": found.excluded, "reasons": found.explain(), "notes": found.notes}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        (out / EXCLUDE).unlink(missing_ok=True)
        if found.excluded:
            with replacing(out / EXCLUDE) as file:
                file.write("".join(f"{name}\n" for name in found.excluded).encode())
        write_json(out / FOLDER / f"{job}-{restart}.json", {"time": now, **content, "ranks": ranks})
    except (UserError, OSError) as error:
        open_console(stderr=True, soft_wrap=True).print(f"warning: {error}", markup=False)


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    wanted, overrides = read_flags_and_rest(Preflight, arguments, "preflight.py", "cluster")
    code = Code.DONE
    with Ending() as ending:
        ending.world = find_world(os.environ)
        if overrides and wanted.recipe is None:
            raise UserError(f"{' '.join(overrides)}: not understood; values of a recipe are given beside --recipe")
        if overrides:  # beside them a job may have options of train.py
            words = ["--recipe", str(wanted.recipe), *overrides]
            overrides = read_flags_and_rest(Train, words, "train.py", "training")[1]
        code = inspect_nodes(wanted, overrides, ending.world)
    return ending.code or code


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
