"""Writes the commonest inline templates of wikitext as the text that a reader of the page sees.

A template is found by its name, in small letters, or by the family that its name begins with. One that is not here is
left out by who asks. No word is written that only the Wikipedia of one language would show, such as the name of a
language before a text in it, and no argument twice: what comes out is about as long as what goes in. A number that the
template would compute is left out (5 km is not said again in miles). Arguments without sense give None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from data_prep.readers.tidying import NOTHING, Sign


class Arguments:
    """The arguments of a template, each by its place, from 1 on, or by its name."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._values: dict[str, str] = {}
        place = 0
        for part in parts:
            name, equals, value = part.partition("=")
            if not equals:
                place += 1
                name, value = str(place), part
            self._values[name.strip()] = value.strip(" \t\n" + NOTHING + Sign.BREAK)

    def first(self, *names: str) -> str:
        """Finds the first of these arguments that says something; "" if none does."""
        return next((value for name in names if (value := self._values.get(name))), "")

    def places(self) -> list[str]:
        """Lists the arguments that have places, to the first place that lacks."""
        found: list[str] = []
        while (value := self._values.get(str(1 + len(found)))) is not None:
            found.append(value)
        return found

    def says(self, name: str) -> bool:
        """Tells whether an argument that switches something on is there."""
        return self.first(name).lower() not in ("", "n", "no", "off", "0", "none")


Writer = Callable[[Arguments], "str | None"]
"""Writes a template: None where its text is not known, "" where it shows nothing in the text."""
PARAGRAPH = f"\n\n{Sign.GONE}"  # the mark keeps what follows from being a list
SHIP = re.compile(r"(?:uss|hms|ss|ms|mv|rms|hmas|hmcs|usns|uscgc|ins|sms)\Z")
PRONUNCIATION_FLAGS = frozenset("icon en us uk au ca nz ie local lang pron also wiki audio and or uklang".split())
MUSIC = {"sharp": "♯", "#": "♯", "flat": "♭", "b": "♭", "natural": "♮", "n": "♮"}


def expand(pieces: list[str]) -> str | None:
    """Writes a template, given what stands between its braces; None where its text is not known."""
    name = _name(pieces[0].partition("|")[0])
    is_function = ":" in name and name not in TABLE
    writer = FUNCTIONS.get(name.partition(":")[0]) if is_function else TABLE.get(name) or _of_family(name)
    if writer is None:
        return None
    head, *parts = "".join(pieces).split("|")
    return writer(Arguments([head.partition(":")[2], *parts] if is_function else parts))


def _name(text: str) -> str:
    """Spells the name of a template as it stands in the table."""
    name = " ".join(text.replace("_", " ").lower().split())
    for prefix in ("template:", "subst:", "safesubst:"):
        name = name.removeprefix(prefix).lstrip()
    return name


def _of_family(name: str) -> Writer | None:
    """Finds what writes a template whose name has a language or a script in it, or is that of a navy."""
    family, dash, code = name.partition("-")
    if dash and family in FAMILIES and len(code) < 20:
        return FAMILIES[family]
    if SHIP.match(name):
        return lambda given: _ship(name.upper(), given.first("1"), given.first("2"), given.first("3"))
    return _last if name.startswith("script/") else None


def _argument(*names: str) -> Writer:
    """Makes the writer of a template that stands for the first of these arguments with a text."""
    return lambda given: given.first(*names) or None


_first = _argument("1", "text", "texte", "content", "inhalt")
"""Writes a template that only changes how its text looks."""


def _last(given: Arguments) -> str | None:
    """Writes a template whose text comes after one or several things that say what it is."""
    return next((place for place in reversed(given.places()) if place), None)


def _shown(text: str) -> Writer:
    """Makes the writer of a template that always stands for the same characters."""
    return lambda given: text


def _around(before: str, after: str = "") -> Writer:
    """Makes the writer of a template that sets something before and after its text."""
    return lambda given: f"{before}{text}{after}" if (text := _first(given)) else None


def _joined(joint: str) -> Writer:
    """Makes the writer of a template that shows all its arguments, with something between them."""
    return lambda given: joint.join(place for place in given.places() if place) or None


def _in_language(start: int) -> Writer:
    """Makes the writer of a text in another language, with its transcription and its meaning, from a place on."""

    def write(given: Arguments) -> str | None:
        text, transcription, meaning = (given.first(str(place)) for place in range(start, start + 3))
        text, meaning = text or given.first("text"), meaning or given.first("lit", "translation")
        known = (text, transcription or given.first("translit"), f"'{meaning}'" * bool(meaning))
        return ", ".join(part for part in known if part) if text else None

    return write


