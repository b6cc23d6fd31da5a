"""Commands that tests start as a user does at a terminal, on this machine or on two made of its network namespaces."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.common.errors import UserError


def start(command: Sequence[str], stdin: int | None = None) -> subprocess.Popen[str]:
    """Starts a command that the signals of a terminal end, even where they do not end the tests.

    Under `nohup make test &` the tests ignore SIGINT and SIGHUP, which children inherit; only a signal that has a
    handler here has its default action in a child.
    """
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_main(main: Callable[[list[str]], int], *words: object, code: int = 0) -> str:
    """Runs a command in this process; returns its output, or of one that ends with code 1 or 2 its errors."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        ended = main([*map(str, words)])
    assert ended == code, output.getvalue() + errors.getvalue()
    return (errors if code in (1, 2) else output).getvalue()


def refusal(act: Callable[..., object], *words: Any, **more: Any) -> str:
    """Calls a function that must refuse; returns what the user is told."""
    with pytest.raises(UserError) as caught:
        act(*words, **more)
    return str(caught.value)


def assert_refusal(match: str, act: Callable[..., object], *words: Any, **more: Any) -> None:
    """Asserts that a function refuses what it is given, and tells the user this, a regular expression."""
    with pytest.raises(UserError, match=match):
        act(*words, **more)


def write_program(path: Path, does: str) -> Path:
    """Writes a program of the shell, which may stand in for another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)
    return path


def has_ended(number: int) -> bool:
    """Tells whether a process is gone."""
    try:
        return bool(psutil.Process(number).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def block_all_signals() -> None:
    """What a starter may leave to a command, before it begins: Slurm 25.05's srun does so with SIGCHLD."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Waits until something holds, and fails where it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started, as a machine that loses its power does."""
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


# Two machines: what each rank needs in order to be started on one of them.

HOSTS = Path("/etc/netns")
"""where `ip netns exec` looks for a namespace's own /etc/hosts"""
ADDRESSES = ("10.249.7.1", "10.249.7.2")


@contextmanager
def two_nodes(*hosts: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words before a command that let it run on a machine, for each of two, which a cable joins.

    `hosts` are their names; by default those of the namespaces. The name of each means 127.0.1.1 to itself, as Debian
    has it. Skips the test where this user may not make them.
    """
    names = [f"cloze-{os.getpid()}-{number}" for number in range(2)]
    hosts = hosts or tuple(names)
    try:
        _make(names, hosts)
        yield tuple(  # type: ignore[misc]
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
            for name, host in zip(names, hosts, strict=True)
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(HOSTS / name, ignore_errors=True)


def node_names(nodes: Sequence[Sequence[str]]) -> list[str]:
    return [node[3] for node in nodes]


def list_processes(node: Sequence[str]) -> list[int]:
    """Lists the processes of a machine."""
    listed = subprocess.run(["ip", "netns", "pids", node[3]], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def send_all(number: int, processes: Sequence[int]) -> None:
    """Sends a signal to processes, of which some may have ended."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(node: Sequence[str]) -> None:
    """Kills all processes of a machine."""
    send_all(signal.SIGKILL, list_processes(node))


def set_cable(node: Sequence[str], state: str) -> None:
    """Cuts a machine off (`down`), as before `kill_all` a power cut does, of which nobody hears; or joins it (`up`)."""
    shown = subprocess.run(["ip", "-n", node[3], "-brief", "link"], capture_output=True, text=True, check=True)
    cable = next(line.split("@")[0] for line in shown.stdout.splitlines() if line.startswith("cz"))
    subprocess.run(["ip", "-n", node[3], "link", "set", cable, state], check=True)


def _make(names: Sequence[str], hosts: Sequence[str]) -> None:
    if missing := [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)} here")
    if os.geteuid() != 0:
        pytest.skip("network namespaces are root's to make")
    ends = [f"cz{os.getpid() % 10**6}{side}" for side in "ab"]
    commands = [["netns", "add", name] for name in names]
    commands.append(["link", "add", ends[0], "type", "veth", "peer", "name", ends[1]])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        commands.append(["link", "set", end, "netns", name])
        commands.append(["-n", name, "address", "add", f"{address}/24", "dev", end])
        commands += [["-n", name, "link", "set", each, "up"] for each in (end, "lo")]
    for command in commands:
        done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(command)}: {done.stderr.strip()}")
    for own in range(2):
        (HOSTS / names[own]).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {hosts[own]}", f"{ADDRESSES[1 - own]} {hosts[1 - own]}"]
        (HOSTS / names[own] / "hosts").write_text("\n".join(lines) + "\n")
