"""Ranks that meet, agree and part, and what a rank computes with."""

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.commands import assert_refusal, wait_for
from support.processes import expect_end, free_port, spawn, take_part
from torch import Tensor

from data_prep.common.errors import SharedError, UserError
from data_prep.common.launchers import World, find_world
from pretraining.processes import group, meeting
from pretraining.processes.ending import Code
from pretraining.processes.signing import SignedStore
from pretraining.processes.watchdog import Watch

CPU = torch.device("cpu")

# Devices and threads


@pytest.mark.parametrize(
    ("gpus", "visible", "wanted", "rank", "ranks", "found"),
    [
        (2, None, "auto", 1, 2, "cuda:1"),
        (2, None, "cuda", 1, 2, "cuda:1"),
        (2, None, "cpu", 1, 2, "cpu"),
        (2, None, "auto", 1, 4, r"error: 4 ranks on .*, but 2 GPUs"),
        (1, None, "auto", 1, 2, r"error: 2 ranks on .*, but 1 GPUs"),
        (1, "1", "auto", 1, 2, "cuda:0"),  # srun --gpus-per-task=1
        (1, "0,1", "auto", 1, 2, "error: but 1 GPUs"),  # deepspeed --num_gpus 2 where there is one
        (0, None, "auto", 0, 1, "cpu"),
        (0, None, "cuda", 0, 1, r"error: a GPU was asked for[\s\S]*`cpu`"),
    ],
)
def test_each_rank_takes_a_gpu_of_its_own(
    gpus: int, visible: str | None, wanted: str, rank: int, ranks: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    world = World(rank, ranks, rank, ranks)
    if found.startswith("error: "):
        assert_refusal(found.removeprefix("error: "), group.choose_device, wanted, world)
    else:
        assert str(group.choose_device(wanted, world)) == found  # type: ignore[arg-type]


def pretend_gpus(patch: pytest.MonkeyPatch, count: int, has: tuple[int, int] = (9, 0), built: str = "sm_90") -> None:
    told = {"is_available": count > 0, "device_count": count, "get_device_name": "one"}
    told |= {"get_device_capability": has, "get_arch_list": built.split()}
    for name, value in told.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


CODE = [((8, 6), "sm_80", True), ((7, 0), "sm_75 sm_80", False)]
CODE += [((12, 0), "sm_90", False), ((12, 0), "sm_90 compute_90", True)]


@pytest.mark.parametrize(("has", "built", "runs"), CODE)
def test_a_gpu_that_this_torch_has_no_code_for_is_refused(
    has: tuple[int, int], built: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 1, has, built)
    if runs:
        assert group.choose_device("auto", World()) == torch.device("cuda", 0)
    else:
        assert_refusal(f"has code for {built.split()[0]}.*none for one", group.choose_device, "auto", World())


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "num_cores", lambda: 8)
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}  # which nobody chose
    for ranks, variables, threads in (
        *((1, {}, 8), (2, {}, 4), (16, {}, 1), (2, torchrun, 4)),
        *((1, {"OMP_NUM_THREADS": "3"}, 3), (2, {"OMP_NUM_THREADS": "1"}, 1)),
    ):
        assert group.default_threads(World(0, ranks, 0, ranks), variables) == threads


# Processes: functions that ranks run.


def agree_and_share_cores(world: World) -> object:
    group.agree({"seed": 1, "lengths": [128, 512]}, "recipe")
    with group.shared_errors():
        total = torch.ones(1)
        dist.all_reduce(total)
    bound = [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]][world.rank]  # as a launcher might: one alone, two share theirs
    setattr(group, "list_cores", lambda: bound)  # noqa: B010
    setattr(group, "num_cores", lambda: 4)  # noqa: B010
    threads = group.default_threads(world, {})
    mixed = group.default_threads(world, {} if world.rank else {"OMP_NUM_THREADS": "3"})  # set on one machine alone
    environment = os.environ["DS_ACCELERATOR"], os.environ["GLOO_SOCKET_IFNAME"]
    return threads, mixed, (float(total), environment, group.open_stores()[0].raw.timeout.total_seconds())


