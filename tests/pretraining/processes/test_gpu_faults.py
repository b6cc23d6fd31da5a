"""A GPU that fails is a lost rank whose node the next start leaves out; a wrong program is not started again."""

from functools import partial
from pathlib import Path

import pytest
import torch
from support.processes import spawn, take_part

from data_prep.common.files import read_json
from data_prep.common.launchers import World
from pretraining.processes.ending import ENDED, Code
from pretraining.processes.gpu_faults import EXCLUDE, DeviceError, is_gpu_failure, note_gpu_failure
from pretraining.processes.watchdog import Watch

ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
ADDRESS = "CUDA error: an illegal memory access was encountered\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
ASSERTION = "CUDA error: device-side assert triggered"


def failed(run: Path, said: str, step: int, node: str, monkeypatch: pytest.MonkeyPatch) -> DeviceError:
    """What is made of an error of a GPU in a start of a run."""
    monkeypatch.setenv("SLURMD_NODENAME", node)
    found = note_gpu_failure(DeviceError(torch.AcceleratorError(said), step), run)
    assert isinstance(found, DeviceError)
    return found


@pytest.mark.parametrize("said", ["unspecified launch failure", "no CUDA-capable device is detected", ECC, ADDRESS])
def test_the_first_failure_excludes_its_node(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # as the watch and the end of the process judge one error
        found = failed(tmp_path, said, 7, "node3", monkeypatch)
        assert found.code == Code.RANK_LOST
        assert str(found).startswith(f"a GPU of node3 failed at step 7: {said.splitlines()[0]}\n")
    assert (tmp_path / EXCLUDE).read_text() == "node3\n"


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        # on other nodes at the same step; node3 may be broken, and no program makes errors of memory
        ([(ADDRESS, 7, 3), (ADDRESS, 8, 4), (ADDRESS, 7, 3), (ECC, 7, 5), (ADDRESS, 7, 6)], True),
        ([(ECC, 7, 3), (ADDRESS, 7, 4)], False),  # a broken GPU is no witness against the program
        ([(ADDRESS, 0, 3), (ADDRESS, 0, 4)], True),  # in fine-tuning, steps that nobody knows
    ],
)
def test_what_two_nodes_have_seen_is_the_programs(
    failures: list[tuple[str, int, int]], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job would leave out one node after another."""
    found = [failed(tmp_path, said, step, f"node{node}", monkeypatch) for said, step, node in failures]
    assert [each.code for each in found[:-1]] == [Code.RANK_LOST] * (len(found) - 1)
    assert found[-1].code == (Code.MISTAKE if ends else Code.RANK_LOST)
    assert ("before, a GPU of node3 failed" in str(found[-1])) == ends
    left_out = sorted({f"node{node}" for _, _, node in failures[: -1 if ends else None]})
    assert (tmp_path / EXCLUDE).read_text().split() == left_out


def test_what_is_no_failure_of_a_gpu_stays_as_it_is(tmp_path: Path) -> None:
    for error in (torch.AcceleratorError(ASSERTION), torch.OutOfMemoryError("out of memory"), ValueError(ECC)):
        assert not is_gpu_failure(error)
        assert note_gpu_failure(error, tmp_path) is error
    assert not list(tmp_path.iterdir())


def test_a_record_that_is_damaged_or_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "gpu-faults.jsonl").write_text('{"node": 3\n[]\n{"other": 1}\n')
    for run in (tmp_path, tmp_path / "missing", None):
        found = note_gpu_failure(torch.AcceleratorError(ADDRESS), run)
        assert isinstance(found, DeviceError)
        assert found.code == Code.RANK_LOST


def work_on_a_bad_gpu(run: Path, said: str, world: World) -> None:
    with Watch(world, every=0.2, run=run):
        if world.rank == world.size - 1:
            raise torch.AcceleratorError(said)
        torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("ranks", "said", "code"), [(1, ECC, Code.RANK_LOST), (2, ECC, Code.RANK_LOST), (2, ASSERTION, Code.MISTAKE)]
)
def test_all_ranks_end_for_it(ranks: int, said: str, code: Code, tmp_path: Path) -> None:
    done = spawn(ranks, partial(take_part, partial(work_on_a_bad_gpu, tmp_path, said), run=tmp_path))
    assert [rank.code for rank in done] == [code] * ranks, done
    assert said.splitlines()[0] in done[0].errors
    assert ("Traceback" in done[-1].errors) == (code == Code.MISTAKE)
    ended = read_json(tmp_path / ENDED)
    assert (ended["code"], ended["rank"]) == (code, ranks - 1)
    assert (tmp_path / EXCLUDE).exists() == (code == Code.RANK_LOST)
