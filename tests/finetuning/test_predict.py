"""predict.py and prediction.py: the answers of transformers on the same text, for every kind, and streams of rows."""

import io
import json
import platform
import shutil
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from support.commands import assert_refusal, refusal, start
from support.fine_tuned_models import LABELS, MODELS, Ask
from support.transformers_models import PIECES, SHAPE, change_weights, their_model
from transformers import AutoTokenizer, BertForMaskedLM

from data_prep.common.files import write_json
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import predict
from finetuning.flags import Predict
from finetuning.inputs import Ragged
from finetuning.prediction import FineTuned, load
from finetuning.tasks.spans import TextWindows
from pretraining import devices
from pretraining.architectures.weights import Kind
from pretraining.devices import cpu_has_int8
from pretraining.huggingface.folders import TASK

pytest_plugins = ["support.fine_tuned_models"]
ENTRY = [sys.executable, str(ROOT / "finetuning" / "predict.py")]
PROMISED = 1e-5
"""How much a probability in fp32 may depend on the rows that are answered with it; docs/predicting.md says so."""
TEXTS = ["a fine film", "", "word1 word2 xyz?", "b " * 60, "Word7 and word9"]
PAIRS = [["what", "a fine film of word3 and word5 ab"], ["", ""], ["who is", "word11 word12 b c d"], ["x", ""]]
CHOICES = [["a text", "one end", "word1", "c"], ["", "", "", ""], ["b", "word3", "xy z", "word8 word9"]]
ROWS: dict[Kind, Sequence[Any]] = {"classes": TEXTS, "labels": TEXTS, "score": TEXTS, "choice": CHOICES, "spans": PAIRS}
ROWS["tags"] = [text.split() for text in TEXTS if text != TEXTS[3]]


@cache
def load_theirs(kind: Kind, folder: Path) -> tuple[Any, Any]:
    return MODELS[kind][0].from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def pick_their_logits(kind: Kind, folder: Path, row: Any) -> Any:
    """Of one row: (outputs,), for tags (words, tags), for spans (pieces, 2)."""
    model, tokenizer = load_theirs(kind, folder)
    settings = {"return_tensors": "pt", "truncation": True, "max_length": SHAPE.positions}
    if kind == "choice":
        inputs = tokenizer([row[0]] * (len(row) - 1), row[1:], padding=True, **settings)
        return model(**{name: value[None] for name, value in inputs.items()}).logits[0].numpy()
    if kind == "spans":
        output = model(**tokenizer(*([text] for text in row), **settings))  # lists, as it drops an empty text alone
        return np.stack([output.start_logits[0], output.end_logits[0]], 1)
    if kind == "tags":
        inputs = tokenizer(row, is_split_into_words=True, **settings)
        firsts = [inputs.word_ids(0).index(number) for number in range(len(row))]
        return model(**inputs).logits[0].numpy()[firsts]
    return model(**tokenizer(row, **settings)).logits[0].numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(torch.from_numpy(logits).double().softmax(-1))


def lines_of(kind: Kind) -> str:
    rows = ROWS[kind]
    joined = {"tags": " ", "choice": "\t", "spans": "\t"}.get(kind)
    lines = [row if joined is None else joined.join(row) for row in rows]
    return "".join(f"{line if line.strip() else ''}\n" for line in lines)


@pytest.mark.parametrize("kind", MODELS)
def test_the_command_line_answers_as_transformers_does(
    kind: Kind, folders: dict[Kind, Path], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines_of(kind).encode())))
    answers = [json.loads(line) for line in ask(kind, "--dtype", "fp32").splitlines()]
    for row, answer in zip(ROWS[kind], answers, strict=True):
        check_answer(kind, row, answer, folders[kind])