def _japanese(given: Arguments) -> str | None:
    """Writes a name with its Japanese in brackets."""
    name, *others = (given.first(place) for place in ("1", "2", "3", "4", "extra"))
    rest = ", ".join(other for other in others if other)
    return f"{name} ({rest})" if name and rest else name or rest or None


def _sounds(given: Arguments) -> str | None:
    """Writes a pronunciation that is given sound by sound."""
    sounds = "".join(place for place in given.places() if place.lower() not in PRONUNCIATION_FLAGS)
    return f"/{sounds.replace('_', ' ')}/" if sounds else None


def _respelled(given: Arguments) -> str | None:
    """Writes a pronunciation in syllables."""
    text = "-".join(place for place in given.places() if place)
    return re.sub(r"-?([,;]?)_-?", r"\1 ", text).strip() or None


def _circa(given: Arguments) -> str | None:
    """Writes one or two years that are known only roughly."""
    years = [f"c. {year}" for year in given.places()[:2] if year]
    return " – ".join(years) or "c."


def _quotation(given: Arguments) -> str | None:
    """Writes a quotation as a paragraph of its own, without who said it."""
    text = given.first("text", "1", "quote", "content", "zitat")
    return f"{PARAGRAPH}{text}\n\n" if text else None


def _old_style(given: Arguments) -> str | None:
    """Writes a date with what it is in the Julian calendar."""
    day, year, old = (given.first(place) for place in "123")
    return f"{day} [O.S. {old}] {year}" if day and old else None


def _ship(prefix: str, name: str, number: str, form: str) -> str | None:
    """Writes the name of a ship, with its number unless the form of the name leaves it out."""
    full = f"{prefix} {name}" if form not in ("1", "3", "5", "6") else name
    return (f"{full} ({number})" if number and form in ("", "3", "5") else full) if name else None


LONGEST_NUMBER = 30
NUMBER = re.compile(r"[-−+]?(?:\d[\d.,]*|\.\d+)(?:e[-+]?\d+)?(?:[ +⁄-]?\d+)?(?:(?://?|⁄)\d+)?\Z", re.ASCII)
UNIT = re.compile(r"[^\W\d_][\w°'′\"″/·⋅.*^ +-]{0,19}\Z|[°%]\w?\Z")
RANGES = (
    dict.fromkeys(("-", "–"), "–") | dict.fromkeys(("x", "×", "*", "xx"), " × ") | dict.fromkeys(("+/-", "±"), " ± ")
)
RANGES |= {"to": " to ", "to(-)": " to ", "and": " and ", "and(-)": " and ", "or": " or ", "by": " by ", ",": ", "}
POWER = re.compile(r"e(?:3|6|9|12)(?=\D)")
POWERS = {"e3": "thousand ", "e6": "million ", "e9": "billion ", "e12": "trillion "}
SMALLER = frozenset("ch d ft h in inch lb m min mi oz ozt rd s st yd".split())
"""Units that may follow another one with a number of their own: 5 ft 9 in."""
SYMBOLS = dict(
    pair.split("=")
    for pair in (
        "C=°C|F=°F|K=K|R=°R|sqmi=sq mi|mi2=sq mi|sqft=sq ft|ft2=sq ft|sqyd=sq yd|yd2=sq yd|sqin=sq in|in2=sq in|"
        "sqkm=km2|sqm=m2|acre=acres|cuft=cu ft|ft3=cu ft|cuin=cu in|in3=cu in|cuyd=cu yd|yd3=cu yd|cumi=cu mi|"
        "kph=km/h|kmh=km/h|kn=knots|knot=knots|nmi=nautical miles|impgal=imp gal|USgal=US gal|U.S.gal=US gal|"
        "usgal=US gal|impoz=imp fl oz|USoz=US fl oz|USfloz=US fl oz|impfloz=imp fl oz|lbf.ft=lbf⋅ft|lb.ft=lb⋅ft|"
        "Nm=N⋅m|N.m=N⋅m|LT=long tons|ST=short tons|t=tonnes|MT=tonnes|tonne=tonnes|mile=miles|foot=feet|inch=inches|"
        "ly=light-years|PD/sqmi=per sq mi|/sqmi=per sq mi|PD/km2=per km2|/km2=per km2|PS=PS|um=μm|oilbbl=barrels"
    ).split("|")
)
"""Codes of units, and how they are shown where that is something else."""
MONTHS = "January February March April May June July August September October November December".split()


