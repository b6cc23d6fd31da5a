"""The plan of a run: arithmetic, memory and hours, all faults of recipe and data together, and what --check says."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.commands import assert_refusal, refusal, run_main
from support.training import TAKE_WHAT_FITS, completing

from data_prep.shards import Manifest
from pretraining import devices, train
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.config.overrides import load_recipe, load_recipe_and_data
from pretraining.config.settings import Dtype
from pretraining.data.corpora import Corpora, CorpusFolder
from pretraining.data.order import BatchOrder, Order
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import configure_objective, count_step_flops, num_parameters
from pretraining.planning import amount
from pretraining.planning.amount import measure_sequences
from pretraining.planning.machines import make_target
from pretraining.planning.memory import Room, count_rank_parameters, plan_memory
from pretraining.planning.plan import Plan, Target, build_plan
from pretraining.planning.record import record_plan
from pretraining.planning.table import render_plan
from pretraining.training import preview

RECIPES = ROOT / "pretraining/recipes"
GPU = Room(80e9)
SMALL_BUCKETS = {"reduce_bucket_size": 0, "stage3_max_live_parameters": 0}
LENGTHS = {32: [20, 32, 32], 128: [60, 100, 128, 128], 512: [100, 300, 512]}


def entry(length: int, duplicate: int, validation: bool = False) -> dict[str, Any]:
    """What a manifest says of a set; duplicates differ in size."""
    sizes = LENGTHS[length] * (duplicate + 1)
    counts = {"examples": len(sizes), "pieces": sum(sizes), "masked": 15 * len(sizes), "random_next": 0}
    found = {"length": length, "duplicate": duplicate, "validation": validation, "shards": [], **counts}
    return {**found, "histogram": [sizes.count(size) for size in range(length + 1)]}


@pytest.fixture
def manifest() -> Manifest:
    sets = [entry(length, duplicate) for length in LENGTHS for duplicate in (0, 1)]
    sets += [entry(length, 0, validation=True) for length in LENGTHS]
    settings = {"lengths": list(LENGTHS), "max_predictions": [5, 20, 80], "mask_rate": 0.15, "pairs": "nsp"}
    known: dict[str, Any] = {"format": 1, "sets": sets, "files": [], "sources": [], "bytes": 0, "fingerprint": ""}
    known |= {"settings": settings, "vocabulary": {"size": 1000, "sha256": "", "cased": False}}
    known |= {"given_vocabulary": None, "corpus": {"documents": 1, "validation_documents": 0}}
    return Manifest(**known)


def plan(
    name: str, *, dtype: Dtype = "bf16", room: Room = GPU, manifest: Manifest | None = None, **options: Any
) -> Plan:
    ranks, path = 8 if "mini" not in name and "demo" not in name else 2, RECIPES / f"{name}.toml"
    recipe, corpora = load_recipe(path, completing(path), ranks=ranks), None
    if manifest is not None:
        corpora = Corpora.one(Path(), manifest)
    return build_plan(Target(recipe, corpora, dtype, room, ranks, **options))


def test_a_plan_out_of_proportion_says_which_share_of_the_steps_suits_so_much_text(manifest: Manifest) -> None:
    """That share makes some 40 epochs, and is warned of no more."""
    figures = []
    for each in manifest.figures:
        more = {name: 1000 * getattr(each, name) for name in ("examples", "pieces", "masked")}
        figures.append(each.model_copy(update={**more, "histogram": [1000 * count for count in each.histogram]}))
    manifest = manifest.model_copy(update={"figures": figures})
    recipe = load_recipe(RECIPES / "demo.toml", ["--phases.0.steps=90000", "--phases.1.steps=9000"])

    said = build_plan(Target(recipe, Corpora.one(Path(), manifest), "fp32", GPU, 1)).warning or ""
    [share] = re.findall(r"([\d.]+)% of the steps", said)
    fewer = [f"--phases.{number}.steps={int(steps * float(share) / 100)}" for number, steps in enumerate((90000, 9000))]
    suited = build_plan(
        Target(load_recipe(RECIPES / "demo.toml", fewer), Corpora.one(Path(), manifest), "fp32", GPU, 1)
    )
    assert suited.warning is None
    assert sum(phase.epochs or 0 for phase in suited.phases) == pytest.approx(40, rel=0.05)


def test_a_rate_that_moves_is_planned_for_every_phase_by_its_own_steps() -> None:
    moving = ["--objective.masks=dynamic", "--objective.rate=0.4", "--objective.last_rate=0.1"]
    recipe = load_recipe(RECIPES / "demo.toml", [*moving, "--phases.0.steps=90", "--phases.1.steps=11"])
    objective, behind = configure_objective(recipe.objective), 0
    for planned in build_plan(Target(recipe, None, "fp32", GPU, 1)).phases:
        assert planned.steps is not None
        order = BatchOrder(Order(0, ((1,),)), 1, past=behind, total=101)
        steps = [order.share_done(step) for step in range(int(planned.steps))]
        length, behind = planned.phase.length, behind + len(steps)
        counts = [objective.predictions(length, 0, done) for done in steps]
        assert planned.statistics.predictions == pytest.approx(sum(counts) / len(counts), abs=0.5)


def test_operations_on_real_text_follow_its_lengths(manifest: Manifest) -> None:
    shape = make_shape("tiny", 1000)
    statistics = measure_sequences(shape, 512, manifest)
    sizes = LENGTHS[512]
    assert (statistics.duplicates, statistics.examples) == (2, 4.5)
    assert (statistics.pieces, statistics.predictions) == pytest.approx((sum(sizes) / 3, 15))
    assert statistics.flops == pytest.approx(count_step_flops(shape, sizes, 45) / 3)


def test_arithmetic_of_the_phases(manifest: Manifest) -> None:
    """Hours are those of the matrix rate; data without pairs have a model without their head."""
    made = plan("bert_mini", manifest=manifest, flops_per_second=1e12)
    assert made.target.shape.vocabulary == 1000
    for planned in made.phases:
        assert planned.phase.batch == planned.micro_batch * planned.accumulation * made.target.ranks
        assert planned.steps == planned.phase.steps
        assert planned.sequences == planned.phase.batch * (planned.steps or 0)
        assert planned.pieces == pytest.approx((planned.sequences or 0) * planned.statistics.pieces)
        assert planned.epochs == pytest.approx((planned.sequences or 0) / planned.statistics.examples)
        operations = (planned.sequences or 0) * planned.statistics.flops
        assert planned.seconds == pytest.approx(operations / (made.target.ranks * 0.5e12))
    assert made.seconds == pytest.approx(sum(planned.seconds or 0 for planned in made.phases))
    assert plan("bert_mini", manifest=manifest).seconds is None
    settings = manifest.settings.model_copy(update={"pairs": "none"})
    alone = plan("bert_mini", manifest=manifest.model_copy(update={"settings": settings}), flops_per_second=1e12)
    assert alone.target.shape == made.target.shape.change_learning(pairs=False)
    assert alone.memories[0].optimizer < made.memories[0].optimizer
    assert (alone.seconds or 0) < (made.seconds or 0)
    assert 8 * 3600 < (plan("bert_large_lamb", flops_per_second=1.2e15).seconds or 0) < 12 * 3600


def test_steps_by_the_clock_follow_from_the_speed() -> None:
    assert plan("bert_large_budget").phases[0].steps is None
    [phase] = plan("bert_large_budget", flops_per_second=1e15).phases
    assert phase.seconds == 24 * 3600
    assert phase.steps == pytest.approx(8 * 0.5e15 * 24 * 3600 / (4096 * phase.statistics.flops))


def count_padded(made: Plan) -> int:
    """Parameters with the rows and biases that pad the vocabulary."""
    return num_parameters(made.target.shape) + (30528 - 30522) * (made.target.shape.hidden + 1)


@pytest.mark.parametrize(
    ("dtype", "whole", "divided"), [("bf16", 2 + 4, 12), ("fp16", 2 + 2 + 4, 12), ("fp32", 4 + 4, 12)]
)
def test_memory_is_so_many_bytes_a_parameter(dtype: Any, whole: int, divided: int) -> None:
    """And what the word embeddings' gradient takes twice, where no gradients of a micro-batch are kept. Without ZeRO in
    fp32 weights, gradients, their copy for a CUDA graph, two averages, and what is joined; in 16 bits the engine takes
    ZeRO 1."""
    made = plan("bert_base_adam", dtype=dtype)
    twice = {"bf16": 2 * 2, "fp16": 0, "fp32": 2 * 4}[dtype] * 30528 * 768
    stages = {each.zero: each.device for each in made.memories}
    assert stages[1] == pytest.approx((whole + divided / 8) * count_padded(made) + twice)
    assert stages.get(0) == (pytest.approx((4 + 4 + 4 + 8 + 4) * count_padded(made)) if dtype == "fp32" else None)
    exact = made.target.change_section("parallel", same_bits=True, zero=1)
    work = exact.recipe.phases[0], made.phases[0].statistics, 1, 1
    traffic = [target.find_work(*work)[1].gradient_bytes for target in (exact, made.target)]
    assert traffic == [8, 4]
    wider = exact.plan_memory().device - stages[1]  # sums of 8 bytes, and a share of them in fp32
    assert wider == pytest.approx(4 * (1 + 1 / 8) * count_rank_parameters(made.target.shape))


def test_zero_divides_what_it_says_among_the_ranks() -> None:
    """With small buckets and nothing kept whole, what is left is the parts."""
    shape = make_shape("large", 30528)
    count = num_parameters(shape)
    stages = [plan_memory(shape, "fp16", 8, zero, zero_options=SMALL_BUCKETS) for zero in (1, 2, 3)]
    assert [each.optimizer for each in stages] == pytest.approx([12 * count / 8] * 3)
    assert [each.gradients for each in stages] == pytest.approx([6 * count, 4 * count / 8, 4 * count / 8])
    assert [each.weights for each in stages] == pytest.approx([2 * count, 2 * count, 2 * count / 8])


def test_offload_moves_memory_to_the_host() -> None:
    shape = make_shape("large", 30522)
    for zero in range(4):
        moved, here = plan_memory(shape, "bf16", 8, zero, "all"), plan_memory(shape, "bf16", 8, zero)
        assert here.host == 0
        assert moved.device + moved.host == pytest.approx(here.device)
        assert (moved.host > 0) == (zero > 0)


DTYPES = st.sampled_from(["bf16", "fp16", "fp32"])


@settings(max_examples=50)
@given(st.sampled_from(sorted(BERT.sizes)), DTYPES, st.integers(0, 3), st.integers(0, 12))
def test_memory_falls_with_ranks_and_with_the_stage(size: str, dtype: Any, zero: int, power: int) -> None:
    """With small buckets; DeepSpeed's own take more than ZeRO 2 and 3 save of small models."""
    shape, ranks = make_shape(size, 30522), 2**power
    here = plan_memory(shape, dtype, ranks, zero, zero_options=SMALL_BUCKETS)
    assert plan_memory(shape, dtype, 2 * ranks, zero, zero_options=SMALL_BUCKETS).device <= here.device
    if zero > 1 and ranks > 1:
        stage_below = plan_memory(shape, dtype, ranks, zero - 1, zero_options=SMALL_BUCKETS)
        assert here.weights + here.optimizer <= stage_below.weights + stage_below.optimizer
        assert here.device <= stage_below.device + 12 * shape.hidden * shape.padded_vocabulary


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_that_can_be_read(path: Path, manifest: Manifest) -> None:
    for data, speed in ((None, None), (manifest, 1e12)):
        made, console = plan(path.stem, flops_per_second=speed, manifest=data), Console(file=io.StringIO(), width=160)
        console.print(render_plan(record_plan(made)))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{num_parameters(made.target.shape) / 1e6:,.1f}M parameters" in shown
        assert ("a vocabulary of " in shown) == (data is None)
        for planned in made.phases:
            about = "~" if planned.phase.micro_batch == "auto" else ""
            sizes = f"{about}{planned.micro_batch} x {about}{planned.accumulation} x {made.target.ranks}"
            assert f"{planned.phase.batch:,} = {sizes}" in shown
        assert ("an estimate for a GPU of 80 GB" in shown) == path.stem.startswith(TAKE_WHAT_FITS)
        stages = range(1, 3 if made.target.tensor > 1 else 4)  # ranks that share a model do without ZeRO 3
        assert all(f"ZeRO {zero}" in shown for zero in stages)
        assert "ZeRO 0" not in shown, "in 16 bits there is none"


