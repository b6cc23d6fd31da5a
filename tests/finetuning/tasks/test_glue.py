"""The tasks of GLUE from small files in their exact formats, with their quirks, and from the hub's Parquet; and the
leaderboard's files."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import assert_refusal, refusal
from support.tasks import CUTTER, labels, laid_out, rows, saying

from finetuning.files.splits import FOLDERS, find_glue
from finetuning.settings import FineTuning, GlueSettings, load_settings
from finetuning.tasks.glue import TASKS, TEST_ROWS, GlueTask, open_glue
from finetuning.tasks.task import Setup

PAIRS = "index\tsentence1\tsentence2\tlabel\n"
MNLI_START = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
MNLI_START += "sentence2_parse\tsentence1\tsentence2"
MNLI_ROW = "{}\t31193\t31193n\tgov\t( a )\t( b )\t(ROOT (a))\t(ROOT (b))\t{}\t{}"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def mnli(split: str, *items: tuple[str, str, str]) -> str:
    """As the official files are: train has one column of single votes, dev has five, test has none."""
    votes = {"train": ["label1"], "dev": [f"label{number}" for number in range(1, 6)], "test": []}[split]
    lines = ["\t".join([MNLI_START, *votes, *(["gold_label"] if votes else [])])]
    for number, (first, second, label) in enumerate(items):
        values = ["neutral"] * len(votes) + ([label] if votes else [])
        lines.append("\t".join([MNLI_ROW.format(number, first, second), *values]))
    return "".join(f"{line}\n" for line in lines)


def stsb(*items: tuple[str, ...]) -> str:
    """As the official files are; those of test have no scores."""
    start = "{}\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\t{}\n"
    header = STSB + "\tscore" * (len(items[0]) - 2)
    return f"{header}\n" + "".join(start.format(number, "\t".join(item)) for number, item in enumerate(items))


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
    "STS-B/train.tsv": stsb(("A plane.", "An air plane.", "5.000"), ("A flute.", "A large flute.", "3.800")),
    "STS-B/dev.tsv": stsb(("X.", "Y.", "0.000")),
    "STS-B/test.tsv": stsb(("P.", "Q."), ("R.", "S."), ("T.", "U.")),
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


ITEMS = """
cola | unacceptable acceptable | one " more . | 1 0 | dev . | 1 | first . | 2
sst2 | negative positive | hide " new secretions | 0 1 | fine | 1 | one | 2
mrpc | not_equivalent equivalent | he said " yes . + he agreed . | 1 0 | c . + d . | 1 | e . + f . | 1
qqp | not_duplicate duplicate | why ? + how ? | 0 1 | who ? + whom ? | 1 | is it ? + was it ? | 2
stsb |  | a plane . + an air plane . | 5 3.8 | x . + y . | 0 | p . + q . | 3
mnli | entailment neutral contradiction | you know . + they know . | 1 2 | m1 . + m2 . | 0 | t1 . + t2 . | 1
qnli | entailment not_entailment | when ? + now . | 1 0 | where ? + here . | 0 | what ? + that . | 1
rte | entailment not_entailment | no weapons . + weapons . | 1 0 | dana . + reeve . | 0 | mangla . + shukla . | 1
wnli | not_entailment entailment | a pin . + the pin . | 1 0 0 | the drain . + it . | 1 | maude . + she . | 2
"""
"""The classes, named as on the hub; the first training item and all training labels, the same of dev, the first test
item and the number of them."""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_task_is_read_from_its_official_files(ending: str, tmp_path: Path) -> None:
    for file, content in FILES.items():
        write(tmp_path / file, content.replace("\n", ending))
    for line in ITEMS.strip().splitlines():
        name, classes, *items, count = line.replace(" + ", " [SEP] ").split(" | ")
        task = open_task(name, tmp_path)
        splits = [task.train, next(iter(task.dev.values())), next(iter(task.test.values()))]
        assert (task.head.kind, task.head.labels) == ("classes" if classes else "score", tuple(classes.split()))
        assert [laid_out(split, 0) for split in splits] == [[f"[CLS] {text} [SEP]"] for text in items[::2]]
        for split, said in zip(splits, items[1::2], strict=False):
            assert labels(split) == pytest.approx([float(label) for label in said.split()])
        assert len(splits[2]) == int(count)
        assert splits[2].encode(np.array([0])).labels is None


def test_mnli_has_both_its_splits_and_the_diagnostic_set(glue: Path) -> None:
    """The diagnostic set may have its own name, and is no task by itself; a task may have no test split."""
    task = open_task("mnli", glue)
    assert {split: len(items) for split, items in task.dev.items()} == {"dev_matched": 1, "dev_mismatched": 2}
    assert list(task.test) == ["test_matched", "test_mismatched", "ax"]
    assert labels(task.dev["dev_mismatched"]) == [2, 0]
    assert laid_out(task.test["ax"], 0) == ["[CLS] the cat . [SEP] the hat . [SEP]"]
    (glue / "MNLI/test_mismatched.tsv").unlink()
    (glue / "AX/test.tsv").rename(glue / "AX/AX.tsv")
    assert list(open_task("mnli", glue).test) == ["test_matched", "ax"]
    for name in ("test_matched", "train", "dev_matched", "dev_mismatched"):
        (glue / f"MNLI/{name}.tsv").unlink()
    (glue / "SST-2/test.tsv").unlink()
    assert open_task("sst2", glue).test == {}
    assert not {"ax", "mnli"} & {*find_glue(glue)}


def test_short_rows_of_qqp_are_skipped_and_counted(glue: Path) -> None:
    task = open_task("qqp", glue)
    assert (len(task.train), len(task.dev["dev"])) == (2, 1)
    for note, name, count in zip(task.notes[1:], ("train", "dev"), (2, 1), strict=True):
        assert note == f"{glue}/QQP/{name}.tsv: rows with too few columns, which are skipped: {count}"


def test_a_test_row_is_never_skipped(glue: Path) -> None:
    for name in TASKS:
        file = glue / FOLDERS[name] / ("test_matched.tsv" if name == "mnli" else "test.tsv")
        file.write_bytes(file.read_bytes() + b"7\n")
        assert_refusal(rf"{file.name}:\d: 1 column where there are \d+", open_task, name, glue)


def test_figures_are_those_that_glue_compares_by(glue: Path) -> None:
    """On dev splits of one item each, which the model answers rightly."""
    several = {name: ("average", {"accuracy", "f1", "average"}) for name in ("mrpc", "qqp")}
    several |= {"cola": ("matthews", {"matthews"}), "stsb": ("average", {"pearson", "spearman", "average"})}
    for name in TASKS:
        task = open_task(name, glue)
        split = next(iter(task.dev))
        logits = rows([[2.0]]) if name == "stsb" else saying([int(labels(task.dev[split])[0])], task.head.outputs)
        found = task.score(split, logits)
        assert (task.metric, set(found)) == several.get(name, ("accuracy", {"accuracy"}))
        assert found[task.metric] == (0 if name in ("cola", "stsb") else 1)


def test_names_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    for name, content in FILES.items():
        folder, file = name.split("/")
        spelled = {"SST-2": "sst2", "STS-B": "sts-b", "CoLA": "COLA"}.get(folder, folder.lower())
        write(tmp_path / spelled / file, content)
    assert find_glue(tmp_path) == tuple(TASKS)
    assert find_glue(tmp_path / "none") == find_glue(tmp_path / "rte") == ()
    assert len(open_task("SST-2", tmp_path).train) == len(open_task("sst2", tmp_path).train) == 2
    assert open_task("STS-B", tmp_path).name == "stsb"
    assert "sst3: no task of GLUE; there is cola, sst2" in refusal(open_task, "sst3", tmp_path)


@pytest.mark.parametrize(("name", "split"), [("rte", "train"), ("rte", "dev"), ("mnli", "dev_mismatched")])
def test_a_missing_split_is_named(name: str, split: str, glue: Path) -> None:
    folder = glue / FOLDERS[name]
    (folder / f"{split}.tsv").unlink()
    assert name in find_glue(glue)
    hub = split.replace("dev", "validation")
    said = f"{folder}: the {split} split is missing: neither {split}.tsv nor {hub}.parquet nor {hub}-*.parquet; "
    assert_refusal(rf"^{re.escape(said)}there is (?!.*{split}\.tsv)", open_task, name, glue)


FAULTS = [
    ("RTE/train.tsv", "", "the file is empty"),
    ("RTE/train.tsv", PAIRS, "no rows after the names of the columns (index, sentence1, sentence2, label)"),
    ("RTE/dev.tsv", f"{PAIRS}0\tA.\tB.\tperhaps\n", "2: unknown label 'perhaps'; the labels are entailment"),
    ("RTE/dev.tsv", f"{PAIRS}0\tA.\tB.\tentailment\n1\tA.\tB.\t\n", "3: unknown label ''; the labels are"),
    ("CoLA/dev.tsv", "gj04\t2\t\tDev.\n", "1: unknown label '2'; the labels are unacceptable"),
    ("CoLA/dev.tsv", "gj04\t1\tDev.\n", "1: 3 columns where there are 4"),
    ("RTE/dev.tsv", "sentence\tlabel\nA.\t1\n", "1: 2 columns where at least 3 are needed: sentence, label"),
    ("QQP/train.tsv", "id\ta\tb\tc\td\te\n1\t1\t2\tA?\tB?\t1\t0\n", "2: 7 columns where there are 6"),
    ("STS-B/dev.tsv", stsb(("X.", "Y.", "5.1")), "2: the score '5.1' is not a"),
    ("STS-B/dev.tsv", stsb(("X.", "Y.", "")), "2: the score '' is not a"),
]


@pytest.mark.parametrize(("file", "content", "said"), FAULTS)
def test_what_is_wrong_in_a_file_is_told_with_its_line(file: str, content: str, said: str, glue: Path) -> None:
    write(glue / file, content)
    told = refusal(open_task, file.partition("/")[0], glue)
    assert told.replace(f"{file}: ", f"{file}:").startswith(f"{glue}/{file}:{said}")


def test_wnli_is_answered_with_the_majority_where_that_is_asked_for(glue: Path) -> None:
    as_the_paper = load_settings("glue").glue
    assert as_the_paper == GlueSettings(wnli_majority=True)
    assert open_task("wnli", glue).answer_without_model() is None
    assert open_task("rte", glue, glue=as_the_paper).answer_without_model() is None
    answers = open_task("wnli", glue, glue=as_the_paper).answer_without_model()
    assert answers is not None
    assert answers["test"].values.argmax(1).tolist() == [0, 0]


LEADERBOARD = """
cola test CoLA 0 1 - 0 1
sst2 test SST-2 1 0 - 1 0
mrpc test MRPC 1 - 1
qqp test QQP 1 0 - 1 0
mnli test_matched MNLI-m 2 - contradiction
mnli test_mismatched MNLI-mm 0 - entailment
mnli ax AX 1 - neutral
qnli test QNLI 1 - not_entailment
rte test RTE 0 - entailment
wnli test WNLI 1 0 - 1 0
"""
"""Tasks, splits, files, the classes that a model says, and how they are spelled."""


def test_a_test_split_is_written_as_the_leaderboard_wants_it(glue: Path, tmp_path: Path) -> None:
    for line in LEADERBOARD.strip().splitlines():
        said, spelled = (part.split() for part in line.split(" - "))
        name, split, file, *classes = said
        task = open_task(name, glue)
        task.write_predictions(split, saying([*map(int, classes)], task.head.outputs), tmp_path)
        lines = ["index\tprediction", *(f"{number}\t{value}" for number, value in enumerate(spelled))]
        assert (tmp_path / f"{file}.tsv").read_text().splitlines() == lines
    open_task("stsb", glue).write_predictions("test", rows([[-0.2], [3.14159], [5.3]]), tmp_path)
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t0.000\n1\t3.142\n2\t5.000\n"
    assert len(list(tmp_path.glob("*[A-Zm2].tsv"))) == 11


@pytest.mark.realdata
def test_the_real_tasks_have_their_official_numbers_of_items(real_data: Path) -> None:
    """Of those that are there; of QNLI's training set, the data have the beginning."""
    counts = "cola 8551 1043 1063, sst2 67349 872, mrpc 3668 408 1725, stsb 5749 1500 1379"
    counts += ", qnli 9999 5463, rte 2490 277 3000"
    found = []
    for name in find_glue(real_data / "glue"):
        task = open_task(name, real_data / "glue")
        found.append(" ".join(map(str, [name, *map(len, (task.train, task.dev["dev"], *task.test.values()))])))
        assert all(len(items) == TEST_ROWS[name, split] for split, items in task.test.items())
        assert len(task.notes) == 1
    assert found == counts.split(", ")


