"""Byte-level BPE: ids equal to those of `tokenizers` on all text, forms of vocabularies that are read, and training."""

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal
from support.marks import slow
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_prep.vocabulary.encoders.encoder import TextEncoder
from data_prep.vocabulary.kinds.bytelevel import KIND, ORDER, ByteLevel
from data_prep.vocabulary.source import read_vocabulary

TEXT = (
    "The river's bank isn't far; they've seen 1990's naïve façade — 中文，русский текст! Don't  stop.\n\tτέλος 'll 'x"
)
FORMS = ("gpt2", "roberta", "modern")
BLANKS = range(8, 1, -1)
"""Runs of blanks that have pieces of their own there."""
MODERN = {"[UNK]": 2_280, "[CLS]": 2_281, "[SEP]": 2_282, "[PAD]": 2_283, "[MASK]": 2_284}
"""Special pieces after all others, as ModernBERT has them."""


def count_text() -> Counter[str]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = (TEXT[start:end] for _, (start, end) in split.pre_tokenize_str(TEXT))
    return Counter({word: 2 + number % 5 for number, word in enumerate(words)})


@cache
def trained() -> ByteLevel:
    vocabulary = KIND.train(count_text(), 400, cased=True)
    assert isinstance(vocabulary, ByteLevel)
    return vocabulary


@cache
def tokenizer(form: str) -> Tokenizer:
    """A tokenizer in the form of GPT-2's, RoBERTa's (whose ids are in no order of merges) or ModernBERT's."""
    special = {"gpt2": ["<|endoftext|>"], "roberta": [*ORDER], "modern": []}[form]
    plain, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    plain.train_from_iterator([TEXT] * 5, trainer)
    table = json.loads(plain.to_str())
    vocab = table["model"]["vocab"]
    if form == "roberta":  # by the order of a dictionary
        others = [piece for piece in vocab if piece not in ORDER]
        random.Random(3).shuffle(others)
        table["model"]["vocab"] = {piece: id for id, piece in enumerate((*ORDER[:4], *others, ORDER[4]))}
        for token in table["added_tokens"]:
            token["id"] = table["model"]["vocab"][token["content"]]
    if form == "modern":  # with many pieces more
        vocab |= {f"|||{id}|||": id for id in range(len(vocab), MODERN["[UNK]"] - len(BLANKS))}
    made = Tokenizer.from_str(json.dumps(table))
    if form == "roberta":
        made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
        ids = {name: (name, made.token_to_id(name) or 0) for name in ("<s>", "</s>")}
        made.post_processor = processors.RobertaProcessing(ids["</s>"], ids["<s>"], add_prefix_space=False)
    if form == "modern":
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken(" " * size, normalized=True) for size in BLANKS])
        made.add_special_tokens([AddedToken(name, lstrip=name == "[MASK]") for name in MODERN])
        made.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [(name, MODERN[name]) for name in ("[CLS]", "[SEP]")]
        )
    return made


class Read(NamedTuple):
    """A vocabulary as it is read, and the tokenizer in its file, for which special pieces in a text are text."""

    vocabulary: ByteLevel
    expected: Tokenizer
    encoder: TextEncoder

    def require_equal(self, texts: list[str]) -> None:
        """Asserts that texts have the ids of the library."""
        found = self.encoder.encode_texts(texts)
        rows = np.split(found.ids, found.ends[:-1])
        expected = self.expected.encode_batch(texts, add_special_tokens=False)
        for text, row, one in zip(texts, rows, expected, strict=True):
            assert row.tolist() == one.ids, repr(text)


@pytest.fixture(scope="module", params=FORMS)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    made, folder = tokenizer(request.param), tmp_path_factory.mktemp(request.param)
    made.save(str(folder / "tokenizer.json"))
    expected = Tokenizer.from_str(made.to_str())
    expected.encode_special_tokens = True
    vocabulary = read_vocabulary(folder)
    assert isinstance(vocabulary, ByteLevel)
    return Read(vocabulary, expected, vocabulary.encoder())


CHARACTERS = [*" \n\t'srevmldtlA1!é中Ω\u00a0\u2003\u0301\u200d\u0085😀²①", "'ll", "  ", "e\u0301", "가", "<mask>"]


