"""Paragraphs come apart into sentences, whatever is in them, by the rules of their language."""

import re
import string
from unittest.mock import Mock

import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.languages import DEFAULT, NAMES, RULES, language_label
from data_prep.readers import splitting
from data_prep.readers.splitting import ANYTHING, DATE, NAME, NAME_AT_START, NO_ENDS, NUMBER, rejoin, split_sentences

CHARACTERS = "aB .!?…—“”’é中。\xa0\u3000\u2003\u200b\u0301\n\t1"


def test_sentences_end_where_a_reader_would_say() -> None:
    passages = ["Dr. Smith went to the U.S. in 1990. He stayed! Did he?", "A new paragraph."]
    expected = ["Dr. Smith went to the U.S. in 1990.", "He stayed!", "Did he?", "A new paragraph."]
    assert split_sentences("en", passages) == expected
    passages = ["In the United States, the film was rated \xa0R\xa0.", " \u3000 "]
    assert split_sentences("en", passages) == ["In the United States, the film was rated R ."]


SENTENCES = """
en | Dr. Who came. | He left.
en | (Dr. Who) came. | "Ms. Marple" came. | St. Paul was there. | Mt. Everest is high.
en | It was directed by Ms. Nina White. | Unlike Mr. No, she agrees.
en | Gen. Lee met Lt. Col. Hand, Capt. Kirk and Rev. King. | See vol. 2 of it. | Vol. 3 is lost.
en | Fig. 3 shows p. 5, ch. 2 and sec. 3. | See fig. 3. | No. 5 is alive. | I say no! | I will not.
en | Op. 27 no. 2 was written c. 1801. | It came out on Dec. 5. | It is in the vol. | So it is.
en | I live on Main St. | He lives there. | Some fruit, e.g. Apples, came. | His father was Americo Sr. | He left.
en | He worked for Acme Inc. | It grew. | He was Robert Peter, Jr. | The couple married.
en-gb | Dr. Who came.
vi | Dr. Who came.
de | Dr. Müller sagte z. B. nichts. | Z. B. Bd. 2 und Nr. 5. | Am 3. Mai kam er. | Das ist so.
de | Am 3. Jänner kam er. | Im 19. Jahrhundert war er der 3. | Man weiß es.
de | Das war am 3. Nov. 1918 in Wien. | Am 3. Nov. kam er. | Seit Sept. 1918 war er dort.
fr | Le 3 juil. 1918. | Le 1er mai. | Le 3 janv. 1990, M. le président vint à St. Louis. | Il part.
vi | TP. Hồ Chí Minh rất lớn. | PGS. TS. Nguyễn Văn A đến. | Hết.
ar | قال د. أحمد ذلك. | ثم ذهب أ.د. سامي. | انظر ص. 3 منه.
hi | कल डॉ. राम आए। | प्रो. शर्मा गए।
th | ในปีพ.ศ. 2500 ดร. สมชาย กับ น.ส. มาลี ไป! | พ.ศ.2500 มา
km | ខ្ញុំទៅ។ | មានឆ្កែ ឆ្មា ។ល។ | និងគោ។ | គាត់ទៅ៕
en | ខ្ញុំទៅ។ | អ្នកមក។
bo | བོད་ཡིག། | ལྷ་ས་ཡིན། ། | ང་ཡིན།
fr | M. Dupont vient. | Mme. Dupont lit le no. 3. | Cf. Dupont.
"""


@pytest.mark.parametrize("row", SENTENCES.strip().split("\n"))
def test_an_abbreviation_ends_no_sentence(row: str) -> None:
    language, *sentences = row.split(" | ")
    assert split_sentences(language, [" ".join(sentences)]) == sentences


@pytest.mark.parametrize("language", NO_ENDS)
def test_each_abbreviation_is_found_wherever_it_stands(language: str) -> None:
    follows = {ANYTHING: "it", NAME: "Anna", NUMBER: "2", DATE: "Mai", NAME_AT_START: "Anna"}
    for word, what in NO_ENDS[language].items():
        for before in (word, *([] if what == NAME_AT_START else [f"Then {word}"])):
            parts = ["First. ", before, f"{follows[what]} came. ", "Last.", ""]
            rejoin(language, parts)
            assert list(filter(None, parts)) == ["First. ", f"{before}{follows[what]} came. ", "Last."]
            parts = [before, "", f"{follows[what]} begins a paragraph.", ""]
            rejoin(language, parts)
            assert parts == [before, "", f"{follows[what]} begins a paragraph.", ""]


MARKS = [*"a_.é(){", '"', '"', ' "a', 'a" ', 'a"\t', '\xa0"a', '"\xa0', "“", "«"]


@settings(max_examples=250)
@given(st.lists(st.sampled_from(MARKS)).map("".join))
def test_marks_that_cannot_be_pairs_are_told(text: str) -> None:
    """The rule in its plainest form: marks of a kind are even, straight ones take turns by what stands beside them."""
    even = all(sum(map(text.count, kind)) % 2 == 0 for kind in ("()", "[]", "{}", "“”„", "«»", '"'))
    must_begin = [mark.start() for mark in re.finditer(r'(?<=\s)"(?=\w)', text)]
    must_end = [mark.start() for mark in re.finditer(r'(?<=[\w.,;:!?])"(?=\s)', text)]
    turns = not any(text.count('"', 0, at) % 2 for at in must_begin)
    turns &= all(text.count('"', 0, at) % 2 for at in must_end)
    assert splitting._pairs_up(text) == (even and turns)


