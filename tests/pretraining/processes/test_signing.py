"""Ranks believe what a rank of the same start has signed, and nothing else that stands in their store."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import assert_refusal
from support.processes import Run, free_port, start, wait_for
from support.ranks import expect_end, take_part

from data_prep.common.errors import UserError
from data_prep.common.launchers import World, find_world
from data_prep.common.supervision import exit_now
from pretraining.processes import meeting, signing
from pretraining.processes.ending import Code, Ending, Outcome
from pretraining.processes.group import connect, disconnect, gather
from pretraining.processes.signing import SECRET, SignedStore, read_secret, write_secret
from pretraining.processes.watchdog import Watch

PLANTED = json.dumps(Outcome(Code.CURE, "planted", 0))


def store_of(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def work(fails: bool, world: World) -> None:
    with Watch(world, every=0.1):
        Path(f"at-work-{os.environ['MASTER_PORT']}-{world.rank}").touch()
        wait_for(Path(f"planted-{os.environ['MASTER_PORT']}").exists, 30)
        if fails and world.rank == 1:
            raise UserError("no room")
    print("done")


def go_there(folder: Path, fails: bool) -> None:
    os.chdir(folder)
    take_part(partial(work, fails))


def plant(folder: Path, port: int, run: Run, *kinds: Callable[[Any], str | bytes]) -> None:
    """Waits for the ranks to be at work, and writes one value after another wherever they may read one."""
    wait_for(lambda: len([*folder.glob(f"at-work-{port}-*")]) == 2 or not run.goes_on(), 30)
    store = store_of(port)
    names = [name.removeprefix("/") for name in store.list_keys()]
    for value in [kind(store) for kind in kinds]:
        for name in (
            *(name for name in names if "cloze" in name),
            "cloze/failure",
            "cloze/0/failure",
            "cloze/0/seen/1",
        ):
            store.set(name, value)
        time.sleep(0.5)  # some rounds of the watch
    (folder / f"planted-{port}").touch()


def other_signature(_: Any) -> str:
    kept = dist.HashStore()  # type: ignore[attr-defined]
    SignedStore(kept, b"another secret").set("failure", PLANTED)
    return bytes(kept.get("cloze/0/failure")).decode()


def signed_for_another_key(store: Any) -> bytes:
    """Of these ranks, but of another key."""
    return bytes(store.get("cloze/0/beat/1"))


def test_a_run_goes_on_whatever_others_write_into_its_store(tmp_path: Path) -> None:
    run = start(2, go_there, tmp_path, False, port=(port := free_port()))
    plant(tmp_path, port, run, lambda _: PLANTED, lambda _: b"\xff" * 100, other_signature, signed_for_another_key)
    done = run.wait(60)
    assert [(rank.code, rank.output) for rank in done] == [(0, "done\n")] * 2, done
    assert [rank.errors for rank in done] == ["", ""]


def test_the_failure_of_a_rank_is_heard_beside_what_others_write(tmp_path: Path) -> None:
    run = start(2, go_there, tmp_path, True, port=(port := free_port()))
    plant(tmp_path, port, run, lambda _: PLANTED)
    expect_end(run.wait(60), Code.CURE, "error: rank 1: no room\n")


def test_what_was_signed_for_another_start_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dist.HashStore()  # type: ignore[attr-defined]
    store = SignedStore(kept, b"secret")
    store.set("failure", PLANTED)
    assert store.get("failure") == PLANTED
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert store.get("failure") is None
    kept.set("cloze/1/failure", kept.get("cloze/0/failure").decode())
    assert store.get("failure") is None
    assert (store.claim("failure", "own"), store.claim("failure", "second")) == ("own", "own")


def test_two_starts_by_one_secret_do_not_hear_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may set one secret for all starts, and an attacker may have kept the messages of an earlier one."""
    monkeypatch.setenv(SECRET, "set by hand")
    kept = [dist.HashStore() for _ in range(2)]  # type: ignore[attr-defined]
    first, second = (meeting._join(store, World(0, 2, 0, 2), 1.0, tmp_path / "secret") for store in kept)
    assert first is not None
    assert second is not None
    first.set("failure", PLANTED)
    kept[1].set("cloze/0/failure", kept[0].get("cloze/0/failure").decode())
    assert second.get("failure") is None
    second.set("failure", "own")
    other = meeting._join(kept[1], World(1, 2, 1, 2), 1.0, tmp_path / "secret")
    assert other is not None
    assert other.get("failure") == "own"


# The secret


