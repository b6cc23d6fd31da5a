"""Baselines give the predictions of scikit-learn used directly, and of values computed by hand; beside runs they are
scored once, and change no bit of a model."""

import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, hstack
from scipy.stats import pearsonr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from support.commands import run_main
from support.finetuning import Toy, Tune, outcome, results
from support.tasks import CUTTER

from data_prep.common.arrays import Array
from finetuning import compare
from finetuning.files.tag_files import Fields
from finetuning.settings import FineTuning
from finetuning.tasks import baselines
from finetuning.tasks.baselines import answer_texts, choose_within, measure_overlap
from finetuning.tasks.glue import open_glue
from finetuning.tasks.ner import open_tags
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup
from pretraining.architectures.weights import TaskHead
from pretraining.processes.ending import Code

SUBJECTS = {
    "sea": "ship wave fish salt sail harbour",
    "sky": "cloud bird wing star wind moon",
    "farm": "cow corn barn field milk plough",
}
DRAW = random.Random(3)


def write_texts(count: int) -> tuple[list[str], list[int]]:
    """Texts of a subject's words and of others', with the numbers of the subjects."""
    labels = [DRAW.randrange(3) for _ in range(count)]
    every = [word for words in SUBJECTS.values() for word in words.split()]
    of_subject = [[*SUBJECTS.values()][label].split() for label in labels]
    return [" ".join([*DRAW.choices(own, k=2), *DRAW.choices(every, k=4)]).title() for own in of_subject], labels


TRAIN, LABELS = write_texts(90)
DEV, _ = write_texts(60)
OTHER_TRAIN, OTHER_DEV = TRAIN[1:] + TRAIN[:1], DEV[::-1]


def compute_features(train: Array | list[str], texts: list[str]) -> csr_matrix:
    """Computes TF-IDF as a user of scikit-learn does, whose default pattern finds the same words in these texts."""
    return TfidfVectorizer(ngram_range=(1, 2)).fit(train).transform(texts)


def test_classes_are_those_of_a_logistic_regression_for_each() -> None:
    right, features, asked = np.array(LABELS), compute_features(TRAIN, TRAIN), compute_features(TRAIN, DEV)
    odds = [LogisticRegression(solver="liblinear").fit(features, right == k).decision_function(asked) for k in range(3)]
    how, found = answer_texts(TaskHead("classes", tuple(SUBJECTS)), (TRAIN,), right[:, None], {"dev": (DEV,)})
    assert how == "TF-IDF with logistic regression"
    assert found["dev"].values.argmax(1).tolist() == np.argmax(odds, 0).tolist()
    assert found["dev"].ends.tolist() == [*range(1, 61)]


def test_labels_each_have_a_model_and_one_that_all_items_have_is_constant() -> None:
    right = np.stack([np.array(LABELS) == 1, np.ones(90, bool), np.array(LABELS) != 2], 1).astype(np.int64)
    features, asked = compute_features(TRAIN, TRAIN), compute_features(TRAIN, DEV)
    first, last = (LogisticRegression(solver="liblinear").fit(features, right[:, k]).predict(asked) for k in (0, 2))
    _, found = answer_texts(TaskHead("labels", ("a", "b", "c")), (TRAIN,), right, {"dev": (DEV,)})
    assert (found["dev"].values > 0).T.astype(int).tolist() == [first.tolist(), [1] * 60, last.tolist()]
    _, alone = answer_texts(TaskHead("labels", ("a",)), (TRAIN,), right[:, :1], {"dev": (DEV,)})
    assert (alone["dev"].values[:, 0] > 0).astype(int).tolist() == first.tolist()


def test_numbers_of_single_texts_are_those_of_a_ridge_regression() -> None:
    right = np.array(LABELS, np.float32)
    wanted = Ridge().fit(compute_features(TRAIN, TRAIN), right).predict(compute_features(TRAIN, DEV))
    how, found = answer_texts(TaskHead("score"), (TRAIN,), right[:, None], {"dev": (DEV,)})
    assert how == "TF-IDF with ridge regression"
    assert found["dev"].values[:, 0].tolist() == pytest.approx(wanted, rel=1e-3)


