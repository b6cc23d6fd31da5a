"""A real Slurm of a few nodes on this machine, each node in network, process and host-name namespaces of its own.

    with mini_slurm(folder) as slurm:
        job = slurm.submit(["--nodes=2", "job.slurm"])
        slurm.cut_power("node2")       # the machine is gone, and its cable says nothing
        slurm.switch_on("node2")
        slurm.wait(job, "COMPLETED")

The nodes hang on a bridge, slurmctld on its other side. Processors, memory and GPUs are pretended. It needs root and
Debian's packages of Slurm (`INSTALL`); elsewhere the tests are skipped, and say why.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.commands import wait_for
from support.processes import LAUNCHERS

from data_prep.common.supervision import end_with_parent

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
NETWORK = "10.249.8"
CONTROLLER = f"{NETWORK}.254"
PORT = 16817
"""where slurmctld listens, and below it nobody"""
BOOT = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts || exit 1
slurmd -D -N "$1" -f "$2/slurm.conf" & wait $!
"""
"""what a node does: the shell is its first process, and takes leave of those that slurmd leaves behind"""
CONF = """
ClusterName=mini
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
PlugStackConfig={folder}/plugstack.conf
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=75
KillWait=5
UnkillableStepTimeout=120
MinJobAge=86400
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class MiniSlurm:
    """The cluster as its user and the one who pulls its plugs see it."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names
        mark = f"{os.getpid()}"
        self._bridge = f"czb{mark}"
        self._ports = {name: f"cz{mark}p{number}" for number, name in enumerate(names, 1)}
        self._spaces = {name: f"cloze-{mark}-{name}" for name in names}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of somebody who is logged in."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "SBATCH_"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}

    def run(self, *command: str, where: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as that user, such as squeue."""
        return subprocess.run(
            command, cwd=where, env=self.environment(**variables), capture_output=True, text=True, timeout=60
        )

    def submit(self, words: Sequence[str], where: Path, variables: Mapping[str, str] | None = None) -> str:
        """The id of a job that these words of sbatch give."""
        done = self.run("sbatch", *words, where=where, **(variables or {}))
        assert done.returncode == 0, done.stderr
        return str(re.findall(r"\d+", done.stdout)[-1])

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "")

    def wait(self, job: str, *states: str, seconds: float = 180.0) -> str:
        """Waits until the job is in one of these states; a failure says what its log says.

        Slurm holds a job that it could not start on a node, such as one that is only just back, and drains a node on
        which it could not end a job while the cable was out, or where it finds that job when it starts it again. An
        administrator lets go of both.
        """
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            if state == "PENDING" and self.job(job).get("Reason") == "launch_failed_requeued_held":
                self.run("scontrol", "release", job)
            if state == "PENDING" and "DRAINED" in self.job(job).get("Reason", ""):
                self.resume_drained()
            over = state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
            if over or time.monotonic() > deadline:
                described = self.job(job)
                log = Path(described.get("StdOut", ""))
                text = log.read_text() if log.is_file() else ""
                raise AssertionError(f"job {job} is {state}, not {' or '.join(states)}: {described}\n{text}")
            time.sleep(0.1)
        return state

    def resume_drained(self) -> None:
        """Takes the nodes back that Slurm drained because a job on them would not end, or was still there."""
        for line in self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").stdout.splitlines():
            name, state = line.split()
            if state.startswith("drain"):
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")

    def idle(self) -> bool:
        """Whether every node is there and has nothing to do."""
        shown = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T").stdout.split()
        return shown == ["idle"] * len(self.names)

    def is_on(self, name: str) -> bool:
        return name in self._processes

    def cut_power(self, name: str) -> None:
        """Ends all that runs on a node, which takes leave of nobody: its cable is pulled first."""
        self.unplug(name)
        self._kill(name)

    def restart(self, name: str) -> None:
        """Ends all that runs on a node, its slurmd too, which is back before Slurm calls the node lost."""
        self._kill(name)
        self.switch_on(name)

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def switch_on(self, name: str) -> None:
        """Boots a node, whose cable is in."""
        self.plug(name)
        command = ["ip", "netns", "exec", self._spaces[name], "unshare", "--mount", "--uts", "--pid", "--fork"]
        command += ["--kill-child", "--mount-proc", "sh", "-c", BOOT, "boot", name, str(self.folder)]
        self._start(name, command)

    def unplug(self, name: str) -> None:
        """Takes the other side of a node's link down."""
        _ip("link", "set", self._ports[name], "down")

    def plug(self, name: str) -> None:
        _ip("link", "set", self._ports[name], "master", self._bridge)
        _ip("link", "set", self._ports[name], "up")

    @contextmanager
    def noticing_after(self, seconds: int) -> Iterator[None]:
        """Lets Slurm call a node lost after a silence of so many seconds; its default is 300, and here 75."""
        path = self.folder / "slurm.conf"
        usual = path.read_text()
        path.write_text(re.sub(r"(?<=SlurmdTimeout=)\d+", str(seconds), usual))
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            path.write_text(usual)
            self.run("scontrol", "reconfigure")

    def resume(self, name: str) -> None:
        """Does what an administrator does whose node was not heard of for a while: slurmctld would ask much later."""

        def heard() -> bool:
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
            return "*" not in self.run("sinfo", "-h", "-N", "-n", name, "-p", "gpu", "-o", "%T").stdout

        wait_for(heard, 60)

    def drop(self, name: str) -> None:
        """Drops a node's packets on their way, which neither side can see."""
        _ip("link", "set", self._ports[name], "nomaster")

    def processes(self, words: str) -> list[int]:
        """The processes on all nodes whose command line has these words."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if words in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(int(path.parent.name))
        return [number for number in found if number != os.getpid()]

    def start(self) -> None:
        self._write_files()
        self._lay_network()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "seed", "log")}
        options = [f"--{name if name == 'socket' else name + '-file'}={path}" for name, path in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", f"--key-file={key}", *options])
        wait_for(lambda: (self.folder / "munge.socket").exists(), 20)
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
        for name in self.names:
            self.switch_on(name)
        wait_for(self.idle, 30)

    def stop(self) -> None:
        """Ends what was started, the nodes first, and takes the network away."""
        for name in [*self.names, "slurmctld", "munged"]:
            if process := self._processes.pop(name, None):
                process.send_signal(signal.SIGKILL if name in self.names else signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": self.environment()}
            self._processes[name] = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **own)

    def _write_files(self) -> None:
        for name in ("state", "dev", *(f"{use}/{node}" for use in ("spool", "tmp") for node in self.names)):
            (self.folder / name).mkdir(parents=True)
        for number in range(8):
            os.mknod(self.folder / "dev" / f"nvidia{number}", 0o20666, os.makedev(1, 3))  # as /dev/null
        hosts = [f"{NETWORK}.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        devices = self.folder / "dev" / "nvidia[0-7]"
        (self.folder / "gres.conf").write_text(f"NodeName={','.join(self.names)} Name=gpu File={devices}\n")
        (self.folder / "plugstack.conf").touch()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which does nothing by itself
        each = f"NodeName={{}} NodeAddr={NETWORK}.{{}} CPUs=16 RealMemory=64000 Gres=gpu:8\n"
        nodes = "".join(each.format(name, number) for number, name in enumerate(self.names, 1))
        addresses = {"host": os.uname().nodename.partition(".")[0], "controller": CONTROLLER}
        conf = CONF.format(port=PORT, node_port=PORT + 1, folder=self.folder, nodes=nodes, **addresses)
        (self.folder / "slurm.conf").write_text(conf)

    def _lay_network(self) -> None:
        """A bridge with this side's address, and a cable from it to each node."""
        for old in Path("/sys/class/net").glob("czb*"):  # of tests that were killed
            if not Path(f"/proc/{old.name.removeprefix('czb')}").exists():
                _ip("link", "delete", old.name)
        _ip("link", "add", self._bridge, "address", "02:00:00:00:c1:02", "type", "bridge")  # else that of a port
        _ip("address", "add", f"{CONTROLLER}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for number, name in enumerate(self.names, 1):
            space, port = self._spaces[name], self._ports[name]
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", space, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", space, "link", "set", link, "up")
            self.plug(name)


@contextmanager
def mini_slurm(folder: Path, nodes: int = 2) -> Iterator[MiniSlurm]:
    """A cluster of so many nodes, which keeps all it writes in a folder that nobody has made yet."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)} here; Debian has them: {INSTALL}")
    if os.geteuid() != 0:
        pytest.skip("the namespaces of a small Slurm are root's to make")
    folder.mkdir(mode=0o755)
    slurm = MiniSlurm(folder, [f"node{number}" for number in range(1, nodes + 1)])
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")
