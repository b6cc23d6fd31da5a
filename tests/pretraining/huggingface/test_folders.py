"""Folders of transformers: read from every kind of file, written whole or not at all, every kind of damage named."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import assert_refusal
from support.transformers_models import PIECES, SHAPE, our_weights, same, their_model, with_old_names
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from data_prep.common.errors import DamageError, UserError
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining.huggingface import folders
from pretraining.huggingface.folders import (
    _read_file,
    read_encoder,
    read_folder,
    read_length,
    read_shape,
    replacing_folder,
    write_folder,
)
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


@pytest.fixture
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Lets caplog hear the warnings of transformers."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def write_bin(folder: Path) -> None:
    torch.save(with_old_names(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
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


@pytest.mark.parametrize(
    "write",
    [
        write_bin,
        lambda folder: write_parts(folder, "model.safetensors"),
        lambda folder: write_parts(folder, "pytorch_model.bin"),
        write_parts_of_transformers,
    ],
    ids=["bin", "parts", "bin in parts", "parts of transformers"],
)
def test_weights_are_read_from_every_kind_of_file(write: Callable[[Path], None], folder: Path) -> None:
    _, expected, _ = read_folder(folder)
    write(folder)
    assert same(read_folder(folder)[1], expected)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


class Hostile:
    """What runs a command where a pickle of it is loaded without care."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def in_bin(content: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content(folder), folder / "pytorch_model.bin")

    return change


def cut_bin(folder: Path) -> None:
    write_bin(folder)
    cut(folder / "pytorch_model.bin")


def in_parts(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        write_parts(folder, "model.safetensors")
        change(folder)

    return both


def point_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json: not a table"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: cut(folder / "model.safetensors"), r"safetensors: cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"safetensors: cannot be read"),
        (in_bin(lambda folder: {"x": Hostile(folder / "mark")}), "more than tensors, which is never executed"),
        (in_bin(lambda _: [torch.zeros(3)]), "not a dictionary of weights"),
        (in_bin(lambda _: {"bert.pooler.dense.bias": 3}), "not a dictionary of weights"),
        (cut_bin, r"pytorch_model\.bin: cannot be read"),
        (
            in_parts(lambda folder: (folder / "model-00002-of-00002.safetensors").unlink()),
            "No such file",
        ),
        (in_parts(lambda folder: cut(folder / "model-00002-of-00002.safetensors")), r"safetensors: cannot be read"),
        (
            in_parts(lambda folder: save_file({}, folder / "model-00002-of-00002.safetensors")),
            "does not hold what the index says",
        ),
        (in_parts(point_outside), "does not name files beside it"),
    ],
)
def test_damage_is_named(change: Callable[[Path], Any], message: str, folder: Path) -> None:
    change(folder)
    assert_refusal(message, read_folder, folder)
    assert not (folder / "mark").exists()


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("kind", [AutoModel, AutoModelForPreTraining, AutoModelForMaskedLM])
def test_transformers_loads_an_export(
    kind: Any, exported: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Newer versions list the heads that a class leaves out, in their own folders too; there is nothing else."""
    _, found = kind.from_pretrained(exported, output_loading_info=True)
    ours = [message.replace(str(exported), "") for message in caplog.messages]
    caplog.clear()
    _, wanted = kind.from_pretrained(folder, output_loading_info=True)
    theirs = [message.replace(str(folder), "") for message in caplog.messages]
    assert found == wanted
    assert [sorted(message.splitlines()) for message in ours] == [sorted(message.splitlines()) for message in theirs]
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]
    if kind is AutoModelForPreTraining:
        assert not any(found.values())
        assert not ours


@pytest.mark.usefixtures("listening")
def test_the_tokenizer_loads_in_silence(exported: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(exported)
    assert caplog.messages == []
    assert tokenizer("Ab c [MASK]")["input_ids"] == [PIECES.index(p) for p in "[CLS] a ##b c [MASK] [SEP]".split()]
    assert (tokenizer.model_max_length, tokenizer.mask_token) == (SHAPE.positions, "[MASK]")


@pytest.mark.parametrize(("said", "wanted"), [("16", 40), (0, 40), (1e30, 40), (40.0, 40), (7, 7), (None, 40)])
def test_a_length_that_no_tokenizer_means_is_that_of_the_positions(said: Any, wanted: int, exported: Path) -> None:
    (exported / "tokenizer_config.json").write_text(json.dumps({"model_max_length": said}))
    assert read_length(exported, SHAPE) == wanted
    (exported / "tokenizer_config.json").unlink()
    assert read_length(exported, SHAPE) == SHAPE.positions


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
    for read in (read_shape, read_folder, read_encoder):
        assert_refusal(r"config\.json: [\d,]+ weights, but the files .* have [\d,]+ bytes", read, folder)


def test_what_transformers_saves_anew_has_no_checksums(exported: Path, tmp_path: Path) -> None:
    AutoModelForPreTraining.from_pretrained(exported).save_pretrained(tmp_path / "again")
    (tmp_path / "again/vocab.txt").write_text("another\n")
    assert same(read_folder(tmp_path / "again")[1], our_weights())


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


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, UserError, OSError])
def test_an_interruption_leaves_the_old(interruption: type[BaseException], exported: Path, vocabulary: Path) -> None:
    with pytest.raises(UserError if interruption is OSError else interruption):
        renew(exported, vocabulary, interruption("stop"))
    assert same(read_folder(exported)[1], our_weights())
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


def test_a_full_disk_is_named(exported: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(folders, "write_weights", Mock(side_effect=full))
    assert_refusal(r"exported: cannot be written: No space left on device$", renew, exported, vocabulary)
    assert same(read_folder(exported)[1], our_weights())


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


WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a.weight": torch.ones(5, dtype=torch.bfloat16)}


def test_any_changed_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "vocab.txt").write_text("river\n")
    write_weights(WEIGHTS, path, ["vocab.txt", "task.json"])
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert_refusal(r"model\.safetensors: ", _read_file, path)
    path.write_bytes(content)
    assert all(torch.equal(weight, WEIGHTS[name]) for name, weight in _read_file(path).items())


def test_equal_weights_have_equal_bytes_which_others_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("river\n")
    for number in range(8):
        write_weights(WEIGHTS, tmp_path / str(number), ["vocab.txt"])
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    assert load_file(tmp_path / "0").keys() == WEIGHTS.keys()


def test_weights_may_take_the_place_of_the_file_that_they_are_a_view_of(tmp_path: Path) -> None:
    """A file that is written anew where it stands takes the memory away: the process ends by SIGBUS."""
    path = tmp_path / "model.safetensors"
    write_weights({"a": torch.arange(5000.0), "b": torch.ones(5000)}, path)
    write_weights({"a": load_file(path)["a"]}, path)
    assert torch.equal(load_file(path)["a"], torch.arange(5000.0))


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "pt", "sha256": "0" * 64}])
def test_files_of_others_are_read_as_they_are(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata=metadata)
    assert _read_file(tmp_path / "model.safetensors").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_mode_is_what_the_umask_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_weights(WEIGHTS, tmp_path / "a")
        save_tensors(WEIGHTS, tmp_path / "b")
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o666 & ~mask}


@pytest.mark.parametrize("name", ["", "a/b", "/etc/passwd"])
def test_a_header_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w", {"format": "pt", "cloze_files": f"{name}=0"})
    with pytest.raises(DamageError, match="no name of a file beside it"):
        read_weights(tmp_path / "w")
