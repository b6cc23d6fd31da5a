"""Writes a paragraph of wikitext as a reader of the page sees it, and takes away the commas, brackets and
quotes that are left around what was left out.

Whatever was left out left a mark, and only around marks are commas, brackets and quotes taken away: those of the text
stay. Everything here takes time linear in the length of the paragraph.
"""

from __future__ import annotations

import html
import re


class Sign:
    """Characters that stand for something in the text until it is tidy; XML has none of them."""

    GONE = "\x00"  # what shows nothing
    REMARK = "\x01"  # a comment
    BREAK = "\x02"  # a <br>
    HOLE = "\x03"  # what the reader of the page sees and we do not know
    FORMULA = "\x04"
    RAISED, LOWERED = "\x05", "\x06"  # begin what stands above or below the line: 10^6 is not 106
    JOINT = "\x07"  # keeps the quotes inside and outside of a template apart


SIGNS = "\x00\x01\x02\x03\x04\x05\x06\x07"
NOTHING = Sign.GONE + Sign.HOLE + Sign.JOINT  # what a line without text may have

QUOTES = re.compile("''+")
MAGIC_WORD = re.compile(r"__[A-Z]+__")
ENTITY = re.compile(r"&(?:#\d{1,9}|#[xX][0-9a-fA-F]{1,8}|\w{2,32});")
STRAY_PAIRS = ("{{", "}}", "[[", "]]")
STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+")
WORD = re.compile(r"[^\W_]")

POWER = re.compile(rf"(?<=\d)([{Sign.RAISED}{Sign.LOWERED}])(?=[-−–+]?\d)")
SHIFTS = str.maketrans("", "", Sign.RAISED + Sign.LOWERED)

RUN = re.compile(f"([{Sign.GONE}{Sign.HOLE}](?: ?[{Sign.GONE}{Sign.HOLE}])* ?)")
PRICE = re.compile(r"(?:\b(?:US|AU|NZ|A|C|NT|HK))?[$£€¥₹] ?\Z")
PAIRS = frozenset("() [] （） “” „” „“ «» »« ‘’ ‚‘ ‹› 「」 『』 \"\" ''".split())
DEEPEST_PAIR = 3  # levels of brackets and quotes around nothing; each level copies what is before it
OPENING, CURRENCIES, COMMAS = tuple("(（[“„«"), tuple("$£€¥₹"), ",;、，"
NEXT_MARK = re.compile(r"[,;.:)）\]、，](?!\d)|\Z")
BRACKETS = re.compile(r"\(([^()]*)\)")
HOLE_IN_SENTENCE = re.compile(rf"(?:\w:?|[(=≈~$£€¥₹]) {Sign.HOLE}|[=≈~$£€¥₹]{Sign.HOLE}")
EMPTY_BRACKETS = re.compile(r"[(（][\s,;:、，–-]*[)）]")
EMPTY_WITH_SPACE = re.compile(f" ?{EMPTY_BRACKETS.pattern}")
DANGLING = re.compile(r"(?<=[(（])[\s,;]+(?=\S)|(?<![\s,;])[\s,;]+(?=[)）])")
DANGLES = ("( ", "(,", "(;", "（ ", "（,", "（;", " )", ",)", ";)", " ）", ",）", ";）")
SPACE_BEFORE = re.compile(r"(?<=[\w)\]\"]) +(?=[,.](?:\s|$))")


def unescape(text: str) -> str:
    """Turns character references into characters; & in other uses stays."""
    return text if "&" not in text else ENTITY.sub(lambda entity: html.unescape(entity[0]), text)


def plain_quotes(text: str) -> str:
    """Takes away the apostrophes that make text bold or italic."""
    return QUOTES.sub(_apostrophes, text)


def tidy(text: str) -> str:
    """Writes a paragraph, freed of tags, on one line; nothing of one with a formula, whose sentences lack a part."""
    if Sign.FORMULA in text:
        return ""
    text = MAGIC_WORD.sub("", plain_quotes(text).replace(Sign.JOINT, "").replace(Sign.BREAK, " "))
    if any(pair in text for pair in STRAY_PAIRS):
        text = STRAY.sub("", text)
    text = " ".join(unescape(text).split())
    if Sign.RAISED in text or Sign.LOWERED in text:
        text = POWER.sub(lambda shift: "^" if shift[1] == Sign.RAISED else "_", text).translate(SHIFTS)
    if Sign.GONE in text or Sign.HOLE in text:
        text = _without_marks(text)
    return _without_remains(text).strip()


def _without_remains(text: str) -> str:
    """Takes away empty brackets, and commas and spaces that stand before or after nothing.

    Few paragraphs have any, so it first looks in ways that are much faster than to replace.
    """
    for _ in range(DEEPEST_PAIR):
        if not EMPTY_BRACKETS.search(text):
            break
        text = EMPTY_WITH_SPACE.sub("", text)
    if any(pair in text for pair in DANGLES):
        text = DANGLING.sub("", text)
    return SPACE_BEFORE.sub("", text) if " ," in text or " ." in text else text


def _without_marks(text: str) -> str:
    """Takes away what was left out, with the quotes, brackets and commas that were there for it."""
    if Sign.HOLE in text:
        text = BRACKETS.sub(_remark, text)
    first, *others = RUN.split(text)
    written = [first]
    for run, after in zip(others[::2], others[1::2], strict=True):
        before = written.pop()
        if written and not before.strip():
            before = written.pop() + before
        written += _around(before, Sign.HOLE in run, " " in run, after)
    return " ".join("".join(written).split())


def _around(before: str, is_hole: bool, spaced: bool, after: str) -> tuple[str, str]:
    """Writes what stood before and after something that was left out, without what was there for it."""
    for _ in range(DEEPEST_PAIR):
        left, right = before.rstrip(" "), after.lstrip(" ")
        pair = left[-1:] + right[:1]
        if pair not in PAIRS or (pair[0] in "\"'" and (spaced or left != before)):
            break
        before, after = left[:-1], right[1:]
        spaced = after.startswith(" ")
    left, right = before.rstrip(" "), after.lstrip(" ")
    if is_hole and left.endswith(CURRENCIES):
        left = before = left[:-4] + PRICE.sub("", left[-4:])
    if not left or left.endswith(OPENING):
        return left, right.lstrip(COMMAS + ": ")
    if NEXT_MARK.match(right):
        return (left[:-1] if left.endswith(tuple(COMMAS)) else left), right
    return before, " " * spaced + after


def _remark(bracket: re.Match[str]) -> str:
    """Leaves out what stands in brackets where something is missing in the middle of it: it can be spared."""
    return Sign.HOLE if HOLE_IN_SENTENCE.search(bracket[0]) else bracket[0]


def _apostrophes(run: re.Match[str]) -> str:
    """Keeps those apostrophes of a run that are left over when the others make text bold or italic."""
    return "'" * (1 if len(run[0]) == 4 else max(0, len(run[0]) - 5))
