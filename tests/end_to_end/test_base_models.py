"""Going on from a BERT: with the real commands, from folders, runs and the hub; what cannot be meant is refused."""

import dataclasses
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_wiki
from support.base_models import swapped, write_bert
from support.commands import run_main
from support.marks import slow
from support.processes import Done
from support.shards import run as shard
from support.training import FEW, SAVES, Place, assert_ended, assert_refused, records, stopped_at, train
from support.transformers_models import change_config
from support.website import Site, downloads, publish_model, read_settings_anew
from transformers import AutoTokenizer

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.source import read_vocabulary
from pretraining import train as train_entry
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import FOLDER
from pretraining.config.overrides import load_recipe
from pretraining.huggingface.folders import read_folder

STILL = [*FEW, "--phases.0.learning_rate", "1e-30"]
"""a step of each phase that changes nothing"""

pytest_plugins = ["support.website"]


@pytest.fixture
def adapting(place: Place) -> Place:
    """A recipe that says nothing of the model."""
    text = place.recipe.read_text()
    recipe = place.folder / "adapt.toml"
    recipe.write_text(text[text.index("[precision]") :])
    return dataclasses.replace(place, recipe=recipe)


@pytest.fixture
def bert(place: Place) -> Path:
    """A BERT with the vocabulary of the data, fewer positions than BERT has, and wide layers of its own."""
    return write_bert(place.folder / "bert", place.data)


@pytest.mark.slow
def test_a_branch_has_the_base_model_of_its_run(adapting: Place, bert: Path) -> None:
    """And so the sizes, whatever became of the model's folder; its own recipe says both."""
    run = adapting.folder / "run"
    adapting.train(run, "--init", bert, *SAVES, ranks=1)
    shutil.rmtree(bert)
    checkpoint = run / FOLDER / "step-00000005"
    copy = shutil.copytree(checkpoint, adapting.folder / "copies" / checkpoint.name)
    again = dataclasses.replace(adapting, recipe=run / "recipe.toml")
    again.train("by its own recipe", "--branch", f"{run}@5", *SAVES, ranks=1)
    for branch in (f"{run}@5", f"{run}@5", copy):  # the second one goes on
        adapting.train("copied" if branch == copy else "branch", "--branch", branch, *SAVES, ranks=1)
    card = (adapting.folder / "branch" / "export" / "README.md").read_text()
    assert f"Its training began with the weights of {bert.name}. Its run is a branch of run after step 5." in card


def test_sizes_and_vocabulary_come_from_the_folder(adapting: Place, bert: Path) -> None:
    change_config(bert, initializer_range=0.03)
    assert f"begins with {bert}: 2 layers of 32, 229 pieces\n" in adapting.train("run", "--init", bert, ranks=1)
    run, export = adapting.folder / "run", adapting.folder / "run" / "export"
    recipe = load_recipe(run / "recipe.toml")
    assert recipe.base_model == str(bert)
    assert (recipe.model.layers, recipe.model.intermediate, recipe.model.positions) == (2, 48, 64)
    card = (export / "README.md").read_text()
    assert f"Its training began with the weights of {bert.name}." in card
    assert "base_model:" not in card
    assert '"initializer_range": 0.03' in (export / "config.json").read_text()
    before, after = (read_folder(folder)[1] for folder in (bert, export))
    assert all(float((before[name] - after[name]).abs().max()) < 0.05 for name in before)  # 8 small steps away


@pytest.mark.slow
def test_the_recipe_names_it_as_well_and_a_run_goes_on_without_it(adapting: Place, bert: Path) -> None:
    run, text = adapting.folder / "run", adapting.recipe.read_text()
    adapting.recipe.write_text(f'base_model = "{bert}"\n{text}')
    adapting.train(run, "--stop-after", "short", ranks=1)
    bert.rename(bert.with_name("moved"))
    said = adapting.train(run, ranks=1)
    assert "begins with" not in said
    assert "continues after step 5" in said
    assert [record["step"] for record in records(run)] == list(range(1, 9))
    assert f"weights of {bert.name}." in (run / "export" / "README.md").read_text()
    kept = (run / "recipe.toml").read_text()
    adapting.recipe.write_text(kept.replace(f'base_model = "{bert}"\n', ""))
    assert "trained already" in adapting.train(run, ranks=1), "its origin matters no more"
    assert (run / "recipe.toml").read_text() == kept


