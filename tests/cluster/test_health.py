"""What a node reports of its GPU, its code and its neighbours, and what follows: which are left out, or none."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster import health
from cluster.findings import Findings, compare_reports, print_findings
from cluster.health import Health, describe_code, find_partners
from pretraining.processes.ending import Code


@pytest.mark.parametrize("nodes", range(1, 10))
def test_neighbours_meet_once_each_in_rounds(nodes: int) -> None:
    names = [f"node{rank % nodes}" for rank in range(2 * nodes)]  # as mpirun may place them
    found = [find_partners(names, rank) for rank in range(2 * nodes)]
    met = []
    for number in range(3):
        for rank, own in enumerate(found):
            if (other := own[number]) is not None:
                assert found[other][number] == rank
                met.append((names[rank], names[other]))
    links = {(f"node{at}", f"node{(at + 1) % nodes}") for at in range(nodes)} if nodes > 1 else set()
    assert set(met) == links | {(other, one) for one, other in links}
    assert len(met) == 2 * len(set(met))  # two ranks a node


# Its code


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code of a few files."""
    root = tmp_path / "root"
    monkeypatch.setattr(health, "ROOT", root)
    for folder in health.FOLDERS:
        (root / folder / "__pycache__").mkdir(parents=True)
        (root / folder / "code.py").write_text(f"# of {folder}\n")
    return root


def test_other_code_is_seen_and_another_place_is_not(root: Path) -> None:
    before = describe_code()["code"]
    elsewhere = shutil.copytree(root, root.parent / "elsewhere")
    health.ROOT = elsewhere  # undone with the fixture
    assert describe_code()["code"] == before
    (elsewhere / health.FOLDERS[0] / "more").mkdir()
    (elsewhere / health.FOLDERS[0] / "more" / "code.py").write_text("more = 1\n")
    assert describe_code()["code"] != before
    shutil.rmtree(elsewhere / health.FOLDERS[0])
    assert describe_code()["code"] != before, "what is missing is other code too"


def test_a_link_is_as_fast_as_its_best_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first exchange opens the connection. All ranks send and receive as much as the others."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name in ("send", "recv", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))

    def time_repeats(work: Callable[[], None], device: torch.device) -> list[float]:
        work()
        return [9.0, 0.5, 2.0]

    monkeypatch.setattr(health, "time_repeats", time_repeats)
    cpu = torch.device("cpu")
    assert health.exchange(0, cpu, None) == 2 * (4 << 20) / 0.5
    assert health.exchange(2, cpu, None) == 2 * (4 << 20) / 0.5
    assert health.reduce_all(cpu, None) == 2 * 3 / 4 * (4 << 20) / 0.5
    assert calls == ["recv", "send", "send", "recv", "all_reduce"]


# What follows


def report(node: int, rate: float = 1.0, links: Sequence[float | None] = ()) -> Health:
    return Health(f"node{node}", same={"device": "H100"}, rate=rate, links=list(links))


def reports(*rates: float) -> list[Health]:
    return [report(number, rate) for number, rate in enumerate(rates)]


def ring(*links: Sequence[float | None]) -> list[Health]:
    return [report(number, links=own) for number, own in enumerate(links)]


def test_a_slow_gpu_is_left_out() -> None:
    """A node is as slow as its slowest rank."""
    some = reports(1.0, 1.0, 0.65, 1.0)
    assert compare_reports(some).excluded == ["node2"]
    assert compare_reports(reports(1.0, 1.0, 0.75, 1.0)).code == Code.DONE
    ranks = [report(rank // 4, rate=0.5 if rank == 6 else 1.0) for rank in range(12)]
    assert compare_reports(ranks).excluded == ["node1"]


def test_most_nodes_are_never_left_out() -> None:
    found = compare_reports(reports(1.0, 1.0, 0.6, 0.6, 0.6, 1.0, 1.0))
    assert (found.code, len(found.excluded)) == (Code.RANK_LOST, 3)
    faulty = reports(1.0, 1.0, 1.0)
    for broken in faulty[1:]:
        broken.faults["GPU"] = "9 GiB are taken by other programs"
    found = compare_reports(faulty)
    assert (found.code, found.excluded) == (Code.RANK_LOST, [])
    assert "none is left out" in found.explain()[-1]
    assert compare_reports(faulty[2:]).excluded == ["node2"], "the only node is, if it is broken"


def test_a_slow_link_blames_none_of_its_ends() -> None:
    """And is as slow as the slowest pair of ranks on it."""
    assert compare_reports(ring([4, 4, None], [0.1, 4, None], [0.1, 4, None], [4, 4, None])).code == Code.DONE
    ranks = [report(rank // 2, links=[0.1, 0.1] if rank == 3 else [4, 4]) for rank in range(8)]
    assert compare_reports(ranks).excluded == ["node1"]


def test_a_node_whose_links_are_all_slow_is_blamed_alone() -> None:
    for count in (3, 4, 5, 8):
        names = [f"node{number}" for number in range(count)]
        others = [find_partners(names, rank) for rank in range(count)]
        ends = [[None if other is None else {rank, other} for other in others[rank]] for rank in range(count)]
        links = [[None if pair is None else 1.9 if 1 in pair else 4.0 for pair in own] for own in ends]
        assert compare_reports(ring(*links)).excluded == ["node1"]
        links = [[link and max(link, 2.1) for link in own] for own in links]
        assert compare_reports(ring(*links)).excluded == []


def test_a_node_with_a_slow_link_between_its_gpus_is_left_out_and_cpus_are_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CPUs may have other work."""
    speeds = {"node0": (200e9, 210e9), "node1": (200e9, 30e9), "node2": (190e9, 200e9)}

    def compare(device: str) -> Findings:
        ranks = [(name, speed) for name, own in speeds.items() for speed in own]
        reports = [Health(name, {"device": device}, rate=min(speed, 120e9), inside=[speed]) for name, speed in ranks]
        return compare_reports(reports)

    told = ["node1: a link between its ranks reaches 16% of the median"]
    slow = "its matrix throughput is 25% of the median"
    found = compare("2 x V100")
    assert (found.excluded, found.explain()) == (["node1"], [f"node1: {slow}; {told[0][7:]}"])
    found = compare(health.CPU)
    assert (found.excluded, found.notes) == ([], [f"node1: {slow}", *told])
    print_findings(found, 1.0)
    assert capsys.readouterr().err.splitlines() == [f"warning: {note}" for note in found.notes]


def test_two_nodes_that_differ_are_both_named() -> None:
    found = compare_reports([Health(f"node{number}", {"Python": version}) for number, version in enumerate("23")])
    assert (found.code, found.explain()) == (Code.CURE, ["Python: 2 on node0, 3 on node1\nall nodes need the same"])
