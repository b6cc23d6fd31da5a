"""The vocabulary: learned the same way every time, checked when given, extended by words of the text."""

import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from conftest import WORDS, sentence
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal
from transformers import AutoTokenizer, BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

from data_prep.common.errors import UserError
from data_prep.vocabulary.extending import LEAST, extend_vocabulary
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.kinds.wordpiece import KIND, SPECIAL, WordPiece, read_pieces


def counts(seed: int = 1) -> Counter[str]:
    draw = random.Random(seed)
    return Counter({word: draw.randint(2, 3000) for word in [*WORDS, "été", "日本", ".", ",", "naïve"]})


def test_the_same_counts_give_the_same_vocabulary_with_the_frequent_words_in_any_order() -> None:
    orders = [list(counts().items()) for _ in range(3)]
    random.Random(3).shuffle(orders[0])
    (pieces,) = {KIND.train(dict(order), 400, cased=False).pieces for order in orders}
    assert pieces[:5] == SPECIAL
    assert len(pieces) <= 400
    assert {word for word, _ in counts().most_common(30)} <= {*pieces}


def test_rare_characters_have_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.vocabulary.kinds.wordpiece.ALPHABET", 10)
    vocabulary = KIND.train(counts(), 200, cased=False)
    assert not {"日", "##日", "本", "##本"} & set(vocabulary.pieces)


@pytest.mark.parametrize("cased", [False, True])
def test_transformers_loads_it_with_the_same_ids(cased: bool, tmp_path: Path) -> None:
    vocabulary = KIND.train(counts(), 400, cased)
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
    assert load_vocabulary(tmp_path, cased) == vocabulary


def test_what_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    assert_refusal("no such file", read_pieces, path, cased=False)
    path.write_text("[PAD]\n[UNK]\na\nb\n")
    assert_refusal(r"lacks the special pieces \[CLS\], \[SEP\], \[MASK\]", read_pieces, path, cased=False)
    path.write_text("".join(f"{piece}\n" for piece in [*SPECIAL, "a", "b", "a"]))
    assert_refusal("line 8 repeats 'a' of line 6", read_pieces, path, cased=False)
    assert_refusal("--vocab-size 20: the text's characters alone need", KIND.train, counts(), 20, cased=False)


LETTERS = "abcdefgh"
BASE = WordPiece((*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "bad", "##face", "."), cased=False)


def test_words_are_added_by_what_they_save_and_ties_by_the_alphabet() -> None:
    """Not "héhé", which the tokenizer reads as "hehe"."""
    counts = {"bad": 1000, "abc": 10, "cab": 10, "face": 30, "badface": 25, "gag": LEAST - 1, "a": 99, "héhé": 5}
    done = extend_vocabulary(BASE, counts, 4)
    assert done.added == ("face", "badface", "abc", "cab")  # 30 x 3, 25 x 1, 10 x 2 each
    assert done.vocabulary.pieces == (*BASE.pieces, *done.added)
    before = 1000 + 30 + 30 + 120 + 50 + 12 + 99 + 20
    after = 1000 + 10 + 10 + 30 + 25 + 12 + 99 + 20
    assert (done.before, done.after) == (before, after)
    said = "4 words added to 24 pieces: face, badface, abc, cab; they make 1,361 pieces of text 1,206 (-11.4%)"
    assert str(done) == said


def test_words_that_were_unknown_are_added_as_if_cut_into_characters() -> None:
    done = extend_vocabulary(BASE, {"xyz": 10, "abc": 11, "中": 50}, 2)
    assert done.added == ("中", "abc")
    assert extend_vocabulary(BASE, {"xyz": 10, "abc": 10, "中": 50}, 3).added == ("中", "abc", "xyz")


def test_no_word_of_the_text_becomes_unknown() -> None:
    """ "baf" would cut "bafxe" into "baf" and "##x", which no piece is, though "##xe" is one."""
    base = WordPiece((*BASE.pieces, "##fxe"), cased=False)
    counts = {"baf": 50, "bafxe": LEAST - 1, "cab": 10}
    assert extend_vocabulary(base, counts, 2).added == ("cab",)


def test_there_may_be_fewer_words_than_asked_for_but_not_none() -> None:
    done = extend_vocabulary(BASE, {"abc": 10, "d": 10}, 1000)
    assert done.added == ("abc",)
    assert str(done).startswith("1 words added to 24 pieces: abc; ")
    assert_refusal("no word of the text is worth a piece", extend_vocabulary, BASE, {"d": 10, "abc": LEAST - 1}, 1000)


MADE_UP = st.text(alphabet=LETTERS + "éxβ中", min_size=1, max_size=6)


@given(st.dictionaries(MADE_UP, st.integers(1, 50), min_size=1), st.lists(MADE_UP))
@example({"ae": 5}, ["aé"])
@settings(max_examples=40)
def test_old_ids_stay_and_the_tokenizer_of_transformers_agrees(counts: dict[str, int], others: list[str]) -> None:
    """Text without new words has the ids that it had; a new word is one piece; nothing counted becomes unknown."""
    normal = BASE.pipeline().normalizer.normalize_str
    counts = {word: count for word, count in counts.items() if normal(word) == word}
    try:
        done = extend_vocabulary(BASE, counts, 5)
    except UserError:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, vocabulary in (("old", BASE), ("new", done.vocabulary)):
            vocabulary.write(Path(folder) / name)
        old, new = (AutoTokenizer.from_pretrained(f"{folder}/{name}") for name in ("old", "new"))
    for number, word in enumerate(done.added, len(BASE)):
        assert new(word, add_special_tokens=False).input_ids == [number]
    for word in [*counts, *others]:
        before, after = (tokenizer(word, add_special_tokens=False).input_ids for tokenizer in (old, new))
        assert after == done.vocabulary.pipeline().encode(word, add_special_tokens=False).ids
        if not any(normal(word).startswith(added) for added in done.added) and "中" not in word:
            assert after == before
        if word in counts and old.unk_token_id not in before:
            assert new.unk_token_id not in after
            assert len(after) <= len(before) or any(word.startswith(added) for added in done.added)


def test_what_a_new_piece_replaces() -> None:
    replaced = {"badface": ["bad", "##face"], "##bad": ["bad"], "xax": ["##a", "a"], "中": []}
    expected = [[BASE.pieces.index(piece) for piece in pieces] for pieces in replaced.values()]
    assert BASE.find_replaced(list(replaced)) == expected