# As the Hugging Face hub has it: Parquet, in one file a split or several


FIELDS = ("sentence", "sentence1", "sentence2", "question", "question1", "question2", "premise", "hypothesis")
HUB_VALUES = {field: [f"{field} {letter}." for letter in "abc"] for field in FIELDS}


@pytest.mark.parametrize("name", ["cola", "stsb", "mnli", "qnli", "qqp"])
def test_a_task_is_read_from_the_parquet_of_the_hub(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    ending = ("_matched", "_mismatched") if name == "mnli" else ("",)
    known = [0.0, 2.5, 5.0] if name == "stsb" else [0, 1, len(task.labels) - 1]
    kind = pa.float32() if name == "stsb" else pa.int64()
    splits = {"train": known, **{f"validation{end}": known for end in ending}}
    splits |= {f"test{end}": [-1, -1, -1] for end in ending}
    if name == "mnli":
        write_parquet(tmp_path / "ax", "test", name, pa.array([-1, -1, -1]))
    for split, values in splits.items():
        write_parquet(tmp_path / name, split, name, pa.array(values, kind))
    assert find_glue(tmp_path) == (name,)
    opened = open_task(name, tmp_path)
    first = [HUB_VALUES[field][0].replace(".", " .") for field in task.fields]
    assert laid_out(opened.train, 0) == [f"[CLS] {' [SEP] '.join(first)} [SEP]"]
    assert (labels(opened.train), list(opened.dev)) == (known, [f"dev{end}" for end in ending])
    assert list(opened.test) == [f"test{end}" for end in ending] + ["ax"] * (name == "mnli")


def test_all_parts_of_a_split_on_the_hub_are_read(tmp_path: Path) -> None:
    """In their order; one that is missing is no smaller data set."""
    for split, values in {"train": [0, 1, 0], "validation": [1, 1, 0]}.items():
        write_parquet(tmp_path / "sst2", split, "sst2", pa.array(values))
    folder = tmp_path / "sst2"
    (folder / "train-00000-of-00001.parquet").rename(folder / "train-00000-of-00003.parquet")
    for number in (1, 2):
        rows = {"sentence": [f"{number}", "b"], "label": [number - 1] * 2}
        pq.write_table(pa.table(rows), folder / f"train-0000{number}-of-00003.parquet")
    task = open_task("sst2", tmp_path)
    assert (labels(task.train), laid_out(task.train, 5)) == ([0, 1, 0, 0, 0, 1, 1], ["[CLS] 2 [SEP]"])
    first = "train-00000-of-00003.parquet"
    assert task.notes[0].startswith(f"reads {folder / first}, ")
    (folder / "train-00001-of-00003.parquet").unlink()
    assert f"{first}: this is one of 3 files, but 2 are there" in refusal(open_task, "sst2", tmp_path)


def write_parquet(folder: Path, split: str, name: str, values: pa.Array) -> None:
    folder.mkdir(exist_ok=True)
    columns = {field: HUB_VALUES[field] for field in TASKS[name].fields}
    pq.write_table(pa.table({**columns, "label": values, "idx": [0, 1, 2]}), folder / f"{split}-00000-of-00001.parquet")
