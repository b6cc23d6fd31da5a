"""What cannot be in a recipe, its objective included: every mistake is named with its cure."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.training import PLAIN, Place, faults, write_plain

from data_prep.common.errors import UserError
from data_prep.shards import MANIFEST, Manifest
from data_prep.vocabulary.kinds.bytelevel import KIND
from pretraining import train
from pretraining.config.overrides import load_recipe, load_recipe_and_data
from pretraining.config.settings import Objective
from pretraining.objectives.declaration import configure_objective

SIZE = 'a whole number of at least 1 is needed, or "auto"'
STATIC = 'static masks are in the data already; take objective.masks = "dynamic", or make other data with shard.py …'
DECIDED = "the other sections of the recipe decide this; remove it"
SHARED = PLAIN.replace("steps = 100\n", "share = 0.9\n").replace("steps = 20", "share = 0.1")
ELECTRA, WSD = "--model.architecture electra --objective.name rtd", "--phases.0.decay wsd --phases.0."
DYNAMIC = "--objective.masks dynamic"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A recipe."""
    return write_plain(tmp_path)


def is_named(fault: str, expected: str) -> bool:
    """Whether a fault is the expected text, in which … stands for any words."""
    return re.fullmatch(re.escape(expected).replace("…", ".*"), fault) is not None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # what does not go together
        ("--model.heads 3", "--model.heads = 3: does not divide model.hidden = 128; 2 does"),
        ("--phases.0.length 1024", "--phases.0.length = 1024: the model has 512 … take 8 to 512, or other …"),
        ("--phases.0.decay wsd --phases.0.decay_steps 120", "--phases.0.decay_steps = 120: … and phases.1.steps); …"),
        ("--phases.0.decay_steps 12", '--phases.0.decay_steps = 12: means nothing with … or take "wsd"'),
        ("--phases.0.decay constant --phases.0.final 0.1", '--phases.0.final = 0.1: … = "constant"; remove it, …'),
        (f"{WSD}warmup 0.6 --phases.0.decay_steps 70", "--phases.0.warmup = 0.6: … = 70 exceed the whole …"),
        (f"{WSD}warmup 0.95", "--phases.0.warmup = 0.95: and the decay of wsd exceed the …"),
        ("--phases.0.warmup_steps 30 --phases.0.warmup 0.1", "--phases.0.warmup_steps = 30: … = 0.1 is given too; …"),
        ("--phases.0.decay wsd --phases.0.decay_from start", '--phases.0.decay_from = "start": … = "wsd"; …'),
        ("--phases.0.warmup_steps 120", "--phases.0.warmup_steps = 120: … (phases.0.steps and phases.1.steps); …"),
        ("--phases.1.power 2", "--phases.1.power = 2.0: … without a learning_rate … or give phases.1.learning_rate"),
        ("--phases.1.name one", '--phases.1.name = "one": phases.0.name is the same'),
        ("--phases []", "--phases: is missing: give at least one [[phases]] with name, length, … and learning_rate"),
        ("--phases.0.share 0.5", "--phases.0.share = 0.5: the recipe gives neither steps nor hours, so …"),
        ("--phases.0.batch 100", "--phases.0.batch = 100: … 1 rank x … = 16; take batch = 96"),
        ("--phases.0.micro_batch 0", f"--phases.0.micro_batch = 0: {SIZE}"),
        ("--phases.0.micro_batch largest", f'--phases.0.micro_batch = "largest": {SIZE}'),
        # the objective
        ("--objective ltr", '--objective = "ltr": a table is needed; did you mean objective.name?'),
        ("--objective.name mlmm", "--objective.name = \"mlmm\": should be …'mlm'…"),
        ("--objective.rate 0.3", f"--objective.rate = 0.3: {STATIC}"),
        (f"{DYNAMIC} --objective.split [0.8,0.1,0.2]", "--objective.split = …: the shares make 1.1; they must make 1"),
        (f"{DYNAMIC} --objective.rate 0", "--objective.rate = 0: should be greater than 0"),
        ("--objective.name rtd", '--objective.name = "rtd": "bert" has no head of replaced pieces, …'),
        (f"{ELECTRA} --objective.generator_share 1.5", "--objective.generator_share = 1.5: should be less than …"),
        (f"{ELECTRA} --objective.generator_share 0", "--objective.generator_share = 0: should be greater than …"),
        ("--objective.generator_layers 1", '--objective.generator_layers = 1: is for objective.name = "rtd"; …'),
        (f"{ELECTRA} {DYNAMIC} --objective.rate 1", "--objective.rate = 1: should be less than 1"),
        (f"{ELECTRA} --evaluation.pairs pairs.tsv", '--evaluation.pairs = "pairs.tsv": …'),
        # hardware
        ("--precision.dtype fp16 --parallel.device cpu", '--precision.dtype = "fp16": not on a CPU; take "bf16", …'),
        ("--parallel.offload optimizer --parallel.zero 0", "--parallel.offload = …: needs parallel.zero = 1; it is 0"),
        ("--parallel.offload all", '--parallel.offload = "all": needs parallel.zero = 3; it is 1'),
        ("--parallel.offload optimizer --parallel.device cpu", '--parallel.offload = …: a CPU … take "none"'),
        ("--precision.tf32 true", "--precision.tf32 = true: is no longer a setting; it is always false: …"),
        ("--data.allow_other", "--data = …: is no longer a setting; it is always allow_other = false: …"),
        # what ranks cannot share
        ("--parallel.tensor 2 --parallel.zero 3", "--parallel.tensor = 2: not with parallel.zero = 3, …"),
        ("--parallel.tensor 2 --model.heads 1", "--parallel.tensor = 2: does not divide model.heads = 1; take 1"),
        (f"--parallel.tensor 2 {ELECTRA}", '--parallel.tensor = 2: not with the objective "rtd", …'),
        ("--parallel.same_bits true --parallel.zero 2", "--parallel.same_bits = …: needs parallel.zero = 1; it is 2"),
        # DeepSpeed's own
        ("--deepspeed.train_batch_size 8", f"--deepspeed.train_batch_size = 8: {DECIDED}"),
        ("--deepspeed.zero_optimization.stage 2", f"--deepspeed.… = 2: {DECIDED}"),
        ("--deepspeed.zero_optimization.round_robin_gradients", f"--deepspeed.… = true: {DECIDED}"),
        ("--deepspeed.zero_optimization 2", "--deepspeed.zero_optimization = 2: a table is needed"),
        ("--deepspeed.wall_clock_break_down", "--deepspeed.… = true: unknown; … deepspeed.wall_clock_breakdown?"),
        # an optimizer's
        ("--optimizer.trust_all", "--optimizer.trust_all = true: is no longer a setting; it is always false: …"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_cure(plain: Path, words: str, expected: str) -> None:
    [fault] = faults(plain, *words.split())
    assert is_named(fault, expected)


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("--parallel.device cuda", "cpu", '--parallel.device = "cuda": no GPU … or look at nvidia-smi'),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_refused_before_training(plain: Path, words: str, device: Any, expected: str) -> None:
    """On the machine that trains; a plan may be made on another."""
    [fault] = faults(plain, *words.split(), device=device)
    assert is_named(fault, expected)
    load_recipe(plain, words.split())


@pytest.mark.parametrize(
    ("words", "known", "expected"),
    [
        ("", {"lengths": [64, 256]}, "FILE: phases.1.length = 512: the data has 64, 256; … 64 256 512, or add …"),
        ("", {"ranks": 8}, "FILE: phases.0.batch = 64: … 8 ranks x … = 16; take batch = 128"),
        ("", {"ranks": 3}, "FILE: phases.1.batch = 32: … 3 ranks x phases.1.micro_batch = 8; take batch = 24"),
        ("--parallel.same_bits true --hours 1", {}, "…same_bits = true: not by the clock (hours = 1); give steps"),
        ("--parallel.same_bits true --deepspeed.communication_data_type fp32", {}, "…: … sends integers; remove it"),
        ("--parallel.same_bits true", {"device": "cuda"}, "…: on a GPU it needs compute.deterministic = true"),
        ("--parallel.tensor 2", {"ranks": 3}, "--parallel.tensor = 2: … the ranks, 3; start a multiple of 2 …"),
    ],
)  # fmt: skip
def test_what_is_known_of_the_run_is_checked_too(plain: Path, words: str, known: dict[str, Any], expected: str) -> None:
    told = expected.replace("FILE", str(plain))
    assert any(is_named(fault, told) for fault in faults(plain, *words.split(), **known))


def test_a_batch_that_the_ranks_cannot_share_is_named_for_any_micro_batch(plain: Path) -> None:
    words = ["--phases.0.micro_batch", "auto", "--phases.1.micro_batch", "auto"]
    assert load_recipe(plain, words, ranks=16).phases[1].micro_batch == "auto"
    assert faults(plain, *words, ranks=3) == [
        f"{plain}: phases.0.batch = 64: does not divide by 3 ranks; take batch = 63",
        f"{plain}: phases.1.batch = 32: does not divide by 3 ranks; take batch = 30",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN.replace("learning_rate = 1e-3\n", ""), "phases.0.learning_rate: is missing: the highest learning rate"),
        (PLAIN.replace("batch = 64\n", ""), "phases.0.batch: is missing"),
        (PLAIN.replace("steps = 100\n", ""), "phases.0.steps: is missing: the … give --phases.0.steps"),
        (PLAIN.replace('name = "one"\n', ""), "phases.0.name: is missing"),
        (PLAIN.replace('size = "tiny"\n', ""), "model.size: is missing: one of tiny, … --init FOLDER"),
        (f"steps = 10\n{PLAIN}", "phases.0.steps = 100: the recipe gives steps, … --phases.N.steps …"),
        (f"hours = 1.0\n{SHARED}".replace("share = 0.1", ""), "phases.1.share: is missing: the recipe gives hours, …"),
        (f"steps = 4\n{SHARED}", "phases.1.share = 0.1: of 4 steps that is none; give more"),
        (f"steps = 10\n{SHARED}".replace("= 0.1", "= 0.2"), "phases.0.share = 0.9: … make 1.1; they must make 1"),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_much_is_named(plain: Path, text: str, expected: str) -> None:
    plain.write_text(text)
    assert any(is_named(fault, f"{plain}: {expected}") for fault in faults(plain))


def test_shares_divide_steps_and_hours_and_steps_do_not_go_by_the_clock(plain: Path) -> None:
    plain.write_text(f"steps = 1000\n{SHARED}")
    assert load_recipe(plain).phase_steps() == (900, 100)
    plain.write_text(SHARED)
    assert all("the recipe gives neither steps nor hours" in fault for fault in faults(plain))
    plain.write_text(f"hours = 1.0\n{SHARED}")
    [fault] = faults(plain, "--phases.0.warmup_steps", "5")
    assert is_named(fault, "--phases.0.warmup_steps = 5: the recipe goes by the clock … give phases.0.warmup, …")
    assert load_recipe(plain).phase_seconds() == (3240.0, 360.0)
    assert load_recipe(plain).phase_steps() is None


ANEW = ["--objective.masks", "dynamic"]
SHORT = ["--phases.0.length", "64", "--phases.1.length", "64"]


def test_a_rate_that_moves_needs_steps(plain: Path) -> None:
    words = [*ANEW, "--objective.last-rate", "0.15"]
    by_clock = ["--hours", "2", "--phases.0.share", "0.9", "--phases.1.share", "0.1"]
    assert load_recipe(plain, words).as_dict()["objective"]["last_rate"] == 0.15
    [fault] = faults(plain, *words, *by_clock)
    assert fault.startswith("--objective.last_rate = 0.15: moves with the steps of a run")
    load_recipe(plain, [*ANEW, "--objective.rate", "0.3", *by_clock])


def test_masks_of_whole_words_stay_static(place: Place) -> None:
    manifest, anew = Manifest.read(place.data), configure_objective(Objective.model_validate({"masks": "dynamic"}))
    for masking, wrong in (("token", False), ("whole-word", True)):
        settings = manifest.settings.model_copy(update={"masking": masking})
        found = [*anew.data_faults(manifest.model_copy(update={"settings": settings}))]
        assert [fault.partition(":")[0] for fault in found] == ['objective.masks = "dynamic"'] * wrong


def test_without_next_sentences_there_is_no_head_for_them(plain: Path, place: Place) -> None:
    for word, pairs in (("true", True), ("false", False)):
        recipe, corpora = load_recipe_and_data(plain, [*SHORT, "--objective.next_sentences", word], [place.data])
        assert corpora is not None
        assert recipe.shape(corpora.common).learns.pairs == pairs


def test_one_segment_reads_pairs_unless_the_model_learns_from_them(plain: Path, place: Place) -> None:
    one = [*SHORT, "--model.segments", "1"]
    for words in (["--objective.name", "ltr"], ["--objective.next_sentences", "false"]):
        recipe, corpora = load_recipe_and_data(plain, [*one, *words], [place.data])
        assert corpora is not None
        assert corpora.common.has_pairs
        assert not recipe.shape(corpora.common).learns.pairs
    for words in ([], ["--objective.name", "ltr", "--phases.1.objective", "mlm"]):
        with pytest.raises(UserError, match=r"^model\.segments = 1: the data has pairs, of two segments; take"):
            load_recipe_and_data(plain, [*one, *words], [place.data])


@pytest.mark.parametrize("mask", ["<s>", "<mask>"])
def test_masks_need_a_piece_of_their_own(mask: str, plain: Path, place: Place, tmp_path: Path) -> None:
    """GPT-2's vocabulary has one mark for everything, so that a model could not tell masks from separators."""
    for name, file in KIND.make_up(300, cased=True).list_contents().items():
        (tmp_path / name).write_bytes(file if isinstance(file, bytes) else file.encode())
    marks = {f"{name}_token": "<s>" for name in ("cls", "sep", "pad", "unk")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**marks, "mask_token": mask}))
    content = json.loads((place.data / MANIFEST).read_text())
    content["settings"] |= {"tokenizer": "bytelevel", "pairs": "none"}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    load_recipe_and_data(plain, [*SHORT, "--objective.name", "ltr"], [tmp_path])
    for words in ([], ["--objective.name", "ltr", "--phases.1.objective", "mlm"]):
        refuses = pytest.raises(UserError, match=r'^objective\.name = "mlm": needs a piece .* <s> stands for')
        with refuses if mask == "<s>" else nullcontext():
            load_recipe_and_data(plain, [*SHORT, *words], [tmp_path])


def test_a_plan_tells_of_the_objective(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ANEW, "--objective.rate", "0.3", "--objective.next_sentences", "false"]
    train.main(["--recipe", str(plain), "--check", "--logging.peak_flops", "1e12", *words])
    said = " ".join(capsys.readouterr().out.split())
    assert "- next sentences are left out: the model learns from masked pieces alone" in said
    assert "- masks are drawn anew in every epoch, a share of 0.3 of the pieces" in said