def agree_and_part() -> object:
    return take_part(agree_and_share_cores), "GLOO_SOCKET_IFNAME" in os.environ, dist.is_initialized()


def test_ranks_that_agree_go_on() -> None:
    """A rank may come to the first operation later than a store may answer: with NCCL, ranks ask the store then."""
    done = spawn(3, agree_and_part)
    found = (3.0, ("cpu", "lo"), 61.0)
    assert [rank.result[0] for rank in done] == [(4, 3, found), (2, 2, found), (2, 2, found)]
    assert [rank.result[1:] for rank in done] == [(False, False)] * 3


def meet_on_one_gpu() -> None:
    setattr(torch.cuda, "set_device", lambda _: None)  # noqa: B010
    setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-5f6e"))  # noqa: B010
    setattr(group, "choose_device", lambda *_: torch.device("cuda", 0))  # noqa: B010
    take_part(meet)


def test_two_ranks_on_one_gpu_are_named() -> None:
    """As where every rank sees one GPU alone, and two see the same."""
    message = f"error: ranks 0, 1 have the same GPU ({socket.gethostname()} GPU-5f6e): each rank needs one of its own\n"
    expect_end(spawn(2, meet_on_one_gpu), Code.CURE, message)


def disagree(world: World) -> None:
    group.agree({"seed": world.rank == 1}, "recipe")


def miss_shards(first: int, world: World) -> None:
    with group.shared_errors():
        if world.rank >= first:
            raise UserError("no shards in data/")
        group.agree(1, "data")  # the others never come here
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
    with group.shared_errors():
        assert world.rank == 0, "a mistake"


def test_a_mistake_of_ours_at_the_start_leaves_no_rank_behind() -> None:
    done = spawn(2, take_part, make_a_mistake_on_rank_1)
    assert [(rank.code, "AssertionError: a mistake" in rank.errors) for rank in done] == [(2, True), (1, True)]


def lose_rank_1(world: World) -> None:
    if world.rank == 1:
        os._exit(9)
    group.agree(1, "recipe")


def test_a_rank_that_is_gone_at_the_start_is_told() -> None:
    done = spawn(2, take_part, lose_rank_1)
    assert [rank.code for rank in done] == [76, 9]
    assert "error: another rank has ended, or cannot be reached any more" in done[0].errors
    assert "Traceback" not in done[0].errors


def meet(_: World) -> None:
    pass


@pytest.mark.slow
def test_a_port_that_another_run_holds() -> None:
    """Its store would answer as ours: no rank may join that run."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("cloze/ranks", "2")
    store.add("cloze/joined/1", 1)
    told = "is in use by another program or run\nchoose a free one: MASTER_PORT=<port>"
    expect_end(spawn(2, take_part, meet, port=port), Code.CURE, told)


def meet_without_patience() -> None:
    """Rank 0 waits for nobody but rank 1."""
    wait = meeting._wait_for_all

    def wait_for_rank_1(store: SignedStore, world: World, patience: float) -> None:
        wait_for(lambda: world.rank or store.get("joined/1"))
        wait(store, world, patience)

    setattr(meeting, "_wait_for_all", wait_for_rank_1)  # noqa: B010
    take_part(meet, patience=60.0 if int(os.environ["RANK"]) else 0.0)


def test_ranks_that_never_come_are_named() -> None:
    done = spawn(2, meet_without_patience, environment={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    expect_end(done, Code.CURE, "error: ranks 2, 3 of 4 did not come in 0 s\n")


def test_rank_1_speaks_where_rank_0_is_not_there() -> None:
    more = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    [done] = spawn(1, take_part, meet, 0.1, environment=more)
    assert done.code == 2
    assert done.errors.startswith("error: rank 1 did not reach rank 0 at 127.0.0.1:")
    assert done.errors.count("\n") == 2, "of our own words alone"


def test_one_process_has_a_group_too() -> None:
    """DeepSpeed wants one; and nothing of it stays behind."""
    before = dict(os.environ)
    assert (group.place(), group.gather("own")) == ((0, 1), ["own"])
    group.agree({"own": object()}, "what no other rank has")
    with pytest.raises(SharedError, match=r"^no room$"):
        group.gather(None, "no room")
    group.connect(World(), CPU)
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        group.agree(1, "recipe")
        with Watch(World()) as watch, watch.pause(), group.shared_errors():
            watch.mark()
            assert (float(total), os.environ["LOCAL_RANK"]) == (1.0, "0")
    finally:
        group.disconnect()
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_a_group_that_cannot_be_left_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is done: no traceback comes out of a run that ends well."""
    monkeypatch.delitem(sys.modules, "deepspeed.comm.comm", raising=False)
    group.connect(World(), CPU)
    leave, error = dist.destroy_process_group, RuntimeError("NCCL communicator was aborted\nframe #0: 0x7f")
    monkeypatch.setattr(dist, "destroy_process_group", Mock(side_effect=error))
    with pytest.warns(UserWarning, match=r"^the process group did not end well: NCCL communicator was aborted$"):
        group.disconnect()
    leave()


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks connect as if each had one."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(group, "_check_own_gpus", lambda *_: None)


