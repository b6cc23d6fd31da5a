"""Folders of transformers: read from every kind of file, written whole or not at all, every kind of damage named."""

import errno
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import assert_refusal
from support.transformers_models import PIECES, SHAPE, our_weights, same, their_model
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from data_prep.common.errors import DamageError, UserError
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining.huggingface import folders
from pretraining.huggingface.folders import _read_file, read_encoder, read_folder, replacing_folder, write_folder
from pretraining.huggingface.weights import read_weights, save_tensors, write_weights


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A folder with a vocabulary, as shard.py writes it."""
    WordPiece(PIECES, cased=False).write(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def exported(tmp_path: Path, vocabulary: Path) -> Path:
    """A folder that we wrote."""
    write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "a card\n")
    return tmp_path / "exported"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that transformers wrote."""
    their_model().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def write_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def write_parts(folder: Path, ending: str) -> None:
    """In two files with an index."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, _, end = ending.partition(".")
    places = {name: f"{stem}-0000{1 + number % 2}-of-00002.{end}" for number, name in enumerate(sorted(state))}
    for file in set(places.values()):
        part = {name: state[name] for name, place in places.items() if place == file}
        save_file(part, folder / file) if end == "safetensors" else torch.save(part, folder / file)
    (folder / f"{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_parts_of_transformers(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    their_model().save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


WEIGHTS, PARTS, BIN = "model.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"
KINDS: dict[str, Callable[[Path], None]] = {
    WEIGHTS: lambda _: None,
    BIN: write_bin,
    PARTS: partial(write_parts, ending=WEIGHTS),
    "bin in parts": partial(write_parts, ending=BIN),
    "parts of transformers": write_parts_of_transformers,
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_from_every_kind_of_file(kind: str, folder: Path) -> None:
    _, expected, _ = read_folder(folder)
    KINDS[kind](folder)
    assert same(read_folder(folder)[1], expected)


class Hostile:
    """What runs a command where a pickle of it is loaded without care."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def point_outside(path: Path) -> None:
    index = path.with_name("model.safetensors.index.json")
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (".", shutil.rmtree, "no such folder"),
        ("config.json", Path.unlink, "no config.json"),
        ("config.json", lambda path: path.write_text("{"), r"config\.json: cannot be read"),
        ("config.json", lambda path: path.write_text("[]"), r"config\.json: not a table"),
        (WEIGHTS, Path.unlink, "no weights"),
        (WEIGHTS, cut, r"safetensors: cannot be read"),
        (WEIGHTS, lambda path: path.write_bytes(b""), r"safetensors: cannot be read"),
        (BIN, lambda path: torch.save({"x": Hostile(path.with_name("mark"))}, path), "which is never executed"),
        (BIN, partial(torch.save, [torch.zeros(3)]), "not a dictionary of weights"),
        (BIN, partial(torch.save, {"bert.pooler.dense.bias": 3}), "not a dictionary of weights"),
        (BIN, cut, r"pytorch_model\.bin: cannot be read"),
        (PARTS, Path.unlink, "No such file"),
        (PARTS, cut, r"safetensors: cannot be read"),
        (PARTS, partial(save_file, {}), "does not hold what the index says"),
        (PARTS, point_outside, "does not name files beside it"),
    ],
)
def test_damage_is_named(file: str, damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    KINDS.get(file, KINDS[WEIGHTS])(folder)
    damage(folder / file)
    assert_refusal(message, read_folder, folder)
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForMaskedLM])
def test_transformers_loads_an_export(kind: Any, exported: Path, folder: Path) -> None:
    """It leaves out the heads that a class lacks, as in its own folders; there is nothing else."""
    found, wanted = (kind.from_pretrained(each, output_loading_info=True)[1] for each in (exported, folder))
    assert found == wanted
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]


