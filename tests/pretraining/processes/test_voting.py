"""The greatest number that any rank brings, and how little that asks of ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from support.processes import spawn
from torch import Tensor

from data_prep.common.launchers import find_world
from pretraining.processes.group import connect, disconnect, find_greatest


class Done:
    """Something that needs no waiting for."""

    def wait(self) -> None:
        pass


class PretendedGroup:
    """A rank among threads that hand one another tensors."""

    def __init__(self, rank: int, boxes: list[list[Queue[Tensor]]]) -> None:
        self._rank, self._boxes = rank, boxes
        self.sent: list[int] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._boxes)

    def send(self, tensors: list[Tensor], to: int, _: int) -> Done:
        self._boxes[to][self._rank].put(tensors[0].clone())
        self.sent.append(to)
        return Done()

    def recv(self, tensors: list[Tensor], source: int, _: int) -> Done:
        tensors[0].copy_(self._boxes[self._rank][source].get(timeout=30))
        return Done()


def vote(own: list[list[float]]) -> tuple[list[list[float]], list[PretendedGroup]]:
    """What ranks that bring these numbers find."""
    ranks = len(own)
    boxes: list[list[Queue[Tensor]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
    groups = [PretendedGroup(rank, boxes) for rank in range(ranks)]
    found: list[Any] = [None] * ranks

    def act(rank: int) -> None:
        found[rank] = find_greatest(torch.tensor(own[rank]), groups[rank]).tolist()

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, groups


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13, 33])
def test_all_find_the_greatest_of_each_number(ranks: int) -> None:
    for speaker in {0, ranks // 2, ranks - 1}:
        own = [[4.0 * (rank == speaker), float(rank)] for rank in range(ranks)]
        found, _ = vote(own)
        assert found == [[4.0, ranks - 1.0]] * ranks
        assert own[0][1] == 0.0


def test_a_vote_of_many_takes_few_turns_and_few_acquaintances() -> None:
    """Where gloo's own all-reduce would hand numbers around all of them, twice."""
    _, groups = vote([[0.0]] * 100)
    assert {len(group.sent) for group in groups} == {7}


def count_sockets() -> object:
    world = find_world(os.environ)
    connect(world, torch.device("cpu"), timeout=60)
    found = float(find_greatest(torch.tensor([float(world.rank)])))
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    sockets = sum(name.startswith("socket:") for name in names)
    disconnect()
    return found, sockets


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows")
def test_a_rank_is_connected_to_few_others() -> None:
    done = spawn(12, count_sockets)
    assert [rank.result[0] for rank in done] == [11.0] * 12
    assert all(rank.result[1] < 11 for rank in done[1:]), "fewer in all than there are other ranks"