def test_pairs_have_the_words_of_both_texts_and_their_overlap() -> None:
    both, right = TRAIN + OTHER_TRAIN, np.array([a == b for a, b in zip(LABELS, LABELS[1:] + LABELS[:1], strict=True)])

    def make_features(first: list[str], second: list[str]) -> csr_matrix:
        shares = []
        for a, b in zip(first, second, strict=True):
            one, other = {*a.lower().split()}, {*b.lower().split()}
            common = len(one & other)
            shares.append([common / len(one | other), common / len(one), common / len(other)])
        return hstack([compute_features(both, first), compute_features(both, second), np.array(shares)]).tocsr()

    model = LogisticRegression(solver="liblinear").fit(make_features(TRAIN, OTHER_TRAIN), right)
    pairs = {"dev": (DEV, OTHER_DEV)}
    _, found = answer_texts(
        TaskHead("classes", ("no", "yes")), (TRAIN, OTHER_TRAIN), right.astype(np.int64)[:, None], pairs
    )
    assert found["dev"].values.argmax(1).tolist() == model.predict(make_features(DEV, OTHER_DEV)).astype(int).tolist()


def test_overlap_counts_words_of_any_script_in_any_case() -> None:
    first = ["A cat, a Dog!", "...", "Ψάρι και ψωμί", "我喜欢猫", "😀😡"]
    second = ["the DOG sat", "dog", "και νερό", "我喜欢狗", "😀"]
    wanted = [[1 / 5, 1 / 3, 1 / 3], [0, 0, 0], [1 / 4, 1 / 3, 1 / 2], [3 / 5, 3 / 4, 3 / 4], [1 / 2, 1 / 2, 1]]
    assert measure_overlap(first, second).tolist() == wanted
    # Marks belong to words in Hindi, Bengali, vocalised Arabic and Hebrew, joiners in Persian; accents may be apart.
    one = ["दिन", "ক্ষমা", "مُحَمَّد", "שָׁלוֹם", "می\u200cروم", "café"]
    other = ["दान", "ক্ষতি", "مِحْمِد", "שֶׁלֶם", "میروم", "cafe\u0301"]
    assert measure_overlap(one, other)[:, 0].tolist() == [0, 0, 0, 0, 0, 1]
    assert measure_overlap(one, one)[:, 0].tolist() == [1] * 6


def test_many_classes_learn_from_all_items() -> None:
    """Each of 1,000 classes has a word of its own; one has no item."""
    right, asked = np.arange(4000)[:, None] % 999, np.arange(0, 999, 7)
    texts = [f"the word{number % 999} of {number % 5} and {number % 7}" for number in range(4000)]
    dev = [f"word{number} and the of 3" for number in asked]
    how, found = answer_texts(TaskHead("classes", tuple(map(str, range(1000)))), (texts,), right, {"dev": (dev,)})
    assert how == "TF-IDF with nearest centroid"
    assert found["dev"].values.shape == (len(asked), 1000)
    assert found["dev"].values.argmax(1).tolist() == asked.tolist()


@pytest.mark.parametrize("kind", ["score", "embeddings"])
def test_numbers_of_pairs_are_fitted_whatever_their_sign(kind: Any) -> None:
    """Of vectors the cosines are the numbers, but for their scale."""
    likeness = measure_overlap(TRAIN, OTHER_TRAIN)[:, :1]
    for sign in (1, -1):
        pairs = {"dev": (TRAIN, OTHER_TRAIN)}
        how, found = answer_texts(TaskHead(kind), (TRAIN, OTHER_TRAIN), sign * likeness, pairs)
        assert how == "TF-IDF and word overlap with ridge regression"
        rows = found["dev"].values
        numbers = rows[:, 0] if kind == "score" else (rows[::2] * rows[1::2]).sum(1)
        assert pearsonr(numbers, sign * likeness[:, 0])[0] > 0.9
        assert found["dev"].ends[-1] == len(rows)


def test_scored_pairs_have_a_baseline_as_vectors(tmp_path: Path) -> None:
    toml = 'name = "near"\nkind = "embeddings"\ntrain = "a.tsv"\ndev = "a.tsv"\n'
    likeness = measure_overlap(TRAIN, OTHER_TRAIN)[:, 0]
    rows = "".join(f"{a}\t{b}\t{c}\n" for a, b, c in zip(TRAIN, OTHER_TRAIN, likeness, strict=True))
    (tmp_path / "a.tsv").write_text("question\tpassage\tlabel\n" + rows)
    for label in ('label = "label"\n', ""):
        (tmp_path / "near.toml").write_text(toml + label)
        task = open_own(tmp_path / "near.toml", Setup(CUTTER, FineTuning()))
        found = task.answer_by_baseline()
        assert (found is None) == (not label), "questions and passages without scores have none"
        if found is not None:
            assert task.score("dev", found[1]["dev"])["spearman"] > 0.9