def test_the_tokenizer_loads_in_silence(
    exported: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(exported)
    assert caplog.messages == []
    assert tokenizer("Ab c [MASK]")["input_ids"] == [PIECES.index(p) for p in "[CLS] a ##b c [MASK] [SEP]".split()]
    assert (tokenizer.model_max_length, tokenizer.mask_token) == (SHAPE.positions, "[MASK]")


@pytest.mark.parametrize(("said", "wanted"), [("16", 40), (0, 40), (1e30, 40), (40.0, 40), (7, 7), (None, 40)])
def test_a_length_that_no_tokenizer_means_is_that_of_the_positions(said: Any, wanted: int, exported: Path) -> None:
    (exported / "tokenizer_config.json").write_text(json.dumps({"model_max_length": said}))
    assert folders.read_length(exported, SHAPE) == wanted
    (exported / "tokenizer_config.json").unlink()
    assert folders.read_length(exported, SHAPE) == SHAPE.positions


def test_a_change_of_any_file_beside_the_weights_is_named(exported: Path) -> None:
    """People may edit the model card and modules.json; a folder without another file says so where that is needed."""
    for path in sorted(path for path in exported.iterdir() if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        if path.name in ("README.md", "modules.json"):
            read_folder(exported)
        elif path.name in ("config.json", "tokenizer_config.json"):  # as people name labels by hand
            with pytest.warns(UserWarning, match=rf"{path.name}: its SHA-256 is not"):
                read_folder(exported)
        else:
            assert_refusal(rf"{path.name}: ", read_folder, exported)
        path.write_bytes(content)
    (exported / "vocab.txt").unlink()
    read_folder(exported)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_named(value: float, folder: Path) -> None:
    name = "bert.encoder.layer.1.attention.self.key.bias"
    state = load_file(folder / "model.safetensors")
    state[name][3] = value
    save_file(state, folder / "model.safetensors")
    for read in (read_folder, read_encoder):
        assert_refusal(f"{folder}: {name} has values that are no numbers", read, folder)


@pytest.mark.parametrize("size", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_sizes_that_the_weights_cannot_have_are_refused_at_once(size: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, size: 10**18}))
    for read in (folders.read_shape, read_folder, read_encoder):
        assert_refusal(r"config\.json: [\d,]+ weights, but the files .* have [\d,]+ bytes", read, folder)


def test_the_vocabulary_of_an_export_serves_the_next(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "again", SHAPE, our_weights(), exported, "a card\n")
    for path in exported.glob("*.*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def renew(folder: Path, vocabulary: Path, fault: BaseException | None = None) -> None:
    """Writes other weights into a folder, as an export does; a fault comes when they are there."""
    with replacing_folder(folder) as unfinished:
        write_folder(unfinished, SHAPE, our_weights(1), vocabulary, "")
        assert same(read_folder(unfinished)[1], our_weights(1))
        if fault is not None:
            raise fault


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (KeyboardInterrupt("stop"), (KeyboardInterrupt, "stop")),
        (UserError("stop"), (UserError, "stop")),
        (FULL, (UserError, "exported: cannot be written: No space left on device$")),
    ],
    ids=["interrupted", "refused", "full disk"],
)
def test_what_fails_leaves_the_old(
    fault: BaseException, told: tuple[Any, str], exported: Path, vocabulary: Path
) -> None:
    with pytest.raises(told[0], match=told[1]):
        renew(exported, vocabulary, fault)
    assert same(read_folder(exported)[1], our_weights())
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


def test_the_old_export_comes_back(exported: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proper = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".exported.tmp":
            raise OSError("no more names")
        return proper(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert_refusal("no more names", renew, exported, vocabulary)
    assert same(read_folder(exported)[1], our_weights())


def test_what_a_killed_run_left_is_cleared_away(exported: Path, vocabulary: Path) -> None:
    """Killed between the two renames: the old export waits under its other name, and comes back before anything."""
    exported.rename(exported.with_name(".exported.old"))
    unfinished = exported.with_name(".exported.tmp")
    unfinished.mkdir()
    (unfinished / ".config.json.tmp").write_text("{")
    with pytest.raises(KeyboardInterrupt), replacing_folder(exported):
        raise KeyboardInterrupt
    assert same(read_folder(exported)[1], our_weights())
    renew(exported, vocabulary)
    assert same(read_folder(exported)[1], our_weights(1))
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


@pytest.mark.parametrize("name", ["exported", ".exported.tmp", ".exported.old"])
def test_folders_of_others_are_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    refused = pytest.raises(UserError, match=rf"{name}: would be replaced, but holds thesis\.tex")
    with refused, replacing_folder(tmp_path / "exported"):
        pytest.fail("it was begun")
    assert (tmp_path / name / "thesis.tex").exists()


@pytest.mark.parametrize(("place", "said"), [("file", "a file; name a folder"), ("file/in", "cannot be written")])
def test_a_place_that_cannot_be_written_is_named(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=said), replacing_folder(tmp_path / place):
        pytest.fail("it was begun")


STATE = {"b": torch.arange(6.0).view(2, 3), "a.weight": torch.ones(5, dtype=torch.bfloat16)}


def test_any_changed_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    (tmp_path / "vocab.txt").write_text("river\n")
    write_weights(STATE, path, ["vocab.txt", "task.json"])
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert_refusal(r"model\.safetensors: ", _read_file, path)
    path.write_bytes(content)
    assert all(torch.equal(weight, STATE[name]) for name, weight in _read_file(path).items())


def test_equal_weights_have_equal_bytes_which_others_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("river\n")
    written = [tmp_path / str(number) for number in range(8)]
    for path in written:
        write_weights(STATE, path, ["vocab.txt"])
    assert len({path.read_bytes() for path in written}) == 1
    assert load_file(path).keys() == STATE.keys()


def test_weights_may_take_the_place_of_the_file_that_they_are_a_view_of(tmp_path: Path) -> None:
    """A file that is written anew where it stands takes the memory away: the process ends by SIGBUS."""
    path = tmp_path / WEIGHTS
    write_weights({"a": torch.arange(5000.0), "b": torch.ones(5000)}, path)
    write_weights({"a": load_file(path)["a"]}, path)
    assert torch.equal(load_file(path)["a"], torch.arange(5000.0))


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "pt", "sha256": "0" * 64}])
def test_files_of_others_are_read_as_they_are(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / WEIGHTS, metadata=metadata)
    assert _read_file(tmp_path / WEIGHTS).keys() == STATE.keys()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_mode_is_what_the_umask_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_weights(STATE, tmp_path / "a")
        save_tensors(STATE, tmp_path / "b")
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o666 & ~mask}


@pytest.mark.parametrize("name", ["", "a/b", "/etc/passwd"])
def test_a_header_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w", {"format": "pt", "cloze_files": f"{name}=0"})
    with pytest.raises(DamageError, match="no name of a file beside it"):
        read_weights(tmp_path / "w")
