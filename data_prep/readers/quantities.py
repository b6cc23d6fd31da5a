"""Writes the templates of wikitext that stand for numbers, units and dates, with the numbers that are in the page.

A number that the template would compute is left out where it is a second one (5 km is not said again in miles), and so
is one that depends on the day on which somebody reads the page. Arguments without sense give None, never an exception.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable

from data_prep.readers.tidying import NOTHING, Sign

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


def convert(given: Arguments) -> str | None:
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


def value(given: Arguments) -> str | None:
    """Writes a measured number with its uncertainty, power of ten and unit."""
    number, *errors = [place.lstrip("+") for place in given.places() if place.strip("+")] or [""]
    if not number and not given.first("e"):
        return None
    if errors and number:
        plus, minus = errors[0], errors[1] if len(errors) > 1 else ""
        number += f"+{plus}−{minus.lstrip('-−')}" if minus else f"±{plus}" if plus[0] != "(" else plus
    if power := given.first("e", "10"):
        number = f"{f'({number})' if errors else number}×" * bool(number) + f"10{Sign.RAISED}{power}"
    unit, per = given.first("u", "ul"), given.first("up", "upl")
    unit += f"/{per}" if per else ""
    spaced = unit if unit[:1] in ("%", "°", "/") else f" {unit}" * bool(unit)
    return f"{given.first('p')}{number}{given.first('s')}{spaced}"


def fraction(given: Arguments) -> str | None:
    """Writes a fraction, perhaps after a whole number; a number alone is a denominator."""
    places = [place for place in given.places() if place]
    if not places or len(places) > 3:
        return None
    whole = f"{places[0]} " if len(places) == 3 else ""
    return f"{whole}{places[-2] if len(places) > 1 else 1}/{places[-1]}"


def height(given: Arguments) -> str | None:
    """Writes the height of a person in the units in which it is given."""
    pairs = [f"{number} {unit}" for unit in ("m", "cm", "ft", "in") if (number := given.first(unit))]
    return " ".join(pairs) or None


def as_of(given: Arguments) -> str | None:
    """Writes the date from which a statement holds ("as of 2020"), in a sentence or at its beginning."""
    if alternative := given.first("alt"):
        return alternative
    date = _date(given.places()[:3], given.first("df").lower() in ("us", "mdy"))
    if date is None or given.says("bare"):
        return date
    opening = "Since" if given.says("since") else "As of"
    return f"{opening[0].lower() if given.says('lc') else opening[0]}{opening[1:]} {date}"


def date(given: Arguments) -> str | None:
    """Writes a day, a month or a year of which the parts are given, or as it stands."""
    places = given.places()
    if len(places) < 2 and places[:1] != [""]:
        return places[0] if places else None
    return _date(places[:3], not given.says("df"))


def died(given: Arguments) -> str | None:
    """Writes the day of a death, and the age where the day of the birth is given."""
    places = given.places()
    day, age = _date(places[:3], not given.says("df")), _years(places[3:6], places[:3])
    return day if age is None or day is None else f"{day} (aged {age})"


def years_between(given: Arguments) -> str | None:
    """Writes the years between two days; one up to today is left out: it would depend on when this is read."""
    places = given.places()
    return _years(places[:3], places[3:6])


def ordinal(given: Arguments) -> str | None:
    """Writes an ordinal number: 1st, 2nd, 3rd."""
    number = given.first("1")
    if not number.isascii() or not number.isdigit():
        return None
    ending = {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number + ("th" if number[-2:-1] == "1" else ending)


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


def _years(start: list[str], end: list[str]) -> str | None:
    """Counts the whole years from a day to another; None where one of them is no day."""
    try:
        first, last = (datetime.date(*(int(part) for part in day[:3])) for day in (start, end))
    except (TypeError, ValueError, OverflowError):
        return None
    years = last.year - first.year - ((last.month, last.day) < (first.month, first.day))
    return str(years) if years >= 0 else None
