"""Ranks believe what a rank of the same start has signed, and nothing else that stands in their store."""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.commands import assert_refusal, wait_for
from support.faults import replace
from support.processes import expect_end, free_port, spawn, start, take_part

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes import meeting, signing
from pretraining.processes.ending import Code, Outcome
from pretraining.processes.group import gather
from pretraining.processes.signing import SECRET, SignedStore, read_secret, write_secret
from pretraining.processes.watchdog import Watch

BEATS, FAILURES = ["cloze/0/beat/0", "cloze/0/beat/1"], ["cloze/failure", "cloze/0/failure", "cloze/0/seen/1"]
PLANTED = json.dumps(Outcome(Code.CURE, "planted", 0))
WORLDS = [World(rank, 2, rank, 2) for rank in range(2)]


def hash_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def work_until_planted(folder: Path, world: World) -> None:
    with Watch(world, every=0.05):
        (folder / f"at-work-{world.rank}").touch()
        wait_for((folder / "planted").exists)
        if world.rank == 1:
            raise UserError("no room")


def plant(store: Any, value: str | bytes) -> None:
    """Writes a value wherever the ranks may read one, and waits until the watch of each has gone around with it."""
    for name in {*(name.removeprefix("/") for name in store.list_keys()), *FAILURES}:
        if "cloze" in name:
            store.set(name, value)
    for beat in 2 * BEATS:
        wait_for(partial(is_other, store, beat, store.get(beat)))


def is_other(store: Any, name: str, before: bytes) -> bool:
    return bool(store.get(name) != before)


def other_signature(_: Any) -> str:
    SignedStore(kept := hash_store(), b"another secret").set("failure", PLANTED)
    return bytes(kept.get("cloze/0/failure")).decode()


def test_a_run_hears_its_ranks_alone_whatever_others_write_into_its_store(tmp_path: Path) -> None:
    run = start(2, take_part, partial(work_until_planted, tmp_path), port=(port := free_port()))
    wait_for(lambda: len([*tmp_path.iterdir()]) == 2 or not run.goes_on())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    signed_for_another_key = bytes(store.get("cloze/0/beat/1"))
    for value in (b"\xff" * 100, other_signature(store), signed_for_another_key, PLANTED):
        plant(store, value)
    (tmp_path / "planted").touch()
    expect_end(run.wait(60), Code.CURE, "error: rank 1: no room\n")


def test_what_was_signed_for_another_start_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SignedStore(kept := hash_store(), b"secret")
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
    join: Callable[..., Any] = partial(meeting._join, patience=1.0, path=tmp_path / "secret")
    earlier, kept = hash_store(), hash_store()
    join(earlier, WORLDS[0]).set("failure", PLANTED)
    store = join(kept, WORLDS[0])
    kept.set("cloze/0/failure", earlier.get("cloze/0/failure").decode())
    assert store.get("failure") is None
    store.set("failure", "own")
    assert join(kept, WORLDS[1]).get("failure") == "own"


# The secret


def gather_words(world: World) -> object:
    return gather([world.rank, "é\udc80", None])


def come_late(late: int, folder: Path) -> object:
    time.sleep(0.1 * (int(os.environ["RANK"]) == late))
    return take_part(gather_words, folder=folder)


@pytest.mark.parametrize(("late", "is_there"), [(1, True), (0, False)])
def test_ranks_find_their_secret_whoever_comes_first(late: int, is_there: bool, tmp_path: Path) -> None:
    """That of an earlier start lies there still; when they have met, none does, nor a folder that was not there."""
    port, folder = free_port(), tmp_path / "run"
    if is_there:
        folder.mkdir()
        path = folder / f".secret-{socket.gethostname()}-{port}"
        path.write_text("of an earlier start")
        path.chmod(0o600)
    done = spawn(2, come_late, late, folder, port=port, environment={SECRET: ""})
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
    monkeypatch.undo()
    monkeypatch.delenv(SECRET, raising=False)
    opened: Any = os.open
    modes = {0o600: 0o666}  # a disk that keeps no modes, as of Windows
    monkeypatch.setattr(os, "open", lambda place, flags, mode=0o777: opened(place, flags, modes.get(mode, mode)))
    assert_refusal("others can read what is written there", write_secret, path)


def test_no_secret_is_none_that_others_may_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.0)
    SignedStore(kept := hash_store(), b"").set("nonce", "0")
    assert meeting._find_secret(kept, WORLDS[1], 0.1, tmp_path / "secret") is None


def write_no_secret(came: Path, out: Path) -> None:
    """Rank 0 fails to write the secret when rank 1 waits for it."""

    def write(path: Path) -> None:
        wait_for(came.exists)
        write_secret(path)

    def read(path: Path) -> bytes:
        came.touch()
        return read_secret(path)

    replace(meeting, "write_secret", write)
    replace(meeting, "read_secret", read)
    take_part(gather_words, 0.5, None, out)


def test_all_end_where_rank_0_cannot_write_their_secret(tmp_path: Path) -> None:
    """Each of the two ranks is on a machine of its own."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "run"
    more = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", SECRET: ""}
    done = spawn(2, write_no_secret, tmp_path / "came", out, environment=more, timeout=40)
    fault = f"--out {out}: cannot be written: {tmp_path / 'file'} is not a folder; name another"
    assert done[0].errors == f"error: {fault}\n"
    assert done[1].errors.startswith("error: rank 1 ")
    assert [rank.code for rank in done] == [Code.CURE] * 2


def print_where_the_port_is_open(world: World) -> None:
    """As Linux writes the address at which somebody listens."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    entries = [line.split()[1:4] for table in tables for line in table]
    print(*(place for place, _, state in entries if state == "0A" and place.endswith(f":{world.port:04X}")))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says who listens where")
def test_the_store_of_one_machine_is_open_to_no_other() -> None:
    done = spawn(2, take_part, print_where_the_port_is_open, port=(port := free_port()))
    assert done[0].output == f"0100007F:{port:04X}\n"


def test_rank_0_leaves_when_the_others_have_read_why_or_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SignedStore(hash_store(), b"secret")
    monkeypatch.setattr(signing, "READ_SECONDS", 300)
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(store.leave, "left", 0, range(3))
        store.leave("left", 1, range(3))
        time.sleep(0.1)
        assert not leaving.done()
        store.leave("left", 2, range(3))
        leaving.result(60)
    monkeypatch.setattr(signing, "READ_SECONDS", 0)
    store.leave("gone", 0, range(3))
