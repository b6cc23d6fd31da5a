"""SQuAD as a task: labels of windows, figures beside the official ones of the files it writes, articles held out."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refusal
from support.marks import slow
from support.tasks import CUTTER, VOCABULARY, article, item, questions, random_outputs, write_questions, write_squad

from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning.evaluate_squad import EvaluateSquad, evaluate
from finetuning.inputs import Cutter, Ragged
from finetuning.settings import FineTuning, Spans
from finetuning.tasks.spans import find_answers
from finetuning.tasks.squad import Lessons, SquadTask, hold_out, open_squad
from finetuning.tasks.squad_rules import Version, read_squad
from finetuning.tasks.task import Setup

SHAPE = FineTuning(length=12, spans=Spans(stride=3, question=3, answer=4))
SETUP = Setup(CUTTER, SHAPE)
TEXT = "Éa b, c-d efg h. i j k l m n o p q r s t u v w x y z"


def labels(items: Any) -> list[list[int]]:
    found: list[list[int]] = items.encode(np.arange(len(items))).labels.values.reshape(-1, 2).tolist()
    return found


def open_task(folder: Path, items: list[dict[str, Any]], version: Version = "1.1", context: str = TEXT) -> SquadTask:
    path = write_questions(folder / "d.json", items, context)
    return open_squad(version, path, path, SETUP)


def cut_back(lessons: Lessons, row: int, span: Sequence[int]) -> str:
    """The text of a window's label, by the offsets of its text."""
    context = lessons.context[lessons.places.question[row]]
    (offsets,) = lessons.find_offsets(np.array([context]))
    first, last = np.array(span) + lessons.places.begins[row] - lessons.count_before(np.array([row]))[0]
    text: str = lessons.texts[context][offsets[first, 0] : offsets[last, 1]]
    return text


GAPS = st.sampled_from([" ", "  ", "\u00a0", "\n", ", ", "-"])
WORD = st.text(string.ascii_lowercase + "ÉÅñ東京한", min_size=1, max_size=3)


@settings(max_examples=50)
@given(st.data(), st.lists(st.tuples(WORD, GAPS), min_size=1, max_size=20))
def test_labels_give_the_answer_back_in_the_windows_that_hold_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, words: list[tuple[str, str]]
) -> None:
    context = "".join(word + gap for word, gap in words)
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    start = sum(len(word + gap) for word, gap in words[:first])
    answer = "".join(word + gap for word, gap in words[first:last]) + words[last][0]
    one = item("a", "q", [answer])
    one["answers"][0]["answer_start"] = start
    lessons = Lessons(questions(tmp_path_factory.mktemp("squad"), [one], context), CUTTER, SHAPE)
    before, inside = (len(CUTTER.cut_texts([text]).values) for text in (context[:start], answer))
    for number, label in enumerate(labels(lessons)):
        holds = lessons.places.begins[number] <= before and before + inside <= lessons.places.ends[number]
        assert (label != [0, 0]) == holds
        if holds:
            assert cut_back(lessons, number, label) == answer


def test_an_answer_within_a_piece_is_labelled_with_the_whole_piece(tmp_path: Path) -> None:
    whole = Cutter(WordPiece((*VOCABULARY.pieces, "house"), cased=False))
    lessons = Lessons(questions(tmp_path, [item("a", "q", ["ouse b"])], "a house b"), whole, SHAPE)
    assert labels(lessons) == [[4, 5]]  # [CLS] q [SEP] a house b
    assert cut_back(lessons, 0, [4, 5]) == "house b"


def test_questions_without_an_answer_are_labelled_with_cls(tmp_path: Path) -> None:
    """Also in the windows of version 2; in version 1 there are none."""
    items = [item("a", "q", [], True), item("b", "q", ["z"], True)]
    assert labels(open_task(tmp_path, items, "2.0", "a z").train) == [[0, 0], [4, 4]]
    assert "qas[0]: has no answer, as in SQuAD 2.0: use version 2.0" in refusal(open_task, tmp_path, items[:1])


