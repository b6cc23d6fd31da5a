"""What only a GPU can show: the flash kernels, the model in bf16 on the device, and that the host never waits."""

import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from support import engine_steps
from support.attention import inputs
from support.operations import NONE
from support.optimizer_reference import NVIDIA, error, make_engine, reference, run_engine
from support.pretraining_reference import SMALL, mean_loss, random_batch
from torch import Tensor

from data_prep.common.launchers import World
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model import gpu_operations
from pretraining.model.attention import Padded
from pretraining.model.batch import Batch, PretrainingBatches
from pretraining.model.dropout import Dropout
from pretraining.model.gpu_layouts import Packed, has_flash
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.processes.group import connect, disconnect
from pretraining.processes.watchdog import Marks

pytestmark = pytest.mark.gpu
LENGTHS = [5, 70, 96, 17, 64, 1, 33]
HEADS, HIDDEN = 2, 128
SHAPE = replace(SMALL, hidden=HIDDEN, heads=HEADS)
"""Heads of 64, which the flash kernels take."""


def test_a_mark_counts_when_the_gpu_has_come_to_it() -> None:
    """The number is in the host's memory, where no thread has to ask the GPU for it."""
    marks = Marks(torch.device("cuda"))
    marks.add()
    torch.cuda.synchronize()  # the first one loads kernels, which may wait for the GPU
    torch.cuda._sleep(2 * 10**8)  # cycles: a tenth of a second at least
    marks.add()
    marks.add()
    assert marks.reached == 1
    torch.cuda.synchronize()
    assert marks.reached == 3


def needs_flash() -> None:
    if not has_flash(torch.empty(1, HIDDEN, device="cuda", dtype=torch.bfloat16), HEADS):
        pytest.skip("the flash kernels need compute capability 8.0")


