"""`parallel.same_bits`: a run has the same bits on any number of ranks, also one that goes on with others."""

import signal
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.faults import Capacity, kill_one_after
from support.marks import slow
from support.shards import CORPORA, make_three_corpora
from support.training import COMMAND, SAVES, Place, assert_ended, assert_refused, assert_well, launch, measured, train
from torch import Tensor

from pretraining.checkpoint.record import list_finished
from pretraining.model import cpu_kernels

SAME = """
--parallel.same-bits true --evaluation.every 3 --optimizer.clip 0.5 --logging.every 2
--phases.0.micro-batch 12 --phases.1.micro-batch 3
""".split()
"""Of three ranks, one has no micro-batch in the first phase, and one has two in the second."""
THREADS = ["--compute.threads", "1"]


def join_state(run: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint, each parameter in one piece, whatever rank had which part."""
    parts = defaultdict[str, dict[int, Tensor]](dict)
    for path in list_finished(run)[-1].glob("*.safetensors"):
        for name, value in load_file(path).items():
            parameter, _, start = name.rpartition(":")
            parts[f"{path.name.split('-')[0]} {parameter}"][int(start)] = value.view(-1)
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in parts.items()}


def assert_same_bits(run: Path, wanted: Path) -> None:
    """Weights, the state of the optimizer, and metrics."""
    ours, theirs = join_state(run), join_state(wanted)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert measured(run) == measured(wanted)
    assert (wanted / "export" / "model.safetensors").exists()
    for name in ("export", "averaged"):
        files = ([*each.glob(f"{name}/model.safetensors")] for each in (run, wanted))
        one, other = ([path.read_bytes() for path in found] for found in files)
        assert one == other


WAYS = {
    "adamw": [],
    "lamb bf16": ["--optimizer.name", "lamb", "--precision.dtype", "bf16"],
    "muon": ["--optimizer.name", "muon"],
    "adamw bf16": ["--precision.dtype", "bf16", "--checkpoints.average", "2"],
    "lamb": ["--optimizer.name", "lamb", "--compute.checkpoint-activations", "true"],
    "muon bf16": ["--optimizer.name", "muon", "--precision.dtype", "bf16"],
    "rtd": ["--objective.name", "rtd", "--model.architecture", "electra"],
    "two objectives": ["--phases.0.objective", "ltr", "--phases.1.objective", "rtl"],
    "plain operations": [],
}
CASES = [("adamw", 2), ("adamw", 3), ("lamb bf16", 3), ("muon", 3)]
CASES += [slow(way, ranks) for way in WAYS for ranks in (2, 3, 4) if (way, ranks) not in CASES]


class Runs:
    """The runs, each made when it is first asked for."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def make(self, way: str, ranks: int) -> Path:
        """Returns the run on so many ranks."""
        name = f"{way} on {ranks}"
        if not (self._place.folder / name).exists():
            fault = partial(cpu_kernels.allow, False) if way == "plain operations" else None
            said = self._place.train(name, *SAME, *THREADS, *WAYS[way], ranks=ranks, fault=fault)
            assert ("up to 1 x 12 a rank (1 of 3 ranks have no work)" in said) == (ranks == 3)
            assert ("up to 2 x 3 a rank\n" in said) == (ranks == 3)
        return self._place.folder / name


@pytest.fixture(scope="module")
def runs(shared: Place) -> Runs:
    return Runs(shared)


@pytest.mark.parametrize(("way", "ranks"), CASES)
def test_any_number_of_ranks_has_the_same_bits(runs: Runs, way: str, ranks: int) -> None:
    assert_same_bits(runs.make(way, ranks), runs.make(way, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["adamw", "lamb bf16", "muon bf16"])
def test_any_number_of_gpus_has_the_same_bits(shared: Place, way: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    how = [*SAME, *WAYS[way], "--parallel.device", "cuda", "--compute.deterministic", "true"]
    for ranks in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = shared.command(f"{way} on {ranks} GPUs", *how)
        subprocess.run([sys.executable, *torchrun, str(COMMAND), *words], check=True)
    assert_same_bits(shared.folder / f"{way} on 2 GPUs", shared.folder / f"{way} on 1 GPUs")


def test_a_run_whose_ranks_change_has_the_bits_of_one_whose_do_not(shared: Place, runs: Runs) -> None:
    """1, 2, 3 and 1 again, with kills between, also between two logged steps. Threads are those of the first start."""
    command = shared.command("changing", *SAME, *SAVES)
    for words, ranks, step in [(THREADS, 1, 2), ([], 2, 4), ([], 3, 6)]:
        victim = partial(kill_one_after, step, ranks - 1, 0.0)
        assert launch([*command, *words], ranks, fault=victim).wait()[ranks - 1].code == -signal.SIGKILL
    assert "continues after step" in assert_well(train(command, 1))
    assert_same_bits(shared.folder / "changing", runs.make("adamw", 1))


@pytest.mark.slow
def test_a_mixture_has_the_same_bits(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_three_corpora(tmp_path_factory.getbasetemp())
    mixture = ["--phases.0.mix", "{ wiki = 0.5, books = 0.3, code = 0.2 }", "--phases.1.mix", "{ wiki = 1.0 }"]
    words = [*SAME, *THREADS, *mixture, "--data", *(f"{name}={folder / name}" for name in CORPORA)]
    for ranks in (1, 2):
        shared.train(f"mixture on {ranks}", *words, ranks=ranks)
    assert_same_bits(shared.folder / "mixture on 2", shared.folder / "mixture on 1")


def test_a_run_begun_without_says_from_where_the_bits_are_the_same(shared: Place) -> None:
    command = shared.command("late", *SAME)
    first = [word if word != "true" else "false" for word in command]
    assert_well(train([*first, "--stop-after", "short"], 1))
    assert "the same on any number of ranks from step 5 on" in assert_well(train(command, 1))


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--parallel.zero", "2"], ["needs parallel.zero = 1; it is 2"]),
        (["--precision.dtype", "fp16"], ["not with precision.dtype"]),
        (["--parallel.offload", "optimizer"], ['not with parallel.offload = "optimizer"']),
        (["--parallel.tensor", "2"], ["not with parallel.tensor = 2; take 1"]),
        (["--phases.0.micro-batch", "7"], ["phases.0.batch = 24: does not divide by 1 rank x"]),
    ],
)
def test_what_would_give_other_bits_is_refused(shared: Place, words: list[str], messages: list[str]) -> None:
    assert_refused(shared.command("refused", *SAME, *words), *messages)


def test_a_micro_batch_that_was_found_is_kept_on_other_ranks(shared: Place) -> None:
    auto = [*SAME, *THREADS, "--phases.0.micro-batch", "auto", "--phases.1.micro-batch", "auto"]
    shared.train("found", *auto, ranks=1, fault=Capacity((4,)))
    command = shared.command("found on 2", *auto)
    assert_well(train([*command, "--stop-after", "short"], 1, fault=Capacity((4,))))
    short = launch(command, 2, fault=Capacity((3, 3))).wait()[0].errors
    assert short.startswith('warning: phases.1.micro_batch = "auto": 4 x 64 pieces do not fit into the ')
    assert "; give 3 and --parallel.same_bits false, or " in short
    assert "would fit" not in short
    assert "6 would fit, but parallel.same_bits keeps 4, of the first start" in train(command, 2)[0].errors
    assert_same_bits(shared.folder / "found on 2", shared.folder / "found")


def test_what_a_run_has_begun_with_is_kept(shared: Place) -> None:
    command = shared.command("kept", *SAME, *THREADS)
    assert_well(train([*command, "--stop-after", "short"], 1))
    for words, message in [
        (["--compute.threads", "2"], "threads of a rank was 1, now 2; give --compute.threads 1"),
        (["--precision.dtype", "bf16"], "precision.dtype was fp32, now bf16; give --precision.dtype fp32"),
        (["--phases.1.micro-batch", "4"], "phases.1.micro_batch was 3, now 4; give --phases.1.micro_batch 3"),
    ]:
        assert_refused([*command, *words], message)
    march = launch(command, 1, environment={"CXX": "g++ -march=x86-64-v2"})
    assert_ended(march, 2, "kernels was ")