def speak_beside_nccl() -> object:
    """What two ranks with GPUs tell one another before they train, and whether NCCL would have been asked for it."""
    make, speak = dist.init_process_group, [Mock(wraps=dist.all_gather), Mock(wraps=dist.barrier)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_a_gpu(monkeypatch)
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: make({"nccl": "gloo"}[backend], **more))
        monkeypatch.setattr(dist, "all_gather", speak[0])
        monkeypatch.setattr(dist, "barrier", speak[1])
        world = find_world(os.environ)
        group.connect(world, torch.device("cuda"), timeout=60)
        told = group.gather(world.rank)
        group.wait_for_all()
        asked = [call.args[-1] is dist.group.WORLD for each in speak for call in each.call_args_list]
        group.disconnect()
    return told, asked


def test_ranks_with_gpus_meet_over_gloo() -> None:
    """NCCL connects them later, in training: what goes wrong there is watched."""
    done = spawn(2, speak_beside_nccl)
    assert [(rank.result, rank.errors) for rank in done] == [(([0, 1], [False] * 3), "")] * 2


INTERFACE = "NCCL_SOCKET_IFNAME"
NCCL = [(name, *told) for name in group.NCCL_ENDS for told in ((None, "0"), ("1", "1"))]


@pytest.mark.parametrize(("name", "chosen", "wanted"), [*NCCL, (INTERFACE, None, "=eth7"), (INTERFACE, "ib0", "ib0")])
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
    group.connect(World(0, 2, 0, 1), torch.device("cuda"))
    group.disconnect()
    assert (seen, os.environ.get(name)) == ([wanted], chosen)


# Votes


class PretendedGroup:
    """A rank among threads that hand one another tensors."""

    def __init__(self, rank: int, boxes: list[list[Queue[Tensor]]]) -> None:
        self.rank, self.size = Mock(return_value=rank), Mock(return_value=len(boxes))
        self._boxes = boxes
        self.sent: list[int] = []

    def send(self, tensors: list[Tensor], to: int, _: int) -> Mock:
        self._boxes[to][self.rank()].put(tensors[0].clone())
        self.sent.append(to)
        return Mock()

    def recv(self, tensors: list[Tensor], source: int, _: int) -> Mock:
        tensors[0].copy_(self._boxes[self.rank()][source].get(timeout=30))
        return Mock()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 17])
def test_all_find_the_greatest_of_each_number(ranks: int) -> None:
    """In few turns and with few acquaintances, where gloo's own all-reduce hands numbers around all of them, twice."""
    for speaker in {0, ranks // 2, ranks - 1}:
        own = [[4.0 * (rank == speaker), float(rank)] for rank in range(ranks)]
        boxes: list[list[Queue[Tensor]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
        groups = [PretendedGroup(rank, boxes) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as threads:
            found = threads.map(group.find_greatest, map(torch.tensor, own), groups)
            assert [each.tolist() for each in found] == [[4.0, ranks - 1.0]] * ranks
        assert {len(each.sent) for each in groups} == {(ranks - 1).bit_length()}
        assert own[0][1] == 0.0