def test_items_are_encoded_in_any_order(tmp_path: Path) -> None:
    train = open_task(tmp_path, [item("a", "q", ["c-d"]), item("b", "q r", ["z"])]).train
    order = np.random.default_rng(1).permutation(len(train))
    whole, some = train.encode(np.arange(len(train))), train.encode(order)
    assert whole.labels is not None
    assert some.labels is not None
    assert some.labels.values.tolist() == whole.labels.take(order).values.tolist()
    assert some.sequences.pieces.values.tolist() == whole.sequences.pieces.take(order).values.tolist()


def test_answers_that_are_not_at_their_offset_are_left_out(tmp_path: Path) -> None:
    items = [item(name, "q", ["z"]) for name in "abcdef"]
    for one, start in zip(items[:5], (0, -1, 10**9, 1, 2), strict=True):
        one["answers"][0]["answer_start"] = start
    task = open_task(tmp_path, items)
    place = f"{tmp_path}/d.json: data[0].paragraphs[0].qas[0]: 'z' (a)"
    assert task.notes[1].startswith(f"5 of 6 answers are not at their offset, first {place}; ")
    assert task.notes[1].endswith("; these questions are left out of training")
    assert labels(task.train) == labels(Lessons(questions(tmp_path, items[5:], TEXT), CUTTER, SHAPE))
    assert "nothing is left to learn from" in refusal(open_task, tmp_path, items[:5])


@pytest.mark.parametrize(("version", "seed"), [("1.1", 0), ("1.1", 1), ("2.0", 2), ("2.0", 3)])
def test_figures_are_those_of_the_files_that_are_written(tmp_path: Path, version: Version, seed: int) -> None:
    words, draw, optional = TEXT.split(), np.random.default_rng(seed), version == "2.0"
    golds = [words[number : number + 3] for number in draw.integers(0, 20, 12)]
    golds = [[] if optional and number % 3 == 0 else each for number, each in enumerate(golds)]
    task = open_task(tmp_path, [item(str(number), "q", each, optional) for number, each in enumerate(golds)], version)
    said = random_outputs(task.dev["dev"], seed)
    scores = task.score("dev", said)
    task.write_predictions("dev", said, tmp_path / "out")
    predictions, odds = tmp_path / "out/predictions.json", tmp_path / "out/null_odds.json"
    official, notes = evaluate(EvaluateSquad(tmp_path / "d.json", predictions))
    assert (notes, task.metric in scores) == ([], True)
    table, threshold = {}, task.describe_use(said)["threshold"]
    if not optional:
        assert scores == {"exact": official["exact_match"] / 100, "f1": official["f1"] / 100}
        assert (odds.exists(), threshold) == (False, None)
    else:
        assert scores.items() >= {name: v / 100 for name, v in official.items() if not name.endswith("total")}.items()
        with_odds, _ = evaluate(EvaluateSquad(tmp_path / "d.json", predictions, odds))
        assert scores["best_f1"] == with_odds["best_f1"] / 100 == pytest.approx(scores["f1"])
        assert scores["best_f1_thresh"] == with_odds["best_f1_thresh"]
        table = json.loads(odds.read_text())
        empty = {name for name, answer in json.loads(predictions.read_text()).items() if not answer}
        assert empty == {name for name in table if table[name] > threshold}
    best = json.loads((tmp_path / "out/nbest_predictions.json").read_text())
    assert best.keys() == json.loads(predictions.read_text()).keys()
    for name, each in best.items():
        assert sum(one["probability"] for one in each) == pytest.approx(1)
        texts = [one["text"] for one in each]
        assert (len({*texts}), "" in texts) == (len(each), optional)
        if optional:
            null, top = each[texts.index("")], next(one for one in each if one["text"])
            odd = null["start_logit"] + null["end_logit"] - top["start_logit"] - top["end_logit"]
            assert table[name] == pytest.approx(odd)


