"""SQuAD as a task: labels of windows, figures beside the official ones of the files it writes, articles held out; and
the windows of a text with the best spans in them, beside plain loops over all pieces."""

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
from support.tasks import CUTTER, VOCABULARY, article, encode, item, random_outputs, write_questions, write_squad

from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning.evaluate_squad import EvaluateSquad, evaluate
from finetuning.inputs import Cutter, Ragged
from finetuning.settings import FineTuning, Spans
from finetuning.tasks.spans import TextWindows, find_answers, find_pieces
from finetuning.tasks.squad import Lessons, SquadTask, hold_out, open_squad
from finetuning.tasks.squad_rules import Question, Version, read_squad
from finetuning.tasks.task import Setup

QUESTION = 3


def shape_of(length: int = 12, stride: int = 3, answer: int = 4) -> FineTuning:
    return FineTuning(length=length, spans=Spans(stride=stride, question=QUESTION, answer=answer))


SHAPE = shape_of()
SETUP = Setup(CUTTER, SHAPE)
TEXT = "Éa b, c-d efg h. i j k l m n o p q r s t u v w x y z"


def labels(items: Any) -> list[list[int]]:
    found: list[list[int]] = encode(items).labels.values.reshape(-1, 2).tolist()
    return found


def open_task(folder: Path, items: list[dict[str, Any]], version: Version = "1.1", context: str = TEXT) -> SquadTask:
    path = write_questions(folder / "d.json", items, context)
    return open_squad(version, path, path, SETUP)


def ask(folder: Path, items: list[dict[str, Any]], context: str = TEXT) -> list[Question]:
    return read_squad(write_questions(folder / "asked.json", items, context))[1]


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
    lessons = Lessons(ask(tmp_path_factory.mktemp("squad"), [one], context), CUTTER, SHAPE)
    before, inside = (len(CUTTER.cut_texts([text]).values) for text in (context[:start], answer))
    for number, label in enumerate(labels(lessons)):
        holds = lessons.places.begins[number] <= before and before + inside <= lessons.places.ends[number]
        assert (label != [0, 0]) == holds
        if holds:
            assert cut_back(lessons, number, label) == answer


def test_an_answer_within_a_piece_is_labelled_with_the_whole_piece(tmp_path: Path) -> None:
    whole = Cutter(WordPiece((*VOCABULARY.pieces, "house"), cased=False))
    lessons = Lessons(ask(tmp_path, [item("a", "q", ["ouse b"])], "a house b"), whole, SHAPE)
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
    whole, some = encode(train), encode(train, *order)
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
    assert labels(task.train) == labels(Lessons(ask(tmp_path, items[5:]), CUTTER, SHAPE))
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
    for name, each in zip(json.loads(predictions.read_text()), best.values(), strict=True):
        totals = {one["text"]: one["start_logit"] + one["end_logit"] for one in each}
        assert (len(totals), "" in totals) == (len(each), optional)
        if optional:
            assert table[name] == pytest.approx(totals.pop("") - max(totals.values()))


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


FILES = [slow("train-v1.1_subset_44articles", 11877, 86), slow("train-v2.0_subset_11articles", 4799, 44)]


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "answers", "within"), [*FILES, ("xquad-dev-v1.1", 1190, 1)])
def test_real_answers_come_back(real_data: Path, name: str, answers: int, within: int) -> None:
    """All answers but those that begin or end within a piece, and of windows all but those whose answer is long."""
    cut = Cutter(load_vocabulary(real_data, cased=False))
    asked = [each for each in read_squad(real_data / f"squad/{name}.json")[1] if each.golds]
    lessons = Lessons(asked, cut, FineTuning(length=384))
    encoded = encode(lessons)
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


# Windows and the spans in them


def text(pieces: int) -> str:
    """A text of so many pieces, all of them different as long as there are letters."""
    return " ".join(string.ascii_lowercase[number % 26] for number in range(pieces))


SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5)
SHAPES = st.builds(shape_of, st.integers(8, 16), st.integers(1, 12))


def plain_windows(question: int, size: int, shape: FineTuning) -> list[tuple[int, int]]:
    """Where windows begin and end, by the loop of the original."""
    room, start, found = shape.length - min(question, QUESTION) - 3, 0, []
    while True:
        found.append((start, min(start + room, size)))
        if start + room >= size:
            return found
        start += min(room, shape.spans.stride)


def plain_owner(windows: list[tuple[int, int]], piece: int) -> int:
    """The window in which a piece has most context, by the rule of the original; the first of equals."""
    best, owner = -np.inf, -1
    for number, (begin, end) in enumerate(windows):
        if begin <= piece < end:
            score = min(piece - begin, end - 1 - piece) + 0.01 * (end - begin)
            if score > best:
                best, owner = score, number
    return owner


@settings(max_examples=30)
@given(SIZES, SHAPES)
def test_windows_cover_every_piece_which_the_one_with_most_context_owns(
    sizes: list[tuple[int, int]], shape: FineTuning
) -> None:
    pairs = [(text(question), text(size)) for question, size in sizes]
    windows = TextWindows(pairs, CUTTER, shape)
    encoded = encode(windows)
    assert len(encoded) == len(windows) == windows.places.first[-1]
    assert encoded.labels is None
    special = CUTTER.special
    for number, (question, size) in enumerate(sizes):
        rows = range(windows.places.first[number], windows.places.first[number + 1])
        spread = plain_windows(question, size, shape)
        assert [(windows.places.begins[row], windows.places.ends[row]) for row in rows] == spread
        owners = [plain_owner(spread, piece) for piece in range(size)]
        for row, (begin, end) in enumerate(spread):
            owned = windows.find_owned(rows.start + row)
            assert owned.tolist() == [owners[piece] == row for piece in range(begin, end)]
        asked, whole = (CUTTER.cut_texts([text]).values.tolist() for text in pairs[number])
        asked = asked[:QUESTION]
        for row in rows:
            seen = whole[windows.places.begins[row] : windows.places.ends[row]]
            expected = [special.cls, *asked, special.sep, *seen, special.sep]
            assert encoded.sequences.pieces.row(row).tolist() == expected
            assert encoded.sequences.second[row] == windows.count_before(np.array([row]))[0] == len(asked) + 2
            assert len(expected) <= shape.length


