"""The tasks of GLUE from small files in their exact formats, with their quirks; and the leaderboard's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.tasks import CUTTER, labels, laid_out, rows, saying

from data_prep.common.errors import UserError
from finetuning.files.splits import FOLDERS
from finetuning.run_glue import RunGlue
from finetuning.settings import FineTuning, GlueSettings, load_settings
from finetuning.tasks.glue import TASKS, TEST_ROWS, GlueTask, find_glue, open_glue
from finetuning.tasks.task import Setup

PAIRS = "index\tsentence1\tsentence2\tlabel\n"
MNLI_START = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
MNLI_START += "sentence2_parse\tsentence1\tsentence2"
MNLI_ROW = "{}\t31193\t31193n\tgov\t( a )\t( b )\t(ROOT (a))\t(ROOT (b))\t{}\t{}"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
STSB_ROW = "{}\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\t{}\t{}"
MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def mnli(split: str, *items: tuple[str, str, str]) -> str:
    """As the official files are: train has one column of single votes, dev has five, test has none."""
    votes = {"train": ["label1"], "dev": [f"label{number}" for number in range(1, 6)], "test": []}[split]
    end = [*votes, *(["gold_label"] if votes else [])]
    lines = ["\t".join([MNLI_START, *end])]
    for number, (first, second, label) in enumerate(items):
        values = ["neutral"] * len(votes) + ([label] if votes else [])
        lines.append("\t".join([MNLI_ROW.format(number, first, second), *values]))
    return "".join(f"{line}\n" for line in lines)


FILES = {
    "CoLA/train.tsv": 'gj04\t1\t\tOne "more.\ngj04\t0\t*\tThe more one.\n',
    "CoLA/dev.tsv": "gj04\t1\t\tDev.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tFirst.\n1\tSecond.\n",
    "SST-2/train.tsv": 'sentence\tlabel\nhide "new secretions \t0\nsaucy " \t1\n',
    "SST-2/dev.tsv": "sentence\tlabel\nfine\t1\n",
    "SST-2/test.tsv": "index\tsentence\n0\tone\n1\ttwo\n",
    "MRPC/train.tsv": f'{MRPC_HEADER}1\t702876\t702977\tHe said "yes.\tHe agreed.\n0\t1\t2\tA.\tB.\n',
    "MRPC/dev.tsv": f"{MRPC_HEADER}1\t3\t4\tC.\tD.\n",
    "MRPC/test.tsv": "\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t5\t6\tE.\tF.\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "133273\t1\t2\tWhy?\tHow?\t0\n71\t3\t4\tShort\n402555\t5\t6\tWhat?\tWhich?\t1\n9\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\tWho?\tWhom?\t1\n2\t3\t4\n",
    "QQP/test.tsv": "id\tquestion1\tquestion2\n0\tIs it?\tWas it?\n1\tA?\tB?\n",
    "STS-B/train.tsv": f"{STSB}\tscore\n{STSB_ROW.format(0, 'A plane.', 'An air plane.')}\t5.000\n"
    f"{STSB_ROW.format(1, 'A flute.', 'A large flute.')}\t3.800\n",
    "STS-B/dev.tsv": f"{STSB}\tscore\n{STSB_ROW.format(0, 'X.', 'Y.')}\t0.000\n",
    "STS-B/test.tsv": f"{STSB}\n{STSB_ROW.format(0, 'P.', 'Q.')}\n{STSB_ROW.format(1, 'R.', 'S.')}\n"
    f"{STSB_ROW.format(2, 'T.', 'U.')}\n",
    "MNLI/train.tsv": mnli("train", ("You know.", "They know.", "neutral"), ("Yes.", "No.", "contradiction")),
    "MNLI/dev_matched.tsv": mnli("dev", ("M1.", "M2.", "entailment")),
    "MNLI/dev_mismatched.tsv": mnli("dev", ("Mm1.", "Mm2.", "contradiction"), ("Mm3.", "Mm4.", "entailment")),
    "MNLI/test_matched.tsv": mnli("test", ("T1.", "T2.", "")),
    "MNLI/test_mismatched.tsv": mnli("test", ("T3.", "T4.", "")),
    "AX/test.tsv": "index\tsentence1\tsentence2\n0\tThe cat.\tThe hat.\n",
    "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n0\tWhen?\tNow.\tnot_entailment\n1\tWho?\tI.\tentailment\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWhere?\tHere.\tentailment\n",
    "QNLI/test.tsv": "index\tquestion\tsentence\n0\tWhat?\tThat.\n",
    "RTE/train.tsv": f"{PAIRS}0\tNo weapons.\tWeapons.\tnot_entailment\n1\tIt was.\tIt is.\tentailment\n",
    "RTE/dev.tsv": f"{PAIRS}0\tDana.\tReeve.\tentailment\n",
    "RTE/test.tsv": "index\tsentence1\tsentence2\n0\tMangla.\tShukla.\n",
    "WNLI/train.tsv": f"{PAIRS}0\tA pin.\tThe pin.\t1\n1\tJohn.\tHe.\t0\n2\tBob.\tHim.\t0\n",
    "WNLI/dev.tsv": f"{PAIRS}0\tThe drain.\tIt.\t1\n",
    "WNLI/test.tsv": "index\tsentence1\tsentence2\n0\tMaude.\tShe.\n1\tDora.\tHer.\n",
}
"""Two or three rows of every official file."""


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """A folder of all tasks."""
    for name, content in FILES.items():
        write(tmp_path / "glue" / name, content)
    return tmp_path / "glue"


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())


def open_task(name: str, folder: Path, **settings: object) -> GlueTask:
    return open_glue(name, folder, Setup(CUTTER, FineTuning.model_validate(settings)))


TRAIN = {
    "cola": ('[CLS] one " more . [SEP]', [1, 0]),
    "sst2": ('[CLS] hide " new secretions [SEP]', [0, 1]),
    "mrpc": ('[CLS] he said " yes . [SEP] he agreed . [SEP]', [1, 0]),
    "qqp": ("[CLS] why ? [SEP] how ? [SEP]", [0, 1]),
    "stsb": ("[CLS] a plane . [SEP] an air plane . [SEP]", [5, pytest.approx(3.8)]),
    "mnli": ("[CLS] you know . [SEP] they know . [SEP]", [1, 2]),
    "qnli": ("[CLS] when ? [SEP] now . [SEP]", [1, 0]),
    "rte": ("[CLS] no weapons . [SEP] weapons . [SEP]", [1, 0]),
    "wnli": ("[CLS] a pin . [SEP] the pin . [SEP]", [1, 0, 0]),
}
"""The first training item, and all training labels."""
DEV = {
    "cola": ("[CLS] dev . [SEP]", [1]),
    "sst2": ("[CLS] fine [SEP]", [1]),
    "mrpc": ("[CLS] c . [SEP] d . [SEP]", [1]),
    "qqp": ("[CLS] who ? [SEP] whom ? [SEP]", [1]),
    "stsb": ("[CLS] x . [SEP] y . [SEP]", [0]),
    "mnli": ("[CLS] m1 . [SEP] m2 . [SEP]", [0]),
    "qnli": ("[CLS] where ? [SEP] here . [SEP]", [0]),
    "rte": ("[CLS] dana . [SEP] reeve . [SEP]", [0]),
    "wnli": ("[CLS] the drain . [SEP] it . [SEP]", [1]),
}
TEST = {
    "cola": ("[CLS] first . [SEP]", 2),
    "sst2": ("[CLS] one [SEP]", 2),
    "mrpc": ("[CLS] e . [SEP] f . [SEP]", 1),
    "qqp": ("[CLS] is it ? [SEP] was it ? [SEP]", 2),
    "stsb": ("[CLS] p . [SEP] q . [SEP]", 3),
    "mnli": ("[CLS] t1 . [SEP] t2 . [SEP]", 1),
    "qnli": ("[CLS] what ? [SEP] that . [SEP]", 1),
    "rte": ("[CLS] mangla . [SEP] shukla . [SEP]", 1),
    "wnli": ("[CLS] maude . [SEP] she . [SEP]", 2),
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_from_its_official_files(name: str, ending: str, tmp_path: Path) -> None:
    for file, content in FILES.items():
        write(tmp_path / file, content.replace("\n", ending))
    task = open_task(name, tmp_path)
    assert (laid_out(task.train, 0), labels(task.train)) == ([TRAIN[name][0]], TRAIN[name][1])
    dev, test = next(iter(task.dev.values())), next(iter(task.test.values()))
    assert (laid_out(dev, 0), labels(dev)) == ([DEV[name][0]], DEV[name][1])
    assert (laid_out(test, 0), len(test)) == ([TEST[name][0]], TEST[name][1])
    assert test.encode(np.array([0])).labels is None
    assert task.head.kind == ("score" if name == "stsb" else "classes")


def test_the_names_of_classes_are_those_of_the_hub(glue: Path) -> None:
    names = {name: open_task(name, glue).head.labels for name in TASKS}
    assert names["mnli"] == ("entailment", "neutral", "contradiction")
    assert names["qnli"] == names["rte"] == ("entailment", "not_entailment")
    assert names["wnli"] == ("not_entailment", "entailment")
    assert names["cola"] == ("unacceptable", "acceptable")
    assert names["sst2"] == ("negative", "positive")
    assert names["mrpc"] == ("not_equivalent", "equivalent")
    assert names["qqp"] == ("not_duplicate", "duplicate")
    assert names["stsb"] == ()


def test_mnli_has_both_its_splits_and_the_diagnostic_set(glue: Path) -> None:
    task = open_task("mnli", glue)
    assert {split: len(items) for split, items in task.dev.items()} == {"dev_matched": 1, "dev_mismatched": 2}
    assert list(task.test) == ["test_matched", "test_mismatched", "ax"]
    assert labels(task.dev["dev_mismatched"]) == [2, 0]
    assert laid_out(task.test["ax"], 0) == ["[CLS] the cat . [SEP] the hat . [SEP]"]


def test_the_diagnostic_set_may_have_its_own_name_and_is_no_task_by_itself(tmp_path: Path) -> None:
    write(tmp_path / "AX/AX.tsv", FILES["AX/test.tsv"])
    assert find_glue(tmp_path) == ()
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / f"MNLI/{name}.tsv", FILES[f"MNLI/{name}.tsv"])
    assert list(open_task("mnli", tmp_path).test) == ["ax"]


def test_short_rows_of_qqp_are_skipped_and_counted(glue: Path) -> None:
    task = open_task("qqp", glue)
    assert (len(task.train), len(task.dev["dev"])) == (2, 1)
    assert [note.removeprefix(str(glue)) for note in task.notes[1:]] == [
        "/QQP/train.tsv: 2 rows with too few columns were skipped",
        "/QQP/dev.tsv: 1 row with too few columns was skipped",
    ]


@pytest.mark.parametrize("name", TASKS)
def test_a_test_row_is_never_skipped(name: str, glue: Path) -> None:
    file = glue / FOLDERS[name] / ("test_matched.tsv" if name == "mnli" else "test.tsv")
    file.write_bytes(file.read_bytes() + b"7\n")
    with pytest.raises(UserError, match=rf"{file.name}:\d: 1 column where there are \d+"):
        open_task(name, glue)


def test_figures_are_those_that_glue_compares_by(glue: Path) -> None:
    """On dev splits of one item each, which the model answers rightly."""
    expected = {name: ("accuracy", {"accuracy"}) for name in ("sst2", "mnli", "qnli", "rte", "wnli")}
    expected |= {name: ("average", {"accuracy", "f1", "average"}) for name in ("mrpc", "qqp")}
    expected |= {"cola": ("matthews", {"matthews"}), "stsb": ("average", {"pearson", "spearman", "average"})}
    for name in TASKS:
        task = open_task(name, glue)
        split = next(iter(task.dev))
        logits = rows([[2.0]]) if name == "stsb" else saying([int(labels(task.dev[split])[0])], task.head.outputs)
        found = task.score(split, logits)
        assert (task.metric, set(found)) == expected[name]
        assert found[task.metric] == (0 if name in ("cola", "stsb") else 1)


def test_names_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    for name, content in FILES.items():
        folder, file = name.split("/")
        spelled = {"SST-2": "sst2", "STS-B": "sts-b", "CoLA": "COLA"}.get(folder, folder.lower())
        write(tmp_path / spelled / file, content)
    assert find_glue(tmp_path) == tuple(TASKS)
    assert len(open_task("SST-2", tmp_path).train) == len(open_task("sst2", tmp_path).train) == 2
    assert open_task("STS-B", tmp_path).name == "stsb"
    with pytest.raises(UserError, match="sst3: no task of GLUE; there is cola, sst2"):
        open_task("sst3", tmp_path)


def test_tasks_are_found_by_their_files(glue: Path, tmp_path: Path) -> None:
    assert find_glue(tmp_path / "none") == ()
    (tmp_path / "some/RTE").mkdir(parents=True)
    assert find_glue(tmp_path / "some") == ()
    write(tmp_path / "some/RTE/dev.tsv", FILES["RTE/dev.tsv"])
    assert find_glue(tmp_path / "some") == ("rte",)


@pytest.mark.parametrize(
    ("name", "split"),
    [("rte", "train"), ("rte", "dev"), ("mnli", "dev_matched"), ("mnli", "dev_mismatched"), ("sst2", "dev")],
)
def test_a_missing_split_is_named(name: str, split: str, glue: Path) -> None:
    folder = glue / FOLDERS[name]
    (folder / f"{split}.tsv").unlink()
    with pytest.raises(UserError) as error:
        open_task(name, glue)
    ours, hub = f"{split}.tsv", split.replace("dev", "validation")
    said = f"{folder}: the {split} split is missing: neither {ours} nor {hub}.parquet nor {hub}-*.parquet; "
    said += "there is "
    assert str(error.value).startswith(said)
    assert ours not in str(error.value).removeprefix(said)


def test_tasks_that_cannot_be_read_are_left_out_on_purpose_alone_and_named_at_the_end(glue: Path) -> None:
    (glue / FOLDERS["rte"] / "train.tsv").unlink()
    command = RunGlue(task=("sst2", "rte"), data=glue, keep_going=True)
    tasks = command.open_tasks(Setup(CUTTER, FineTuning()))
    assert [task.name for task in tasks] == ["sst2"]
    with pytest.raises(UserError, match=r"left out.*\n.*rte: .*the train split is missing"):
        command.finish(glue, [], Console())
    with pytest.raises(UserError, match="the train split is missing"):
        RunGlue(task=("sst2", "rte"), data=glue).open_tasks(Setup(CUTTER, FineTuning()))


def test_a_task_without_a_test_split_has_none(glue: Path) -> None:
    for name in ("SST-2/test.tsv", "MNLI/test_mismatched.tsv", "AX/test.tsv"):
        (glue / name).unlink()
    assert open_task("sst2", glue).test == {}
    assert list(open_task("mnli", glue).test) == ["test_matched"]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("RTE/train.tsv", "", "the file is empty"),
        ("RTE/train.tsv", PAIRS, "no rows after the names of the columns (index, sentence1, sentence2, label)"),
        ("RTE/dev.tsv", f"{PAIRS}0\tA.\tB.\tperhaps\n", "2: unknown label 'perhaps'; the labels are entailment"),
        ("RTE/dev.tsv", f"{PAIRS}0\tA.\tB.\tentailment\n1\tA.\tB.\t\n", "3: the label is empty; the labels are"),
        ("CoLA/dev.tsv", "gj04\t2\t\tDev.\n", "1: unknown label '2'; the labels are unacceptable"),
        ("CoLA/dev.tsv", "gj04\t1\tDev.\n", "1: 3 columns where there are 4"),
        ("RTE/dev.tsv", "sentence\tlabel\nA.\t1\n", "1: 2 columns where at least 3 are needed: sentence, label"),
        ("QQP/train.tsv", "id\ta\tb\tc\td\te\n1\t1\t2\tA?\tB?\t1\t0\n", "2: 7 columns where there are 6"),
        ("STS-B/dev.tsv", f"{STSB}\tscore\n{STSB_ROW.format(0, 'X.', 'Y.')}\tnan\n", "2: the score 'nan' is not a"),
        ("STS-B/dev.tsv", f"{STSB}\tscore\n{STSB_ROW.format(0, 'X.', 'Y.')}\tinf\n", "2: the score 'inf' is not a"),
        ("STS-B/dev.tsv", f"{STSB}\tscore\n{STSB_ROW.format(0, 'X.', 'Y.')}\t5.1\n", "2: the score '5.1' is not a"),
        ("STS-B/dev.tsv", f"{STSB}\tscore\n{STSB_ROW.format(0, 'X.', 'Y.')}\t\n", "2: the score is empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(file: str, content: str, said: str, glue: Path) -> None:
    write(glue / file, content)
    with pytest.raises(UserError) as error:
        open_task(file.partition("/")[0], glue)
    assert str(error.value).replace(f"{file}: ", f"{file}:").startswith(f"{glue}/{file}:{said}")


def test_a_text_of_ten_thousand_words_is_cut_to_the_length(glue: Path) -> None:
    write(glue / "SST-2/train.tsv", f"sentence\tlabel\n{'a ' * 10_000}\t1\nb\t0\n")
    pieces = open_task("sst2", glue, length=16).train.encode(np.array([0, 1])).sequences.pieces
    assert pieces.lengths.tolist() == [16, 3]


def test_an_empty_text_is_a_sequence_all_the_same(glue: Path) -> None:
    write(glue / "SST-2/train.tsv", "sentence\tlabel\n\t1\n")
    write(glue / "RTE/train.tsv", f"{PAIRS}0\t\t\tentailment\n")
    assert laid_out(open_task("sst2", glue).train, 0) == ["[CLS] [SEP]"]
    assert laid_out(open_task("rte", glue).train, 0) == ["[CLS] [SEP] [SEP]"]


def test_wnli_is_answered_with_the_majority_where_that_is_asked_for(glue: Path, tmp_path: Path) -> None:
    assert open_task("wnli", glue).answer_without_model("dev") is None
    assert open_task("rte", glue, glue=GlueSettings(wnli_majority=True)).answer_without_model("dev") is None
    task = open_task("wnli", glue, glue=load_settings("glue").glue)  # as the paper
    dev, test = task.answer_without_model("dev"), task.answer_without_model("test")
    assert dev is not None
    assert test is not None
    assert (len(dev), len(test)) == (1, 2)
    assert task.score("dev", dev) == {"accuracy": 0.0}
    task.write_predictions("test", test, tmp_path)
    assert (tmp_path / "WNLI.tsv").read_text() == "index\tprediction\n0\t0\n1\t0\n"


def test_a_test_split_is_written_as_the_leaderboard_wants_it(glue: Path, tmp_path: Path) -> None:
    said = {
        ("cola", "test"): ("CoLA.tsv", [0, 1], ["0", "1"]),
        ("sst2", "test"): ("SST-2.tsv", [1, 0], ["1", "0"]),
        ("mrpc", "test"): ("MRPC.tsv", [1], ["1"]),
        ("qqp", "test"): ("QQP.tsv", [1, 0], ["1", "0"]),
        ("mnli", "test_matched"): ("MNLI-m.tsv", [2], ["contradiction"]),
        ("mnli", "test_mismatched"): ("MNLI-mm.tsv", [0], ["entailment"]),
        ("mnli", "ax"): ("AX.tsv", [1], ["neutral"]),
        ("qnli", "test"): ("QNLI.tsv", [1], ["not_entailment"]),
        ("rte", "test"): ("RTE.tsv", [0], ["entailment"]),
        ("wnli", "test"): ("WNLI.tsv", [1, 0], ["1", "0"]),
    }
    for (name, split), (file, classes, spelled) in said.items():
        task = open_task(name, glue)
        task.write_predictions(split, saying(classes, task.head.outputs), tmp_path)
        lines = ["index\tprediction", *(f"{number}\t{value}" for number, value in enumerate(spelled))]
        assert (tmp_path / file).read_text().splitlines() == lines
    open_task("stsb", glue).write_predictions("test", rows([[-0.2], [3.14159], [5.3]]), tmp_path)
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t0.000\n1\t3.142\n2\t5.000\n"
    assert len(list(tmp_path.glob("*[A-Zm2].tsv"))) == 11


def test_predictions_of_a_split_have_the_probability_of_each_class(glue: Path, tmp_path: Path) -> None:
    open_task("mnli", glue).write_predictions("dev_mismatched", rows([[0, 0, 0], [0, 50, 0]]), tmp_path)
    assert (tmp_path / "predictions_dev_mismatched.tsv").read_text().splitlines() == [
        "index\tprediction\tentailment\tneutral\tcontradiction",
        "0\tentailment\t0.333333\t0.333333\t0.333333",
        "1\tneutral\t0.000000\t1.000000\t0.000000",
    ]
    assert not (tmp_path / "MNLI-mm.tsv").exists()


@pytest.mark.realdata
def test_the_real_tasks_have_their_official_numbers_of_items(real_data: Path) -> None:
    """Of those that are there; of QNLI's training set, the data have the beginning."""
    found = {}
    for name in find_glue(real_data / "glue"):
        task = open_task(name, real_data / "glue")
        found[name] = [len(task.train), len(task.dev["dev"]), *map(len, task.test.values())]
        for split, items in task.test.items():
            assert len(items) == TEST_ROWS[name, split]
        assert len(task.notes) == 1
    assert found == {
        "cola": [8551, 1043, 1063],
        "sst2": [67349, 872],
        "mrpc": [3668, 408, 1725],
        "qnli": [9999, 5463],
        "stsb": [5749, 1500, 1379],
        "rte": [2490, 277, 3000],
    }
