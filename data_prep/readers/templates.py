"""Writes the commonest inline templates of wikitext as the text that a reader of the page sees.

A template is found by its name, in small letters, or by the family that its name begins with. One that is not here is
left out by who asks. No word is written that only the Wikipedia of one language would show, such as the name of a
language before a text in it, and no argument twice: what comes out is about as long as what goes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from data_prep.readers import quantities
from data_prep.readers.quantities import Arguments
from data_prep.readers.tidying import Sign

Writer = Callable[[Arguments], "str | None"]
"""Writes a template: None where its text is not known, "" where it shows nothing in the text."""
PARAGRAPH = f"\n\n{Sign.GONE}"  # the mark keeps what follows from being a list
FRACTION = re.compile(r"[0-9]{1,3}/[0-9]{1,3}\Z")
SHORT_LANGUAGE = re.compile(r"[a-z]{2,3}s\Z")  # {{enS|…}} of the German Wikipedia
SHIP = re.compile(r"(?:uss|hms|ss|ms|mv|rms|hmas|hmcs|hmnzs|usns|uscgc|usat|ins|sms|hnlms|hdms|orp|rv|gts)\Z")
PRONUNCIATION_FLAGS = frozenset("icon en us uk au ca nz ie local lang pron also wiki audio and or uklang".split())
MUSIC = {"sharp": "♯", "#": "♯", "flat": "♭", "b": "♭", "natural": "♮", "n": "♮"}
CHARGE = re.compile(r"\d*[+−-]\Z")


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
    """Finds what writes a template whose name has a language, a script or a number in it."""
    if FRACTION.match(name):
        return lambda given: name
    family, dash, code = name.partition("-")
    if dash and family in FAMILIES and len(code) < 20:
        return FAMILIES[family]
    if name.startswith("script/"):
        return _last
    if SHIP.match(name):
        return lambda given: _ship(name.upper(), given.first("1"), given.first("2"), given.first("3"))
    return _first if SHORT_LANGUAGE.match(name) else None


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


def _chinese(given: Arguments) -> str | None:
    """Writes a Chinese or Korean name in its scripts and transcriptions."""
    names = ("1", "c", "s", "t", "hangul", "hanja", "p", "tp", "w", "j", "poj", "rr", "mr")
    shown = dict.fromkeys(text for name in names if (text := given.first(name)))
    meaning = given.first("l", "lit")
    return ", ".join((*shown, f"'{meaning}'") if meaning else shown) or None


def _japanese(given: Arguments) -> str | None:
    """Writes a name with its Japanese in brackets."""
    name, *others = (given.first(place) for place in ("1", "2", "3", "4", "extra"))
    rest = ", ".join(other for other in others if other)
    return f"{name} ({rest})" if name and rest else name or rest or None


def _romaji_first(given: Arguments) -> str | None:
    """Writes a Japanese name in Latin letters, with its signs and its meaning in brackets."""
    rest = ", ".join(part for part in (given.first("2"), given.first("1")) if part)
    return f"{name} ({rest})" if (name := given.first("3")) and rest else rest or None


def _sounds(given: Arguments) -> str | None:
    """Writes a pronunciation that is given sound by sound."""
    sounds = "".join(place for place in given.places() if place.lower() not in PRONUNCIATION_FLAGS)
    return f"/{sounds.replace('_', ' ')}/" if sounds else None


def _respelled(given: Arguments) -> str | None:
    """Writes a pronunciation in syllables."""
    text = "-".join(place for place in given.places() if place)
    return re.sub(r"-?([,;]?)_-?", r"\1 ", text).strip() or None


def _circa(abbreviation: str) -> Writer:
    """Makes the writer of one or two years that are known only roughly."""

    def write(given: Arguments) -> str | None:
        years = [f"{abbreviation} {year}" for year in given.places()[:2] if year]
        return " – ".join(years) or abbreviation

    return write


def _sic(given: Arguments) -> str | None:
    """Writes a word that is meant to be spelled so, and says it where the template does."""
    word = "".join(given.places())
    return word if given.first("hide") and word else f"{word} [sic]".lstrip()


def _quotation(given: Arguments) -> str | None:
    """Writes a quotation as a paragraph of its own, without who said it."""
    text = given.first("text", "1", "quote", "content", "zitat")
    return f"{PARAGRAPH}{text}\n\n" if text else None


def _address(given: Arguments) -> str | None:
    """Writes the address of a site, or what it is called."""
    text, address = given.first("2"), given.first("1")
    return text or re.sub(r"\Ahttps?://|/\Z", "", address) or None


def _date_parts(given: Arguments) -> str | None:
    """Writes a date whose parts come as they are shown (1 | mars | 2000), or as numbers, the year first."""
    places = given.places()
    return quantities.date(given) if len(places[:1] and places[0]) == 4 else _joined(" ")(given)


def _old_style(given: Arguments) -> str | None:
    """Writes a date with what it is in the Julian calendar."""
    day, year, old = (given.first(place) for place in "123")
    return f"{day} [O.S. {old}] {year}" if day and old else None


def _ship(prefix: str, name: str, number: str, form: str) -> str | None:
    """Writes the name of a ship, with its number unless the form of the name leaves it out."""
    full = f"{prefix} {name}" if form not in ("1", "3", "5", "6") else name
    return (f"{full} ({number})" if number and form in ("", "3", "5") else full) if name else None


def _ship_class(given: Arguments) -> str | None:
    """Writes the class of a ship, with what kind of ship it is."""
    return f"{name}-class {given.first('2')}".rstrip() if (name := given.first("1")) else None


def _cited(form: str) -> Writer:
    """Makes the writer of a work that is cited in the text: authors and year with the page, in a form for the two."""

    def write(given: Arguments) -> str | None:
        *authors, year = [place for place in given.places()[:5] if place] or [""]
        shown = ", ".join(authors[:-1]) + " & " * (len(authors) > 1) + "".join(authors[-1:])
        at = given.first("p", "pp", "loc")
        page = f", {'pp. ' if given.first('pp') else 'p. '}{at}" if given.first("p", "pp") else at and f", {at}"
        return form.format(shown, year + page) if authors else None

    return write


def _by_name(writers: Mapping[str, Writer]) -> dict[str, Writer]:
    """Finds writers by single names, of several that are parted by |."""
    return {name: writer for names, writer in writers.items() for name in names.split("|")}


CHARACTERS = {
    "–": "ndash|en dash|endash|–|nbndash",
    " – ": "snd|spnd|spaced ndash|spaced en dash|sndash|dash|--",
    "—": "mdash|em dash|emdash|—|---",
    " — ": "mdashb|spaced mdash|spaced em dash|smd|spmd|snmd",
    " ": "nbsp|space|spaces|nnbsp|thin space|thinsp|thinspace|hsp|hair space|0|ensp|emsp|pad|figure space",
    " · ": "·|•|dot|bull|bullet|middot|bold middot|spaced middot|\\",
    "'": "'|apostrophe|'-|-'|`",
    "'s": "'s",
    "'\"": "' \"|'\"",
    "\"'": "\" '|\"'",
    '"': '-"|"-',
    PARAGRAPH: "pb|paragraph break|parabr|para|paragraph|p",
    Sign.BREAK: "br|break|crlf",
    "&#124;": "!|pipe",
    "&#61;": "=|equals",
    "&#42;": "*|asterisk",
    "&#123;": "(",
    "&#125;": ")",
    "...": "...|ellipsis|…",
    "×": "times",
    "−": "minus",
    "†": "dagger|†",
    "ʻ": "okina|'okina",
    "ʾ": "hamza",
    "ʿ": "ayin",
    "°": "degree",
    "♯": "sharp",
    "♭": "flat",
    Sign.FORMULA: "math|bigmath|equation|numblk|math block|intmath|tmath",
}
"""Templates that always stand for the same characters."""

BEFORE = {
    "£": "£|gbp|pound sterling",
    "US$": "us$|usd",
    "€": "€|eur|euro",
    "¥": "¥|jpy|jp¥|cny|cn¥",
    "₹": "₹|inr",
    "A$": "a$|aud|au$",
    "C$": "c$|cad|ca$",
    "±": "±|plusminus",
    "p. ": "p.",
    "pp. ": "pp.",
    "vol. ": "vol.",
    "No. ": "numero|no.",
    Sign.LOWERED: "sub",
    Sign.RAISED: "sup|exp|exposant",
}
"""Templates that set something before their text."""

SILENT = (
    "citation needed|cn|fact|citation needed span|sfn|sfnp|sfnm|efn|efn-ua|efn-lr|refn|rp|r|ref|ref label|note|"
    "note label|clarify|clarification needed|who|whom|by whom|which|when|where|why|vague|dubious|disputed inline|"
    "page needed|pn|page number needed|better source|better source needed|failed verification|verify source|"
    "verification needed|original research inline|relevance inline|weasel-inline|weasel inline|peacock inline|"
    "pov-statement|unreliable source|unreliable source?|unreliable source inline|update inline|update after|dead link|"
    "full|full citation needed|quantify|according to whom|specify|example needed|disambiguation needed|dn|"
    "non-primary source needed|primary source inline|attribution needed|synthesis inline|lead citation needed|"
    "undue weight inline|tone inline|copyedit inline|elucidate|self-published inline|self-published source|"
    "third-party inline|not in source|citation not found|subscription required|registration required|isbn needed|"
    "year needed|ambiguous|inconsistent|webarchive|wayback|inflation-fn|inflation/fn|cref|cref2|audio icon|"
    "nowrap begin|nowrap end|nowrap start|anchor|anchors|coord|coords|flagicon|flag icon|flagdeco|"
    "clear|clr|-|clear left|clear right|toc left|toc right|no more links|use dmy dates|use mdy dates|short description|"
    "zwj|zwnj|zwsp|wbr|shy|lrm|rlm|void|word joiner|en icon|fr icon|de icon|es icon|it icon|ru icon|gr icon"
)
"""Templates that show nothing in the text but perhaps a small remark, a number of a note or a flag."""

WRITERS: dict[str, Writer] = {
    **{names: _shown(text) for text, names in CHARACTERS.items()},
    **{names: _around(before) for before, names in BEFORE.items()},
    SILENT: _shown(""),
    "nowrap|nobr|nobreak|nwr|no wrap|small|smaller|big|bigger|large|larger|huge|midsize|nobold|normal|noitalic|"
    "noitalics|nocaps|roman|em|strong|bold|italic|i|italics|var|mvar|tt|mono|code|kbd|samp|key|unicode|sc|"
    "smallcaps|small caps|sc2|smcaps|smallcaps all|aut|uppercase|abbr|abbrlink|abbrv|tooltip|ipa|iast|polytonic|"
    "hebrew|typo|as written|proper name|underline|ul|strike|strikethrough|overline|visible anchor|vanchor|script|"
    "tlit|flag|flagcountry|flagu|flaglist|flagathlete|nts|crossreference|xref|cross-reference|nihongo2|"
    "nihongo foot|not a typo|chem2|nombre|highlight|initialism": _first,
    "lang|rtl-lang|ltr-lang|native phrase|native name|langue": _argument("2", "text", "texte"),
    "color|colour|background color|font color|fontcolor|colored text|lsj|h:title|wt|wikt-lang": _last,
    "transl|transliteration|xlit": _last,
    "langx": _in_language(2),
    "zh|chinese|korean|ko-hhrm": _chinese,
    "nihongo|nihongo krt|nihongo4": _japanese,
    "nihongo3": _romaji_first,
    "ill|illm|ill2|interlanguage link|interlanguage link multi|link-interwiki|lien": _argument(
        "lt", "label", "texte", "1", "fr", "en"
    ),
    "convert|cvt|conv": quantities.convert,
    "val": quantities.value,
    "unité|unit": _joined(" "),
    "frac|fraction|sfrac|fract|tfrac": quantities.fraction,
    "e|e-sp|esp": lambda given: f"×10{Sign.RAISED}{power}" if (power := given.first("1")) else None,
    "height": quantities.height,
    "circa|ca|ca.|c.": _circa("c."),
    "floruit|fl|fl.": _circa("fl."),
    "reign": lambda given: f"r. {years}" if (years := "–".join(filter(None, given.places()[:2]))) else None,
    "as of|asof": quantities.as_of,
    "age|age in years|age nts": quantities.years_between,
    "birth date|birth-date|birth date and age|birth-date and age|bda|start date|start date and age|end date|film date|"
    "release date|launch date|death date|death-date|death year|birth year|dts|start-date|end-date": quantities.date,
    "death date and age|dda|death-date and age": quantities.died,
    "date|date-": _date_parts,
    "oldstyledate|old style date": _old_style,
    "ordinal|ord": quantities.ordinal,
    "gaps|linktext": _joined(""),
    "chem": lambda given: "".join(Sign.RAISED * bool(CHARGE.match(part)) + part for part in given.places()) or None,
    "keypress|key press|button": _joined("+"),
    "bibleverse|bible verse|bibleref|bibleref2": lambda given: " ".join(given.places()[:2]) or None,
    "prime": _around("", "′"),
    "music": lambda given: MUSIC.get(given.first("1").lower()),
    "angbr|angle bracket|angle brackets|grapheme|vr": _around("⟨", "⟩"),
    "bracket|brackets|interp|interpolation": _around("[", "]"),
    "gloss|single+double|single quote": _around("'", "'"),
    "lit|literal translation|literally": _around("lit. '", "'"),
    '"|qq|inline quote|„': _around('"', '"'),
    "see below|see above|below|above": _around("(", ")"),
    "section link|slink": _joined(" § "),
    "respell|pronunciation respelling": _respelled,
    "sic|sic!": _sic,
    "quote|blockquote|block quote|bquote|cquote|quotation|longquote|centered pull quote|poemquote|poem quote|"
    "début citation|zitat|cita|citazione|bq|center|centre|block indent|blockindent|verse": _quotation,
    "url|website": _address,
    "ship": lambda given: _ship(*(given.first(place) for place in "1234")),
    "sclass|sclass2|ship class": _ship_class,
    "harvtxt|harvp|harvard citation text|harvcoltxt": _cited("{} ({})"),
    "harvnb|harvard citation no brackets": _cited("{} {}"),
    "harv|harvard citation": _cited("({} {})"),
}
"""The writers of templates by their names, where those that are written alike are parted by |."""
TABLE = _by_name(WRITERS)

FAMILIES: dict[str, Writer] = {
    "lang": _in_language(1),
    "ipa": _around("[", "]"),
    "ipac": _sounds,
    "flagicon": _shown(""),
    "zh": _chinese,
}
"""The writers of templates whose names go on with a dash and a language."""

FUNCTIONS = _by_name(
    {
        "formatnum": _first,
        "lc": lambda given: given.first("1").lower() or None,
        "uc": lambda given: given.first("1").upper() or None,
        "lcfirst": lambda given: (text := given.first("1"))[:1].lower() + text[1:] or None,
        "ucfirst": lambda given: (text := given.first("1"))[:1].upper() + text[1:] or None,
        "defaultsort|displaytitle|#tag|defaultcategorysort|defaultsortkey": _shown(""),
    }
)
"""The writers of the parser's functions, whose names end with a colon before the first argument."""