@given(st.lists(st.lists(st.sampled_from(CHARACTERS), max_size=12).map("".join), min_size=1, max_size=6))
@settings(max_examples=30)
def test_any_text_has_the_ids_of_the_library(read: Read, texts: list[str]) -> None:
    read.require_equal(texts)


def test_common_text_has_the_ids_of_the_library(read: Read) -> None:
    long = ["a" * 5000, "the " * 3000, " " * 300 + "x", "!" * 200, "中" * 100, "e\u0301" * 40]
    read.require_equal([TEXT, *long, "", " ", "x  y", "[MASK] <s>", *TEXT.split(), TEXT[::-1]])
    blocks = (0, 0x370, 0x900, 0x2000, 0x1F300)
    read.require_equal(["".join(map(chr, range(first, first + 700))) for first in blocks])


def test_of_equal_pairs_that_overlap_the_first_is_merged() -> None:
    vocabulary = KIND.train(Counter({"aa": 9, "!!": 9, "abab": 9}), 270, cased=True)
    texts = ["aaa", "a" * 7, "!!!", "aabababa"]
    wanted = vocabulary.pipeline().encode_batch(texts, add_special_tokens=False)
    assert max(len(one.ids) for one in wanted) < 5, "nothing is merged"
    found = vocabulary.encoder().encode_texts(texts)
    assert found.ids.tolist() == [number for one in wanted for number in one.ids]


@pytest.mark.slow
def test_every_character_is_in_the_class_of_the_library(read: Read) -> None:
    """Between letters, digits, blanks and marks; of the planes without characters some."""
    codes = (code for code in range(0x110000) if code >> 16 in (0, 1, 2, 3, 14) or code % 1024 < 64)
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    texts = [f"a{one}1{one}{one} {one}! {one}a  {one}'s{one}" for one in characters]
    read.require_equal(["".join(texts[first : first + 64]) for first in range(0, len(texts), 64)])


def test_ids_of_special_pieces_are_those_that_the_file_says(read: Read) -> None:
    vocabulary, expected, _ = read
    assert list(vocabulary.special) == [expected.token_to_id(name) for name in vocabulary.special_pieces]
    assert len(vocabulary) == expected.get_vocab_size()
    if "[CLS]" in vocabulary.pieces:
        assert {name: vocabulary.pieces.index(name) for name in MODERN} == MODERN


def test_what_is_written_is_read_again_and_by_transformers(read: Read, tmp_path: Path) -> None:
    vocabulary, _, encoder = read
    vocabulary.write(tmp_path)
    again = read_vocabulary(tmp_path)
    assert (again, again.sha256) == (vocabulary, vocabulary.sha256)
    ids = encoder.encode_texts([TEXT]).ids.tolist()
    for cls in (AutoTokenizer, PreTrainedTokenizerFast):
        theirs = cls.from_pretrained(tmp_path)
        assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
        roles = ("pad", "unk", "cls", "sep", "mask")
        assert [getattr(theirs, f"{role}_token_id") for role in roles] == list(vocabulary.special)
        if vocabulary.special.mask != vocabulary.special.sep:
            text = f"The {theirs.mask_token}."
            masked = theirs(text, add_special_tokens=False)["input_ids"]
            first = encoder.encode_texts(vocabulary.split_at_masks(text))
            assert masked[:-1] == [*first.ids[: first.ends[0]], vocabulary.special.mask]
    (tmp_path / "tokenizer.json").unlink()
    if "[CLS]" not in vocabulary.pieces:  # whose added pieces are in no vocab.json
        assert read_vocabulary(tmp_path).sha256 == vocabulary.sha256


def test_a_blank_before_a_text_is_put_there_where_the_file_says_so(tmp_path: Path) -> None:
    made = Tokenizer.from_str(tokenizer("roberta").to_str())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(tmp_path)
    assert isinstance(vocabulary, ByteLevel)
    Read(vocabulary, made, vocabulary.encoder()).require_equal(["river", " river", "", "\u00a0x", "  a", " "])


