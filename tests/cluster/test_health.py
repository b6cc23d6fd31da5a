"""Who exchanges data with whom, and what nvidia-smi says of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.health import ask_nvidia_smi, find_partners


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


@pytest.mark.parametrize(
    ("knows", "says", "found"),
    [
        ("clocks_event_reasons", "3, 0x0000000000000048", (3, 0x48)),
        ("clocks_throttle_reasons", "0, 0x0000000000000001", (0, 1)),
        ("clocks_event_reasons", "[N/A], [N/A]", (0, 0)),
        ("nothing", "", (0, 0)),
    ],
)
def test_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: str, says: str, found: tuple[int, int]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--id=GPU-abc*{knows}*) echo "{says}";; *) exit 2;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ask_nvidia_smi("abc") == found


def test_nvidia_smi_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_nvidia_smi("abc") == (0, 0)
