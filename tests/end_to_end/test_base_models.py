"""Going on from a BERT: with the real commands, from folders, runs and the hub; what cannot be meant is refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_wiki
from support.base_models import swapped, write_bert
from support.hub import downloads, publish_model, read_settings_anew
from support.marks import slow
from support.processes import Done
from support.shards import run as shard
from support.training import FEW, SAVES, Place, assert_ended, assert_refused, assert_well, launch, records, train
from support.transformers_models import change_config
from support.website import Site
from transformers import AutoModelForMaskedLM, AutoTokenizer

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import FOLDER
from pretraining.config.overrides import load_recipe
from pretraining.huggingface.folders import read_folder

STILL = [*FEW, "--phases.0.learning_rate", "1e-30"]
"""a step of each phase that changes nothing"""

pytest_plugins = ["support.website_fixtures"]


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
    assert_well(train(adapting.command("run", "--init", bert, *SAVES), 1))
    shutil.rmtree(bert)
    for recipe in (adapting.recipe, adapting.folder / "run" / "recipe.toml"):
        name, branch = f"of {recipe.name}", ["--branch", f"{adapting.folder / 'run'}@5"]
        again = dataclasses.replace(adapting, recipe=recipe)
        for _ in range(2):
            assert_well(train(again.command(name, *branch, *SAVES), 1))
        checkpoint = adapting.folder / "run" / FOLDER / "step-00000005"
        copy = shutil.copytree(checkpoint, adapting.folder / "copies" / name / checkpoint.name)
        assert_well(train(again.command(f"{name}, copied", "--branch", copy, *SAVES), 1))
        card = (adapting.folder / name / "export" / "README.md").read_text()
        assert f"Its training began with the weights of {bert.name}. Its run is a branch of run after step 5." in card


def test_sizes_and_vocabulary_come_from_the_folder(adapting: Place, bert: Path) -> None:
    change_config(bert, initializer_range=0.03)
    said = assert_well(train(adapting.command("run", "--init", bert), 2))
    assert f"begins with {bert}: 2 layers of 32, 229 pieces\n" in said
    recipe = load_recipe(adapting.folder / "run" / "recipe.toml")
    assert recipe.base_model == str(bert)
    assert (recipe.model.layers, recipe.model.intermediate, recipe.model.positions) == (2, 48, 64)
    card = (adapting.folder / "run" / "export" / "README.md").read_text()
    assert f"Its training began with the weights of {bert.name}." in card
    assert "base_model:" not in card
    assert '"initializer_range": 0.03' in (adapting.folder / "run" / "export" / "config.json").read_text()
    before, after = (read_folder(folder)[1] for folder in (bert, adapting.folder / "run" / "export"))
    assert all(float((before[name] - after[name]).abs().max()) < 0.05 for name in before)  # 8 small steps away


@pytest.mark.slow
def test_the_recipe_names_it_as_well_and_a_run_goes_on_without_it(adapting: Place, bert: Path) -> None:
    text = adapting.recipe.read_text()
    adapting.recipe.write_text(f'base_model = "{bert}"\n{text}')
    assert_well(train(adapting.command("run", "--stop-after", "short"), 1))
    bert.rename(bert.with_name("moved"))
    said = assert_well(train(adapting.command("run"), 1))
    assert "begins with" not in said
    assert "continues after step 5" in said
    assert [record["step"] for record in records(adapting.folder / "run")] == list(range(1, 9))
    run = adapting.folder / "run"
    assert f"weights of {bert.name}." in (run / "export" / "README.md").read_text()
    kept = (run / "recipe.toml").read_text()
    adapting.recipe.write_text(kept.replace(f'base_model = "{bert}"\n', ""))
    assert "trained already" in assert_well(train(adapting.command("run"), 1)), "its origin matters no more"
    assert (run / "recipe.toml").read_text() == kept


@pytest.mark.slow
def test_another_base_model_is_refused_where_a_run_is(adapting: Place, bert: Path, place: Place) -> None:
    """It keeps its own, by whatever path that is named; also where it has none, and where it is trained."""
    other = write_bert(place.folder / "other", place.data)
    for name, words, before in (("with", ["--init", bert], bert), ("without", [], "not set")):
        recipe = adapting if words else place
        assert_well(train(recipe.command(name, *words, "--stop-after", "short"), 1))
        given = recipe.command(name, "--init", other, "--model.intermediate", "48" if words else "128")
        assert_refused(given, f"  base_model was {before}, now {other}\ngive what was, or name a new folder\n")
    assert_well(train(adapting.command("with", "--init", bert.parent / "." / "other" / ".." / bert.name), 1))
    assert load_recipe(adapting.folder / "with" / "recipe.toml").base_model == str(bert)
    told = f"  base_model was {bert}, now {other}\nname a new folder\n"
    assert_refused(adapting.command("with", "--init", other), told)


@pytest.mark.slow
def test_another_vocabulary_of_the_same_size_is_refused(adapting: Place, place: Place) -> None:
    """Also from a run and its checkpoints, whose weights are as scrambled by it."""
    ours = read_vocabulary(place.data)
    other = write_bert(place.folder / "other", swapped(ours, 100, 200))
    pieces = f"piece 100 is {ours.pieces[200]!r} in {other} and {ours.pieces[100]!r} in the data"
    cure = f"make the data with shard.py --vocab {other}"
    assert_refused(adapting.command("run", "--init", other), f"--data {place.data}: {pieces}; {cure}")
    wiki = write_wiki(place.folder / "wiki", documents=60)
    shard(wiki, place.folder / "data", "--vocab", str(other))
    given = dataclasses.replace(adapting, data=place.folder / "data")
    assert_well(train(given.command("before", "--init", other, *SAVES), 1))
    run = place.folder / "before"
    for source in (run, run / "checkpoints" / "step-00000005", run / "export"):
        assert_refused(adapting.command("run", "--init", source), f"piece 100 is {ours.pieces[200]!r} in {source}")


def test_another_casing_and_another_size_are_refused(adapting: Place, place: Place) -> None:
    cased = write_bert(place.folder / "cased", WordPiece(read_vocabulary(place.data).pieces, cased=True))
    message = f"the vocabulary of {cased} is WordPiece, cased, that of the data WordPiece, uncased"
    assert_refused(adapting.command("run", "--init", cased), message)
    wide = write_bert(place.folder / "wide", place.data, hidden=64)
    message = f"{place.recipe}: model.hidden = 32: {wide} has 64; leave it out"
    assert_refused(place.command("run", "--init", wide), message)
    assert not (place.folder / "run" / "recipe.toml").exists(), "nothing is trained"


def test_the_plan_has_the_sizes(adapting: Place, bert: Path) -> None:
    assert "2 layers of 32" in assert_well(train(adapting.command("run", "--init", bert, "--check"), 1))
    assert_refused(adapting.command("run", "--check"), "or begin with a model that has them: --init FOLDER")


@pytest.mark.parametrize("new", [slow("drawn"), "copied"])
def test_more_positions_begin_anew_as_the_phase_says(adapting: Place, new: str) -> None:
    """Those that the model had stay; of a model with 40 the second phase, of length 64, needs 24 more."""
    short = write_bert(adapting.folder / "short", adapting.data, positions=40)
    words = ["--model.positions", "64", "--phases.1.new_positions", new, *STILL]
    said = assert_well(train(adapting.command("run", "--init", short, *words), 1))
    assert "; anew: positions 40 to 63\n" in said
    before, after = (
        read_folder(folder)[1]["embeddings.position.weight"] for folder in (short, adapting.folder / "run" / "export")
    )
    assert ("positions 40 to 63 begin as copies of those before them\n" in said) == (new == "copied")
    assert torch.equal(after[:40], before)
    assert torch.equal(after[40:], before[1:25]) == (new == "copied")
    fewer = adapting.command("fewer", "--init", adapting.folder / "run", "--model.positions", "40")
    assert_refused(fewer, "--model.positions = 40: ")


@pytest.mark.parametrize("length", [slow(64), 40])
def test_positions_that_the_model_had_are_never_copied_over(adapting: Place, bert: Path, length: int) -> None:
    """Though no phase of this run has trained those that the second one needs, and its tokenizer may use fewer."""
    config = bert / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', f'"model_max_length": {length}'))
    words = ["--phases.1.new_positions", "copied", *STILL]
    said = assert_well(train(adapting.command("run", "--init", bert, *words), 1))
    assert "begin as copies" not in said
    name = "embeddings.position.weight"
    before, after = (read_folder(folder)[1][name] for folder in (bert, adapting.folder / "run" / "export"))
    assert torch.equal(before, after)


@pytest.mark.slow
def test_positions_that_a_run_never_trained_are_copied(adapting: Place, place: Place) -> None:
    """Also by way of a run that trained no more of them, but not those of a BERT that it began with."""
    short, copied = ["--stop-after", "short", *STILL], ["--phases.1.new_positions", "copied", *STILL]
    assert_well(train(place.command("first", *short), 1))
    assert_well(train(adapting.command("second", "--init", place.folder / "first", *short), 1))
    said = assert_well(train(adapting.command("third", "--init", place.folder / "second", *copied), 1))
    assert "positions 32 to 63 begin as copies of those before them\n" in said
    name = "embeddings.position.weight"
    first, third = (load_checkpoint(place.folder / run)[1][name] for run in ("first", "third"))
    assert torch.equal(third[:32], first[:32])
    assert torch.equal(third[32:63], first[1:32])


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        slow(64, ["--phases.0.length", "32", "--phases.1.length", "32"]),
        (48, ["--phases.0.length", "32", "--phases.1.length", "48"]),
    ],
)
def test_the_recipe_takes_other_lengths(place: Place, positions: int, words: list[str]) -> None:
    """As the documentation says for data of one length and for a BERT with fewer positions."""
    bert = write_bert(place.folder / "bert", place.data, positions=positions)
    few = "--phases.0.steps 2 --phases.1.steps 1 --phases.0.batch 4 --phases.1.batch 2 --evaluation.examples 8".split()
    adapting = dataclasses.replace(place, recipe=Path("adapt"))
    assert_well(train(adapting.command("run", "--init", bert, *words, *few), 1))


@pytest.mark.slow
def test_words_that_are_added_are_trained_and_exported(adapting: Place, bert: Path) -> None:
    """Old ids stay, new pieces learn; a run goes on from a run that was extended."""
    wiki = write_wiki(adapting.folder / "wiki", documents=60, seed=7)
    text = "".join(path.read_text() for path in sorted(wiki.iterdir())).replace("river", "floodplain")
    (adapting.folder / "text.txt").write_text(text)
    data = adapting.folder / "longer"
    shard(adapting.folder / "text.txt", data, "--format", "text", "--vocab", str(bert), "--extend", "3")
    assert "floodplain" in read_vocabulary(data).pieces[229:]
    given = dataclasses.replace(adapting, data=data)
    (bert / "README.md").write_text("---\nlicense: mit\n---\n")
    first, second = train(given.command("run", "--init", bert, "--card.licence", "apache-2.0"), 2)
    assert (first.code, second.code, first.errors + second.errors) == (0, 0, "")
    assert "229 pieces; anew: 3 pieces, each the mean of those that it replaces\n" in first.output
    export = adapting.folder / "run" / "export"
    card = (export / "README.md").read_text()
    assert "| licence of bert, with which it began | mit |" in card
    assert "3 pieces were added" in card
    assert "`floodplain`" in card
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (bert, export))
    assert new.convert_ids_to_tokens(list(range(229))) == old.convert_ids_to_tokens(list(range(229)))
    assert len(new("floodplain", add_special_tokens=False).input_ids) == 1
    model = AutoModelForMaskedLM.from_pretrained(export)
    assert model.get_input_embeddings().weight.shape == (232, 32)
    assert_well(train(given.command("again", "--init", export.parent, *STILL), 1))
    before, after = (load_checkpoint(adapting.folder / name)[1]["embeddings.word.weight"] for name in ("run", "again"))
    assert torch.equal(before, after)


def test_a_run_is_a_base_without_its_moments(adapting: Place, place: Place) -> None:
    """All ranks check its weights together; in cards its checkpoints and its export are called as it is."""
    assert_well(train(place.command("first", *FEW, "--stop-after", "short"), 2))
    checkpoint = place.folder / "first" / "checkpoints" / "step-00000001"
    for moment in checkpoint.glob("exp_avg*"):
        moment.unlink()
    assert_well(train(adapting.command("second", *FEW, "--init", checkpoint), 2))
    assert_well(train(adapting.command("third", *FEW, "--init", place.folder / "second" / "export"), 1))
    for run, base in (("second", "first"), ("third", "second")):
        assert f"began with the weights of {base}." in (place.folder / run / "export" / "README.md").read_text()
    damaged = checkpoint / "weight-00001-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused = assert_ended(launch(adapting.command("fourth", "--init", checkpoint), 2), 2)
    assert str(damaged) in refused


def test_a_base_that_differs_between_ranks_is_an_error(adapting: Place, bert: Path) -> None:
    """As folders of the same name on the disks of two machines may."""
    trained = write_bert(adapting.folder / "1" / "bert", adapting.data)
    (adapting.folder / "0").mkdir()
    bert.rename(adapting.folder / "0" / "bert")
    config = trained / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', '"model_max_length": 40'))
    done = launch(adapting.command("run", "--init", "bert"), 2, partial(enter_own_folder, adapting.folder))
    assert "the model bert: rank 1 differs from rank 0" in assert_ended(done, 2)
    shutil.rmtree(trained)
    done = launch(adapting.command("run", "--init", "bert"), 2, partial(enter_own_folder, adapting.folder))
    assert "--init bert: no such folder on some machines" in assert_ended(done, 2)


def enter_own_folder(folder: Path) -> None:
    """Lets a rank work in a folder that only it has."""
    os.chdir(folder / os.environ["RANK"])


def command(place: Place, name: str, init: str, ranks: int = 1) -> Done:
    """Trains in this folder, with this test's settings of the hub; returns what rank 0 says."""
    return train(place.command(name, *FEW, "--init", init), ranks, fault=partial(read_settings_anew, Path.cwd()))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_a_name_on_the_hub(adapting: Place, bert: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once for both ranks, kept in the cache, and named in the card; without the network from the cache."""
    (bert / "README.md").write_text("---\nlicense: mit\n---\n")
    publish_model(site, "owner/bert", bert)
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    done = command(adapting, "run", "owner/bert", ranks=2)
    assert done.code == 0, done.errors
    assert "begins with owner/bert: 2 layers of 32" in done.output
    assert downloads(site, "model.safetensors") == downloads(site, "config.json") == downloads(site, "README.md") == 1
    asked_once = [
        request.path for request in site.requests if request.path.endswith("/models/owner/bert/revision/main")
    ]
    assert len(asked_once) == 1, "rank 0 finds the commit for all"
    card = (adapting.folder / "run" / "export" / "README.md").read_text()
    assert "\nbase_model: owner/bert\n" in card.split("---")[1]
    assert "| licence of owner/bert, with which it began | mit |" in card
    asked = len(site.requests)
    run = adapting.folder / "run"
    assert_well(train(adapting.command("again", "--init", run / "export"), 1))
    assert_well(train(adapting.command("third", "--init", adapting.folder / "again"), 1))
    assert "\nbase_model: owner/bert\n" in (adapting.folder / "third" / "export" / "README.md").read_text()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert command(adapting, "offline", "owner/bert").code == 0
    assert len(site.requests) == asked
    done = command(adapting, "other", "owner/other")
    assert done.code == 2
    assert "is not in the cache, and HF_HUB_OFFLINE forbids the network" in done.errors


@pytest.mark.usefixtures("surroundings")
def test_names_that_are_none(adapting: Place, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown to the hub; no name at all; and a hub that does not answer."""
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    done = command(adapting, "run", "owner/bert")
    where = "error: --init owner/bert: no such folder here; as a name on the hub: "
    assert f"{where}{site.url}/owner/bert: no such model there" in done.errors
    done = command(adapting, "run", "my/own/bert")
    assert "--init my/own/bert: no such folder, and not the name of a model on the Hugging Face hub" in done.errors
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = command(adapting, "run", "owner/bert")
    assert f"{where}http://127.0.0.1:9/owner/bert: cannot be reached" in done.errors


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_older_weights_on_the_hub(adapting: Place, bert: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that PyTorch wrote, without a next-sentence head. A folder of the same name comes before the hub's."""
    old = adapting.folder / "old"
    bert.rename(old)
    torch.save(AutoModelForMaskedLM.from_pretrained(old).state_dict(), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    publish_model(site, "owner/old", old)
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    done = command(adapting, "run", "owner/old")
    assert "anew: pooler, next-sentence head\n" in done.output, done.errors
    asked = len(site.requests)
    Path("owner").mkdir()
    old.rename("owner/old")
    assert command(adapting, "run by folder", "owner/old").code == 0
    assert len(site.requests) == asked