def test_texts_without_words_are_told() -> None:
    with pytest.raises(ValueError, match="no words in the training texts"):
        answer_texts(TaskHead("score"), (["...", " "],), np.ones((2, 1)), {"dev": (["word"],)})


def test_texts_without_blanks_are_told_apart_by_their_letters() -> None:
    draw = random.Random(1)
    texts = ["".join([*draw.choices("的一是了我", k=9), *draw.choices(own, k=2)]) for own in ("猫狗鱼", "车船机") * 40]
    right = np.arange(80)[:, None] % 2
    _, found = answer_texts(TaskHead("classes", ("a", "b")), (texts[:60],), right[:60], {"dev": (texts[60:],)})
    assert np.mean(found["dev"].values.argmax(1) == right[60:, 0]) > 0.9


def test_too_much_text_is_cut_to_a_sample_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, right = [f"{'word ' * 9}{number}" for number in range(100)], np.arange(100)[:, None] % 2
    chosen = choose_within(1000, (texts, texts))
    assert sum(2 * len(texts[number]) for number in chosen) <= 1000
    assert len({*chosen.tolist()}) == len(chosen) >= 9
    assert chosen.tolist() == choose_within(1000, (texts, texts)).tolist() != [*range(len(chosen))]
    assert choose_within(1e6, (texts,)).tolist() == [*range(100)]
    assert len(choose_within(1, (texts,))) == 1
    monkeypatch.setattr(baselines, "CHARACTERS", 2400)
    for labels, items in ((20, 50), (40, 25)):  # half as much text for twice as many labels as the limit
        head = TaskHead("labels", tuple(map(str, range(labels))))
        how, _ = answer_texts(head, (texts,), np.tile(right, labels), {"dev": (texts,)})
        count = int(how.partition(" of ")[2].split()[0])
        assert (abs(count - items) <= 3, how.endswith(" of the 100 training items")) == (True, True)


def test_words_get_their_most_frequent_tag(tmp_path: Path) -> None:
    """Anna: one of B-PER and O, so O, which is more frequent overall; Ben: 2 of 3 B-PER; unknown words: O."""
    train = "Anna B-PER\nsat O\n\nAnna O\nin O\nRome B-LOC\nwith O\nBen B-PER\n\n"
    train += "Ben B-PER\nBen O\nNew B-LOC\nYork I-LOC\n"
    dev = "Ben B-PER\nmet O\nEve B-PER\n\nNew B-LOC\nYork I-LOC\nsaw O\nAnna B-PER\nin O\nRome B-LOC\n"
    for name, text in (("train.txt", train), ("dev.txt", dev)):
        (tmp_path / name).write_text(text)
    files = {split: [tmp_path / f"{split}.txt"] for split in ("train", "dev")}
    task = open_tags("names", files, Setup(CUTTER, FineTuning()), Fields())
    found = task.answer_by_baseline()
    assert found is not None
    tags = [task.head.labels[number] for number in found[1]["dev"].values.argmax(1)]
    assert tags == "B-PER O O B-LOC I-LOC O O O B-LOC".split()
    scored = task.score("dev", found[1]["dev"])
    assert (scored["precision"], scored["recall"]) == (1, 3 / 5)
    assert scored["f1"] == pytest.approx(0.75)


@pytest.mark.realdata
def test_real_tasks_have_a_baseline_better_than_the_largest_class(real_data: Path) -> None:
    """And the likeness of sentences one better than the overlap of words."""
    for name in ("rte", "stsb"):
        task: Any = open_glue(name, real_data / "glue", Setup(CUTTER, FineTuning()))
        found = task.answer_by_baseline()
        assert found is not None
        figures, labels = task.score("dev", found[1]["dev"]), task.dev["dev"].labels[:, 0]
        if name == "rte":
            assert figures["accuracy"] > np.bincount(labels).max() / len(labels) + 0.02
        else:
            assert figures["pearson"] > pearsonr(*(_list_overlaps(task)))[0] + 0.02