def test_what_is_estimated_to_fit_follows_the_memory() -> None:
    """Every size is planned beside weights, gradients and the optimizer; on a CPU its pieces are bounded too, and the
    memory of the process is told beside that of the model."""
    for room in (Room(80e9), Room(80e9, on_cpu=True)):
        told = [note for note in plan("bert_mini", room=room).notes if "the process takes some 0.8 GB besides" in note]
        assert bool(told) == room.on_cpu
    wanted = {16e9: [64, 16], 40e9: [256, 64], 80e9: [512, 128], 141e9: [1024, 256]}
    for size, micro_batches in wanted.items():
        assert [each.micro_batch for each in plan("bert_large_lamb", room=Room(size)).phases] == micro_batches
    assert [each.micro_batch for each in plan("bert_large_lamb", room=Room(2.5e9)).phases] == [1, 1]
    assert [each.micro_batch for each in plan("bert_large_lamb", room=Room(200e9, on_cpu=True)).phases] == [32, 8]


def test_more_fits_where_activations_are_computed_again() -> None:
    room = Room(16e9)
    recipe = load_recipe(RECIPES / "bert_large_lamb.toml", ["--compute.checkpoint_activations", "true"])
    again = build_plan(Target(recipe, None, "bf16", room, 8))
    for planned, kept in zip(again.phases, plan("bert_large_lamb", room=room).phases, strict=True):
        assert planned.micro_batch >= 4 * kept.micro_batch