def check_answer(kind: Kind, row: Any, answer: dict[str, Any], folder: Path) -> None:
    names, logits = list(LABELS.values()), pick_their_logits(kind, folder, row)
    if kind == "score":
        assert answer["score"] == pytest.approx(logits.item(), abs=1e-5)
    elif kind == "labels":
        shares = 1 / (1 + np.exp(-logits.astype(np.float64)))
        assert list(answer["probabilities"].values()) == pytest.approx(shares, abs=1e-5)
        assert answer["labels"] == [name for name, share in zip(names, shares, strict=True) if share > 0.5]
    elif kind == "classes":
        assert list(answer["probabilities"].values()) == pytest.approx(softmax(logits), abs=1e-5)
        assert answer["label"] == names[logits.argmax()]
        assert answer["probability"] == max(answer["probabilities"].values())
    elif kind == "choice":
        assert answer["probabilities"] == pytest.approx(softmax(logits), abs=1e-5)
        if any(row):
            assert (answer["choice"], answer["text"]) == (logits.argmax(), row[1 + logits.argmax()])
    elif kind == "tags":
        assert (answer["words"], answer["tags"]) == (row, [names[tag] for tag in logits.argmax(-1)])
        assert answer["probabilities"] == pytest.approx(softmax(logits).max(-1, initial=0), abs=1e-5)
    elif row[1]:
        assert answer["answer"] == row[1][answer["start"] : answer["end"]]
        encoded = load_theirs(kind, folder)[1](*row, return_offsets_mapping=True)
        pieces = [place for place, sequence in enumerate(encoded.sequence_ids()) if sequence == 1]
        _, first, last = max((logits[i, 0] + logits[j, 1], i, j) for i in pieces for j in pieces if j >= i)
        ends = encoded["offset_mapping"][first][0], encoded["offset_mapping"][last][1]
        assert (answer["start"], answer["end"]) == ends, "of all spans"
    else:
        assert not answer["answer"]


def copied(folder: Path, target: Path, **task: Any) -> Path:
    """A model as it is fine-tuned here: with a task.json."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    write_json(target / TASK, task)
    return target


def test_task_json_says_how_text_is_laid_out(folders: dict[Kind, Path], tmp_path: Path) -> None:
    """That of SWAG as in training."""
    model = load(copied(folders["classes"], tmp_path / "pairs", length=9, fields=["premise", "claim"]))
    row = {"claim": "word3 word4 word5 b", "premise": "a b c d e f g", "id": 7}
    assert model([row]) == model([("a b c d e f g", "word3 word4 word5 b")])
    assert model([row]) == load(folders["classes"])([("a b c", "word3 word4 word5")])
    fields = ["sent1", "sent2", "ending0", "ending1"]
    model = load(copied(folders["choice"], tmp_path / "swag", length=40, fields=fields))
    [answer] = model([["a b c", "word1", "word2 d", "word3"]])
    [expected] = load(folders["choice"])([["a b c", "word1 word2 d", "word1 word3"]])
    assert answer["probabilities"] == expected["probabilities"]
    assert answer["text"] == ["word2 d", "word3"][expected["choice"]]


def test_questions_may_have_no_answer(folders: dict[Kind, Path], tmp_path: Path) -> None:
    """Where task.json has a threshold, and the odds of no answer are above it."""
    never, always = (
        load(copied(folders["spans"], tmp_path / str(threshold), length=40, question=10, threshold=threshold))
        for threshold in (1e9, -1e9)
    )
    [found], [none] = never([PAIRS[0]]), always([PAIRS[0]])
    assert found["answer"]
    assert 0 < none.pop("probability") <= 1 - found["probability"]
    assert none == {"answer": "", "start": None, "end": None}


def test_long_texts_are_read_to_their_ends(folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    [answer] = load(folders["tags"])([["ab"] * 100])
    assert len(answer["tags"]) == 100
    model, text = load(folders["spans"]), "a b c d " * 50 + "word3 word4"
    seen = []

    def point_at_the_end(_: FineTuned, items: TextWindows) -> Ragged:
        """The last two pieces of the text, before the last [SEP]."""
        lengths = items.encode(np.arange(len(items))).sequences.pieces.lengths
        seen.append(len(lengths))
        logits = np.zeros((lengths.sum(), 2), np.float32)
        logits[[-3, -2], [0, 1]] = 9
        return Ragged(logits, np.cumsum(lengths))

    monkeypatch.setattr(FineTuned, "logits", point_at_the_end)
    [answer] = model([("where", text)])
    assert answer["answer"] == "word3 word4"
    assert text[answer["start"] : answer["end"]] == "word3 word4"
    assert seen[0] > 5


def test_entities_of_tags(folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FineTuned, "logits", lambda *_: Ragged(np.eye(3)[[0, 1, 2, 1]], np.array([4])))
    [answer] = load(folders["tags"])(["to New York London"])
    assert [[*each.values()] for each in answer["entities"]] == [["X", "New York", 1, 2], ["X", "London", 3, 3]]
    assert [*answer["entities"][0]] == ["type", "text", "first", "last"]


def test_rows_are_answered_some_at_a_time(folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more are read than are answered together, none is lost, and neighbours change a probability by rounding."""
    model, texts = load(folders["classes"], "fp32"), [f"word{number} a" for number in range(10)]
    read: list[str] = []

    class Stream(io.BytesIO):
        def __next__(self) -> bytes:
            read.append("line")
            return super().__next__()

    monkeypatch.setattr(predict, "ROWS", 3)
    monkeypatch.setattr(Path, "open", lambda *_: Stream("".join(f"{text}\n" for text in texts).encode()))
    answers: list[Any] = []
    for part in predict.answer_file(model, Path("some.txt"), Predict(Path("model"))):
        answers += part
        assert len(read) <= len(answers) + 1
    together = model(texts)
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in together]
    for answer, other in zip(answers, together, strict=True):
        assert answer["probabilities"] == pytest.approx(other["probabilities"], abs=PROMISED)


