"""Tasks of one's own: TOML files of each kind and format, what is wrong with them told at once, and what is laid out,
held out and written of their texts."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from support.commands import refusal
from support.tasks import CUTTER, encode, labels, laid_out, rows, saying

from finetuning.run_task import RunTask
from finetuning.settings import FineTuning
from finetuning.tasks.own import OwnTask, open_own, read_own
from finetuning.tasks.scores import METRICS
from finetuning.tasks.sentences import SentenceItems, format_predictions, hold_out
from finetuning.tasks.task import Setup
from pretraining.architectures.weights import TaskHead


def write(folder: Path, files: dict[str, str]) -> Path:
    """Writes files; returns the TOML."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / "task.toml"


SETUP = Setup(CUTTER, FineTuning())


def open_task(path: Path) -> Any:
    return open_own(path, SETUP)


CLASSES = 'name = "reviews"\nkind = "classes"\ntrain = "data/train.csv"\ndev = "data/dev.csv"\n'
CLASSES += 'text = "review"\nlabel = "stars"\n'
SCORES = CLASSES.replace("classes", "score")
REVIEWS = {
    "task.toml": CLASSES,
    "data/train.csv": 'stars,review\n2,"good, or so"\n10,great\n1,bad\n',
    "data/dev.csv": "review,stars\nfine,2\nawful,1\n",
}


def test_classes_are_those_of_the_training_items_in_order_or_as_named(tmp_path: Path) -> None:
    task, said = open_task(write(tmp_path, REVIEWS)), saying([1, 2], 3)
    assert (task.name, task.head.kind, task.head.labels) == ("reviews", "classes", ("1", "2", "10"))
    assert laid_out(task.train, 0) == ["[CLS] good , or so [SEP]"]
    assert (labels(task.train), labels(task.dev["dev"])) == ([1, 2, 0], [1, 0])
    assert (task.metric, task.score("dev", said)["accuracy"]) == ("accuracy", 0.5)
    assert "f1" not in task.score("dev", said)
    assert task.describe_use(said) == {"length": 128, "fields": ["review"]}
    toml = CLASSES + 'labels = ["10", "2", "1"]\nmetric = "f1_macro"\n'
    task = open_task(write(tmp_path, {**REVIEWS, "task.toml": toml}))
    assert (task.head.labels, labels(task.train), task.metric) == (("10", "2", "1"), [1, 0, 2], "f1_macro")


def test_pairs_in_json_lines_and_numbers(tmp_path: Path) -> None:
    items = [{"first": "A", "other": "B", "score": 1.5}, {"first": "C", "other": "D", "score": -2}]
    lines = "\n".join(map(json.dumps, items))
    toml = 'name = "near"\nkind = "score"\ntrain = "a.jsonl"\ndev = "a.jsonl"\n'
    toml += 'text = "first"\nsecond = "other"\nlabel = "score"\nmetric = "spearman"\n'
    task = open_task(write(tmp_path, {"task.toml": toml, "a.jsonl": lines}))
    assert (laid_out(task.train, 0), labels(task.dev["dev"])) == (["[CLS] a [SEP] b [SEP]"], [1.5, -2])
    assert (task.metric, task.fields) == ("spearman", ("first", "other"))
    assert task.score("dev", rows([[2], [1]]))["spearman"] == pytest.approx(1)


