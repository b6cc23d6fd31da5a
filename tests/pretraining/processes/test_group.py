"""Ranks that meet, agree and part, and what a rank computes with."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.commands import assert_refusal
from support.processes import free_port, spawn
from support.ranks import expect_end, take_part
from torch import Tensor

from data_prep.common.errors import SharedError, UserError
from data_prep.common.launchers import World, find_world
from data_prep.common.supervision import exit_now
from pretraining.processes import group
from pretraining.processes.ending import Code, Ending
from pretraining.processes.group import (
    agree,
    choose_device,
    connect,
    default_threads,
    disconnect,
    find_greatest,
    gather,
    place,
    shared_errors,
    wait_for_all,
)
from pretraining.processes.watchdog import Watch

# Devices and threads


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    world = World(1, 2, 1, 2)
    assert choose_device("auto", world) == choose_device("cuda", world) == torch.device("cuda", 1)
    assert choose_device("cpu", world) == torch.device("cpu")
    assert_refusal(r"4 ranks on .*, but 2 GPUs", choose_device, "auto", World(1, 4, 1, 4))


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert_refusal(r"2 ranks on .*, but 1 GPUs", choose_device, "auto", World(1, 2, 1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # srun --gpus-per-task=1
    assert choose_device("auto", World(1, 2, 1, 2)) == torch.device("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # deepspeed --num_gpus 2 where there is one
    assert_refusal("but 1 GPUs", choose_device, "auto", World(1, 2, 1, 2))


@pytest.mark.parametrize(
    ("has", "built", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
    ],
)
def test_a_gpu_that_this_torch_has_no_code_for_is_refused(
    has: tuple[int, int], built: list[str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: has)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "one")
    if runs:
        assert choose_device("auto", World()) == torch.device("cuda", 0)
    else:
        assert_refusal(f"has code for {built[0]}.*none for one", choose_device, "auto", World())


def test_one_process_gathers_from_itself() -> None:
    assert place() == (0, 1)
    assert gather("own") == ["own"]
    agree({"own": object()}, "what no other rank has")
    with pytest.raises(SharedError, match=r"^no room$"):
        gather(None, "no room")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    assert choose_device("auto", World()) == torch.device("cpu")
    assert_refusal(r"a GPU was asked for[\s\S]*`cpu`", choose_device, "cuda", World())


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "num_cores", lambda: 8)
    assert default_threads(World(), {}) == 8
    assert default_threads(World(0, 2, 0, 2), {}) == 4
    assert default_threads(World(0, 16, 0, 16), {}) == 1
    assert default_threads(World(), {"OMP_NUM_THREADS": "3"}) == 3
    assert default_threads(World(0, 2, 0, 2), {"OMP_NUM_THREADS": "1"}) == 1
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}  # which nobody chose
    assert default_threads(World(0, 2, 0, 2), torchrun) == 4


# Processes: functions that ranks run.


def three_agree() -> object:
    world = find_world(os.environ)
    connect(world, torch.device("cpu"), timeout=60)
    agree({"seed": 1, "lengths": [128, 512]}, "recipe")
    with shared_errors():
        total = torch.ones(1)
        dist.all_reduce(total)
    bound = [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]][world.rank]  # as a launcher might: one alone, two share theirs
    setattr(group, "list_cores", lambda: bound)  # noqa: B010
    setattr(group, "num_cores", lambda: 4)  # noqa: B010
    threads = default_threads(world, {})
    mixed = default_threads(world, {} if world.rank else {"OMP_NUM_THREADS": "3"})  # set on one machine alone
    before = os.environ["DS_ACCELERATOR"], os.environ["GLOO_SOCKET_IFNAME"]
    disconnect()
    return float(total), (threads, mixed), before, "GLOO_SOCKET_IFNAME" in os.environ, dist.is_initialized()


def test_ranks_that_agree_go_on() -> None:
    done = spawn(3, three_agree)
    assert [rank.result[1] for rank in done] == [(4, 3), (2, 2), (2, 2)]  # threads
    assert [rank.result[0::2] for rank in done] == [(3.0, ("cpu", "lo"), False)] * 3
    assert not any(rank.result[3] for rank in done)


def meet_on_one_gpu() -> None:
    setattr(torch.cuda, "set_device", lambda _: None)  # noqa: B010
    setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-5f6e"))  # noqa: B010
    with Ending() as ending:
        ending.world = world = find_world(os.environ)
        connect(world, torch.device("cuda", 0))
    exit_now(ending.code)


def test_two_ranks_on_one_gpu_are_named() -> None:
    """As where every rank sees one GPU alone, and two see the same."""
    message = f"error: ranks 0, 1 have the same GPU ({socket.gethostname()} GPU-5f6e): each rank needs one of its own\n"
    expect_end(spawn(2, meet_on_one_gpu), Code.CURE, message)


def disagree(world: World) -> None:
    agree({"seed": world.rank == 1}, "recipe")


def miss_shards(first: int, world: World) -> None:
    with shared_errors():
        if world.rank >= first:
            raise UserError("no shards in data/")
        agree(1, "data")  # the others never come here
    print("went on")


@pytest.mark.parametrize(
    ("ranks", "work", "message"),
    [
        (3, disagree, "recipe: rank 1 differs from rank 0"),
        (2, partial(miss_shards, 1), "rank 1: no shards in data/"),
        (2, partial(miss_shards, 0), "no shards in data/"),
    ],
)
def test_an_error_at_the_start_is_every_rank_s(ranks: int, work: Callable[[World], None], message: str) -> None:
    """That of all ranks without their numbers."""
    done = spawn(ranks, take_part, work)
    expect_end(done, Code.CURE, f"error: {message}\n")
    assert "went on" not in done[0].output


def make_a_mistake_on_rank_1(world: World) -> None:
    with shared_errors():
        assert world.rank == 0, "a mistake"


def test_a_mistake_of_ours_at_the_start_leaves_no_rank_behind() -> None:
    first, second = spawn(2, take_part, make_a_mistake_on_rank_1)
    assert (first.code, second.code) == (2, 1)
    assert "AssertionError: a mistake" in first.errors
    assert "AssertionError: a mistake" in second.errors


def lose_rank_1(world: World) -> None:
    if world.rank == 1:
        os._exit(9)
    agree(1, "recipe")


def test_a_rank_that_is_gone_at_the_start_is_told() -> None:
    done = spawn(2, take_part, lose_rank_1, timeout=60)
    assert [rank.code for rank in done] == [76, 9]
    assert "error: another rank has ended, or cannot be reached any more" in done[0].errors
    assert "Traceback" not in done[0].errors


IN_USE = "is in use by another program or run\nchoose a free one: MASTER_PORT=<port>"


def meet(_: World) -> None:
    pass


@pytest.mark.slow
def test_a_port_that_another_run_holds() -> None:
    """Its store would answer as ours: no rank may join that run."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("cloze/ranks", "2")
    store.add("cloze/joined/1", 1)
    expect_end(spawn(2, take_part, meet, port=port, timeout=60), Code.CURE, IN_USE)