def _convert(given: Arguments) -> str | None:
    """Writes a number with its unit, or several, or a range of them, without what it is in other units."""
    places, at, text = given.places(), 0, ""
    while at < len(places) and (number := _number(places[at])):
        text += number
        after = places[at + 1] if at + 1 < len(places) else ""
        at += 2
        if after in RANGES:
            text += RANGES[after]
            continue
        if not UNIT.match(after) and after not in SYMBOLS:
            return None
        power = POWER.match(after)
        after = after[power.end() :] if power else after
        shown = (POWERS[power[0]] if power else "") + SYMBOLS.get(after, after)
        text += shown if shown.startswith("°") and shown != "°" else f" {shown}"
        if at + 1 >= len(places) or places[at + 1] not in SMALLER or not _number(places[at]):
            break
        text += " "
    else:
        return None
    middle = places[-1] if given.first("adj") == "mid" and places[-1].startswith("-") else ""
    return text + middle.replace("-", " ", 1)


def _fraction(given: Arguments) -> str | None:
    """Writes a fraction, perhaps after a whole number; a number alone is a denominator."""
    places = [place for place in given.places() if place]
    if not places or len(places) > 3:
        return None
    whole = f"{places[0]} " if len(places) == 3 else ""
    return f"{whole}{places[-2] if len(places) > 1 else 1}/{places[-1]}"


def _as_of(given: Arguments) -> str | None:
    """Writes the date from which a statement holds ("as of 2020"), in a sentence or at its beginning."""
    if alternative := given.first("alt"):
        return alternative
    date = _date(given.places()[:3], given.first("df").lower() in ("us", "mdy"))
    if date is None or given.says("bare"):
        return date
    opening = "Since" if given.says("since") else "As of"
    return f"{opening[0].lower() if given.says('lc') else opening[0]}{opening[1:]} {date}"


def _number(text: str) -> str:
    """Spells a number as it is shown; "" for anything else."""
    if len(text) > LONGEST_NUMBER or not NUMBER.match(text):
        return ""
    return re.sub(r"(?<=\d)[+-](?=\d+/)", " ", text.replace("//", "/")).replace("-", "−" if text[0] == "-" else "-")


def _date(parts: list[str], month_first: bool) -> str | None:
    """Spells a date of which year, month and day are given, or fewer of them; None for what is none."""
    year, month, day = (*(part.strip() for part in parts), "", "", "")[:3]
    if not year or (month.isdigit() and (len(month) > 2 or not month.isascii() or not 1 <= int(month) <= 12)):
        return None
    month = MONTHS[int(month) - 1] if month.isdigit() else month
    day = day.lstrip("0") if month else ""
    if day and not (day.isascii() and day.isdigit() and len(day) < 3):
        return None
    if day and month_first:
        return f"{month} {day}, {year}"
    return " ".join(part for part in (day, month, year) if part)


def _by_name(writers: Mapping[str, Writer]) -> dict[str, Writer]:
    """Finds writers by single names, of several that are parted by |."""
    return {name: writer for names, writer in writers.items() for name in names.split("|")}


CHARACTERS = {
    "–": "ndash|en dash|endash|–",
    " – ": "snd|spnd|spaced ndash|spaced en dash|dash|--",
    "—": "mdash|em dash|emdash|—|---",
    " — ": "mdashb|spaced mdash|spaced em dash",
    " ": "nbsp|space|nnbsp|thin space|thinsp|thinspace|hair space|0|ensp|emsp",
    " · ": "·|•|dot|bull|bullet|middot|\\",
    "'": "'|apostrophe|'-|-'|`",
    "'s": "'s",
    "'\"": "' \"|'\"",
    "\"'": "\" '|\"'",
    '"': '-"|"-',
    PARAGRAPH: "pb|paragraph break|parabr|p",
    Sign.BREAK: "br|break|crlf",
    "&#124;": "!|pipe",
    "&#61;": "=|equals",
    Sign.FORMULA: "math|bigmath|equation|numblk|math block|intmath|tmath",
}
"""Templates that always stand for the same characters."""

BEFORE = {
    "£": "£|gbp",
    "US$": "us$|usd",
    "€": "€|eur|euro",
    "p. ": "p.",
    "pp. ": "pp.",
    "vol. ": "vol.",
    Sign.LOWERED: "sub",
    Sign.RAISED: "sup|exp|exposant",
}
"""Templates that set something before their text."""