def test_several_labels_in_parquet(tmp_path: Path) -> None:
    columns = {"text": ["a", "b"], "toxic": [True, False], "rude": [True, True]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    toml = 'name = "tone"\nkind = "labels"\ntrain = "a.parquet"\ndev = "a.parquet"\nlabels = ["toxic", "rude"]\n'
    task = open_task(write(tmp_path, {"task.toml": toml}))
    assert encode(task.train, 1, 0).labels.values.tolist() == [0, 1, 1, 1]
    assert (task.head.labels, task.metric) == (("toxic", "rude"), "f1_micro")
    assert task.score("dev", rows([[1, 1], [-1, 1]])) == {"f1_micro": 1.0, "f1_macro": 1.0, "accuracy": 1.0}


def test_a_share_is_held_out_where_there_is_no_dev(tmp_path: Path) -> None:
    toml = CLASSES.replace('dev = "data/dev.csv"', "held_out = 0.25")
    train = "review,stars\n" + "".join(f"text {number},{number % 2}\n" for number in range(20))
    task = open_task(write(tmp_path, {"task.toml": toml, "data/train.csv": train}))
    assert (len(task.train), len(task.dev["dev"])) == (15, 5)
    assert task.notes[1].endswith("data/train.csv: 5 of its 20 rows are held out from training and scored")
    path = write(tmp_path, {"data/train.csv": "review,stars\na,1\n", "task.toml": toml + 'labels = ["0", "1"]\n'})
    assert "train.csv: one row alone, of which none can be held out" in refusal(open_task, path)


def test_tags_are_read_as_those_of_entities(tmp_path: Path) -> None:
    """Runs are compared on held-out sentences rather than on a test split that has tags."""
    toml = 'name = "names"\nkind = "tags"\ntrain = "a.txt"\ntest = "b.jsonl"\ntext = "words"\nlabel = "marks"\n'
    line = json.dumps({"words": ["Ann", "sat"], "marks": ["B-PER", "O"]})
    files = {"task.toml": toml, "a.txt": "Bob B-PER\nran O\n\nEve B-PER\n", "b.jsonl": line}
    task = open_task(write(tmp_path, files))
    assert (task.name, task.head.kind, task.head.labels) == ("names", "tags", ("O", "B-PER", "I-PER"))
    assert {split: len(items) for split, items in task.dev.items()} == {"dev": 1, "test": 1}


def test_a_share_of_tagged_sentences_is_held_out(tmp_path: Path) -> None:
    """Whole documents where the file parts them."""
    toml = 'name = "names"\nkind = "tags"\ntrain = "train.txt"\nheld_out = 0.25\n'
    sentences = [f"word{number} B-PER\nran O\n" for number in range(20)]

    def held(*parts: str) -> tuple[list[str], str]:
        task = open_task(write(tmp_path, {"task.toml": toml, "train.txt": "\n".join(parts)}))
        dev, train = task.dev["dev"], task.train
        assert not {*dev.words.texts} & {*train.words.texts} - {"ran"}
        assert len(dev) + len(train) == 20
        return sorted(dev.words.texts), task.notes[-1]

    names, note = held(*sentences)
    assert (len(names), "train.txt: 5 of its 20 sentences are" in note) == (2 * 5, True)
    documents = ["-DOCSTART- -X-\n\n" + "\n".join(sentences[start : start + 5]) for start in range(0, 20, 5)]
    names, note = held(*(document.replace(" -X-", " O") for document in documents))
    assert "1 of its 4 documents" in note
    numbers = sorted(int(name[4:]) for name in names if name != "ran")
    assert numbers == list(range(numbers[0], numbers[0] + 5))


def test_a_test_file_is_scored_where_it_has_labels(tmp_path: Path) -> None:
    toml = CLASSES + 'test = "data/test.csv"\n'
    path = write(tmp_path, {**REVIEWS, "task.toml": toml, "data/test.csv": "review\na\n"})
    task = open_task(path)
    assert (list(task.dev), list(task.test), len(task.test["test"])) == (["dev"], ["test"], 1)
    write(tmp_path, {"data/test.csv": "review,stars\na,10\n"})
    task = open_task(path)
    assert (list(task.dev), list(task.test), labels(task.dev["test"])) == (["dev", "test"], [], [2])


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    assert "task.toml: no such file; a task says" in refusal(open_task, tmp_path / "task.toml")
    toml = 'nam = "reviews"\nkind = "class"\ntrain = "a.csv"\ntxt = "review"\nheld_out = 2\n'
    lines = sorted(refusal(open_task, write(tmp_path, {"task.toml": toml, "a.csv": ""})).splitlines())
    starts = "held_out = 2: ", 'kind = "class": should', "nam: unknown; did you mean name?", "name: is missing", "txt: "
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"{tmp_path}/task.toml: {start}")


CONTRADICTIONS = [
    ('kind = "tags"\nsecond = "b"\nmetric = "f1"', ["second: ", "metric: "]),
    ('kind = "classes"\ntext = "a"\nsecond = "a"', ["second: of a, a each should be another column"]),
    ('kind = "labels"', ["labels: is missing"]),
    ('kind = "labels"\nlabel = "a"\nlabels = ["a", "a"]', ["label: ", "labels: a name stands there twice"]),
    ('kind = "score"\nlabels = ["a", "b"]', ['labels: kind = "score" has none']),
    ('kind = "classes"\nlabels = ["a"]', ["labels: one class leaves nothing to decide"]),
    ('kind = "classes"\nname = "a/b"', ["name = "]),
    ('kind = "classes"\nname = "results.json"', ["name: results.json has another meaning"]),
    ('kind = "classes"\ndev = "b.csv"\nheld_out = 0.5', ["held_out: there is a dev file"]),
]


@pytest.mark.parametrize(("toml", "said"), CONTRADICTIONS)
def test_what_does_not_go_together_is_told(toml: str, said: list[str], tmp_path: Path) -> None:
    text = 'train = "a.csv"\n' + toml + ("" if "name" in toml.split("\n")[-1] else '\nname = "a"')
    lines = refusal(open_task, write(tmp_path, {"task.toml": text, "a.csv": "", "b.csv": ""})).splitlines()
    assert len(lines) == len(said)
    for line, start in zip(lines, said, strict=True):
        assert line.startswith(f"{tmp_path}/task.toml: {start}")


