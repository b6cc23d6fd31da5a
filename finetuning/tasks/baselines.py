"""Baselines for texts and pairs: linear models or centroids of TF-IDF, and of the overlap of words.

Only one thread computes, so that the number of cores changes nothing, and no global random state is used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from unicodedata import category, normalize

import numpy as np

from data_prep.common.arrays import Array
from finetuning.inputs import Ragged
from pretraining.architectures.weights import TaskHead

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2600-\u27bf\u3040-\u30ff\u3400-\u9fff\U0001f000-\U0001faff"
"""Emoji, and letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no blanks between words."""
MARKS = "\u200c\u200d" + "".join(char for char in map(chr, range(0x300, 0x10000)) if category(char)[0] == "M")
"""Combining marks and joiners within words, such as the vowels of Hindi and Arabic; `\\w` has none of them."""
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+(?:[{MARKS}]+[^\W{UNSPACED}]*)*")
TERMS = 100_000
"""Most frequent words and pairs of neighbouring words that a model counts."""
CHARACTERS, MODELS = 10_000_000, 20
"""Maximum characters of training texts, and maximum models that read them all. Each label has a model: more labels read
fewer characters, in proportion. Each class has one too; more classes are told apart by their centroids. Two models of
10 million characters take about 15 seconds of a core, 20 about a minute."""
Texts = Sequence[Sequence[str]]
"""Columns of texts: one, or two of pairs."""


def answer_texts(
    head: TaskHead, train: Texts, labels: Array, splits: Mapping[str, Texts]
) -> tuple[str, dict[str, Ragged]]:
    """Fits the baseline of a task with one text or two; returns its name and its outputs for all items of `splits`.
    `labels` (n, outputs) are those of the training texts. ImportError without scikit-learn."""
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

    kind, count = head.kind, len(head.labels)
    chosen = choose_within(CHARACTERS * min(1.0, MODELS / count) if kind == "labels" else CHARACTERS, train)
    train = [[column[number] for number in chosen] for column in train]
    if not any(map(list_words, chain(*train))):
        raise ValueError("no words in the training texts")
    terms = TfidfVectorizer(tokenizer=list_words, token_pattern=None, ngram_range=(1, 2), max_features=TERMS)
    terms.fit(chain(*train))

    def compute_features(texts: Texts) -> Any:
        return sparse.hstack([*map(terms.transform, texts), *map(measure_overlap, texts[:-1], texts[1:])]).tocsr()

    how, predict = fit_model(head, compute_features(train), labels[chosen] if kind == "labels" else labels[chosen, 0])
    how = f"TF-IDF{' and word overlap' * (len(train) == 2)} with {how}"
    how += f" of {len(chosen):,} of the {len(labels):,} training items" * (len(chosen) < len(labels))
    found = {}
    for split, texts in splits.items():
        said = predict(compute_features(texts)).reshape(len(texts[0]), -1)
        if kind == "classes":
            said = said == np.arange(count)
        elif kind == "embeddings":  # two vectors of each item, whose cosine is its number
            said = np.interp(said, (said.min(), said.max()), (0, 1))
            said = np.hstack([np.ones_like(said), np.zeros_like(said), said, np.sqrt(1 - said**2)]).reshape(-1, 2)
        found[split] = Ragged(said.astype(np.float32), np.arange(1, len(texts[0]) + 1) * (len(said) // len(texts[0])))
    return how, found


def fit_model(head: TaskHead, features: Any, right: Array) -> tuple[str, Callable[[Any], Array]]:
    """Fits the model of a kind of task; returns its name, and a function that predicts for each item a class, 0 or 1
    for each label, or a number. The time of centroids does not depend on the number of classes."""
    from sklearn import linear_model, multiclass, preprocessing

    if head.kind == "classes" and len(head.labels) > MODELS:
        members = preprocessing.label_binarize(right, classes=range(len(head.labels)), sparse_output=True)
        centroids = preprocessing.normalize(members.T @ features).T
        return "nearest centroid", lambda asked: np.asarray((asked @ centroids).argmax(1))
    logistic = multiclass.OneVsRestClassifier(linear_model.LogisticRegression(solver="liblinear", random_state=0))
    how, model = ("logistic", logistic) if head.kind in ("classes", "labels") else ("ridge", linear_model.Ridge())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that no item or every item has
        model.fit(features, right)
    return f"{how} regression", model.predict


def choose_within(characters: float, texts: Texts) -> Array:
    """Chooses items at random, the same in every call, that have at most so many characters together, at least one;
    all if these do."""
    sizes = np.sum([[len(text) for text in column] for column in texts], axis=0)
    order = np.random.default_rng(0).permutation(len(sizes))
    count = int(np.searchsorted(np.cumsum(sizes[order]), characters, "right"))
    return np.sort(order[: max(1, count)])


def list_words(text: str) -> list[str]:
    """Lists the words of a text in lower case, and its letters of scripts without blanks."""
    return WORD.findall(normalize("NFC", text.lower()))


def measure_overlap(first: Sequence[str], second: Sequence[str]) -> Array:
    """Counts the words that both texts of each pair have, in any case: their share of the words of both, of the first
    and of the second text."""
    rows = []
    for pair in zip(first, second, strict=True):
        one, other = (set(list_words(text)) for text in pair)
        rows.append([len(one & other) / max(1, len(words)) for words in (one | other, one, other)])
    return np.array(rows)
