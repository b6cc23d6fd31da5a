"""Wikitext to what a reader of the page sees as running text."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import slow
from support.reading import read

from data_prep.readers import tidying
from data_prep.readers.wikitext import Wikitext, is_disambiguation, remove_tags

ARTICLE = """{{Short description|Town in a county}}
{{Infobox settlement
| name        = Ashby
| image       = [[File:Ashby.jpg|250px]]
| population  = {{formatnum:12370}}<ref name="census">{{cite web |url=http://x.org |title=[[Census]]}}</ref>
| coordinates = {{coord|52|44|N|1|28|W|display=inline,title}}
}}
[[File:Ashby market.jpg|thumb|left|The [[market]] of '''Ashby''' in 1900{{dubious}}]]
'''Ashby''' ({{IPAc-en|ˈ|æ|ʃ|b|i}}) is a [[market town]] in the [[Leicestershire|county]],<!-- not the
old one --> close to ''Derbyshire''.<ref>{{cite book |title=A|last=B}}</ref><ref name="x" /> Its population
was 12,370 ({{lang|la|Ascebi}}; {{lang-fr|x}}), and [[king]]s came here.

<!-- a remark -->
== History ==
{{main|History of Ashby}}
The town was&nbsp;founded in 1086 &ndash; so they say.
<!-- a line of its own -->
It grew.{{citation needed|date=May 2010}} See [http://x.org/a the history] and [http://x.org/b].
"""
PARTS = {
    "== Later ==\n* one [[thing]]\n** under it\n# two\n; term : definition\n: indented\nText.": ["Text."],
    '{|class="x"\n|-\n! Year !! [[People]]\n|-\n| 1900 || 5,000\n|\n* in a cell\n{|\n|b\n|}\n|}\nText.': ["Text."],
    "----\nH<sub>2</sub>O costs <span style='color:red'>5&nbsp;€</span>.\n\nA <math>x^2 < 5</math>": ["H2O costs 5 €."],
    "E = mc<sup>2</sup>.<br />Next.": ["E = mc2. Next."],
    "<gallery>\nFile:A.jpg|A caption\n</gallery>\n\n<pre>\ncode\n</pre>": [],
    "<blockquote>A quoted passage.</blockquote>": ["A quoted passage."],
    '==References==\n{{reflist|30em|refs=\n<ref name="a">Text of a note.</ref>\n}}\n<references />': [],
    "[[Category:Towns in Leicestershire]]\n[[de:Ashby]]\n__NOTOC__\n": [],
}
"""What may follow in an article, and its paragraphs."""


def passages(text: str) -> list[str]:
    return Wikitext(("datei", "kategorie")).passages(text)


def test_an_article() -> None:
    town = "Ashby (/ˈæʃbi/) is a market town in the county, close to Derbyshire. "
    town += "Its population was 12,370 (Ascebi; x), and kings came here."
    expected = [town, "The town was founded in 1086 – so they say. It grew. See the history and."]
    for text, paragraphs in PARTS.items():
        assert passages(text) == paragraphs
        expected += paragraphs
    assert passages("\n\n".join([ARTICLE, *PARTS])) == expected


def test_namespaces_of_several_words_may_be_spelled_with_underscores() -> None:
    text = "A[[Tập_tin:a.jpg|nhỏ|Of a file.]][[Tập tin:b.jpg]][[tập__tin: c.jpg]]."
    assert Wikitext({"tập tin"}).passages(text) == ["A."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # links
        ("A [[link]] and [[target|another]], [[a|b|c]]. / A [https://z.org].", "A link and another, b|c. / A."),
        ("[[Bus]]es, [[:Category:Buses]], [[#Part]], [[Talk:A|talk]].", "Buses, Category:Buses, #Part, talk."),
        ("[[File:a.jpg|thumb|It [[is|was]] {{small|[[so]]}} [http://x y]]]A / [http://x.org [[a]] b]", "A / a b"),
        ("A[[Image_:b.png|mini]][[_category :B]]. / ([http://x.org]) ( [[File:a.ogg]] ) (;, ) A", "A. / A"),
        ("A[[ image : b.png ]][[Datei:c.png|mini]][[CATEGORY:D]][[Kategorie:E|F]][[Bild:g.jpg]].", "A."),
        ("A.[[fr:B]][[zh-min-nan:C]][[simple:D]] [[wikt:e|f]] [[:de:G]]", "A. f de:G"),
        ("[http://x.org Title of ''it''], [//y.org Y], [mailto:a@b.c mail].", "Title of it, Y, mail."),
        ("At http://x.org/a_b it is [1] [so].", "At http://x.org/a_b it is [1] [so]."),
        # style
        ("'''''Both''''' '''bold''' ''italic'' L''''état''' rock 'n' ''''''", "Both bold italic L'état rock 'n' '"),
        ("<b>a</b> <I>b</I><small>c</small> <font color=red>d</font> <code>e</code>", "a bc d e"),
        ("__NOTOC__A __FORCETOC__ __init__", "A __init__"),
        # templates
        ("A{{x}} {{c|{{d|[[e]]}}|f={{{g|}}}}}h / A {{b\n|c=d\n\n|e=[[f]]\n}} g", "A h / A g"),
        ("It is ({{unknown|5|km}}) long ({{unknown|la|x}}, born 1900; {{y}}).", "It is long (born 1900)."),
        ("A {{b}}, c {{d}} ({{e}}) . F . . . g / {{{1|default}}} A {{{b}}}", "A, c. F. . . g / A"),
        ("{{#if:{{{x|}}}|yes}}A", "A"),
        # tables
        ("{|\n|a\n|}\nB / A {| b |} c", "B / A {| b |} c"),
        (" :{| class=x\n|a\n {|\n|b\n |}\n|}C", "C"),
        ("<ref>a</ref>\n{|\n|b\n|}\n<ref>c</ref>\n:{|\n|d\n|}\nE", "E"),
        # references and other tags
        ('A<ref>b</ref> c<ref name="d"/>e<ref name=f group=g >h [[i]]</ref>. / A<REF>b</REF>.', "A ce. / A."),
        ('A<ref name="not closed">b c<ref>d</ref> e / A<references><ref>b</ref></references>C', "Ab c e / AC"),
        ("A <score>\\frac{{a}}{b}</score> b <score display=block>{{</score>c", "A b c"),
        ("<nowiki>[[not a link]] ''x'' {{y}} &amp; <ref></nowiki>", "[[not a link]] ''x'' {{y}} & <ref>"),
        ("<nowiki>* no list</nowiki> / A<nowiki/>B <ref/>C <br/>D<br>E</br>F <hr>", "* no list / AB C D E F"),
        ("A<includeonly>b</includeonly><noinclude>c</noinclude><onlyinclude>d</onlyinclude>", "Acd"),
        ("A<ul><li>b<ul><li>c</li></ul></li></ul>D <table><tr><td>e<table></table></td></tr></table>F", "AD F"),
        ('A<span style="display: none">b<span>c</span>d</span>E', "AE"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>字", "漢字"),
        ("<syntaxhighlight lang=c>a < b;</syntaxhighlight><source>x</source>A", "A"),
        ("A<score>{ c }</score><timeline>x</timeline><imagemap>y</imagemap>B<H2>c</H2>", "AB"),
        ("a < b, c > d, a<b, <THE END>, <http://x.org>", "a < b, c > d, a<b, <THE END>, <http://x.org>"),
        # characters
        ("&lt;b&gt; &amp;nbsp; &eacute;&#233;&#xE9; AT&T &copy= &bogus;", "<b> &nbsp; ééé AT&T &copy= &bogus;"),
        (
            "a&nbsp;b&#160;c\xa0d\te / a&#xD800;b &#0; &#99999999; &#x110000;",
            "a b c d e / a\ufffdb \ufffd \ufffd \ufffd",
        ),
        ("a<!-- b -->c<!-- not closed", "ac"),
        ("a\x00b\x01c", "abc"),
    ],
)
def test_pieces(text: str, expected: str) -> None:
    assert passages(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<b>not closed <div>there</span>", ["not closed", "there"]),
        ("A\nb\n\nc\n \nd\r\n\r\ne\n\nA\n<!-- b -->\nc\n\nA\n{{b}}\nc", ["A b", "c", "d", "e", "A c", "A", "c"]),
        ("A\n* b\nc\n# d\n:e\n;f\n**g\nh\n\nA\n*b {{c\n|d}} e\nf\n\n\n\n{{a}}", ["A", "c", "h", "A", "f"]),
        ("*a<br>b<br><br>c\nd<br>* e\n\n== {{b}} [[c]] ==\nD\n\n:{| class=x\n! a\n|}B", ["d * e", "D", "B"]),
        ("A\n==B==\nc\n===D=== <!-- e -->\nf\n= G =\nh = i\n\na\n----\nb", ["A", "c", "f", "h = i", "a", "b"]),
        ("{|\n| a\n|}\nB {| c |}\n\n{| {{b}}\n|-\n| c || d\ne\n\nf\n{{end}}\n|}\nG", ["B {| c |}", "G"]),
        ("{{a|\n{| class=b\n| c\n|}\n}}D\n\n{|\n| not closed\n|-\n! b !! c\nD\n\nWord", ["D", "D", "Word"]),
        ("{{not closed\n| b = c\n| d\nE\n\n[[not closed\n\nA [[b]] c]]\n\nd", ["E", "not closed", "A b c", "d"]),
        ("[[x\n\nA | b [[c]] d]]\n\n!Kung is\n! a header\n!! b", ["x", "A | b c d", "!Kung is"]),
        ("[[File:not closed.jpg|thumb\n\nA}} b {{", ["File:not closed.jpg|thumb", "A b"]),
        ("<p>a</p><p>b</p>c<div>d</div>\n\na<br><br>b<br />c", ["a", "b", "c", "d", "a", "b c"]),
        ("<poem>\na\nb\n</poem>\n\n<div>\n* a\n</div>\nB\n\n[[File:a.jpg]], {{b}}.\n\n—\n\n...", ["a b", "B"]),
    ],
)
def test_paragraphs(text: str, expected: list[str]) -> None:
    assert passages(text) == expected


def test_disambiguation() -> None:
    marks = ["A\n{{disambiguation}}", "{{Disambig|geo}}", "{{ Human name disambiguation }}", "{{hndis|x}}"]
    assert all(is_disambiguation("Mercury", text) for text in (*marks, "{{Begriffsklärung}}", "__DISAMBIG__"))
    assert is_disambiguation("Mercury (disambiguation)", "")
    others = ["{{disambiguation needed}}", "{{about|x|y|Mercury (disambiguation)}} This is no disambiguation."]
    assert not any(is_disambiguation("Mercury", text) for text in others)


@settings(max_examples=500)
@given(st.text(st.sampled_from("a1 ,;.:-()（）、"), max_size=12))
def test_what_is_looked_for_first_changes_nothing(text: str) -> None:
    """Empty brackets and stray commas are replaced only where a quick look finds some; the rest is left alone."""
    text = expected = " ".join(text.split())
    for _ in range(tidying.DEEPEST_PAIR):
        expected = re.sub(r" ?[(（][\s,;:、，–-]*[)）]", "", expected)
    expected = tidying.SPACE_BEFORE.sub("", tidying.DANGLING.sub("", expected)).strip()
    assert tidying.tidy(text) == expected


def test_tags_alone() -> None:
    assert remove_tags("a<br>b <BR/>c <ref name=x>d</ref> <refs> a < b </li>e<!x>") == "a b c d <refs> a < b e<!x>"


MARKS = [*"[]{}|'*#:;=!<>/&,()a\n -", *"{{ }} [[ ]] {| |} {{{ }}} ''' <!-- --> [http:// File: word &amp; ==".split()]
MARKS += [*"<ref> </ref> <nowiki> </nowiki> <table> </table> <br> <div> </div> __TOC__".split(), "<ref name=a/>"]
MARKS += ["&#xD800;", "\n\n", "\n{|", "\n|}", "[http://x y]", "\x00"]


@given(st.lists(st.sampled_from(MARKS), max_size=60).map("".join) | st.text(max_size=200))
@settings(max_examples=400)
def test_broken_wikitext_raises_nothing(text: str) -> None:
    is_disambiguation("", text)
    for passage in passages(text):
        assert passage
        assert passage.encode().decode() == " ".join(passage.replace("\x00", "").split())


UNITS = [*MARKS, *"[[a| {{a| [[a|{{b <b> <ul> <ref><div> (, [[File:a|".split()]
UNITS += ["<a b='", "<div ", "{{ ", "( ", "[http://a "]


def take_seconds(*texts: str) -> float:
    start = time.process_time()
    for text in texts:
        passages(text)
        is_disambiguation("", text)
    return time.process_time() - start


@pytest.mark.parametrize("size", [15_000, slow(60_000)])
def test_hostile_wikitext_takes_no_longer_for_being_long(size: int) -> None:
    """A page of one mark, never closed, closed once or as often, takes hours where time is not linear."""
    ends = "x]]}}|}</ul></ref></nowiki>-->)"
    for unit in UNITS:
        many = unit * (size // len(unit))
        taken = take_seconds(many, many + ends, unit * (size // 25) + ends * (size // 25))
        assert taken < size / 30_000, unit  # seconds
    many = 3 * size
    for text in ("<ref>" * many + "</ref>", "[[" * many + "word " * many + "]]" * many, "(" + "," * many + "x"):
        assert take_seconds(text) < size / 12_000, text[:9]


HOLES = r"\(\s*\)|\[\s*\]|“\s*”|«\s*»|[(\[]\s*[,;]|[,;]\s*[)\]]|\w [,;](?=\s)|,\s*,"
HOLES += r"|''|\[\[|\]\]|\{\{|\}\}|\{\||<(?:ref|span|math|div)\b"
"""What no writer leaves."""


@pytest.mark.realdata
@pytest.mark.parametrize(("dump", "most"), [("enwiki-100-pages.xml.bz2", 6), ("viwiki-test.xml", 0)])
def test_passages_of_real_dumps_have_hardly_a_hole(dump: str, most: int, real_data: Path) -> None:
    """A few are the page's own."""
    documents, _ = read(real_data / "wikidump" / dump, "mediawiki", "skip")
    assert len(documents) > 5
    assert sum(bool(re.search(HOLES, passage)) for page in documents for passage in page.passages) <= most