@pytest.mark.slow
def test_another_base_model_is_refused_where_a_run_is(adapting: Place, bert: Path, place: Place) -> None:
    """It keeps its own, by whatever path that is named; also where it has none, and where it is trained."""
    other = write_bert(place.folder / "other", place.data)
    for name, words, before in (("with", ["--init", bert], bert), ("without", [], "not set")):
        recipe = adapting if words else place
        recipe.train(name, *words, "--stop-after", "short", ranks=1)
        given = recipe.command(name, "--init", other, "--model.intermediate", "48" if words else "128")
        assert_refused(given, f"  base_model was {before}, now {other}\nundo these, or name a new folder\n")
    adapting.train("with", "--init", bert.parent / "." / "other" / ".." / bert.name, ranks=1)
    assert load_recipe(adapting.folder / "with" / "recipe.toml").base_model == str(bert)
    told = f"  base_model was {bert}, now {other}\nname a new folder\n"
    assert_refused(adapting.command("with", "--init", other), told)


def test_another_vocabulary_another_casing_and_another_size_are_refused(adapting: Place, place: Place) -> None:
    ours = read_vocabulary(place.data)
    other = write_bert(place.folder / "other", swapped(ours, 100, 200))
    pieces = f"piece 100 is {ours.pieces[200]!r} in {other} and {ours.pieces[100]!r} in the data"
    cure = f"make the data with shard.py --vocab {other}"
    assert_refused(adapting.command("run", "--init", other), f"--data {place.data}: {pieces}; {cure}")
    cased = write_bert(place.folder / "cased", WordPiece(ours.pieces, cased=True))
    message = f"the vocabulary of {cased} is WordPiece, cased, that of the data WordPiece, uncased"
    assert_refused(adapting.command("run", "--init", cased), message)
    wide = write_bert(place.folder / "wide", place.data, hidden=64)
    message = f"{place.recipe}: model.hidden = 32: {wide} has 64; leave it out"
    assert_refused(place.command("run", "--init", wide), message)
    assert not (place.folder / "run" / "recipe.toml").exists(), "nothing is trained"


@pytest.mark.usefixtures("leaves_group")
def test_the_plan_has_the_sizes(adapting: Place, bert: Path) -> None:
    assert "2 layers of 32" in run_main(train_entry.main, *adapting.command("run", "--init", bert, "--check"))
    assert_refused(adapting.command("run", "--check"), "or begin with a model that has them: --init FOLDER")


POSITIONS = "embeddings.position.weight"


@pytest.mark.parametrize("new", [slow("drawn"), "copied"])
def test_more_positions_begin_anew_as_the_phase_says(adapting: Place, new: str) -> None:
    """Those that the model had stay; of a model with 40 the second phase, of length 64, needs 24 more."""
    short = write_bert(adapting.folder / "short", adapting.data, positions=40)
    words = ["--model.positions", "64", "--phases.1.new_positions", new, *STILL]
    said = adapting.train("run", "--init", short, *words, ranks=1)
    assert "; anew: positions 40 to 63\n" in said
    before, after = (read_folder(folder)[1][POSITIONS] for folder in (short, adapting.folder / "run" / "export"))
    assert ("positions 40 to 63 begin as copies of those before them\n" in said) == (new == "copied")
    assert torch.equal(after[:40], before)
    assert torch.equal(after[40:], before[1:25]) == (new == "copied")
    fewer = adapting.command("fewer", "--init", adapting.folder / "run", "--model.positions", "40")
    assert_refused(fewer, "--model.positions = 40: ")


def test_positions_that_the_model_had_are_never_copied_over(adapting: Place, bert: Path) -> None:
    """Though no phase of this run has trained those that the second one needs, and its tokenizer uses fewer."""
    config = bert / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', '"model_max_length": 40'))
    said = adapting.train("run", "--init", bert, "--phases.1.new_positions", "copied", *STILL, ranks=1)
    assert "begin as copies" not in said
    before, after = (read_folder(folder)[1][POSITIONS] for folder in (bert, adapting.folder / "run" / "export"))
    assert torch.equal(before, after)


@pytest.mark.slow
def test_positions_that_a_run_never_trained_are_copied(adapting: Place, place: Place) -> None:
    """Also by way of a run that trained no more of them, but not those of a BERT that it began with."""
    short, copied = ["--stop-after", "short", *STILL], ["--phases.1.new_positions", "copied", *STILL]
    place.train("first", *short, ranks=1)
    adapting.train("second", "--init", place.folder / "first", *short, ranks=1)
    said = adapting.train("third", "--init", place.folder / "second", *copied, ranks=1)
    assert "positions 32 to 63 begin as copies of those before them\n" in said
    first, third = (load_checkpoint(place.folder / run)[1][POSITIONS] for run in ("first", "third"))
    assert torch.equal(third[:32], first[:32])
    assert torch.equal(third[32:63], first[1:32])