def test_the_same_counts_train_the_same_pieces() -> None:
    words = list(count_text().items())
    orders = (words, words[::-1], random.Random(5).sample(words, len(words)))
    assert len({KIND.train(dict(order), 400, cased=True).sha256 for order in orders}) == 1
    assert trained().pieces[:5] == ORDER
    assert len(trained()) <= 400
    said = r"--vocab-size 200: special pieces and bytes alone need 261; take more"
    assert_refusal(said, KIND.train, count_text(), 200, cased=True)


def test_words_are_counted_as_the_library_splits_the_text() -> None:
    text = np.frombuffer(TEXT.encode(), np.uint8)
    counts = KIND.count_words(text, np.array([len(text)]), cased=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(TEXT)
    assert counts == Counter(TEXT[start:end] for _, (start, end) in split)


def test_pieces_are_spelled_as_text() -> None:
    vocabulary = trained()
    ids = vocabulary.encoder().encode_texts([f" {TEXT}"]).ids.tolist()
    assert vocabulary.spell(ids) == TEXT
    pieces = dict(zip(vocabulary.pieces, range(len(vocabulary)), strict=True))
    river = [pieces[piece] for piece in ("Ġ", "r", ".", "ä", "<mask>")]
    assert vocabulary.continues[river].tolist() == [False, True, False, True, False]
    assert vocabulary.is_close[river].tolist() == [False, True, True, True, False]
    assert [vocabulary.spellings[id] for id in river] == [" ", "r", ".", r"\xe4", "<mask>"]
    assert (vocabulary.marks[pieces["."]], vocabulary.texts[pieces["<mask>"]]) == (2, "")
    cut = vocabulary.encoder().encode_texts([" riverbank"]).ids.tolist()
    assert vocabulary.find_replaced(["Ġriverbank", " riverbank"]) == [cut, cut]


def test_offsets_leave_blanks_out() -> None:
    encoding = trained().pipeline().encode(" naïve  river", add_special_tokens=False)
    words = {" naïve  river"[start:end] for start, end in encoding.offsets}
    assert not any(word.startswith(" ") and word.strip() for word in words)


def test_a_file_of_2020_is_read(tmp_path: Path) -> None:
    """As roberta-base has it: without the type of the model, and with merges as texts."""
    trained().write(tmp_path)
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    table["model"] = {name: part for name, part in table["model"].items() if name in ("vocab", "merges")}
    table["model"] |= {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    table["model"]["merges"] = [" ".join(pair) for pair in table["model"]["merges"]]
    del table["pre_tokenizer"]["use_regex"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.sha256 == trained().sha256
    assert vocabulary.pipeline().encode(TEXT).ids == trained().pipeline().encode(TEXT).ids


def test_special_pieces_that_are_not_there_are_named(tmp_path: Path) -> None:
    """They may have names of their own, which tokenizer_config.json says."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>", "<m>"])
    made.save(str(tmp_path / "tokenizer.json"))
    said = r"has no piece for mask: name them in tokenizer_config.json \(as mask_token\)"
    assert_refusal(said, read_vocabulary, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": {"content": "<m>"}}')
    assert read_vocabulary(tmp_path).special_pieces.mask == "<m>"


def test_files_that_are_no_bpe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("a b\n")
    assert_refusal(r"vocab.json and merges.txt are no BPE: .*; copy them again", read_vocabulary, tmp_path)


PUBLISHED = {"gpt2": ([15496, 995], [50256] * 5), "roberta": ([31414, 232], [1, 3, 0, 2, 50264])}
"""The ids of "Hello world", and of the special pieces."""


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "files"), [("roberta", 0), slow("roberta", 20), slow("gpt2", 20)])
def test_published_vocabularies_give_the_ids_of_the_library(name: str, files: int, real_data: Path) -> None:
    folder = real_data / "bpe" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    vocabulary = read_vocabulary(folder)
    encoder = vocabulary.encoder()
    assert (encoder.encode_texts(["Hello world"]).ids.tolist(), list(vocabulary.special)) == PUBLISHED[name]
    expected = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for path in sorted((real_data / "wiki").rglob("wiki_*"))[:files]:
        texts = path.read_text("utf-8").split("\n")
        ids = [id for one in expected.encode_batch(texts) for id in one.ids]
        assert encoder.encode_texts(texts).ids.tolist() == ids
