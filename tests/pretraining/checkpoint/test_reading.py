"""Checkpoints: what is written and read, which one a run goes on from, which are kept, and those that are refused."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.damage import FILES, change_number, flip, spoil_weight, truncate
from support.pretraining_reference import SMALL
from support.records import SCORES
from support.training import contents, stopped_at
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.launchers import World
from pretraining.checkpoint import record, writing
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.reading import find_newest_whole, load_checkpoint, restore_engine
from pretraining.checkpoint.record import DAMAGED, FOLDER, RECORD, CheckpointRecord, MadeBy, list_finished, write_record
from pretraining.checkpoint.state import FoundMicroBatch, RunRecord, RunState, Saved
from pretraining.checkpoint.writing import Snapshots, remove_old
from pretraining.config.settings import Checkpoints, Parallel, Precision, Recipe
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine, LossScaler
from pretraining.huggingface.model_card import DataSummary
from pretraining.huggingface.weights import save_tensors
from pretraining.mesh.mesh import Shares
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model, find_objective
from pretraining.optimizers.adamw import OPTIMIZER
from pretraining.processes.group import connect


def record_of(section: dict[str, Any], scaler: LossScaler | None = None) -> CheckpointRecord:
    """What a checkpoint says after step 7 of a tiny model, with this section of its caller."""
    return CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, scaler, MadeBy(1, 0, "fp32"), section)


def fill_with_zeros(path: Path) -> None:
    """Leaves a file as a crash of the machine does if only its size has reached the disk."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip, "missing": Path.unlink}
CASES = [*itertools.product(FILES, DAMAGES.values()), (RECORD, change_number), (RECORD, fill_with_zeros)]