@pytest.mark.slow
def test_words_that_are_added_are_trained_and_exported(adapting: Place, bert: Path) -> None:
    """And are the base of another run."""
    wiki = write_wiki(adapting.folder / "wiki", documents=60, seed=7)
    text = "".join(path.read_text() for path in sorted(wiki.iterdir())).replace("river", "floodplain")
    (adapting.folder / "text.txt").write_text(text)
    data = adapting.folder / "longer"
    shard(adapting.folder / "text.txt", data, "--format", "text", "--vocab", str(bert), "--extend", "3")
    given = dataclasses.replace(adapting, data=data)
    (bert / "README.md").write_text("---\nlicense: mit\n---\n")
    said = given.train("run", "--init", bert, "--card.licence", "apache-2.0")
    assert "229 pieces; anew: 3 pieces, each the mean of those that it replaces\n" in said
    export = adapting.folder / "run" / "export"
    card = (export / "README.md").read_text()
    for told in ("| licence of bert, with which it began | mit |", "3 pieces were added", "`floodplain`"):
        assert told in card
    assert len(AutoTokenizer.from_pretrained(export)("floodplain", add_special_tokens=False).input_ids) == 1
    given.train("again", "--init", export.parent, *STILL, ranks=1)
    before, after = (load_checkpoint(adapting.folder / name)[1]["embeddings.word.weight"] for name in ("run", "again"))
    assert torch.equal(before, after)


def test_a_run_is_a_base_without_its_moments(adapting: Place, straight: Path) -> None:
    """All ranks check its weights together; in cards its checkpoints are called as it is."""
    run = stopped_at(straight, adapting.folder / "first", 1)
    checkpoint = run / FOLDER / "step-00000001"
    for moment in checkpoint.glob("exp_avg*"):
        moment.unlink()
    adapting.train("second", *STILL, "--init", checkpoint, ranks=1)
    card = (adapting.folder / "second" / "export" / "README.md").read_text()
    assert "began with the weights of first." in card
    before, after = (
        load_checkpoint(straight / "checkpoints/step-00000001")[1],
        load_checkpoint(adapting.folder / "second")[1],
    )
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    damaged = checkpoint / "weight-00001-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_ended(adapting.launch("third", "--init", checkpoint), 2, str(damaged))


def test_a_base_that_differs_between_ranks_is_an_error(adapting: Place, bert: Path) -> None:
    """As folders of the same name on the disks of two machines may."""
    trained = write_bert(adapting.folder / "1" / "bert", adapting.data)
    (adapting.folder / "0").mkdir()
    bert.rename(adapting.folder / "0" / "bert")
    config = trained / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', '"model_max_length": 40'))
    for told in ("the model bert: rank 1 differs from rank 0", "--init bert: no such folder on some machines"):
        going = adapting.launch("run", "--init", "bert", fault=partial(enter_own_folder, adapting.folder))
        assert_ended(going, 2, told)
        shutil.rmtree(trained, ignore_errors=True)


def enter_own_folder(folder: Path) -> None:
    """Lets a rank work in a folder that only it has."""
    os.chdir(folder / os.environ["RANK"])


def command(place: Place, name: str, init: str, ranks: int = 1) -> Done:
    """Trains in this folder, with this test's settings of the hub; returns what rank 0 says."""
    return train(place.command(name, *FEW, "--init", init), ranks, fault=partial(read_settings_anew, Path.cwd()))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_a_name_on_the_hub(adapting: Place, bert: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once for both ranks, kept in the cache, and named in the card; without the network from the cache. A
    folder of the same name comes before it."""
    (bert / "README.md").write_text("---\nlicense: mit\n---\n")
    publish_model(site, "owner/bert", bert)
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    done = command(adapting, "run", "owner/bert", ranks=2)
    assert done.code == 0, done.errors
    assert "begins with owner/bert: 2 layers of 32" in done.output
    assert [downloads(site, name) for name in ("model.safetensors", "config.json", "README.md")] == [1, 1, 1]
    asked = [request.path.endswith("/models/owner/bert/revision/main") for request in site.requests]
    assert sum(asked) == 1, "rank 0 finds the commit for all"
    run, again = adapting.folder / "run", adapting.folder / "again"
    adapting.train(again, "--init", run / "export", ranks=1)
    for folder in (run, again):
        assert "\nbase_model: owner/bert\n" in (folder / "export" / "README.md").read_text().split("---")[1]
    assert "| licence of owner/bert, with which it began | mit |" in (run / "export" / "README.md").read_text()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert command(adapting, "offline", "owner/bert").code == 0
    done = command(adapting, "other", "owner/other")
    assert done.code == 2
    assert "is not in the cache, and HF_HUB_OFFLINE forbids the network" in done.errors
    monkeypatch.delenv("HF_HUB_OFFLINE")
    Path("owner").mkdir()
    bert.rename("owner/bert")
    assert command(adapting, "by folder", "owner/bert").code == 0
    assert len(site.requests) == len(asked)


@pytest.mark.usefixtures("surroundings")
def test_a_name_that_is_none(adapting: Place) -> None:
    told = "error: --init my/own/bert: no such folder, and not the name of a model on the Hugging Face hub"
    assert told in command(adapting, "run", "my/own/bert").errors
