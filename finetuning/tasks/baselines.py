"""Baselines for texts and pairs: linear models of TF-IDF, and the overlap of words.

Only one thread computes, so that the number of cores changes nothing, and no global random state is used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from data_prep.common.arrays import Array
from finetuning.inputs import Ragged
from pretraining.architectures.weights import TaskHead

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no blanks between words."""
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
TERMS = 100_000
"""Most frequent words and pairs of neighbouring words that a model counts: 100 MB for 100 classes."""
CHARACTERS, CLASSES = 10_000_000, 10
"""Maximum characters of training texts, about half a minute; fewer in proportion for more classes than these, since
each class has a model of its own."""
Texts = Sequence[Sequence[str]]
"""Columns of texts: one, or two of pairs."""


def answer_texts(
    head: TaskHead, train: Texts, labels: Array, splits: Mapping[str, Texts]
) -> tuple[str, dict[str, Ragged]]:
    """Fits the baseline of a task with one text or two; returns its name and its outputs for all items of `splits`.
    `labels` (n, outputs) are those of the training texts. ImportError without scikit-learn."""
    if head.kind == "score" and len(train) == 2:  # needs no training
        return "word overlap", {split: _as_outputs(measure_overlap(*texts)[:, :1]) for split, texts in splits.items()}
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    chosen = choose_within(CHARACTERS * min(1.0, CLASSES / max(1, len(head.labels))), train)
    whole, train = len(labels), [[column[number] for number in chosen] for column in train]
    terms = TfidfVectorizer(token_pattern=WORD.pattern, ngram_range=(1, 2), max_features=TERMS)
    terms.fit(chain(*train))

    def compute_features(texts: Texts) -> sparse.csr_matrix:
        parts = [terms.transform(column) for column in texts]
        return sparse.hstack([*parts, measure_overlap(*texts)]).tocsr() if len(parts) == 2 else parts[0]

    is_number = head.kind == "score"
    model = Ridge() if is_number else OneVsRestClassifier(LogisticRegression(solver="liblinear", random_state=0))
    right = labels[chosen] if head.kind == "labels" else labels[chosen, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that no item or every item has
        model.fit(compute_features(train), right)
    found = {}
    for split, texts in splits.items():
        said = model.predict(compute_features(texts))
        found[split] = _as_outputs(np.eye(len(head.labels))[said] if head.kind == "classes" else said)
    part = f" of {len(chosen):,} of the {whole:,} training items" * (len(chosen) < whole)
    return f"TF-IDF with {'ridge' if is_number else 'logistic'} regression{part}", found


def choose_within(characters: float, texts: Texts) -> Array:
    """Chooses items at random, the same in every call, that have at most so many characters together, at least one;
    all if these do."""
    sizes = np.sum([[len(text) for text in column] for column in texts], axis=0)
    order = np.random.default_rng(0).permutation(len(sizes))
    count = int(np.searchsorted(np.cumsum(sizes[order]), characters, "right"))
    return np.sort(order[: max(1, count)])


def measure_overlap(first: Sequence[str], second: Sequence[str]) -> Array:
    """Counts the words that both texts of each pair have, in any case: their share of the words of both, of the first
    and of the second text."""
    rows = []
    for pair in zip(first, second, strict=True):
        one, other = (set(WORD.findall(text.lower())) for text in pair)
        rows.append([len(one & other) / max(1, len(words)) for words in (one | other, one, other)])
    return np.array(rows)


def _as_outputs(values: Array) -> Ragged:
    """Makes one row of outputs of each item."""
    rows = values.reshape(len(values), -1).astype(np.float32)
    return Ragged(rows, np.arange(1, len(rows) + 1))