def test_ranks_that_never_come_are_named() -> None:
    more = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    done = spawn(2, take_part, meet, 4.0, environment=more, timeout=60)
    expect_end(done, Code.CURE, "error: ranks 2, 3 of 4 did not come in 4 s\n")


def test_rank_1_speaks_where_rank_0_is_not_there() -> None:
    more = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    [done] = spawn(1, take_part, meet, 1.0, environment=more, timeout=60)
    assert done.code == 2
    assert done.errors.startswith("error: rank 1 did not reach rank 0 at 127.0.0.1:")
    assert done.errors.count("\n") == 2, "of our own words alone"


def test_one_process_has_a_group_too() -> None:
    """DeepSpeed wants one; and nothing of it stays behind."""
    before = dict(os.environ)
    connect(World(), torch.device("cpu"))
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        agree(1, "recipe")
        with Watch(World()) as watch, watch.pause(), shared_errors():
            watch.mark()
            assert (float(total), os.environ["LOCAL_RANK"]) == (1.0, "0")
    finally:
        disconnect()
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def fail_to_leave() -> object:
    connect(World(), torch.device("cpu"))
    error = RuntimeError("NCCL communicator was aborted\nframe #0: 0x7f")
    setattr(dist, "destroy_process_group", Mock(side_effect=error))  # noqa: B010
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        disconnect()
    return [str(each.message) for each in told]


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks connect as if each had one."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(group, "_check_own_gpus", lambda *_: None)