def wrong_score(score: str, first: str = "1") -> dict[str, str]:
    return {"data/train.csv": f"review,stars\na,{first}\nb,{score}\n"}


FAULTS = [
    ({"data/dev.csv": "review,stars\nfine,3\n"}, "data/dev.csv:2: unknown label '3'; the labels are 1, 2, 10"),
    ({"data/train.csv": "review,stars\na,1\nb,NaN\n"}, "data/train.csv:3: the label is NaN"),
    ({"data/train.csv": "text,stars\na,1\n"}, "data/train.csv: no column 'review'; there is 'text', 'stars'"),
    ({"data/dev.csv": "review|stars\na|1\n"}, "data/dev.csv: no column 'review'; there is 'review|stars'"),
    ({"data/dev.csv": "review;stars\na;3\nb;3\n"}, "data/dev.csv:2: unknown label '3'; the labels are 1, 2, 10, as"),
    ({"data/dev.csv": "stars,review,stars\n1,a,2\n"}, "data/dev.csv: two columns have the name 'stars'"),
    ({"data/dev.csv": ""}, "data/dev.csv: the file is empty"),
    ({"data/train.csv": "review,stars\na,1\nb,1\n"}, "data/train.csv: all labels are '1', so there is nothing to"),
    ({"task.toml": CLASSES.replace("dev.csv", "no.csv")}, "data/no.csv: no such file"),
    ({"task.toml": CLASSES + 'metric = "f1"\n'}, "task.toml: metric = 'f1': here there is accuracy, f1_macro"),
    ({"task.toml": SCORES, **wrong_score("1e301")}, "data/train.csv:3: the score '1e301' is not a number from"),
    ({"task.toml": SCORES, **wrong_score("1700000059", "1700000000")}, "data/train.csv: scores from 1700000000 to 17"),
    ({"task.toml": SCORES, **wrong_score("x")}, "data/train.csv:3: the score 'x' is not a number from"),
    ({"task.toml": CLASSES + "= 1"}, "task.toml"),
]


@pytest.mark.parametrize(("files", "said"), FAULTS)
def test_what_is_wrong_is_told_with_its_place(files: dict[str, str], said: str, tmp_path: Path) -> None:
    path = write(tmp_path, {**REVIEWS, **files})
    assert f"{tmp_path}/{said}" in refusal(open_task, path)


def test_all_faults_of_files_columns_and_metric_are_told_at_once(tmp_path: Path) -> None:
    """Of tags too, and of all tasks of a command."""
    toml = (
        CLASSES.replace("dev.csv", "no.csv").replace('"stars"', '"star"') + 'test = "test.csv"\nmetric = "f1_makro"\n'
    )
    lines = refusal(open_task, write(tmp_path, {**REVIEWS, "task.toml": toml, "test.csv": "text\na\n"})).splitlines()
    faults = ["task.toml: metric = 'f1_makro': here there is accuracy, f1, f1_macro"]
    faults += ["data/train.csv: no column 'star'; there is 'stars', 'review'", "data/no.csv: no such file"]
    faults += ["test.csv: no column 'review'; there is 'text'"]
    for line, fault in zip(lines, faults, strict=True):
        assert line.startswith(f"{tmp_path}/{fault}")
    other = 'name = "names"\nkind = "tags"\ntrain = "a.txt"\ndev = "b.txt"\n'
    (tmp_path / "tags.toml").write_text(other)
    told = refusal(RunTask(tasks=(tmp_path / "task.toml", tmp_path / "tags.toml")).open_tasks, SETUP).splitlines()
    assert told[: len(lines)] == lines
    assert told[len(lines) :] == [f"{tmp_path}/{name}.txt: no such file" for name in "ab"]


def test_missing_files_are_told_with_wrong_keys_and_the_keys_of_all_tasks(tmp_path: Path) -> None:
    write(tmp_path, {**REVIEWS, "task.toml": CLASSES.replace("dev.csv", "no.csv") + 'lable = "x"\n'})
    (tmp_path / "other.toml").write_text(CLASSES + "held_out = 2\n")
    lines = refusal(RunTask(tasks=(tmp_path / "task.toml", tmp_path / "other.toml")).suite).splitlines()
    starts = "task.toml: lable: unknown", "data/no.csv: no such file", "other.toml: held_out = 2"
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"{tmp_path}/{start}")


def test_an_empty_column_of_labels_in_the_test_file_is_none(tmp_path: Path) -> None:
    """As competitions give it. Labels at once may be spelled as pandas does."""
    toml = CLASSES.replace("classes", "labels").replace('label = "stars"', 'test = "test.csv"\nlabels = ["stars"]')
    files = {"data/train.csv": "review,stars\na,True\nb,False\n", "data/dev.csv": "review,stars\na,true\n"}
    task = open_task(write(tmp_path, {"task.toml": toml, **files, "test.csv": "review,stars\na,\nb,\n"}))
    assert (labels(task.train), [*task.dev], len(task.test["test"])) == ([1, 0], ["dev"], 2)
    said = refusal(open_task, write(tmp_path, {"test.csv": "review,stars\na,\nb,0\n"}))
    assert "test.csv:2: unknown label ''" in said


