"""What CHANGELOG promises: the shards, the documents, the run and the model that 1.0.0 has written are read.

tests/promised/v1 was made with 1.0.0 from the small text of conftest.write_wiki (40 documents in 1 file), by

    python data_prep/shard.py --docs text --out shards --lengths 32 --duplicates 1 --vocab-size 200 --validation 0.1
    python pretraining/train.py --recipe recipe.toml --data shards --out run

`run` is as a kill after step 2 would leave it, with the metrics of all 4 steps; `export` is the model at the end. These
files are never made anew: a later format gets a folder beside them.
"""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from support.shards import tree
from support.training import Place, records

from data_prep import shard, verify
from pretraining import export
from pretraining.checkpoint.models import StoredModel

WRITTEN = ROOT / "tests" / "promised" / "v1"


def test_shards_and_their_documents_are_read(tmp_path: Path) -> None:
    """Shards of the kept documents are the same again."""
    assert verify.main([str(WRITTEN / "shards")]) == 0
    words = "--lengths 32 --duplicates 1 --validation 0.1 --workers 1".split()
    assert shard.main(["--from", str(WRITTEN / "shards"), "--out", str(tmp_path / "again"), *words]) == 0
    before, after = tree(WRITTEN / "shards"), tree(tmp_path / "again")
    examples = [name for name in before if name.startswith("length-32")]
    assert len(examples) == 2
    assert {name: after[name] for name in examples} == {name: before[name] for name in examples}


def test_a_run_goes_on(tmp_path: Path) -> None:
    run = Path(shutil.copytree(WRITTEN / "run", tmp_path / "run"))
    expected = records(run)
    place = Place(WRITTEN / "shards", WRITTEN / "recipe.toml", tmp_path)
    assert "continues after step 2" in place.train("run", ranks=1)
    assert [line["step"] for line in records(run)] == [1, 2, 3, 4]
    assert "branch of run after step 2" in place.train("new", "--branch", WRITTEN / "run", ranks=1)
    for same in (run, tmp_path / "new"):
        for ours, theirs in zip(records(same), expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_exported_models_are_read(tmp_path: Path) -> None:
    model = StoredModel.open(str(WRITTEN / "export"))
    assert (model.shape.layers, model.shape.hidden, len(model.vocabulary.pieces)) == (1, 8, 200)
    assert export.main([str(WRITTEN / "export"), "--out", str(tmp_path / "again")]) == 0
    before, after = (folder / "model.safetensors" for folder in (WRITTEN / "export", tmp_path / "again"))
    assert after.read_bytes() == before.read_bytes()
