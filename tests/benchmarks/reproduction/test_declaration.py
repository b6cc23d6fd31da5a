"""The declarations of the paper's tables are whole, have the paper's values and find their data."""

from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from support.commands import assert_refusal

from benchmarks.reproduction import commands, declaration
from benchmarks.reproduction.commands import find_files, find_missing, join_flags, list_cells, order_commands
from benchmarks.reproduction.declaration import ScaledTable, ScaleName, Table, list_tables, load_table
from data_prep.common.reading import Form, read_settings
from finetuning.settings import load_settings
from pretraining.config.overrides import load_recipe

SCALES: tuple[ScaleName, ...] = get_args(ScaleName)


@pytest.fixture(params=list_tables())
def tables(request: pytest.FixtureRequest) -> list[ScaledTable]:
    """A table at all scales."""
    return [load_table(request.param, scale) for scale in SCALES]


def test_a_table_names_only_what_there_is(tables: list[ScaledTable]) -> None:
    for each in tables:
        assert declaration.find_table_faults(each.table) == []
        assert {*each.table.columns, *each.table.beside} <= {*each.columns}
        assert {other for other in each.scale.stand_ins.values() if other != declaration.LEFT_OUT} <= {*each.columns}
        assert {*each.scale.tune_for} <= {*each.columns}
        assert all(each.table.find_row(row.model) in each.table.rows for row in each.table.rows if row.fresh)


def test_every_row_is_made_by_commands_that_are_named_once_and_understood(tables: list[ScaledTable]) -> None:
    for each in tables:
        cells, seen = list_cells(each), set[str]()
        steps = order_commands(cells)
        assert {cell.row for cell in cells} == {row.name for row in each.rows}
        assert len({step.name for step in steps}) == len({tuple(step.named_words) for step in steps}) == len(steps)
        for step in steps:
            assert {need.name for need in step.needs} <= seen
            assert "{" not in " ".join(step.build_words(lambda need: f"root/{need.name}", "data"))
            seen.add(step.name)
            if step.kind in ("train", "tune"):
                flags = {name: values for name, values in step.flags.items() if name not in FLAGS}
                recipe = str(step.flags.get("--recipe", ["glue"])[0])
                check_recipe(step.kind, recipe, tuple(map(str, join_flags(flags))))


FLAGS = {"--model", "--backward", "--task", "--version", "--seeds", "--from-scratch", "--train", "--data", "--recipe"}
"""Flags of commands, which are no values of a recipe."""


@cache
def check_recipe(kind: str, recipe: str, words: tuple[str, ...]) -> None:
    """Checks the values that a row gives to a recipe, and what two settings say together."""
    _ = load_recipe(Path(recipe), words, ranks=1) if kind == "train" else load_settings(recipe, words)


def test_checkpoints_lie_on_steps_that_are_saved(tables: list[ScaledTable]) -> None:
    for scale in (each.scale for each in tables):
        recipe = load_recipe(Path(scale.recipe), [*scale.train])
        assert sum(phase.steps or 0 for phase in recipe.phases) == scale.steps
        assert scale.keep_every % (scale.save_every or scale.keep_every) == 0
        places = [scale.find_checkpoint(number / 6) for number in range(1, 7)]
        assert places == [*sorted({*places[:-1]}), 0]
        assert all(place % scale.keep_every == 0 for place in places)


def test_gpt_is_as_large_as_base_and_fine_tuned_by_its_own_recipe_beside_bert_large() -> None:
    found, named = dict[str, set[tuple[str, ...]]](), []
    for table in ("table1", "table4"):
        tuned = [cell for cell in list_cells(load_table(table, "large")) if cell.command.kind == "tune"]
        named.append({cell.command.needs[0].name for cell in tuned if cell.row == "OpenAI GPT"})
        for cell in tuned if table == "table1" else ():
            steps = (cell.command.needs[0], cell.command)
            found.setdefault(cell.row, set()).add(tuple(str(step.flags["--recipe"][0]) for step in steps))
    assert found == {
        "BiLSTM+ELMo+Attn": {("bert_base_adam", "elmo")},
        "OpenAI GPT": {("bert_base_adam", "gpt")},
        "BERT large": {("bert_large_adam", "glue_large")},
    }
    assert named[0] == named[1], "tables 1 and 4 have the same"