def test_what_cannot_answer_is_refused(
    folders: dict[Kind, Path], ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not fine-tuned or whose weights are no numbers, folders and files that are missing, and a GPU."""
    plain, broken, none = tmp_path / "model", tmp_path / "broken", tmp_path / "none.txt"
    their_model(BertForMaskedLM).save_pretrained(plain)
    WordPiece(PIECES, cased=False).write(plain)
    shutil.copytree(folders["classes"], broken)
    change_weights(broken, lambda weights: weights["classifier.weight"][0].fill_(float("nan")))
    error = ask(plain, code=2)
    assert "not fine-tuned" in error
    assert f"python finetuning/run_glue.py --model {plain}" in error
    assert ask(broken, code=2) == f"error: {broken}: classifier.weight has values that are no numbers\n"
    assert f"{none}: no such folder" in ask(none, code=2)
    assert f"{none}: no such file" in ask("classes", none, code=2)
    for row in ("a fine film", {"text": "a"}):
        assert "one row alone; give a list of rows" in refusal(load(folders["classes"]), row)


def test_rows_may_be_arrays(folders: dict[Kind, Path]) -> None:
    model = load(folders["classes"])
    assert model(list(np.array(PAIRS))) == model(PAIRS)
    assert "texts[0] is float64, not text" in refusal(model, np.array([1.0]))


def test_the_results_of_a_task_lead_to_its_model(folders: dict[Kind, Path], tmp_path: Path) -> None:
    copied(folders["classes"], tmp_path / "model")
    assert load(tmp_path)(["a"]) == load(folders["classes"])(["a"])
    assert load(tmp_path)([]) == []
    for name in ("rte", "sst2"):
        copied(folders["classes"], tmp_path / "glue" / name / "model", length=20)
    assert_refusal(f"several tasks; name one of them: {tmp_path / 'glue' / 'rte'}, .*sst2$", load, tmp_path / "glue")


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_fewer_bits_say_nearly_the_same(dtype: str, folders: dict[Kind, Path], ask: Ask, tmp_path: Path) -> None:
    if dtype == "int8" and not cpu_has_int8():
        pytest.skip("no products of bytes here")
    (tmp_path / "a.txt").write_text(lines_of("classes"))
    said = ask("classes", tmp_path / "a.txt", "--dtype", dtype)
    fewer = [json.loads(line)["probabilities"] for line in said.splitlines()]
    exact = [row["probabilities"] for row in load(folders["classes"], "fp32")(TEXTS)]
    assert fewer != exact
    assert fewer == [{name: pytest.approx(share, abs=0.1) for name, share in row.items()} for row in exact]


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_the_numbers_of_a_processor_are_told(
    fast: bool, chosen: str, folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What auto chooses where a person looks, and what bf16 costs where it is emulated."""
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: fast)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("finetuning.prediction.choose_device", lambda *_: torch.device("cpu"))
    for looked_at in (True, False):
        monkeypatch.setattr(predict, "is_terminal", lambda _, looked_at=looked_at: looked_at)
        predict.load_and_tell(folders["classes"], "auto")
        assert capsys.readouterr().err == f"computing in {chosen}, which suits this machine\n" * looked_at
    with warnings.catch_warnings(record=True) as told:
        load(folders["classes"], "bf16")
    assert ["this processor emulates it" in str(each.message) for each in told] == [True] * (not fast)


@pytest.mark.slow
def test_a_closed_pipe_ends_it_without_a_word(folders: dict[Kind, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fine film\n" * 20_000)
    process: Any = start([*ENTRY, str(folders["score"]), str(tmp_path / "a.txt")])
    assert json.loads(process.stdout.readline())
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", -signal.SIGPIPE)
