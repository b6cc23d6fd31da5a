"""Templates of wikitext are written as their text, or leave nothing at all behind."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import slow

from data_prep.readers.templates import FAMILIES, FUNCTIONS, TABLE, expand
from data_prep.readers.wikitext import Wikitext


def passages(text: str) -> list[str]:
    return Wikitext().passages(text)


def written(text: str) -> str:
    """A template in the middle of a sentence."""
    (passage,) = passages(f"A {text} b")
    return passage[1:-1].strip()


TEMPLATES = {
    "{{H:title|a note|shown}}": "shown",
    # languages
    "{{lang|fr|Le Monde}} / {{Lang|fr|''Le Monde''}} / {{ lang_\n|fr| Le\nMonde }}": "Le Monde / Le Monde / Le Monde",
    "{{Template:lang|fr|x}} / {{lang|zh|text=中国}} / {{lang|fr|[[Le Monde|the ''World'']]}}": "x / 中国 / the World",
    "{{lang|fr|2={{nowrap|1=a = b}}}} / {{lang-fr|Le Monde}} / {{IPA|/a/}}": "a = b / Le Monde / /a/",
    "{{lang-ru|Москва|Moskva|Moscow}} / {{respell|MON|dee|,_|KAH|_|ko}}": "Москва, Moskva, 'Moscow' / MON-dee, KAH ko",
    "{{langx|grc|λόγος|translit=logos|lit=word}} / {{rtl-lang|ar|قلب}}": "λόγος, logos, 'word' / قلب",
    "{{transl|ar|qalb}} / {{transl|ar|ISO|qalb}} / {{script/Hebrew|עין}}": "qalb / qalb / עין",
    "{{nihongo|Tokyo|東京|Tōkyō|capital}} / {{nihongo|Tokyo}}": "Tokyo (東京, Tōkyō, capital) / Tokyo",
    "{{IPA-fr|mɔ̃d|lang}} / {{IPAc-en|lang|ˈ|m|ɒ|n|_|d|audio=x.ogg}}": "[mɔ̃d] / /ˈmɒn d/",
    "{{wikt-lang|en|word}}": "word",
    # looks
    "{{nowrap|a b}} / {{small|{{nobold|a}} b}} / {{abbr|WHO|World Health Organization}}": "a b / a b / WHO",
    "{{tooltip|a|b}} / {{sub|2}} / {{color|red|word}} / {{angbr|a}} / {{see below}}word": "a / 2 / word / ⟨a⟩ / word",
    "{{mvar|x}} / {{visible anchor|word}} / {{flag|France}} / {{flagicon|FRA}} word": "x / word / France / word",
    "{{ill|Jean Jean|fr|Jean}} / {{ill|Jean (x)|fr|Jean|lt=Jean}} / {{formatnum:12345}}": "Jean Jean / Jean / 12345",
    "{{typo|teh}} / {{linktext|a|b}} / {{USS|Enterprise|CV-6}}": "teh / ab / USS Enterprise (CV-6)",
    "{{USS|Enterprise|CV-6|2}} / {{ship|HMS|Victory||6}} / {{music|sharp}}": "USS Enterprise / Victory / ♯",
    "{{bibleverse|1 John|4:8|KJV}}": "1 John 4:8",
    # characters
    "1{{ndash}}2 / a{{snd}}b / a{{mdash}}b / a{{spaced mdash}}b": "1–2 / a – b / a—b / a — b",
    "a{{nbsp}}b / a{{·}}b / ''Time''{{'s}} word / a{{!}}b": "a b / a · b / Time's word / a|b",
    "{{nowrap|a{{!}}b{{=}}c}} / {{£|5}} {{US$|6}} / H<sub>2</sub>O 101<sub>2</sub>": "a|b=c / £5 US$6 / H2O 101_2",
    "p{{sup|2}} 10{{sup|6}} 101{{sub|2}}": "p2 10^6 101_2",
    "10<sup>6</sup> km<sup>2</sup> 5<sup>th</sup> 10<sup>−6</sup>": "10^6 km2 5th 10^−6",
    # quantities
    "{{convert|5|km|mi}} / {{convert|5|km}} / {{cvt|5.5|km|mi|1|abbr=on}}": "5 km / 5 km / 5.5 km",
    "{{convert|1,200|sqmi|km2|0}} / {{convert|5|to|10|km|mi}} / {{bartable}} word": "1,200 sq mi / 5 to 10 km / word",
    "{{convert|5|-|10|km|mi|abbr=on}} / {{convert|10|x|20|x|30|m|ft}}": "5–10 km / 10 × 20 × 30 m",
    "{{convert|5|ft|9|in|m}} / {{convert|-27|F|C}} / {{convert|5+1/2|in|mm}}": "5 ft 9 in / −27°F / 5 1/2 in",
    "{{convert|1/2|mi}} / {{convert|22|e6acre|km2}}": "1/2 mi / 22 million acres",
    "{{convert|6|ft|m|adj=mid|-tall}} / {{frac|1|2}} / {{frac|3|1|2}} / {{frac|4}}": "6 ft tall / 1/2 / 3 1/2 / 1/4",
    "5{{e|6}} / {{gaps|12|345}}": "5×10^6 / 12345",
    # dates
    "{{circa|1500}} / {{c.|1500|1550}} / {{circa}} 1500": "c. 1500 / c. 1500 – c. 1550 / c. 1500",
    "{{As of|2010}} / {{as of|2010|bare=yes}} / {{date|1|mars|2000}}": "As of 2010 / 2010 / 1 mars 2000",
    "{{as of|2010|3|lc=y}} / {{as of|2010|03|05|df=US}}": "as of March 2010 / As of March 5, 2010",
    "{{as of|2010|March|5|since=y}} / {{as of|2010|alt=in 2010}}": "Since 5 March 2010 / in 2010",
    "{{OldStyleDate|24 February|1955|12 February}}": "24 February [O.S. 12 February] 1955",
}


@pytest.mark.parametrize(("text", "expected"), TEMPLATES.items())
def test_a_template_is_written_as_a_reader_sees_it(text: str, expected: str) -> None:
    assert written(text) == expected


LEFT_OUT = (
    "{{unknown}} / {{unknown|a|b=c}} / {{lang|fr}} / {{lang}} / {{lang|fr|{{unknown}}}} / {{}} / {{|}} / "
    "{{convert}} / {{convert|5}} / {{convert|a|km}} / {{convert|5|{{unknown}}}} / {{val}} / {{frac}} / "
    "{{frac|1|2|3|4}} / {{as of}} / {{as of|2010|13}} / {{age|1990|1|1}} / {{age|1990|2|30|2000|1|1}} / "
    "{{inflation|US|5|1900}} / {{ordinal|x}} / {{#if:a|b|c}} / {{anchor|a}} / {{coord|52|N|1|W}} / "
    "{{#tag:ref|A note.}} / {{cite book|title=A}} / {{citation needed|date=May 2010}} / {{sfn|Smith|2000|p=5}} / "
    "{{efn|A note.}}"
)


AROUND = """
A {} b. = A b. | A ''{}'' b. = A b. | A '''''{}''''' b. = A b. | A {}, b. = A, b. | A, {}, b. = A, b. | A, {}. = A.
A ({}) b. = A b. | A ({}, born 1950) b. = A (born 1950) b. | A ({}; {}, born 1950) b. = A (born 1950) b.
A (born 1950, {}) b. = A (born 1950) b. | A "{}" b. = A b. | A “''{}''” b. = A b. | A « {} » b. = A b.
A [{}], b. = A, b. | {}, A b. = A b. | A 1{},000 b. = A 1,000 b.
"""
"""What stands around a template, and what is left of it."""


@pytest.mark.parametrize("row", re.split(r" \| |\n", AROUND.strip()))
def test_what_is_left_out_takes_its_surroundings_along(row: str) -> None:
    around, _, left = row.partition(" = ")
    for text in LEFT_OUT.split(" / "):
        assert passages(around.replace("{}", text)) == [left], text


@pytest.mark.parametrize("name", ["quote", "Blockquote", "cquote", "poem quote"])
def test_a_quotation_is_a_paragraph(name: str) -> None:
    text = f"He said:\n{{{{{name}|text=So it is.\n\nIt was.|author=He}}}}\nThen he left."
    assert passages(text) == ["He said:", "So it is.", "It was.", "Then he left."]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("A <math>x^2</math> b.", []),
        ("A 2-b <chem>H2O2 -> B</chem>.\n\nA 2-b <ce>A -> B</ce>.", []),
        ("A {{math|''x''<sup>2</sup>}}.\n\nB.", ["B."]),
        ("A is\n:<math>x^2</math> <math>y^2</math>,\nwhere b.\n\nB.", ["B."]),
        ("A.\n\n:<math>x^2</math>\n\nB.", ["A.", "B."]),
        ("A <math>n</math>th of <math> 12 </math>.", ["A nth of 12."]),
        ("A.{{infobox|a=<math>x^2</math>}}<ref><math>x^2</math></ref>", ["A."]),
    ],
)
def test_a_paragraph_with_a_formula_is_left_out(text: str, left: list[str]) -> None:
    assert passages(text) == left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # around templates
        ("A (about {{unknown}} in all) b.\n\nA (£{{inflation|UK|5|1900}} today) b.", ["A b.", "A b."]),
        ("A (of 1950{{unknown}}) b.\n\n''{{lang|fr|''Le'' Monde}}''s", ["A (of 1950) b.", "Le Mondes"]),
        ("It has '''{{lang|fr|Le Monde}}''' ''(\"{{unknown}}\")''.", ["It has Le Monde."]),
        ("He said \"yes\"<ref>a</ref> \"no\"{{cn}}, and ''{{lang|fr|non}}''.", ['He said "yes" "no", and non.']),
        # variants of a language
        ("A -{zh-hans:计算机; zh-hant:電腦;}- b\n\nA -{not closed, {{ndash}} c", ["A 计算机 b", "A -{not closed, – c"]),
        ("A -{计算机}- b -{H|zh-cn:c;zh-tw:d}-e -{zh-hans;zh-hant|f}-", ["A 计算机 b e f"]),
        (
            "A [[计算机|-{zh-hans:计算机;zh-hant:電腦}-]], -{a-{zh:b}-c}-\n\n1990-{{ndash}}-5",
            ["A 计算机, abc", "1990-–-5"],
        ),
        # indented prose
        (":This is prose that somebody has indented.", ["This is prose that somebody has indented."]),
        ("A\n::\"It's a text that 'he' has indented.\"\nb", ["A", "\"It's a text that 'he' has indented.\"", "b"]),
        (":''This is where to read more of it, at [[x]].''", []),
        ("; A term\n: What it means is said in many words.\n: It means this and that too.\nA", ["A"]),
        (":* An item of a list that has six words.\n:No end of a sentence is in sight", []),
        # links to sister projects
        ("A [[wikt:word|word]], [[wikt:word]], [[s:A Book]], [[:s:fr:Un livre]].", ["A word, word, A Book, Un livre."]),
        ("[[q:Him|He]] wrote [[b:Wikt: B]] [[doi:10.1/a]] [[m:Meta]].", ["He wrote Wikt: B doi:10.1/a Meta."]),
        ("Anarchism: [[Anarchism: A History]][[fr:B]]", ["Anarchism: Anarchism: A History"]),
    ],
)
def test_passages_of_a_page(text: str, expected: list[str]) -> None:
    assert passages(text) == expected


NAMES = sorted({*TABLE, *FUNCTIONS, "lang-fr", "ipa-fr", "ipac-en", "script/x", "uss", "1/2", "unknown", "zh-x"})
VALUES = ["", " ", *"5 12 -3 1/2 1990 km ft in to - word ''it'' y \x03 \" ² text=x e=5 {0}".split(), "9" * 40]
VALUES += ["{{lang|fr|x}}", "{{unknown}}", "[[a|b]]", "<math>a</math>", "a\nb", "*a\n*b"]


FLAGS = st.sampled_from(["", "1=", "df=", "lc=", "e="])


@given(st.sampled_from(NAMES), st.lists(st.tuples(FLAGS, st.sampled_from(VALUES))))
@settings(max_examples=300)
def test_no_argument_raises_anything_or_leaves_marks(name: str, arguments: list[tuple[str, str]]) -> None:
    text = f"A ({{{{{name}{'' if name in FUNCTIONS else '|'}{'|'.join(map(''.join, arguments))}}}}}) ''b''"
    for passage in passages(text):
        assert not re.search(r"\{\{|\}\}|''|\[\[|\]\]|[\x00-\x08]|\(\s*\)|  ", passage), passage


@given(st.sampled_from(NAMES), st.text(max_size=60))
@settings(max_examples=200)
def test_any_text_may_be_an_argument(name: str, text: str) -> None:
    expand([f"{name}{':' if name in FUNCTIONS else '|'}{text}"])
    assert len(expand([f"{name}|{text}"]) or "") < 3 * len(text) + 40


def test_names_are_spelled_as_they_are_looked_up() -> None:
    for name in (*TABLE, *FAMILIES, *FUNCTIONS):
        assert name == " ".join(name.lower().split())


def make_hostile(many: int) -> list[str]:
    """Makes texts that take hours where time is not linear."""
    words = "x " * 3 * many
    return [
        "{{lang|fr|" * 4 * many + "x " * 8 * many + "}}" * 4 * many,
        "{{nowrap|[[a|" * (many // 2) + "x " * 2 * many + "]]}}" * (many // 2),
        "{{nowrap|" + "{{lang|fr|a|b=c}} " * many + "}}",
        "{{convert|" + "5|to|" * 2 * many + "5|km}}",
        "{{convert|" + "1" * 10 * many + "|km}}",
        "{{unknown}} , " * many + "(" + "{{unknown}}; " * many + ")",
        "($" + "{{unknown}} " * 2 * many,
        f"{words}({'{{unknown}}; ' * (many // 2)}",
        f"{words}({'{{unknown}} a ' * (many // 2)}",
        words + '"{{unknown}}"' * (many // 2),
        words + "(" * many + "{{unknown}}" + ")" * many,
        "(" * 3 * many + "{{a}}" + ")" * 3 * many,
        "-{" * 3 * many + "}-" * 3 * many,
        "-{zh:a;" * 2 * many + "}-",
        ":" * 5 * many + "<math>a b</math>\n" * (many // 5),
        "<sup>5" * 2 * many,
        "{{harv|" + "a|" * 3 * many + "}}",
    ]


@pytest.mark.parametrize("many", [12_000, slow(50_000)])
def test_hostile_templates_take_no_longer_for_being_long(many: int) -> None:
    for text in make_hostile(many):
        start = time.process_time()
        passages(text)
        taken = time.process_time() - start
        assert taken < many / 20_000, text[:12]  # seconds; what is quadratic takes many times that
