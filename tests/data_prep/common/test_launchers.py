"""Each launcher's environment."""

import pytest
from support.commands import assert_refusal

from data_prep.common import supervision
from data_prep.common.codes import Code
from data_prep.common.launchers import World, expand_tasks, find_world, first_node, missing_tasks


def variables(text: str) -> dict[str, str]:
    """Reads variables as a shell sets them."""
    return dict(word.split("=") for word in text.split())


TORCHRUN = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node7 MASTER_PORT=29400")
TORCHRUN["TORCHELASTIC_RUN_ID"] = "none"
DEEPSPEED = variables("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
# `sbatch -N2 -n4`, as Slurm 22.05 sets it, and `srun` in its script
BATCH_SCRIPT = variables("SLURM_JOB_ID=17 SLURM_JOB_NODELIST=node[003-004] SLURM_LOCALID=0 SLURM_NODEID=0")
BATCH_SCRIPT |= variables("SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=3,1")
STEP = BATCH_SCRIPT | variables("SLURM_PROCID=3 SLURM_NODEID=1 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=node[003-004]")
STEP |= variables("SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=3,1")
OPEN_MPI = variables("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1")
OPEN_MPI |= variables("OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=1 PMIX_NAMESPACE=prterun-vm-778@1")
MPICH = variables("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 MASTER_ADDR=node1")


def test_one_process_torchrun_and_deepspeed() -> None:
    assert find_world({}) == World(0, 1, 0, 1, launcher="plain")
    assert find_world({"MASTER_PORT": "29500", "OMP_NUM_THREADS": "4"}).size == 1
    assert find_world(TORCHRUN) == World(3, 4, 1, 2, "node7", 29400, "torchrun")
    assert find_world(DEEPSPEED) == World(1, 2, 1, 2, "127.0.0.1", 29500, "deepspeed")


def test_srun() -> None:
    found = find_world(STEP)
    assert found == World(3, 4, 0, 1, "node003", found.port, "srun")
    one = "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2"
    found = find_world(STEP | variables(one))  # on one node, which needs no name
    assert (found.local_size, found.address) == (2, "127.0.0.1")


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = {
        find_world({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4_000_000, 4_000_100)
        for step in range(16)
    }
    assert len(ports) == 1600
    assert all(20000 <= port < 30000 for port in ports)
    assert find_world({**STEP, "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    "more", ["", "SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=4"], ids=["batch script", "interactive step of salloc"]
)
def test_a_slurm_job_without_srun_waits_for_nobody(more: str) -> None:
    environment = BATCH_SCRIPT | variables(more)
    found = find_world(environment)
    assert (found.rank, found.size, found.launcher) == (0, 1, "plain")
    assert missing_tasks(environment, found) == 4
    assert missing_tasks(STEP, find_world(STEP)) == 0


def test_the_innermost_launcher_counts() -> None:
    assert find_world({**STEP, **TORCHRUN}).launcher == "torchrun"
    assert find_world({**STEP, **OPEN_MPI}) == find_world(OPEN_MPI)
    assert find_world({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}).launcher == "srun"


def test_mpirun() -> None:
    found = find_world(OPEN_MPI)
    assert found == World(1, 2, 1, 2, "127.0.0.1", found.port, "mpirun")
    assert found.port != find_world({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-779@1"}).port
    assert find_world(MPICH) == World(2, 4, 0, 2, "node1", find_world(MPICH).port, "mpirun")


def test_mpirun_on_several_machines_says_how_to_find_rank_0() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert_refusal(r"mpirun -x MASTER_ADDR=<host of rank 0> …", find_world, several)
    assert find_world({**several, "MASTER_ADDR": "node1"}).address == "node1"


@pytest.mark.parametrize(
    ("environment", "more", "message"),
    [
        ({}, "RANK=0", "WORLD_SIZE is not set"),
        ({}, "WORLD_SIZE=2", "RANK is not"),
        ({}, "RANK=0 WORLD_SIZE=2", "MASTER_ADDR"),
        (TORCHRUN, "LOCAL_WORLD_SIZE=", "LOCAL_WORLD_SIZE or LOCAL_SIZE is not set"),
        (TORCHRUN, "RANK=4", "rank 4 of 4, and 1 of 2 on this machine, cannot be"),
        (TORCHRUN, "LOCAL_RANK=2", "and 2 of 2 on this machine, cannot be"),
        (TORCHRUN, "LOCAL_WORLD_SIZE=8", "and 1 of 8 on this machine, cannot be"),
        (TORCHRUN, "RANK=one", "RANK='one' is no whole number"),
        ({}, "RANK=1 WORLD_SIZE=1", "rank 1 of 1, and 0 of 1"),
        ({}, "PMI_RANK=0 PMI_SIZE=2", "nor what says how many ranks"),
        (STEP, "SLURM_LOCALID=", "SLURM_LOCALID is not set"),
        ({}, "PMI_SIZE=abc", "^PMI_SIZE='abc'"),
        ({}, "WORLD_SIZE=abc", "^WORLD_SIZE='abc'"),
    ],
)
def test_what_cannot_be_is_refused(environment: dict[str, str], more: str, message: str) -> None:
    assert_refusal(message, find_world, environment | variables(more))


def test_the_first_node_of_a_list_and_tasks_per_node() -> None:
    lists = {"node1": "node1", "node[003-010,12]": "node003", "node[12],other": "node12", "a-1,b[2-3]": "a-1"}
    lists |= {"rack[1-2]node[07-09]": "rack1node07", "gpu.cluster.org": "gpu.cluster.org"}
    assert [*map(first_node, lists)] == [*lists.values()]
    assert expand_tasks("4(x2),3") == [4, 4, 3]
    assert expand_tasks("2") == [2]
    assert_refusal("not understood", expand_tasks, "many")


def test_preparation_names_a_variable_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "x")
    monkeypatch.setattr(supervision, "_fork", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        supervision.continue_in_child()
    assert ended.value.code == Code.CURE
    assert capsys.readouterr().err.startswith("error: OMPI_COMM_WORLD_RANK=")
