"""Splits paragraphs into sentences, and says which abbreviations end none, by language.

The library that splits paragraphs knows many abbreviations, but not where a paragraph begins with one ("Dr. Who
came."), nor those before a number ("vol. 2"). A rule asks what follows, so that "No. I will not." and "on Main St. He
lives there." stay two sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate, pairwise

import sentencex

from data_prep.common.languages import DEFAULT, RULES

ANYTHING, NAME, NUMBER, NAME_AT_START = "anything", "a name", "a number", "a name, at the start"
DATE = "a month or century"
DATES = frozenset(
    "Januar Jänner Februar Feber März April Mai Juni Juli August September Oktober November Dezember "
    "Jan Jän Feb Mär Apr Jun Jul Aug Sep Sept Okt Nov Dez "
    "Jahrhundert Jahrhunderts Jahrhunderte Jahrhunderten Jh".split()
)
WINDOW, MARGIN = 1 << 15, 1 << 13  # characters; the longest paragraph of 114 books has 16,145
OPENINGS = ("", *"(\"'“‘[„«")
AFTER = {
    "en": {
        NAME: "Dr. Mr. Mrs. Ms. Messrs. Prof. Gen. Col. Lt. Maj. Capt. Cmdr. Adm. Sgt. Rev. Hon. Gov. Sen. Rep. Pres.",
        NAME_AT_START: "St. Mt. Ft. Fr. Br. Sr. Mme. Mlle.",
        NUMBER: "vol. vols. no. nos. fig. figs. p. pp. ch. chap. chaps. sec. secs. eq. eqs. c. ca. b. d. fl. r. v. "
        "Vol. Vols. No. Nos. Fig. Figs. Ch. Chap. Sec. Eq. Op. op. Art. Pt. Bk. "
        "Jan. Feb. Mar. Apr. Aug. Sep. Sept. Oct. Nov. Dec.",
        ANYTHING: "e.g. i.e. E.g. I.e. cf. Cf. vs. viz. approx. Approx. a.k.a.",
    },
    "de": {
        NUMBER: "Bd. Nr. S. Abb. Kap. Abs. Art. Tab. Jg. H. vgl. ca. "
        "Jan. Jän. Feb. Apr. Jun. Jul. Aug. Sep. Sept. Okt. Nov. Dez.",
        DATE: " ".join(f"{number}." for number in range(1, 32)),
    },
    "fr": {
        NAME: "St. Ste. Mme. Mmes. Mlle. Dr. Mgr. Pr. Me.",
        NUMBER: "vol. no. nos. p. pp. fig. chap. t. art. v. n°. janv. févr. avr. juil. juill. sept. oct. nov. déc.",
        ANYTHING: "M. MM. cf. Cf. env. av. apr. c.-à-d.",
    },
    "es": {
        NUMBER: "vol. Vol. núm. n.º pág. págs. p. pp. cap. fig. art.",
        NAME: "Sr. Sra. Srta. Dr. Dra. D. Dña. Prof.",
    },
    "it": {NUMBER: "vol. n. p. pp. pag. cap. fig. art.", NAME: "Sig. Dott. Prof. Ing. Avv."},
    "ar": {ANYTHING: "د. أ.", NUMBER: "ص."},
    "hi": {ANYTHING: "डॉ. प्रो. श्री. सुश्री. पं."},
    "th": {ANYTHING: "ศ. ค. ย. พ. ส. ช. ญ. อ. ดร. นพ. พญ. ผศ. รศ."},
}
AFTER["vi"] = {**AFTER["en"], NAME: f"{AFTER['en'][NAME]} TP. Tp. GS. PGS. TS. ThS. BS. KS."}
"""What may follow which abbreviations within a sentence. Ends of sentences that look like them are those of others."""
NO_ENDS = {
    language: {
        f"{opening}{word} ": what for what, words in rules.items() for word in words.split() for opening in OPENINGS
    }
    for language, rules in AFTER.items()
}
"""The same, as the last words of what the library takes for sentences: with the space after them."""
DOTTED = {"ar": 2, "th": WINDOW}
"""Languages in which a full stop before a letter is within an abbreviation (พ.ศ.), for words of so many characters at
most: Thai ends no sentence with one."""
TAIL = 4  # characters
TAILS = {
    language: frozenset(end[-TAIL:] for word in words for end in (word, f" {word}"))
    for language, words in NO_ENDS.items()
}
"""The last characters of sentences that may end with such a word: few others end so, and they are found at once."""


def rejoin(language: str, parts: list[str]) -> None:
    """Joins the parts of paragraphs, each with the space after it, where an abbreviation ended no sentence.

    An empty part ends a paragraph; one also takes the place of a part that was joined to the one before it.
    """
    rules = language if language in AFTER else RULES.get(language, DEFAULT)
    tails, longest = TAILS.get(rules, frozenset()), DOTTED.get(rules, 0)
    for n in reversed([n for n, part in enumerate(parts) if part[-TAIL:] in tails or (longest and part[-1:] == ".")]):
        before, after = parts[n : n + 2]
        word = before[before.rfind(" ", 0, -1) + 1 :]
        what = NO_ENDS[rules].get(word)
        inside = word.endswith(".") and after[:1].isalpha() and len(word) <= longest
        if inside or (what and after and _goes_on(what, before, after)):
            parts[n : n + 2] = before + after, ""


def _goes_on(what: str, sentence: str, after: str) -> bool:
    """Tells whether what may follow an abbreviation is what follows it."""
    first = after.lstrip("".join(OPENINGS))[:1]
    if what == NAME_AT_START:
        return first.isupper() and " " not in sentence[:-1]
    if what == DATE:
        return after.split(maxsplit=1)[0].rstrip(".,;:!?)") in DATES
    return what == ANYTHING or (first.isdigit() if what == NUMBER else first.isupper())


WHITE_SPACE = re.compile(r"\s(?:\s+|(?<! ))")  # all but single spaces, of which there are many
SENTENCE_END = re.compile(r"(?<=[.!?。！？]) +")
SCRIPT_ENDS = "។៕།༎"
SCRIPT_END = re.compile(f"(?:។ល)?[{SCRIPT_ENDS}](?:[{SCRIPT_ENDS} ”»)]*[{SCRIPT_ENDS}”»)])? *")
"""What ends a sentence of Khmer or Tibetan, which sentencex does not know; ។ល។ is "and so on"."""
CERTAIN_END = re.compile(r"[^。！？]*[。！？]+[」』）】”’]*|[^。！？]+")  # what ends no abbreviation
DOUBTFUL = 120  # characters beyond which a sentence whose marks do not pair up is looked at without them
ENCLOSING = re.compile(r"""["“”„‘’«»‹›「」《》()\[\]{}]+""")
PAIRS_IN_ASCII = ("()", "[]", "{}")
PAIRS = (*PAIRS_IN_ASCII, "“”„", "«»")
WORD, WORD_END = re.compile(r"\w"), re.compile(r"[\w.,;:!?]")
LONG = 5000  # characters, beyond which a paragraph with such ends is divided at them