def test_a_model_that_is_never_right_is_best_silent(tmp_path: Path) -> None:
    items = [item(str(number), "q", [] if number else ["Éa"], True) for number in range(4)]
    task = open_task(tmp_path, items, "2.0", "Éa b")
    said = random_outputs(task.dev["dev"])
    for number in range(4):
        said.row(number)[:] = [[-9, -9]] * 3 + [[-5, -5]] * 2 + [[5, 5], [0, 0]]  # "b" for sure
    scores = task.score("dev", said)
    assert (scores["exact"], scores["f1"], scores["best_f1"]) == (0.75, 0.75, 0.75)
    assert (scores["exact_at_zero"], scores["f1_at_zero"]) == (0.0, 0.0)
    assert scores["best_f1_thresh"] == 0.0  # as the official script says it, though silence begins far below
    assert task.describe_use(said)["threshold"] < -28 < task.describe_use(said)["threshold"] + 1


def test_whole_articles_are_held_out(tmp_path: Path) -> None:
    articles = [
        article(f"t{number}", [("a b", [item(f"{number}-{each}", "q", ["b"]) for each in range(number + 1)])])
        for number in range(10)
    ]
    path = write_squad(tmp_path / "d.json", articles)
    _, asked = read_squad(path)
    train, dev = hold_out(asked, 0.2)
    assert {each.article for each in train}.isdisjoint({each.article for each in dev})
    assert sorted(each.id for each in [*train, *dev]) == sorted(each.id for each in asked)
    assert 0.2 * 55 <= len(dev) < 0.2 * 55 + 10
    task = open_squad("1.1", path, None, Setup(CUTTER, SHAPE.model_copy(update={"seed": 5})))
    held = hold_out(asked, 0.1)[1]  # the same whatever the seed
    assert (len(task.train), len(task.dev["dev"])) == (55 - len(held), len(held))
    told = f"{len(held)} of its 55 questions ({len({each.article for each in held})} whole articles) are held out"
    assert task.notes == (f"reads {path}", f"{path}: {told} from training and scored")
    assert all(all(hold_out(asked, share)) for share in (0.0001, 0.9999))
    write_squad(path, articles[:1])
    assert "train has 1, and it takes 2" in refusal(open_squad, "1.1", path, None, SETUP)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "answers", "within"),
    [
        slow("train-v1.1_subset_44articles", 11877, 86),
        slow("train-v2.0_subset_11articles", 4799, 44),
        ("xquad-dev-v1.1", 1190, 1),
    ],
)
def test_real_answers_come_back(real_data: Path, name: str, answers: int, within: int) -> None:
    """All answers but those that begin or end within a piece, and of windows all but those whose answer is long."""
    cut = Cutter(load_vocabulary(real_data, cased=False))
    asked = [each for each in read_squad(real_data / f"squad/{name}.json")[1] if each.golds]
    lessons = Lessons(asked, cut, FineTuning(length=384))
    encoded = lessons.encode(np.arange(len(lessons)))
    assert encoded.labels is not None
    spans = encoded.labels.values.reshape(-1, 2)
    labelled = np.flatnonzero(spans[:, 0]).tolist()
    back = {lessons.places.question[row]: cut_back(lessons, row, spans[row]) for row in labelled}
    assert len(asked) == answers
    assert sum(back.get(number) != each.golds[0].text for number, each in enumerate(asked)) == within
    pieces = encoded.sequences.pieces
    sure = np.zeros((len(pieces.values), 2), np.float32)
    for side in (0, 1):
        sure[pieces.starts + spans[:, side], side] = 20
    found = find_answers(lessons, Ragged(sure, pieces.ends), optional=False)
    right = sum(answer.text() == each.golds[0].text for answer, each in zip(found, asked, strict=True))
    assert right >= 0.989 * answers  # the others have over 30 pieces, or their start and end in different windows