@settings(max_examples=30)
@given(SIZES, SHAPES, st.integers(0, 99), st.booleans())
def test_answers_are_those_that_trying_all_spans_finds(
    sizes: list[tuple[int, int]], shape: FineTuning, seed: int, optional: bool
) -> None:
    pairs = [(text(question), text(size)) for question, size in sizes]
    windows = TextWindows(pairs, CUTTER, shape)
    outputs = random_outputs(windows, seed)
    for number, answers in enumerate(find_answers(windows, outputs, optional)):
        question, size = sizes[number]
        spread = plain_windows(question, size, shape)
        best: dict[str, float] = {}
        for row, (begin, end) in enumerate(spread):
            values = outputs.row(windows.places.first[number] + row)[min(question, QUESTION) + 2 :].astype(float)
            for first in (piece for piece in range(begin, end) if plain_owner(spread, piece) == row):
                for last in range(first, min(first + shape.spans.answer, end)):
                    words = " ".join(pairs[number][1].split()[first : last + 1])
                    score = values[first - begin, 0] + values[last - begin, 1]
                    best[words] = max(score, best.get(words, -np.inf))
        ranked = sorted(best, key=lambda words: -best[words])
        null = min(outputs.row(row)[0].astype(float).sum() for row in range(*windows.places.first[number : number + 2]))
        given = [each for each in answers.candidates if each.text]
        assert answers.text() == ranked[0]
        assert [each.start_logit + each.end_logit for each in given[:8]] == [best[words] for words in ranked[:8]]
        assert (answers.odds, answers.text(threshold=answers.odds)) == (null - best[ranked[0]], ranked[0])
        assert answers.text(threshold=answers.odds - 1e-6) == ""
        assert len(answers.candidates) - len(given) == optional
        totals = np.array([each.start_logit + each.end_logit for each in answers.candidates])
        assert (np.diff(totals) <= 0).all()
        shares = np.exp(totals - totals[0]) / np.exp(totals - totals[0]).sum()
        assert [each.probability for each in answers.candidates] == pytest.approx(shares.tolist())
        assert all(pairs[number][1][each.start :].startswith(each.text) for each in given)


def test_as_many_answers_as_wanted_without_doubles() -> None:
    windows = TextWindows([("a", "b b b b c")], CUTTER, shape_of(answer=1))
    answers = next(find_answers(windows, random_outputs(windows, 1), optional=False))
    assert sorted(each.text for each in answers.candidates) == ["b", "c"]


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("context", ["\x00\x01", "a b c"])
def test_a_question_without_any_candidate_has_an_empty_answer(context: str, optional: bool) -> None:
    """A text without pieces, and a model whose outputs are no numbers."""
    windows = TextWindows([("a", context), ("a", "b")], CUTTER, shape_of())
    outputs = random_outputs(windows, 1)
    outputs.row(0)[1:] = np.nan
    empty, whole = find_answers(windows, outputs, optional)
    assert (empty.text(), empty.text(0.0), whole.text()) == ("", "", "b")
    assert empty.odds == outputs.row(0)[0].astype(float).sum()
    assert [each.text for each in empty.candidates] == [""] * optional
    assert all(each.probability == 1.0 for each in empty.candidates)


def test_answers_are_cut_from_the_text_itself() -> None:
    """Capitals, accents and white space stay as they stand in the text."""
    context = "A  BÉ\u00a0\tc"
    windows = TextWindows([("a", context)], CUTTER, shape_of())
    ends = encode(windows).sequences.pieces.ends
    outputs = Ragged(np.zeros((ends[-1], 2), np.float32), ends)
    size, before = int(windows.places.ends[0]), 3
    outputs.values[before + 1, 0] = outputs.values[before + size - 1, 1] = 9
    (answers,) = find_answers(windows, outputs, optional=False)
    assert (answers.text(), answers.candidates[0].start) == ("BÉ\u00a0\tc", 3)


@pytest.mark.parametrize(
    ("start", "end", "pieces"),
    [(0, 3, (0, 0)), (1, 2, (0, 0)), (2, 5, (0, 1)), (3, 4, (1, 0)), (4, 9, (1, 2)), (7, 8, (2, 2)), (9, 10, (3, 2))],
)
def test_an_answer_takes_the_pieces_that_hold_its_ends(start: int, end: int, pieces: tuple[int, int]) -> None:
    offsets = np.array([(0, 3), (4, 6), (6, 9)])
    assert find_pieces(offsets, start, end) == pieces


def test_a_length_without_room_for_text_is_refused() -> None:
    assert len(TextWindows([], CUTTER, shape_of())) == 0
    said = refusal(TextWindows, [("a", "b")], CUTTER, FineTuning(length=8, spans=Spans(question=5)))
    assert "length = 8 leaves no room for text beside a question of 5 pieces" in said
