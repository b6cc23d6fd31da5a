"""The vocabulary: learned the same way every time, checked when given, and the same for transformers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from conftest import WORDS, sentence
from transformers import AutoTokenizer, BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import SPECIAL, load_vocabulary, train_vocabulary


def counts(seed: int = 1) -> Counter[str]:
    draw = random.Random(seed)
    return Counter({word: draw.randint(2, 3000) for word in [*WORDS, "été", "日本", ".", ",", "naïve"]})


def test_the_same_counts_give_the_same_vocabulary_every_time() -> None:
    vocabularies = {train_vocabulary(counts(), 400, cased=False).pieces for _ in range(5)}
    assert len(vocabularies) == 1


def test_the_order_of_the_counts_does_not_matter() -> None:
    shuffled = list(counts().items())
    random.Random(3).shuffle(shuffled)
    assert train_vocabulary(dict(shuffled), 400, cased=False) == train_vocabulary(counts(), 400, cased=False)


def test_the_vocabulary_holds_the_special_pieces_and_the_frequent_words() -> None:
    vocabulary = train_vocabulary(counts(), 400, cased=False)
    assert vocabulary.pieces[:5] == SPECIAL
    assert len(vocabulary) <= 400
    frequent = [word for word, _ in counts().most_common(30)]
    assert set(frequent) <= set(vocabulary.pieces)


def test_rare_characters_have_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.vocabulary.vocabulary.ALPHABET", 10)
    vocabulary = train_vocabulary(counts(), 200, cased=False)
    assert not {"日", "##日", "本", "##本"} & set(vocabulary.pieces)


def test_a_vocabulary_smaller_than_the_alphabet_is_refused() -> None:
    with pytest.raises(UserError, match="--vocab-size 20: the characters of the text alone need"):
        train_vocabulary(counts(), 20, cased=False)


@pytest.mark.parametrize("cased", [False, True])
def test_transformers_loads_it_with_the_same_ids(cased: bool, tmp_path: Path) -> None:
    vocabulary = train_vocabulary(counts(), 400, cased)
    vocabulary.write(tmp_path)
    draw = random.Random(2)
    texts = [sentence(draw) for _ in range(50)] + ["Été, NAÏVE 日本 xyz!"]
    expected = [vocabulary.pipeline().encode(text).ids for text in texts]
    for tokenizer in (AutoTokenizer.from_pretrained(tmp_path), BertTokenizerFast.from_pretrained(tmp_path)):
        assert tokenizer(texts, add_special_tokens=False)["input_ids"] == expected
        pair = tokenizer("a", "b")
        assert tokenizer.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
        assert pair["token_type_ids"] == [0, 0, 0, 1, 1]
        assert tokenizer.mask_token_id == vocabulary.special.mask
    assert load_vocabulary(tmp_path / "vocab.txt", cased) == vocabulary


def write(path: Path, pieces: list[str]) -> Path:
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def test_a_vocabulary_without_the_special_pieces_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", ["[PAD]", "[UNK]", "a", "b"])
    with pytest.raises(UserError, match=r"lacks the special pieces \[CLS\], \[SEP\], \[MASK\]"):
        load_vocabulary(path, cased=False)


def test_a_vocabulary_with_duplicates_is_refused_naming_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", [*SPECIAL, "a", "b", "a"])
    with pytest.raises(UserError, match="line 8 repeats 'a' of line 6"):
        load_vocabulary(path, cased=False)


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_vocabulary(tmp_path / "vocab.txt", cased=False)


@pytest.mark.realdata
def test_a_given_vocabulary_is_copied_byte_for_byte(real_data: Path, tmp_path: Path) -> None:
    load_vocabulary(real_data / "vocab.txt", cased=False).write(tmp_path)
    assert (tmp_path / "vocab.txt").read_bytes() == (real_data / "vocab.txt").read_bytes()