def _list_overlaps(task: Any) -> tuple[list[float], list[float]]:
    """Lists the right scores of the pairs, and the shares of their words that both have."""
    found = []
    for pair in zip(*task.dev["dev"].texts, strict=True):
        one, other = ({*re.findall(r"\w+", text.lower())} for text in pair)
        found.append(len(one & other) / len(one | other))
    return task.dev["dev"].labels[:, 0].tolist(), found


# Beside runs


def test_a_grid_has_one_baseline_and_its_models_the_same_bits(
    toy: Toy, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the tables, results.json and the card, and is not scored again."""
    said = tune(toy.command("with", "--seeds", 2))
    assert said.count("toy: baseline, TF-IDF with logistic regression: accuracy  dev ") == 1
    with_one, without = results(toy.folder / "with"), toy.folder / "without"
    task = open_own(toy.data / "toy.toml", Setup(CUTTER, FineTuning()))
    found = task.answer_by_baseline()
    assert found is not None
    figures = with_one["baseline"]["scores"]["dev"]
    assert figures == task.score("dev", found[1]["dev"])
    percent = f"{100 * figures['accuracy']:.1f}"
    assert f"{percent} ± " in next(line for line in said.splitlines() if line.startswith("toy   dev"))
    card = (toy.folder / "with" / "toy" / "model" / "README.md").read_text().partition("## Baseline: TF-IDF")[2]
    assert f"accuracy = {round(figures['accuracy'], 4)}\n" in card
    lines = run_main(compare.main, toy.folder / "with").splitlines()
    assert [line.split()[:3] for line in lines] == [["task", "metric", "baseline"], ["toy", "accuracy", percent]]

    monkeypatch.setattr(baselines, "answer_texts", lambda *_: pytest.fail("scored again"))
    tune(toy.command("with", "--seeds", 3))
    assert results(toy.folder / "with")["baseline"] == with_one["baseline"]
    assert "toy: baseline" not in tune(toy.command("without", "--seeds", 3, "--no-baseline"))
    one, other = outcome(toy.folder / "with"), outcome(without)
    assert "baseline" not in other["toy/results.json"] or other["toy/results.json"]["baseline"] is None
    for name in ("results.json", "toy/results.json"):
        for each in (one, other):
            [each[name].pop("baseline", None), each[name].get("toy", {}).pop("baseline", None)]
    del one["toy/baseline.json"]
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def test_no_baseline_leaves_out_one_that_is_there(toy: Toy, tune: Tune) -> None:
    """Of the summary, of results.json and of the cards of new runs."""
    tune(toy.command("out"))
    folder = toy.folder / "out" / "toy"
    for more, is_there in ((["--no-baseline"], False), ([], True)):
        shutil.rmtree(folder / "lr0.003-seed1")
        said = tune(toy.command("out", *more))
        card = (folder / "model" / "README.md").read_text()
        assert {"toy: baseline: " in said, "Baseline: " in card} == {is_there}
        assert (results(toy.folder / "out")["baseline"] is not None) == is_there
        assert (folder / "baseline.json").exists()


def test_no_fault_of_a_baseline_ends_the_command(toy: Toy, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "answer_texts", Mock(side_effect=MemoryError("of 9 GB")))
    assert "toy: no baseline: MemoryError: of 9 GB\n" in tune(toy.command("out"))
    assert results(toy.folder / "out")["score"] is not None


def test_who_asks_to_stop_waits_for_no_other_baseline(toy: Toy, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes during the baseline of the first of two tasks; the first run then saves and stops."""
    (toy.data / "second.toml").write_text((toy.data / "toy.toml").read_text().replace('"toy"', '"second"'))
    asked = []

    def answer(*_: object) -> tuple[str, dict[str, Any]]:
        asked.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("none")

    monkeypatch.setattr(baselines, "answer_texts", answer)
    first, *words = toy.command("out")
    tune([first, str(toy.data / "second.toml"), *words], code=Code.STOPPED)
    assert len(asked) == 1


def test_global_random_states_stay(toy: Toy) -> None:
    def read_states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), torch.get_num_threads()]

    task, before = open_own(toy.data / "toy.toml", Setup(CUTTER, FineTuning())), read_states()
    assert task.answer_by_baseline() is not None
    assert read_states() == before


def test_without_scikit_learn_a_line_says_how_to_get_it(toy: Toy, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    said = tune(toy.command("out"))
    assert [line for line in said.splitlines() if "no baseline" in line and "pip install scikit-learn" in line]
    assert json.loads((toy.folder / "out" / "toy" / "results.json").read_text())["baseline"] is None