@settings(max_examples=250)
@given(st.one_of(st.text(st.sampled_from(" aé")), st.text(st.sampled_from(CHARACTERS + " \x1c\x85\u2028\u202f"))))
def test_a_splitter_is_given_plain_single_spaces_unless_all_is_ascii(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentencex.segment", lambda language, passage: [passage])
        [given_text, _] = splitting._parts("en", [text])
    assert given_text == (text if text.isascii() else re.sub(r"\s+", " ", text))


@settings(max_examples=250)
@given(st.text(st.sampled_from(CHARACTERS)), st.sampled_from(["en", "zh", "de", "xx"]))
def test_no_text_is_lost_or_invented(text: str, language: str) -> None:
    assert "".join("".join(split_sentences(language, [text])).split()) == "".join(text.split())


class PanicException(BaseException):
    """The exception that compiled code raises when it stumbles."""


def test_a_fault_in_the_splitter_costs_no_document_and_an_interruption_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentencex.segment", Mock(side_effect=PanicException))
    assert split_sentences("en", ["One. Two! Three"]) == ["One.", "Two!", "Three"]
    monkeypatch.setattr("sentencex.segment", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        split_sentences("en", ["One. Two!"])


def test_a_very_long_paragraph_is_split_as_short_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencex takes time that grows with the square of a paragraph of Japanese, so it is handed parts of it."""
    sentences = ["吾輩は猫である。", "名前はまだ無い！", "どこで生れたかとんと見当がつかぬ。", "「そうか。」"]
    text = "".join(sentences * 300)
    expected = list(sentencex.segment("ja", text))
    segment = Mock(wraps=sentencex.segment)
    monkeypatch.setattr(sentencex, "segment", segment)
    assert split_sentences("ja", [text]) == expected
    assert max(len(call.args[1]) for call in segment.call_args_list) < 6000 < len(text)


@pytest.mark.parametrize("mark", ["“", "«", "‘"])
def test_marks_without_partners_cost_no_more_in_a_longer_paragraph(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencex looks for each partner up to the end of what it is given, which therefore never grows."""
    text = " ".join(f"{mark}It was so in {year} and no later." for year in range(1000, 4000))
    expected = [sentence.strip() for sentence in sentencex.segment("en", text)]
    segment = Mock(wraps=sentencex.segment)
    monkeypatch.setattr(sentencex, "segment", segment)
    assert split_sentences("en", [text]) == expected
    sizes = [len(call.args[1]) for call in segment.call_args_list]
    assert max(sizes) <= splitting.WINDOW < len(text)
    assert sum(sizes) < 2 * len(text)


@pytest.mark.parametrize("panics", [False, True])
@settings(max_examples=100)
@given(text=st.text(st.sampled_from("ab .\n“”é\t!"), max_size=200))
def test_nothing_is_lost_where_windows_meet(panics: bool, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "WINDOW", 16)
        patch.setattr(splitting, "MARGIN", 4)
        if panics:
            patch.setattr("sentencex.segment", Mock(side_effect=PanicException))
        assert "".join(splitting._in_windows("en", text)) == text


def test_a_real_quotation_stays_whole_and_a_mark_without_a_partner_parts_nothing_else() -> None:
    inside = "They went home. We stayed there. " * 25
    whole = f'He wrote "{inside.strip()}" and left.'
    assert split_sentences("en", [whole]) == [whole]
    assert len(split_sentences("en", [f'It is 6" wide. {inside}It is 12" long.'])) > 50


WORDS = [*string.ascii_lowercase, *"абвгджзийклмнпрстухц", *"αδκμνπρστ", *"աբգդհմն", *"دامو", *"कखगडपश"]
WORDS += "bzw usw etc pag sra srta pan mgr inż gde dhr mevr prof esim nro huom sig dott ecc mme mlle env tlf fx".split()
PROBE = "On 3. May! so? so։ so؟ so۔ so। so; on" + "\n\n".join(f"It is {word}. On" for word in WORDS)
"""What may be an abbreviation, and what may end a sentence, in many scripts."""


@pytest.fixture(scope="module")
def split() -> dict[str, list[str]]:
    """How the languages with rules of their own split the probe."""
    return {code: sentencex.segment(code, PROBE) for code in NAMES}


def test_the_rules_are_those_of_the_splitter(split: dict[str, list[str]]) -> None:
    wrong = [code for code, rules in RULES.items() if sentencex.segment(code, PROBE) != split[rules]]
    assert not wrong


def test_a_language_whose_sentences_end_rightly_is_not_said_to_lack_rules() -> None:
    lacking = {code for code in RULES if "no rules of its own" in language_label(code)}
    assert {"sw", "tr", "fa"} <= lacking
    assert not lacking & {"zh", "ko", "th", "vi", "km", "bo", "ar", "hi", "gl", "en"}


@given(st.lists(st.sampled_from("ក ខ។ល៕།༎.»”")).map("".join))
def test_nothing_is_lost_at_ends_of_khmer_and_tibetan(text: str) -> None:
    assert "".join(splitting._split_script(text)) == text


def test_relatives_have_rules_unlike_english(split: dict[str, list[str]]) -> None:
    assert {rules for code, rules in RULES.items() if split[rules] == split[DEFAULT]} == {DEFAULT}
