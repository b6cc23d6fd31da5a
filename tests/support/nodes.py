"""Two machines, made of network namespaces of this one: what each rank needs in order to be started on one of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

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