def split_sentences(language: str, passages: Iterable[str]) -> list[str]:
    """Lists the sentences of paragraphs in their order, none of them empty."""
    parts: list[str] = []
    for part in _parts(language, passages):
        if len(part) <= DOUBTFUL or _pairs_up(part):
            parts.append(part)
        else:
            parts += _split_quotation(language, part)
    rejoin(language, parts)
    return list(filter(None, map(str.strip, parts)))


def _parts(language: str, passages: Iterable[str]) -> list[str]:
    """Lists what sentencex takes for sentences, whatever is in them, with an empty part at the end of each paragraph.

    sentencex stumbles over white space of several bytes, such as a no-break space before a full stop, so it is given
    plain spaces.
    """
    parts: list[str] = []
    for passage in passages:
        if passage.isascii():
            parts += _in_windows(language, passage)
        else:
            if "  " in passage or not passage.isprintable():  # much faster than to look for each white space
                passage = WHITE_SPACE.sub(" ", passage)
            for sentence in _split_script(passage):
                for piece in _pieces(sentence):
                    parts += _in_windows(language, piece)
        parts.append("")
    return parts


def _split_script(text: str) -> list[str]:
    """Divides a paragraph at the ends of sentences of Khmer and Tibetan."""
    if "។" not in text and "།" not in text:
        return [text]
    ends = [0, *(match.end() for match in SCRIPT_END.finditer(text)), len(text)]
    return [part for start, end in pairwise(ends) if (part := text[start:end])]