@pytest.mark.parametrize(("file", "damage"), CASES)
@pytest.mark.usefixtures("alone")
def test_damage_is_named_and_left(straight: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    """Once it is repaired, the checkpoint counts again."""
    run = stopped_at(straight, tmp_path / "run", 6)
    before, newest = list_finished(run)[-2:]
    (tmp_path / "kept").write_bytes((newest / file).read_bytes())
    damage(newest / file)
    there, warnings = contents(newest), list[str]()
    assert find_newest_whole(run, warnings.append) == before
    [warning] = warnings
    assert str(newest / file) in warning
    assert f"{newest} is left as it is" in warning
    assert ("contains only zeros" in warning) == (damage is fill_with_zeros)
    marked = contents(newest)
    assert str(newest / file) in marked.pop(DAMAGED).decode()
    assert marked == there
    assert find_newest_whole(run, warnings.append) == before
    assert len(warnings) == 1, "it is told once"
    (tmp_path / "kept").rename(newest / file)
    (newest / DAMAGED).unlink()
    assert find_newest_whole(run, pytest.fail) == newest


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_no_number_is_named_by_all_readers(value: float, straight: Path, tmp_path: Path) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    name = spoil_weight(list_finished(run)[-1], value)
    for load in (load_checkpoint, lambda run: StoredModel.open(str(run)).read_weights()):
        with pytest.raises(UserError, match=rf"step-00000006: {name} has values that are no numbers"):
            load(run)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_was_being_replaced_is_put_back(straight: Path, tmp_path: Path) -> None:
    """A run that saves a step twice, with one checkpoint kept, may be killed when that has lost its name."""
    run = stopped_at(straight, tmp_path / "run", 1)
    [only] = list_finished(run)
    there, old = contents(only), only.with_name(only.name + ".old")
    only.rename(old)
    (run / FOLDER / (only.name + ".tmp")).mkdir()
    assert find_newest_whole(run, pytest.fail) == only
    assert contents(only) == there
    old.mkdir()
    assert find_newest_whole(run, pytest.fail) == only
    assert old.exists(), "it is not taken for the one that has the name"
    assert record.read_record(only).step == 1


@pytest.mark.parametrize("scaler", [{"cur_scale": 4096.0, "cur_iter": 7}, None])
def test_the_scale_of_the_loss_goes_on(tmp_path: Path, scaler: LossScaler | None) -> None:
    write_record(tmp_path, record_of({}, scaler))
    optimizer = SimpleNamespace(kind=OPTIMIZER)
    engine: Any = SimpleNamespace(flat_tensors=[], optimizer=optimizer, loss_scaler="its own", shares=Shares())
    restore_engine(tmp_path, engine)
    assert engine.loss_scaler == scaler


@pytest.mark.usefixtures("alone")
def test_a_new_folder_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert find_newest_whole(tmp_path, pytest.fail) is None
    (tmp_path / FOLDER / "step-00000001.tmp").mkdir(parents=True)
    assert find_newest_whole(tmp_path, pytest.fail) is None


PHASE = {"name": "a", "length": 32, "batch": 8, "micro_batch": "auto"}
RECIPE = Recipe.model_validate({"phases": [PHASE, {**PHASE, "name": "b", "length": 64}]})
SUMMARY = DataSummary({"wiki": 3}, 100, {"32": 5}, {"pairs": "nsp"}, "vocabulary", "fingerprint")
FOUND = {"a": FoundMicroBatch(4, {"model": {"layers": 2, "pairs": True}})}


@pytest.mark.parametrize("scores", [SCORES, replace(SCORES, learns={"masked_loss": 5.0}), None])
def test_what_is_written_is_read(scores: Any) -> None:
    seen: Any = {"examples_seen": 56, "pieces_seen": 500, "trained_length": 64, "begun_positions": 80}
    corpora = [{"wiki": {"first": 1, "last": 1, "stored": 32, "sequences": 9}}]
    state = RunState(1, 2, 3.5, 7, **seen, trained_segments=1, corpora=corpora)
    written = RunRecord(state, RECIPE, SUMMARY, scores, [1.0], FOUND, skips=[[0, 2, 1, "it leapt"]])
    assert RunRecord.from_checkpoint(record_of(written.as_json()), Path()) == written


OTHER_FORMATS = [({"format": version}, rf"\(format {version}, here \d+\)") for version in (None, 1, 99)]


@pytest.mark.parametrize(("other", "fault"), [*OTHER_FORMATS, ({}, ".*'causal'.*; go on with the")])
def test_what_another_version_wrote_is_not_damaged(tmp_path: Path, other: dict[str, Any], fault: str) -> None:
    """Its shape said `causal`, and its recipe had the objective as a word."""
    checkpoint = tmp_path / FOLDER / "step-00000007"
    checkpoint.mkdir(parents=True)
    write_record(checkpoint, record_of({}))
    content = json.loads((checkpoint / RECORD).read_text())
    sizes = {"layers": 1, "hidden": 8, "heads": 1, "intermediate": 8, "vocabulary": 9}
    content["shape"] = {**sizes, "objective": "mlm", "causal": False}
    content |= {"caller": {"recipe": {"objective": "mlm"}}, **other}
    content.pop(record.CHECKSUM)
    (checkpoint / RECORD).write_text(json.dumps({**content, record.CHECKSUM: record._checksum(content)}))
    with pytest.raises(UserError, match=fault) as caught:
        find_newest_whole(tmp_path, pytest.fail)
    assert not isinstance(caught.value, DamageError)
    assert record.is_finished(checkpoint)


@pytest.mark.parametrize(
    ("objective", "fault"),
    [
        ({"name": "gone"}, r"objective\.name = \"gone\": should be .*'mlm'"),
        ({"name": "mlm", "gone": 1}, r"objective\.gone: unknown; there is name, "),
    ],
)
def test_an_objective_that_is_gone_is_named_with_its_cure(tmp_path: Path, objective: Any, fault: str) -> None:
    """Also a setting of one."""
    section = RunRecord(RunState(), RECIPE, SUMMARY, None, []).as_json()
    section["recipe"]["objective"] = objective
    write_record(tmp_path, record_of(section))
    with pytest.raises(UserError, match=f"^{tmp_path}: the recipe of a checkpoint is none of today: {fault}") as caught:
        Saved.read(tmp_path)
    assert "put back the file of an objective or optimizer that is gone" in str(caught.value)
    with pytest.raises(UserError, match=r'^objective\.name = "gone": there is .*mlm.*; put back .*/gone\.py'):
        find_objective(SMALL.change_learning(objective="gone"))


def test_a_run_with_a_setting_that_is_none_any_more_can_be_read(tmp_path: Path) -> None:
    """What it learned by is named, since it cannot go on; how it was done is forgotten."""
    section = RunRecord(RunState(), RECIPE, SUMMARY, None, []).as_json()
    section["recipe"]["optimizer"] |= {"trust_all": True, "normalize": False, "kernels": "torch"}
    section["recipe"]["precision"]["loss_scale_power"] = 12
    section["recipe"] |= {"data": {"allow_other": True}, "checkpoints": {"keep_every": 7}}
    write_record(tmp_path, record_of(section))
    [lost] = Saved.read(tmp_path).run.lost
    assert lost.startswith("optimizer.trust_all = true: is no longer a setting; it is always false: ")


def make_checkpoints(folder: Path, count: int) -> list[Path]:
    """Folders with records of nothing."""
    made = [folder / FOLDER / f"step-{step:08}" for step in range(1, count + 1)]
    for each in made:
        each.mkdir(parents=True)
        (each / RECORD).touch()
    return made


def test_a_damaged_checkpoint_is_never_removed(tmp_path: Path) -> None:
    _, second, third, *_ = make_checkpoints(tmp_path, 5)
    (second / DAMAGED).touch()
    (third / RECORD).unlink()
    remove_old(tmp_path, Checkpoints(keep=1))
    assert sorted(path.name[-1] for path in (tmp_path / FOLDER).iterdir()) == ["2", "3", "5"]


def test_a_file_that_reads_otherwise_than_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_with_a_wrong_bit(tensors: dict[str, Tensor], path: Path) -> None:
        save_tensors(tensors, path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    tensors = {"weight:0": torch.arange(5.0)}
    writing._write_file(tmp_path, "right.safetensors", tensors)
    monkeypatch.setattr(writing, "save_tensors", save_with_a_wrong_bit)
    with pytest.raises(DamageError, match=r"wrong\.safetensors"):
        writing._write_file(tmp_path, "wrong.safetensors", tensors)


@pytest.mark.usefixtures("leaves_group")
def test_a_snapshot_takes_one_copy_for_each_flat_tensor_and_has_every_weight() -> None:
    """However many parameters there are: a GPU gives many small copies slowly."""
    connect(World(), torch.device("cpu"))
    model = build_model(SMALL).initialize(1)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings = EngineSettings(precision=Precision(dtype="fp32"), parallel=Parallel(zero=1))
    engine = Engine(model, settings, torch.device("cpu"))
    snapshots = Snapshots()
    with torch.profiler.profile() as profile:
        found = snapshots.take(engine)
    engine.close()
    copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
    assert copies == len(found) * len(engine.flat_tensors)
    assert {*found} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(found["weight"][f"{name}:0"], weight.flatten()) for name, weight in weights.items())
    assert {*map(len, found.values())} == {len(weights)}