SILENT = (
    "citation needed|cn|fact|citation needed span|sfn|sfnp|sfnm|efn|efn-ua|efn-lr|refn|rp|r|ref|ref label|note|"
    "note label|clarify|who|whom|by whom|which|when|where|why|vague|dubious|page needed|better source|"
    "better source needed|failed verification|verify source|verification needed|original research inline|"
    "relevance inline|weasel-inline|weasel inline|peacock inline|pov-statement|unreliable source|unreliable source?|"
    "unreliable source inline|update inline|update after|dead link|full citation needed|quantify|according to whom|"
    "specify|disambiguation needed|dn|non-primary source needed|primary source inline|attribution needed|"
    "subscription required|registration required|isbn needed|webarchive|wayback|inflation-fn|inflation/fn|cref|cref2|"
    "nowrap begin|nowrap end|anchor|anchors|coord|coords|flagicon|flag icon|flagdeco|clear|clr|-|clear left|"
    "clear right|toc left|toc right|use dmy dates|use mdy dates|short description|zwj|zwnj|zwsp|wbr|shy|void|"
    "en icon|fr icon|de icon|es icon|it icon|ru icon|gr icon"
)
"""Templates that show nothing in the text but perhaps a small remark, a number of a note or a flag."""

WRITERS: dict[str, Writer] = {
    **{names: _shown(text) for text, names in CHARACTERS.items()},
    **{names: _around(before) for before, names in BEFORE.items()},
    SILENT: _shown(""),
    "nowrap|nobr|nobreak|nwr|no wrap|small|smaller|big|bigger|large|larger|huge|midsize|nobold|normal|noitalic|"
    "noitalics|em|strong|bold|italic|i|italics|var|mvar|tt|mono|code|kbd|samp|key|unicode|sc|smallcaps|small caps|sc2|"
    "aut|uppercase|abbr|abbrlink|abbrv|tooltip|ipa|iast|polytonic|hebrew|typo|as written|underline|visible anchor|"
    "vanchor|script|tlit|flag|flagcountry|flagu|nts|crossreference|xref|nihongo2|nihongo foot|not a typo|chem2|nombre|"
    "initialism": _first,
    "lang|rtl-lang|ltr-lang|native phrase|native name|langue": _argument("2", "text", "texte"),
    "color|colour|font color|colored text|h:title|wt|wikt-lang|transl|transliteration|xlit": _last,
    "langx": _in_language(2),
    "nihongo|nihongo krt|nihongo4": _japanese,
    "ill|illm|ill2|interlanguage link|interlanguage link multi|lien": _argument("lt", "label", "texte", "1", "fr"),
    "convert|cvt|conv": _convert,
    "frac|fraction|sfrac|fract": _fraction,
    "e|e-sp|esp": _around(f"×10{Sign.RAISED}"),
    "circa|ca|ca.|c.": _circa,
    "as of|asof": _as_of,
    "oldstyledate|old style date": _old_style,
    "unité|unit": _joined(" "),
    "date|date-": lambda given: _joined(" ")(given) if len(given.first("1")) != 4 else None,  # the day first
    "gaps|linktext": _joined(""),
    "bibleverse|bible verse|bibleref|bibleref2": lambda given: " ".join(given.places()[:2]) or None,
    "ship": lambda given: _ship(*(given.first(place) for place in "1234")),
    "music": lambda given: MUSIC.get(given.first("1").lower()),
    "angbr|angle bracket|angle brackets|grapheme|vr": _around("⟨", "⟩"),
    "respell|pronunciation respelling": _respelled,
    "quote|blockquote|block quote|bquote|cquote|quotation|poemquote|poem quote|zitat|center|block indent|verse": (
        _quotation
    ),
}
"""The writers of templates by their names, where those that are written alike are parted by |."""
TABLE = _by_name(WRITERS)

FAMILIES: dict[str, Writer] = {
    "lang": _in_language(1),
    "ipa": _around("[", "]"),
    "ipac": _sounds,
    "flagicon": _shown(""),
}
"""The writers of templates whose names go on with a dash and a language."""

FUNCTIONS = _by_name(
    {"formatnum": _first, "defaultsort|displaytitle|#tag|defaultcategorysort|defaultsortkey": _shown("")}
)
"""The writers of the parser's functions, whose names end with a colon before the first argument."""