def _split_quotation(language: str, sentence: str) -> list[str]:
    """Splits what sentencex takes for one sentence as it is enclosed, where the marks around it do not pair up.

    All between two quotation marks is one to it, and a mark that has no partner (6" wide) finds one far away. A real
    quotation stays whole, however long.
    """
    parts = _segment(language, ENCLOSING.sub("", sentence))
    if len(parts) == 1:
        return [sentence]
    ends, left_out = [], 0  # where parts end in the sentence; characters that its parts lack so far
    marks = ENCLOSING.finditer(sentence)
    mark = next(marks, None)
    for end in accumulate(map(len, parts[:-1])):
        while mark and mark.start() - left_out < end:
            left_out += len(mark[0])
            mark = next(marks, None)
        ends.append(end + left_out)
    return [sentence[start:end] for start, end in pairwise((0, *ends, len(sentence)))]


def _pairs_up(sentence: str) -> bool:
    """Whether the marks that enclose something can be the first and the second of pairs."""
    for kind in PAIRS_IN_ASCII if sentence.isascii() else PAIRS:
        for mark in kind:
            if mark in sentence:  # which is faster than to count what is not there
                if sum(map(sentence.count, kind)) % 2:
                    return False
                break
    return '"' not in sentence or _take_turns(sentence.split('"'))


def _take_turns(pieces: list[str]) -> bool:
    """Whether the straight quotation marks between these pieces can begin and end a quotation in turn.

    None may end one where it should begin it, as in 6" wide, nor begin one where it should end it.
    """
    ends = False
    for before, after in pairwise(pieces):
        if ends:
            if before[-1:].isspace() and WORD.match(after):
                return False
        elif after[:1].isspace() and WORD_END.match(before[-1:]):
            return False
        ends = not ends
    return not ends


def _pieces(text: str) -> list[str]:
    """Divides a very long paragraph of Chinese or Japanese, in whose length the time of sentencex is quadratic."""
    if len(text) <= LONG:
        return [text]
    ends = [0]
    for match in CERTAIN_END.finditer(text):
        if match.end() - ends[-1] > LONG:
            ends.append(match.end())
    return [part for start, end in pairwise((*ends, len(text))) if (part := text[start:end])]


def _in_windows(language: str, text: str) -> list[str]:
    """Lists what sentencex takes for sentences, of a paragraph that is longer than any real one a window at a time.

    It looks for the partner of each opening mark up to the end of a paragraph: where many have none, its time is
    quadratic. What ends in the margin, where a mark may have its partner beyond, is left to the next window.
    """
    parts: list[str] = []
    at = 0
    while len(text) - at > WINDOW:
        end = at
        for part in _segment(language, text[at : at + WINDOW]):
            if end + len(part) > at + WINDOW - MARGIN:
                break
            parts.append(part)
            end += len(part)
        if end == at:  # one sentence, as far as one can see
            end = text.rfind(" ", at, at + WINDOW) + 1 or at + WINDOW
            parts.append(text[at:end])
        at = end
    return parts + _segment(language, text[at:])


def _segment(language: str, text: str) -> list[str]:
    """Calls sentencex; should it stumble, one paragraph in a corpus is split at its full stops instead."""
    try:
        return sentencex.segment(language, text)  # type: ignore[no-any-return]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a fault in its compiled code raises
            raise
        ends = (match.end() for match in SENTENCE_END.finditer(text))
        return [text[start:end] for start, end in pairwise((0, *ends, len(text)))]