def meet_without_a_variable(folder: Path, late: Sequence[float]) -> object:
    del os.environ[SECRET]
    world = find_world(os.environ)
    time.sleep(late[world.rank])
    connect(world, torch.device("cpu"), timeout=60, folder=folder)
    found = gather([world.rank, "é\udc80", None])
    disconnect()
    return found


@pytest.mark.parametrize(("late", "is_there"), [((0, 0.5), True), ((0.5, 0), False)])
def test_ranks_find_their_secret_whoever_comes_first(late: Sequence[float], is_there: bool, tmp_path: Path) -> None:
    """That of an earlier start lies there still; when they have met, none does, nor a folder that was not there."""
    port, folder = free_port(), tmp_path / "run"
    if is_there:
        folder.mkdir()
        path = folder / f".secret-{socket.gethostname()}-{port}"
        path.write_text("of an earlier start")
        path.chmod(0o600)
    done = start(2, meet_without_a_variable, folder, late, port=port).wait(60)
    assert [(rank.result, rank.errors) for rank in done] == [([[0, "é\udc80", None], [1, "é\udc80", None]], "")] * 2
    assert [*tmp_path.rglob("*")] == [folder] * is_there


def test_runs_of_two_machines_have_secrets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may share a folder, as fine-tuning does with --share, and have the same port."""
    paths: list[Path] = []
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr(meeting, "_enter_store", lambda world, patience, path: paths.append(path))
    monkeypatch.setattr(meeting, "_wait_for_all", lambda *_: None)
    for name in ("node1", "node2"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        meeting.meet(World(0, 2, 0, 2, port=29500), 1.0, tmp_path)
    assert len({*paths}) == 2


def test_a_secret_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    path = tmp_path / "secret"
    path.symlink_to(tmp_path / "target")
    write_secret(path)
    secret = read_secret(path)
    assert len(secret) == 64
    assert not (tmp_path / "target").exists()
    assert path.stat().st_mode & 0o777 == 0o600
    write_secret(path)
    assert read_secret(path) not in (secret, b""), "each start has its own"
    path.chmod(0o640)
    assert read_secret(path) == b""
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert read_secret(path) == b""
    assert_refusal(f"others can read what is written there.*\n.*{SECRET}", write_secret, path)


def test_where_a_disk_keeps_no_modes_a_secret_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk of Windows."""
    monkeypatch.delenv(SECRET, raising=False)
    opened = os.open
    monkeypatch.setattr(
        os, "open", lambda place, flags, mode=0o777: opened(place, flags, 0o666 if mode == 0o600 else mode)
    )
    assert_refusal("others can read what is written there", write_secret, tmp_path / "secret")


def test_no_secret_is_none_that_others_may_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.1)
    kept = dist.HashStore()  # type: ignore[attr-defined]
    SignedStore(kept, b"").set("nonce", "0")
    assert meeting._find_secret(kept, World(1, 2, 1, 2), 0.1, tmp_path / "secret") is None


def meet_in(folder: Path) -> None:
    del os.environ[SECRET]
    with Ending() as ending:
        ending.world = find_world(os.environ)
        connect(ending.world, torch.device("cpu"), patience=5, folder=folder)
    exit_now(ending.code)


def test_all_end_where_rank_0_cannot_write_their_secret(tmp_path: Path) -> None:
    """Each of the two ranks is on a machine of its own."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "run"
    done = start(2, meet_in, out, environment={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}).wait(60)
    fault = f"--out {out}: cannot be written: {tmp_path / 'file'} is not a folder; name another"
    assert done[0].errors == f"error: {fault}\n"
    assert done[1].errors.startswith("error: rank 1 ")
    assert [rank.code for rank in done] == [Code.CURE] * 2


def listen(world: World) -> None:
    print("loopback" if world.rank else next(open_ports(world.port)))


def open_ports(port: int) -> Any:
    """The addresses at which a port is open, as Linux writes them."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and local.endswith(f":{port:04X}"):
                yield local.partition(":")[0]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says who listens where")
def test_the_store_of_one_machine_is_open_to_no_other() -> None:
    assert start(2, take_part, listen).wait(60)[0].output == "0100007F\n"


def test_rank_0_leaves_when_the_others_have_read_why_or_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SignedStore(dist.HashStore(), b"secret")  # type: ignore[attr-defined]
    monkeypatch.setattr(signing, "READ_SECONDS", 300)
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(store.leave, "left", 0, range(3))
        store.leave("left", 1, range(3))
        time.sleep(0.2)
        assert not leaving.done()
        store.leave("left", 2, range(3))
        leaving.result(60)
    monkeypatch.setattr(signing, "READ_SECONDS", 0)
    store.leave("gone", 0, range(3))
