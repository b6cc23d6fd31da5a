"""The official figures of SQuAD beside a second statement of their rules, each fault of its files, and what
evaluate_squad.py says: figures on standard output, what is odd on standard error."""

import json
import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, refusal
from support.tasks import article, item, write_questions

from finetuning import evaluate_squad
from finetuning.tasks import squad_rules
from finetuning.tasks.squad_rules import read_squad


def plain_normalise(text: str) -> str:
    """A second statement of what is compared: character by character, then word by word."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    words = "".join(" " if part in ("a", "an", "the") else part for part in re.split(r"(\W+)", kept))
    return " ".join(words.split())


NORMALISED = [
    ("The  Panthers' defense!", "panthers defense"),
    ("A an THE", ""),
    ("a-the", "athe"),  # punctuation goes first and leaves no blank
    ("theatre an-other", "theatre another"),
    ("L’été — «the end»", "l’été — « end»"),  # only ASCII punctuation goes
    ("Ünïcödé\u00a0A\tB\n", "ünïcödé b"),
    ("A the-a cat", "thea cat"),
    ("東京 the 大学", "東京 大学"),
    ("the\u2014end", "\u2014end"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "kept"), NORMALISED)
def test_what_is_compared_of_an_answer(text: str, kept: str) -> None:
    assert squad_rules.normalize_answer(text) == kept


PAIRS = [
    ("the Virgin Mary", "Virgin Mary.", 1, 1.0, 1.0),
    ("gold gold dome", "gold dome dome", 0, 2 / 3, 2 / 3),  # every word as often as both have it
    ("cat", "dog", 0, 0.0, 0.0),
    ("1858", "in 1858", 0, 2 / 3, 2 / 3),
    ("Café", "Cafe", 0, 0.0, 0.0),
    ("", "cat", 0, 0.0, 0.0),
    ("the", "a!", 1, 0.0, 1.0),  # nothing against nothing: in 1.1 it matches exactly all the same
]


@pytest.mark.parametrize(("gold", "said", "exact", "f1", "f1_of_2"), PAIRS)
def test_exact_match_and_f1(gold: str, said: str, exact: int, f1: float, f1_of_2: float) -> None:
    for one, other in ((gold, said), (said, gold)):
        assert squad_rules.exact_match(one, other) == exact
        assert squad_rules.token_f1("1.1", one, other) == pytest.approx(f1, abs=1e-15)
        assert squad_rules.token_f1("2.0", one, other) == pytest.approx(f1_of_2, abs=1e-15)


def plain_figures(
    asked: list[squad_rules.Question], said: Mapping[str, str], odds: Mapping[str, float] | None, limit: float
) -> dict[str, float]:
    """A second statement of the official script of 2.0, by the letter of its rules."""
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for question in asked:
        golds = [gold.text for gold in question.golds if plain_normalise(gold.text)] or [""]
        pairs = [(plain_normalise(gold), plain_normalise(said[question.id])) for gold in golds]
        raw["exact"][question.id] = max(float(one == other) for one, other in pairs)
        raw["f1"][question.id] = max(plain_f1(one.split(), other.split()) for one, other in pairs)
    figures, by_id = {}, {each.id: each for each in asked}
    groups = {"": asked, "HasAns_": [each for each in asked if each.golds]}
    groups["NoAns_"] = [each for each in asked if not each.golds]
    for name, scores in raw.items():
        silent = {each.id for each in asked if odds and odds[each.id] > limit}
        final = {each.id: float(not each.golds) if each.id in silent else scores[each.id] for each in asked}
        for prefix, group in groups.items():
            if group:
                figures[f"{prefix}{name}"] = 100 * sum(final[each.id] for each in group) / len(group)
                figures[f"{prefix}total"] = len(group)
        if odds:
            best = now = float(sum(not each.golds for each in asked))
            at = 0.0
            for key in sorted((key for key in odds if key in by_id), key=odds.__getitem__):
                now += scores[key] if by_id[key].golds else -1 if said[key] else 0
                if now > best:
                    best, at = now, odds[key]
            figures |= {f"best_{name}": 100 * best / len(asked), f"best_{name}_thresh": at}
    return figures


def plain_f1(gold: list[str], said: list[str]) -> float:
    if not gold or not said:
        return float(gold == said)
    shared = sum(min(gold.count(word), said.count(word)) for word in {*said})
    return 2 * shared / (len(gold) + len(said))


ANSWERS = st.sampled_from(["", "the", "red house", "red", "house red red", "Été!", "a house", "ÉTÉ"])


@settings(max_examples=50)
@given(st.data())
def test_version_2_gives_the_figures_of_a_second_statement(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    golds = data.draw(st.lists(st.lists(ANSWERS, max_size=3), min_size=1, max_size=8))
    path, items = tmp_path_factory.mktemp("squad") / "d.json", [item(str(i), "x", s, True) for i, s in enumerate(golds)]
    asked = read_squad(write_questions(path, items))[1]
    said = {question.id: data.draw(ANSWERS) for question in asked}
    odds = {question.id: data.draw(st.sampled_from([-2.5, -1.0, 0.0, 0.5, 3.0])) for question in asked}
    odds |= data.draw(st.sampled_from([{}, {"unknown": 0.1}]))
    limit = data.draw(st.sampled_from([-1.0, 0.0, 1.0]))
    assert squad_rules.evaluate_2(asked, said) == pytest.approx(plain_figures(asked, said, None, limit))
    assert squad_rules.evaluate_2(asked, said, odds, limit) == pytest.approx(plain_figures(asked, said, odds, limit))


# Files


def test_questions_of_a_paragraph_share_their_context(tmp_path: Path) -> None:
    """And a question of blanks is one: the official training file has it. A byte order mark and CRLF are no fault."""
    path = write_questions(tmp_path / "d.json", [item("a", "q", ["été"]), item("b", "   ", ["red"])], "red été")
    for content in (path.read_bytes(), ("\ufeff" + path.read_text()).replace("\n", "\r\n").encode()):
        path.write_bytes(content)
        version, (first, second) = read_squad(path)
        assert version == "1.1"
        assert first.context is second.context
        assert (first.golds[0].text, first.golds[0].start, first.article) == ("été", 4, "t")
        assert (second.text, second.where) == ("   ", f"{path}: data[0].paragraphs[0].qas[1]")


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


VERSIONS: list[tuple[Any, Any, str]] = [
    ({"version": "1.1"}, {}, "1.1"),
    ({"version": "v2.0"}, {}, "2.0"),
    ({}, {"is_impossible": False}, "2.0"),
    ({}, {}, "1.1"),
]


@pytest.mark.parametrize(("more", "flag", "found"), VERSIONS)
def test_the_version_is_found_from_the_data(tmp_path: Path, more: Any, flag: Any, found: str) -> None:
    content = {"data": [article("t", [("red", [item("a", "q", ["red"]) | flag])])]} | more
    assert read_squad(write(tmp_path / "d.json", content))[0] == found


QUESTION = ("data", 0, "paragraphs", 0, "qas", 0)
ANSWER = (*QUESTION, "answers", 0)
TWICE = [{"id": "a", "question": "q", "answers": [{"text": "red", "answer_start": 0}]}] * 2
PLACE = "data[0].paragraphs[0]"


FAULTS: list[tuple[tuple[Any, ...], Any, str]] = [
    (QUESTION[:3], None, "data[0]: 'paragraphs' should be a list; it is null"),
    (("data",), None, "'data' should be a list"),
    (("data",), {}, "'data' should be a list; it is {}"),
    (("data",), [3], "data[0]: 'paragraphs' should be a list"),
    (("data",), [], "no questions"),
    ((*QUESTION[:4], "context"), None, f"{PLACE}: 'context' should be text; it is null"),
    ((*QUESTION[:4], "context"), "", f"{PLACE}: 'context' should be text; it is \"\""),
    ((*QUESTION[:4], "context"), "a\ud800", f"{PLACE}: 'context' has half of a character"),
    ((*QUESTION, "question"), "", f"{PLACE}.qas[0]: 'question' should be text"),
    ((*QUESTION, "id"), 7, f"{PLACE}.qas[0]: 'id' should be text; it is 7"),
    ((*QUESTION, "answers"), None, f"{PLACE}.qas[0]: 'answers' should be a list"),
    ((*QUESTION, "answers"), [], f"{PLACE}.qas[0]: no answer"),
    ((*ANSWER, "text"), None, f"{PLACE}.qas[0].answers[0]: 'text' should be text"),
    ((*ANSWER, "answer_start"), "0", "answers[0]: 'answer_start' should be a whole number; it is \"0\""),
    ((*QUESTION, "is_impossible"), True, f"{PLACE}.qas[0]: says is_impossible, and has answers"),
    (QUESTION[:5], TWICE, f"{PLACE}.qas[1]: repeats the id 'a' of "),
]


@pytest.mark.parametrize(("place", "value", "message"), FAULTS)
def test_a_fault_is_named_with_its_place(tmp_path: Path, place: tuple[Any, ...], value: Any, message: str) -> None:
    """None takes a value away."""
    data: Any = {"version": "1.1", "data": [article("t", [("red", [item("a", "q", ["red"])])])]}
    inner, (*outer, last) = data, place
    for key in outer:
        inner = inner[key]
    inner[last] = value
    if value is None:
        del inner[last]
    path = write(tmp_path / "d.json", data)
    said = refusal(read_squad, path)
    assert said.startswith(f"{path}: ")
    assert message in said


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for content in (b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(content)
        assert "d.json" in refusal(read_squad, path)
    for path in (tmp_path, tmp_path / "none.json"):
        assert f"{path}: cannot be read" in refusal(read_squad, path)


def test_predictions_and_odds_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for content in ('["a"]', '{"a": 1}', '{"a": null}', "no"):
        path.write_text(content)
        assert "p.json: " in refusal(squad_rules.read_by_id, path, str, "answers")
    for content in ('{"a": "1"}', '{"a": true}', '{"a": NaN}'):
        path.write_text(content)
        assert_refusal(r"p\.json: 'a': .* stands where odds are expected", squad_rules.read_by_id, path, float, "odds")


# evaluate_squad.py as a user types it


Typed = Callable[..., tuple[Any, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """The command in this process: the figures and what was said."""

    def call(*arguments: object, code: int = 0) -> tuple[Any, str]:
        assert evaluate_squad.main([*map(str, arguments)]) == code
        printed, said = capsys.readouterr()
        return json.loads(printed) if printed else None, said

    return call


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """SQuAD 1.1 with an accent, an article and several golds."""
    items = [item("a", "q", ["Été de 1858", "the Été"]), item("b", "q", ["1858"])]
    return write_questions(tmp_path / "dev-v1.1.json", items, "the Été de 1858")


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """SQuAD 2.0 with a question that has no answer."""
    items = [item("a", "q", ["Été"], True), item("b", "q", [], True)]
    return write_questions(tmp_path / "dev-v2.0.json", items, "the Été de 1858")


def test_version_1_counts_and_names_what_is_missing(typed: Typed, first: Path, tmp_path: Path) -> None:
    figures, said = typed(first, write(tmp_path / "p.json", {"a": "été!", "z1": "", "z2": "", "z3": "", "z4": ""}))
    assert figures == {"exact_match": 50.0, "f1": 50.0}
    assert "no answer for 1 id (b): counted as wrong" in said
    assert "4 ids (z1, z2, z3, …) no question of" in said


def test_version_2_with_odds_has_best_thresholds(typed: Typed, second: Path, tmp_path: Path) -> None:
    """Answers and odds that are missing are refused."""
    predictions = write(tmp_path / "p.json", {"a": "the été", "b": "1858"})
    assert typed(second, predictions)[0]["exact"] == 50.0
    odds = write(tmp_path / "o.json", {"a": -3, "b": 0.5})
    figures, said = typed(second, predictions, "--null-odds", odds)
    assert said == ""
    assert (figures["exact"], figures["best_f1"]) == (50.0, 100.0)
    refused = typed(second, predictions, "--null-odds", write(odds, {"b": 1}), code=2)
    assert "o.json: no odds for 1 id (a) of" in refused[1]
    assert "p.json: no answer for 1 id (b) of" in typed(second, write(predictions, {"a": ""}), code=2)[1]


def test_what_cannot_be_scored_is_refused(typed: Typed, first: Path, tmp_path: Path) -> None:
    predictions = write(tmp_path / "p.json", {"a": "", "b": ""})
    for words, message in (
        ((first, first), "'data'"),
        ((first, predictions, "--null-odds", predictions), "--null-odds: "),
    ):
        figures, said = typed(*words, code=2)
        assert (figures, said[:7], message in said) == (None, "error: ", True)
