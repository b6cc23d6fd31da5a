"""A run over several machines, whose names mean nothing to themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.nodes import ADDRESSES, node_names, two_nodes
from support.processes import rank_environment
from support.training import COMMAND, Place, assert_same_curve

PORT = 29511


@pytest.mark.slow
@pytest.mark.parametrize("master", ["name", "address"])
def test_ranks_of_two_machines_find_each_other(place: Place, straight: Path, master: str) -> None:
    with two_nodes() as nodes:
        address = node_names(nodes)[0] if master == "name" else ADDRESSES[0]
        processes = []
        for rank, node in enumerate(nodes):
            own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address}
            command = [*node, sys.executable, str(COMMAND), *place.command("run")]
            environment = {**rank_environment(rank, 2, PORT), **own}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_same_curve(place.folder / "run", straight, 1e-6)