def test_tags_are_read_of_packed_files_and_columns_that_are_named(tmp_path: Path) -> None:
    toml = 'name = "pos"\nkind = "tags"\ntrain = "a.jsonl.gz"\ndev = "b.tsv"\ntext = "word"\nlabel = "tag"\n'
    lines = json.dumps({"word": ["a", "b"], "tag": ["DET", "NOUN"]}).encode()
    path = write(tmp_path, {"task.toml": toml, "b.tsv": "word\ttag\na\tDET\n"})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    task = open_task(path)
    assert (task.head.labels, len(task.list_columns("dev")[0])) == (("DET", "NOUN"), 1)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.replace(b'"NOUN"', b"1")))
    assert "a.jsonl.gz:1: tag 1; there should be a text" in refusal(open_task, path)


PAGE = (ROOT / "docs/own-tasks.md").read_text()
DOCUMENTED = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_every_file_in_the_documentation_is_right(tmp_path: Path) -> None:
    for toml in DOCUMENTED:
        assert read_own(write(tmp_path, {"task.toml": toml})).name in toml


def test_the_documentation_has_every_key_and_figure() -> None:
    assert re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]* \|$", PAGE, re.MULTILINE) == list(OwnTask.model_fields)
    for kind in ("classes", "labels", "score"):
        [line] = re.findall(rf"^\| `{kind}` \| ([^|]*) \|$", PAGE, re.MULTILINE)
        assert re.findall(r"`(\w+)`", line) == list(METRICS[kind])


# Texts and pairs: what is laid out, held out, and written of them


FILE = Path("train.tsv")


def items(*texts: str, second: list[str] | None = None) -> SentenceItems:
    columns = (list(texts),) if second is None else (list(texts), second)
    return SentenceItems(CUTTER, 16, columns, np.arange(len(texts))[:, None])


def test_items_come_in_any_order_again_and_again() -> None:
    pairs = items("a", "b b", "c", second=["d", "e", "f f"])
    encoded = encode(pairs, 2, 0, 2)
    assert (encoded.labels.values.tolist(), encoded.sequences.pieces.lengths.tolist()) == ([2, 0, 2], [6, 5, 6])
    assert encoded.sequences.second.tolist() == [3, 3, 3]
    assert laid_out(pairs, 1) == ["[CLS] b b [SEP] e [SEP]"]


def test_a_share_is_held_out_by_what_the_texts_are() -> None:
    texts = [f"text {number}" for number in range(200)]
    parts, note = hold_out(FILE, {"test": items("a"), "train": items(*texts)}, 0.1)
    assert [*parts] == ["train", "dev", "test"], "runs are compared on the first that is scored"
    train, held = parts["train"], parts["dev"]
    assert (len(train), len(held)) == (180, 20)
    assert sorted([*train.texts[0], *held.texts[0]]) == sorted(texts)
    assert note == "train.tsv: 20 of its 200 rows are held out from training and scored"
    assert held.labels is not None
    assert [texts[label] for label in held.labels[:, 0]] == list(held.texts[0])
    longer, _ = hold_out(FILE, {"train": items(*texts, *(f"more {number}" for number in range(20)))}, 0.1)
    assert len({*longer["dev"].texts[0]} & {*held.texts[0]}) >= 15


def test_predictions_are_a_table_that_can_be_read() -> None:
    labels = format_predictions(TaskHead("labels", ("toxic", "rude")), rows([[3, -3], [1, 1], [-1, -1]]).values)
    said = ["toxic\t0.952574\t0.047426", "toxic rude\t0.731059\t0.731059", "\t0.268941\t0.268941"]
    lines = ["index\tprediction\ttoxic\trude", *(f"{number}\t{line}" for number, line in enumerate(said))]
    assert labels.decode().splitlines() == lines
    score = format_predictions(TaskHead("score"), rows([[2.5], [1.25e-7]]).values)
    assert score == b"index\tprediction\n0\t2.5\n1\t1.25e-07\n"
    choice = format_predictions(TaskHead("choice"), saying([3], 4).values)
    assert choice.startswith(b"index\tprediction\t0\t1\t2\t3\n0\t3\t")
    spread = format_predictions(TaskHead("classes", ("a\tb", "c\nd")), saying([1], 2).values).decode()
    assert spread.splitlines()[0] == "index\tprediction\ta b\tc d"
    assert pytest.approx(sum(map(float, spread.splitlines()[1].split("\t")[2:]))) == 1