def test_what_is_read_of_each_corpus_is_told_and_which_is_read_too_often(manifest: Manifest) -> None:
    full = [each.model_copy(update={"histogram": [0] * each.length + [each.examples]}) for each in manifest.figures]
    both = {"code": manifest, "wiki": manifest.model_copy(update={"figures": full})}
    corpora = Corpora(tuple(CorpusFolder(name, Path(name), each) for name, each in both.items()))
    words = [f"--phases.{number}.mix={{ code = 0.5, wiki = 0.5 }}" for number in range(2)]
    words += [f"--phases.{number}.last_mix={{ code = 0.1, wiki = 0.9 }}" for number in range(2)]
    recipe = load_recipe(RECIPES / "demo.toml", [*words, "--phases.0.steps=90", "--phases.1.steps=9"])
    plan = build_plan(Target(recipe, corpora, "fp32", GPU, 1))
    lines = [line for line in plan.notes if line.startswith("phase ")]
    assert [line.split()[1] for line in lines] == [phase.name for phase in recipe.phases]
    for line, phase in zip(lines, recipe.phases, strict=True):
        short = 0.3 * corpora.parts[0].measure_pieces(phase.length)
        share = short / (short + 0.7 * phase.length)
        assert "wiki 70.0% of the sequences (from 50.0% to 90.0%)" in line
        assert f"code 30.0% of the sequences (from 50.0% to 10.0%), {share:.1%} of the pieces" in line
    assert re.match(r"the text of wiki is read [\d,]+ times, of code is read ", plan.warning or "")
    assert "% of the steps" in (plan.warning or ""), "no other corpus can take over"