def speak_beside_nccl() -> object:
    """What two ranks with GPUs tell one another before they train, and whether NCCL would have been asked for it."""
    make, groups = dist.init_process_group, []

    def noted(speak: Callable[..., None]) -> Callable[..., None]:
        def double(*given: object) -> None:
            groups.append(given[-1])
            speak(*given)

        return double

    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_a_gpu(monkeypatch)
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: make({"nccl": "gloo"}[backend], **more))
        for name in ("all_gather", "barrier"):
            monkeypatch.setattr(dist, name, noted(getattr(dist, name)))
        world = find_world(os.environ)
        connect(world, torch.device("cuda"), timeout=60)
        told = gather(world.rank)
        wait_for_all()
        asked = [each is dist.group.WORLD for each in groups]
        disconnect()
    return told, set(asked)


def test_ranks_with_gpus_meet_over_gloo() -> None:
    """NCCL connects them later, in training: what goes wrong there is watched."""
    done = spawn(2, speak_beside_nccl)
    assert [(rank.result, rank.errors) for rank in done] == [(([0, 1], {False}), "")] * 2


@pytest.mark.parametrize(
    ("name", "chosen", "wanted"),
    [
        *((name, None, "0") for name in group.NCCL_ENDS),
        *((name, "1", "1") for name in group.NCCL_ENDS),
        ("NCCL_SOCKET_IFNAME", None, "=eth7"),
        ("NCCL_SOCKET_IFNAME", "ib0", "ib0"),
    ],
)
def test_what_nccl_is_told(name: str, chosen: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user wants it otherwise; nothing of that stays behind."""
    seen: list[str] = []
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    pretend_a_gpu(monkeypatch)
    for part, value in (("meet", None), ("find_interface", "eth7")):
        monkeypatch.setattr(group, part, lambda *_, value=value: value)
    monkeypatch.setattr(group, "_join_group", lambda *_: seen.append(os.environ[name]))
    connect(World(0, 2, 0, 1), torch.device("cuda"))
    disconnect()
    assert (seen, os.environ.get(name)) == ([wanted], chosen)


def test_a_group_that_cannot_be_left_is_a_warning() -> None:
    """All work is done: no traceback comes out of a run that ends well."""
    [done] = spawn(1, fail_to_leave)
    assert (done.code, done.errors) == (0, "")
    assert done.result == ["the process group did not end well: NCCL communicator was aborted"]


# Votes


class AtOnce:
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

    def send(self, tensors: list[Tensor], to: int, _: int) -> AtOnce:
        self._boxes[to][self._rank].put(tensors[0].clone())
        self.sent.append(to)
        return AtOnce()

    def recv(self, tensors: list[Tensor], source: int, _: int) -> AtOnce:
        tensors[0].copy_(self._boxes[self._rank][source].get(timeout=30))
        return AtOnce()


def vote(own: list[list[float]]) -> tuple[list[list[float]], list[PretendedGroup]]:
    """What ranks that bring these numbers find."""
    ranks = len(own)
    boxes: list[list[Queue[Tensor]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
    groups = [PretendedGroup(rank, boxes) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found = threads.map(find_greatest, map(torch.tensor, own), groups)
        return [each.tolist() for each in found], groups


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
