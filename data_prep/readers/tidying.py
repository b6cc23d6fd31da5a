"""Writes a paragraph of wikitext as a reader of the page sees it, and tidies what is left of what is not in the text.

Whatever was left out left a mark, and only around marks are commas, brackets and quotes taken away: those of the text
stay. Everything here takes time linear in the length of the paragraph.
"""

from __future__ import annotations

import html
import re

GONE, REMARK, BREAK = "\x00", "\x01", "\x02"  # stand for what shows nothing, a comment, a <br>; XML has none of them
HOLE, FORMULA = "\x03", "\x04"  # stand for what the reader of the page sees and we do not know, and for a formula
RAISED, LOWERED = "\x05", "\x06"  # begin what stands above or below the line: 10^6 is not 106
JOINT = "\x07"  # keeps the quotes inside and outside of a template apart
NOTHING = GONE + HOLE + JOINT  # what a line without text may have
MARKS_OF_OURS = re.compile(f"[{GONE}-{JOINT}]")
MARKS_WITHIN = str.maketrans("", "", JOINT)

QUOTES = re.compile("'{2,}")
MAGIC_WORD = re.compile(r"__[A-Z]+__")
ENTITY = re.compile(r"&(?:#\d{1,9}|#[xX][0-9a-fA-F]{1,8}|\w{2,32});")
STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+")
WORD = re.compile(r"[^\W_]")

POWER = re.compile(rf"(?<=\d)([{RAISED}{LOWERED}])(?=[-−–+]?\d)")
SHIFTS = str.maketrans("", "", RAISED + LOWERED)
FORMULAS = re.compile(rf"{FORMULA}(?: ?{FORMULA})*")
GLUED = re.compile(rf"(?<=\w)(?={FORMULA})|(?<={FORMULA})(?=\w)")

RUN = re.compile(f"[{GONE}{HOLE}](?: ?[{GONE}{HOLE}])* ?")
PRICE = re.compile(rf"(?:\b(?:US|AU|NZ|A|C|NT|HK))?[$£€¥₹] ?{HOLE}")
EMPTY_QUOTES = re.compile(rf"([\"'])[{GONE}{HOLE}]\1|[“„”«»‘‚‹「『\[] ?[{GONE}{HOLE}] ?[”“»«’‘›」』\]]")
REMARK_IN_BRACKETS = re.compile(rf" ?\([^()]*{HOLE}[^()]*\)")
HOLE_IN_SENTENCE = re.compile(rf"\w:? {HOLE}|[=≈~$£€¥₹] ?{HOLE}")
AFTER_OPENING = re.compile(rf"(?:(?<=[(（\[“„«])|\A) ?(?:[{GONE}{HOLE}] ?[,;:、，]? ?)+")
BEFORE_COMMA = re.compile(rf"(?: ?[,;、，])? ?[{GONE}{HOLE}] ?(?=[,;.:)）\]、，](?!\d))|[,;、，] ?[{GONE}{HOLE}]\Z")
EMPTY_BRACKETS = re.compile(r" ?[(（][\s,;:、，–-]*[)）]")
DANGLING = re.compile(r"(?<=[(（])[\s,;]+(?=\S)|(?<![\s,;])[\s,;]+(?=[)）])")
SPACE_BEFORE = re.compile(r"(?<=[\w)\]\"]) +(?=[,.](?:\s|$))")


def unescape(text: str) -> str:
    """Turns character references into characters; & in other uses stays."""
    return ENTITY.sub(lambda entity: html.unescape(entity[0]), text)


def plain_quotes(text: str) -> str:
    """Takes away the apostrophes that make text bold or italic."""
    return QUOTES.sub(_apostrophes, text)


def tidy(text: str, word: str) -> str:
    """Writes a paragraph, freed of tags, on one line; formulas become the word, and without one nothing is written.

    A paragraph of formulas alone is none.
    """
    text = MAGIC_WORD.sub("", plain_quotes(text).translate(MARKS_WITHIN).replace(BREAK, " "))
    text = " ".join(unescape(STRAY.sub("", text)).split())
    if FORMULA in text:
        if not word or not WORD.search(text.replace(FORMULA, "")):
            return ""
        text = FORMULAS.sub(word, GLUED.sub(" ", text))
    if RAISED in text or LOWERED in text:
        text = POWER.sub(lambda shift: "^" if shift[1] == RAISED else "_", text).translate(SHIFTS)
    if GONE in text or HOLE in text:
        text = _without_marks(text)
    text = EMPTY_BRACKETS.sub("", text)
    return SPACE_BEFORE.sub("", DANGLING.sub("", text)).strip()


def _without_marks(text: str) -> str:
    """Takes away what was left out, with the quotes, brackets and commas that were there for it."""
    text = RUN.sub(_one_mark, text)
    text = PRICE.sub(HOLE, REMARK_IN_BRACKETS.sub(_remark, EMPTY_QUOTES.sub(HOLE, text)))
    text = RUN.sub(_one_mark, text)
    text = BEFORE_COMMA.sub("", AFTER_OPENING.sub("", text))
    return " ".join(text.replace(GONE, "").replace(HOLE, "").split())


def _one_mark(run: re.Match[str]) -> str:
    """Joins marks beside each other, with the space between them or after them."""
    return (HOLE if HOLE in run[0] else GONE) + " " * (" " in run[0])


def _remark(bracket: re.Match[str]) -> str:
    """Leaves out what stands in brackets where something is missing in the middle of it: it can be spared."""
    return HOLE if HOLE_IN_SENTENCE.search(bracket[0]) else bracket[0]


def _apostrophes(run: re.Match[str]) -> str:
    """Keeps those apostrophes of a run that are left over when the others make text bold or italic."""
    return "'" * (1 if len(run[0]) == 4 else max(0, len(run[0]) - 5))