def test_many_corpora_are_planned_by_the_costs_of_their_lengths(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus more adds no operations to count but those of a prediction, wherever the hours are asked for."""
    counted: list[int] = []

    def count(shape: Shape, lengths: list[int], predictions: float) -> float:
        counted.extend(lengths)
        return count_step_flops(shape, lengths, predictions)

    monkeypatch.setattr(amount, "count_step_flops", count)
    recipe, found = load_recipe(RECIPES / "demo.toml", ["--model.hidden=104"]), []
    for number in (1, 20):
        corpora = Corpora(tuple(CorpusFolder(f"c{each}", Path(f"c{each}"), manifest) for each in range(number)))
        found.append(build_plan(make_target(recipe, corpora, "h100-80", 1, 2)))
    assert [each.statistics.flops for each in found[0].phases] == pytest.approx(
        [each.statistics.flops for each in found[1].phases]
    )
    sizes = {size for length in LENGTHS for size in LENGTHS[length]} | {phase.length for phase in recipe.phases}
    assert sorted(counted) == sorted({*counted})
    assert {*counted} <= sizes


def test_all_faults_of_recipe_and_data_come_at_once(tmp_path: Path, manifest: Manifest) -> None:
    path = RECIPES / "bert_mini.toml"
    told = refusal(load_recipe_and_data, path, ["--model.heads", "3"], [tmp_path / "nothing"], ranks=3).splitlines()
    assert "--model.heads = 3: does not divide model.hidden = 256; 2 does" in told
    assert f"--data {tmp_path / 'nothing'}: no such folder" in told
    assert sum("does not divide by 3 ranks" in line for line in told) == 3
    assert_refusal(r"^--data .*: no manifest.json", load_recipe_and_data, path, [], [tmp_path])
    assert load_recipe_and_data(path)[1] is None
    (tmp_path / "manifest.json").write_text(json.dumps(manifest.as_json()))
    recipe, read = load_recipe_and_data(path, [], [tmp_path])
    assert (len(recipe.phases), read is None) == (3, False)
    words = ["--phases.0.length", "600", "--model.positions", "600"]
    told_length = r"length = 600: the data has 32, 128, 512; make it with shard\.py --lengths 32 128 512 600"
    assert_refusal(told_length, load_recipe_and_data, path, words, [tmp_path])


GIVEN = "--gpu v100-32 --ranks 8 --phases.0.micro_batch"
HUGE = "--gpu v100-32 --model.hidden 4096 --model.heads 64 --ranks 8"


def check(words: str, code: int = 0) -> str:
    return " ".join(run_main(train.main, "--check", "--recipe", "bert_large_lamb", *words.split(), code=code).split())


def test_hours_are_those_of_the_gpu_that_is_named_and_what_makes_them_long_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = check("--ranks 64 --gpu h100-80")
    assert "8 nodes of 8 h100-80" in text
    assert re.search(r"from \d+ [hm] \d+ [ms] to \d+ h \d+ m: published runs", text)
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(preview, "measure_flops", lambda *_: 1e11)
    assert "no fast bf16" in check("--ranks 1 --parallel.device cpu")


def test_what_does_not_fit_is_a_mistake_with_its_cures() -> None:
    text = check(HUGE, code=2)
    assert re.search(r"needs \d+\.\d GB a rank under ZeRO 1 with .*, and may take ..\.. of 32.0 GB; ", text)
    for cure in re.findall(r"(--\S+ \S+) fits", text):
        check(f"{HUGE} {cure}")  # what is said to fit does
    text = check(f"{GIVEN} 8192", code=2)
    assert text.endswith("; --phases.0.micro_batch auto fits"), "nothing else makes room for so many"
    check(f"{GIVEN} auto")
    text = check("--gpu h1000 --optimizer.nam x", code=2)
    faults = "--gpu h1000", "--optimizer.nam"
    assert [fault for fault in faults if f"{fault}: " not in text] == []