PAPER = {
    ("table1", "BERT large"): (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
    ("table1", "BERT base"): (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
    ("table1", "OpenAI GPT"): (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0),
    ("table2", "BERT large"): (84.1, 90.9),
    ("table3", "BERT large"): (78.7, 81.9),
    ("table4", "BERT large"): (86.6,),
    ("table5", "BERT"): (84.4, 88.4, 86.7, 92.7, 88.5),
    ("table5", "LTR & No NSP"): (82.1, 84.3, 77.5, 92.1, 77.8),
    ("table6", "12-768-12"): (3.99, 84.4, 86.7, 92.9),
    ("table7", "features: concat of the last four"): (96.1,),
    ("table8", "0/20/80"): (83.7, 94.8, 94.6),
    ("figure5", "MLM 6/6"): (84.4,),
}


def test_the_papers_values() -> None:
    for (name, row), values in PAPER.items():
        table = load_table(name, "base").table
        assert tuple(table.find_row(row).paper[column] for column in table.columns) == values


@pytest.mark.parametrize("scale", ["tiny", "base", "large"])
def test_tables_share_the_runs_that_are_the_same(scale: str) -> None:
    """The base row of table 5 is that of 6, 8 and figure 5, and their text is one."""
    runs = {}
    for name in ("table5", "table6", "table8", "figure5"):
        runs[name] = {step.name for step in order_commands(list_cells(load_table(name, scale)))}
    base = [name for name in runs["table5"] if name.startswith("train/base-seed-1")]
    assert len(base) == 1
    for names in runs.values():
        assert set(base) <= names
        assert len([name for name in names if name.startswith("shards/")]) == 1
    left = [name for name in runs["figure5"] & runs["table5"] if name.startswith("train/name-ltr")]
    assert len(left) == 1


def test_shares_divide_the_work_and_no_model_is_trained_twice() -> None:
    steps = order_commands(list_cells(load_table("table1", "tiny")))
    for shares in (1, 2, 3, 5):
        parts = commands.divide_commands(steps, shares)
        assert {step.name for part in parts for step in part} == {step.name for step in steps}
        for part in parts:
            names = [step.name for step in part]
            assert len(names) == len({*names})
            assert {need.name for step in part for need in step.needs} <= {*names}
        trained = [step.name for part in parts for step in part if step.kind == "train"]
        assert len(trained) == len({*trained})


def test_the_last_value_of_a_flag_counts_in_the_place_of_the_first() -> None:
    assert join_flags(commands.split_flags("--a", "1", "--b", "x", "y", "--a", "2")) == ["--a", "2", "--b", "x", "y"]


def test_a_chain_of_rows_is_compared_link_by_link() -> None:
    claim = declaration.Claim(text="", rows=("c", "b", "a"), columns=("x",))
    assert [*claim.list_pairs(["a", "b", "c"])] == [("c", "b"), ("b", "a")]
    assert [*claim.list_pairs(["a", "c"])] == [("c", "a")]
    assert [*claim.model_copy(update={"within": 1.0}).list_pairs(["a", "b", "c"])] == [("c", "b"), ("c", "a")]


def test_what_a_table_has_not_is_named() -> None:
    rows = (declaration.Row(name="a", paper={"y": 1.0}), declaration.Row(name="a", model="b"))
    claims = (declaration.Claim(text="c", rows=("a", "d"), columns=("z",)),)
    table = Table(title="", columns=("x",), rows=rows, claims=claims)
    assert sorted(declaration.find_table_faults(table)) == [
        "columns: y is named, but is no column",
        "columns: z is named, but is no column",
        "rows: b is named, but is no row",
        "rows: d is named, but is no row",
        "rows: two are called a",
    ]


def test_an_unknown_table_is_refused_and_a_wrong_file_told(tmp_path: Path) -> None:
    there = ", ".join([*(f"table{number}" for number in range(1, 9)), "figure5"])
    for name in ("table15", "table-5", "figure4"):
        assert_refusal(rf"^{name}: is not declared; there is {there}$", load_table, name, "demo")
    wrong = tmp_path / "table.toml"
    wrong.write_text('title = "x"\ncolums = []\nrows = [{ name = "a" }]\n')
    assert_refusal("colums", read_settings, Form(Table), wrong, find_faults=declaration.find_table_faults)


NEEDED = {
    "mnli": ["glue/MNLI/train.tsv", "glue/MNLI/dev_matched.tsv", "glue/MNLI/dev_mismatched.tsv"],
    "stsb": ["glue/STS-B/train.tsv", "glue/STS-B/dev.tsv"],
    "squad": ["squad/train-v1.1.json"],
    "squad2": ["squad/train-v2.0.json"],
    "swag": ["swag/train.csv", "swag/val.csv"],
    "ner": ["ner/train.txt", "ner/valid.txt"],
    "nerfeatures": ["ner/eng.train", "ner/eng.testa"],
    "blimp": ["pairs/blimp.jsonl.xz"],
}
"""What a column needs: SQuAD's commands hold out a part of what there is."""


@pytest.mark.parametrize("name", NEEDED)
def test_a_column_has_its_data_when_its_command_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path / "given"))
    column = load_table("table1", "base").columns[name]
    assert find_missing(column)
    for number, file in enumerate(NEEDED[name], 1):
        path = tmp_path / "given" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        assert bool(find_missing(column)) == (number < len(NEEDED[name]))
    assert sorted(find_files(column)) == sorted(NEEDED[name])


def test_a_lone_csv_serves_swag_as_it_serves_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path))
    (tmp_path / "swag").mkdir()
    (tmp_path / "swag" / "some.csv").write_text("x")
    assert not find_missing(load_table("table4", "base").columns["swag"])