def attended(layout: str, dtype: torch.dtype = torch.bfloat16, probability: float = 0.0) -> list[Tensor]:
    """What packed sequences attend to by the flash kernels, with their bias or on sums with it, or padded; and the
    gradients of queries, keys and values, and of the bias."""
    needs_flash()
    qkv, bias = (each.detach().cuda().requires_grad_() for each in inputs(sum(LENGTHS), HIDDEN, dtype))
    starts, dropout = random_batch(LENGTHS, 50).starts.cuda(), Dropout(probability, NONE.keys)
    packed = Packed(starts, max(LENGTHS))
    if layout == "sums":
        attends_sums = packed.attends_sums(qkv) or pytest.skip("Triton is not installed")
        out = attends_sums(qkv + bias.detach(), bias, HEADS, dropout)
    else:
        padded = Padded(starts, max(LENGTHS), sum(LENGTHS), False, None)
        out = (packed if layout == "packed" else padded).attend(qkv, bias, HEADS, dropout)
    return [each.float() for each in (out, *torch.autograd.grad(out.float().square().sum(), (qkv, bias)), qkv, bias)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_attention_over_each_sequence(dtype: torch.dtype) -> None:
    (ours, *our_slopes), (theirs, *their_slopes) = (attended(layout, dtype) for layout in ("packed", "padded"))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    for one, other in zip(our_slopes, their_slopes, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.02


def test_flash_attention_on_sums_is_that_which_adds_the_bias() -> None:
    """The same kernels on the same numbers; the gradient of the bias is summed in another order."""
    (ours, our_slope, our_sum, *_), (theirs, their_slope, their_sum, *_) = map(attended, ("sums", "packed"))
    assert torch.equal(ours, theirs)
    assert torch.equal(our_slope, their_slope)
    assert float((our_sum - their_sum).norm() / their_sum.norm()) < 0.01


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_dropout_goes_backward_through_the_same_mask(layout: str) -> None:
    """What comes out is linear in the values, so their gradient gives it back; one of another mask would not."""
    torch.manual_seed(3)
    out, slope, _, qkv, bias = attended(layout, probability=0.3)
    part = slice(2 * HIDDEN, None)
    values = (qkv + bias)[:, part]
    assert float((slope[:, part] * values).sum()) == pytest.approx(2 * float(out.square().sum()), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_host_never_waits_for_the_gpu(dtype: torch.dtype, recompute: bool) -> None:
    """From the batch in the host's memory to the gradients. The first batch may wait: it prepares libraries."""
    model = build_model(SHAPE, recompute).initialize(1).cuda().to(dtype)
    for seed in range(2):
        batch = random_batch(LENGTHS, SHAPE.vocabulary, seed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            mean_loss(model, batch.to("cuda")).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_deterministic_gives_the_same_bits_twice(dtype: str, optimizer: str) -> None:
    """In a process of its own: the library for matrix products reads its settings once."""
    done = subprocess.run(
        [sys.executable, engine_steps.__file__, "cuda", dtype, optimizer], capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_drop_what_one_drops(dtype: torch.dtype) -> None:
    """Of hidden states: each has some of the sequences, and a generator of its own."""
    shape = replace(SHAPE, attention_dropout=0.0)
    model = build_model(shape).initialize(1).cuda().to(dtype)
    model.dropout_seed = 5
    batch, found = random_batch(LENGTHS, shape.vocabulary), []
    for seed, each in enumerate((batch, *divided(batch, 3))):
        torch.manual_seed(seed)
        found.append(model.encode(each.to("cuda")).float())
    distance = (found[0] - torch.cat(found[1:])).norm() / found[0].norm()
    assert float(distance) < (1e-5 if dtype == torch.float32 else 1e-2)
    on_cpu = build_model(shape).initialize(1)
    on_cpu.dropout_seed = 5
    distance = (found[0].cpu() - on_cpu.encode(batch)).norm() / found[0].cpu().norm()
    assert float(distance) < (1e-4 if dtype == torch.float32 else 3e-2)


def divided(batch: Batch, sequences: int) -> list[Batch]:
    """So many sequences, and the others."""
    cut, found = int(batch.starts[sequences]), []
    for pieces, which in ((slice(cut), slice(sequences)), (slice(cut, None), slice(sequences, None))):
        ids, lengths = (batch.pieces[pieces], batch.segments[pieces], batch.positions[pieces]), batch.lengths[which]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=batch.starts.dtype)
        found.append(Batch(*ids, starts=starts, lengths=lengths, examples=batch.examples[which]))
    return found


LAMB = [("fp32", zero) for zero in range(4)] + [(dtype, zero) for dtype in ("bf16", "fp16") for zero in (1, 2, 3)]


@pytest.fixture
def one_rank() -> Iterator[None]:
    connect(World(), torch.device("cuda", 0))
    yield
    disconnect()


@pytest.mark.parametrize(("dtype", "zero"), LAMB)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.usefixtures("one_rank")
def test_lamb_is_lamb_on_one_process(dtype: str, zero: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forces are exact in bf16, nearly so in fp16, where the scale of the loss grows on the way."""
    if kernels == "torch":
        monkeypatch.setattr(gpu_operations, "usable", lambda *_: False)
    weights, ratios = run_engine(make_engine(dtype, zero, NVIDIA, device="cuda"))
    wanted, wanted_ratios = reference(1, NVIDIA)
    tolerance = 2**-10 if dtype == "fp16" else 1e-6
    assert error(weights, wanted) < tolerance
    assert ratios == pytest.approx(wanted_ratios, rel=max(tolerance, 2e-6))


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.usefixtures("one_rank")
def test_no_optimizer_takes_a_gradient_that_is_not_finite(name: str, zero: int) -> None:
    """And the host need not look."""
    engine_steps.assert_leaves_out(math.nan, torch.device("cuda", 0), name, zero)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.usefixtures("one_rank")
def test_lamb_with_the_optimizer_in_the_hosts_memory(zero: int) -> None:
    weights, _ = run_engine(make_engine("bf16", zero, NVIDIA, offload="optimizer", device="cuda"))
    assert error(weights, reference(1, NVIDIA)[0]) < 1e-6


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.usefixtures("one_rank")
def test_the_host_waits_once_in_a_step(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the norm of the gradient, however many micro-batches there are; otherwise it hands out work ahead."""
    device, batch = torch.device("cuda", 0), random_batch(LENGTHS, SHAPE.vocabulary)
    engine = Engine(build_model(SHAPE).initialize(1), EngineSettings(), device)
    batches = PretrainingBatches(
        (batch,) * micro_batches, micro_batches * len(LENGTHS), micro_batches * len(batch.labels)
    )
    for step in range(3):
        train_step(engine, batches, 1e-4, Seeds(step, step), MLM.loss)
    places: list[str] = []
    for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):  # of which PyTorch does not warn
        monkeypatch.setattr(owner, "synchronize", lambda *_: places.append("synchronize"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        train_step(engine, batches, 1e-4, Seeds(3, 3), MLM.loss)
        torch.cuda.set_sync_debug_mode("default")
    places += [f"{each.filename}:{each.lineno}" for each in warned if "synchronizing CUDA" in str(each.message)]
    engine.close()
    assert len(places) <= 1, places
