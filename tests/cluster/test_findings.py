"""What follows from the reports of ranks: which nodes are left out, and when none is."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.findings import judge
from cluster.health import Health, find_partners
from pretraining.processes.ending import Code

MET = (0.0, 1.0)


def reports(*links: Sequence[float | None], rates: Sequence[float] = (), device: str = "H100") -> list[Health]:
    count = max(len(links), len(rates))
    return [
        Health(
            f"node{number}",
            MET,
            same={"device": device},
            rate=rates[number] if rates else 1.0,
            links=list(links[number]) if links else [],
        )
        for number in range(count)
    ]


def test_a_slow_gpu_is_left_out_by_itself_and_not_where_that_is_turned_off() -> None:
    rates = [1.0, 1.0, 0.65, 1.0]
    assert judge(reports(rates=rates), None).excluded == ["node2"]
    assert judge(reports(rates=rates), 0.6).code == Code.DONE
    assert judge(reports(rates=rates), 0.0).code == Code.DONE


def test_a_node_is_as_slow_as_its_slowest_rank() -> None:
    ranks = [Health(f"node{rank // 4}", MET, same={"device": "H100"}, rate=1.0) for rank in range(12)]
    ranks[6].rate = 0.5
    assert judge(ranks, None).excluded == ["node1"]


def test_most_nodes_are_never_left_out() -> None:
    found = judge(reports(rates=[1.0, 1.0, 0.6, 0.6, 0.6, 1.0, 1.0]), None)
    assert (found.code, len(found.excluded)) == (Code.RANK_LOST, 3)
    faulty = reports(rates=[1.0, 1.0, 1.0])
    for report in faulty[1:]:
        report.faults["GPU"] = "9 uncorrected ECC errors"
    found = judge(faulty, None)
    assert (found.code, found.excluded) == (Code.RANK_LOST, [])
    assert "none is left out" in found.explain()[-1]


def test_the_only_node_is_left_out_if_it_is_broken() -> None:
    alone = reports(rates=[1.0])
    alone[0].faults["GPU"] = "9 uncorrected ECC errors"
    assert judge(alone, None).excluded == ["node0"]


def test_a_slow_link_blames_none_of_its_ends() -> None:
    ring = reports([4, 4, None], [0.1, 4, None], [0.1, 4, None], [4, 4, None])
    assert judge(ring, None).code == Code.DONE


def test_a_link_is_as_slow_as_the_slowest_pair_of_ranks_on_it() -> None:
    ranks = [Health(f"node{rank // 2}", MET, same={"device": "H100"}, rate=1.0, links=[4, 4]) for rank in range(8)]
    ranks[3].links = [0.1, 0.1]
    assert judge(ranks, None).excluded == ["node1"]


def test_a_node_whose_links_are_all_slow_is_blamed_alone() -> None:
    for count in (3, 4, 5, 8):
        names = [f"node{number}" for number in range(count)]
        others = [find_partners(names, rank) for rank in range(count)]
        links = [
            [None if other is None else 1.9 if 1 in (rank, other) else 4.0 for other in others[rank]]
            for rank in range(count)
        ]
        assert judge(reports(*links), None).excluded == ["node1"]
        links = [[link and max(link, 2.1) for link in own] for own in links]
        assert judge(reports(*links), None).excluded == []


def test_clocks_differ_where_no_moment_was_the_same_on_them() -> None:
    ranks = reports(rates=[1.0] * 5)
    ranks[1].met, ranks[2].met, ranks[3].met = (8.0, 9.0), (-9.0, -8.0), (-30.0, 30.0)  # the last came early, left late
    found = judge(ranks, None)
    assert found.notes == ["node1: its clock is 7 s ahead", "node2: its clock is 8 s behind"]
    assert found.code == Code.DONE
    ranks = reports(rates=[1.0] * 2)
    ranks[1].met = (70.0, 71.0)
    assert judge(ranks, None).notes == ["node1: its clock is 69 s ahead"]
