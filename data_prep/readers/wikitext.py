"""Turns wikitext into paragraphs: the text alone, without tables, lists, headings, references or boxes.

It takes one pass over the marks with a stack, so that the time is linear in the length of a page, whatever is broken
in it: a parser that tries again where a bracket has no partner needs hours for a page of a few megabytes of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from data_prep.readers.templates import expand
from data_prep.readers.tidying import NOTHING, SIGNS, Sign, plain_quotes, tidy, unescape

SKIPPED_PREFIXES = frozenset(
    "file image category media bild imagen imagem afbeelding grafika изображение 画像 图像 圖像".split()
)
OTHER_WIKI = re.compile(r"(?!(?:doi|hdl|mw|pmc|rfc|voy|wmf)\Z)(?:[a-z]{2,3}(?:-[a-z-]+)?|simple)\Z")
"""Prefixes of other Wikipedias, whose links show nothing in the text: [[fr:…]]."""
SISTER = re.compile(
    r"\A:?(?:wikt|wiktionary|s|wikisource|b|wikibooks|n|wikinews|q|wikiquote|v|wikiversity|voy|wikivoyage|c|commons|species|"
    r"wikispecies|d|wikidata|m|meta|mw|w|wikipedia)\s*:\s*(?:[a-z]{2,3}:)?(?=\S)",
    re.IGNORECASE,
)
"""Opens the target of a link to another project, whose page has the word that is meant in its title."""
DISAMBIGUATION = re.compile(
    r"__DISAMBIG__|\{\{\s*(?:(?:\w[\w -]{0,40})?disambig(?:uation)?(?:[ -](?:page|cleanup))?|dab|hndis|geodis|surname"
    r"|given name|set index(?: article)?|begriffsklärung|homonymie|desambiguaci[oó]n|disambigua|desambiguação"
    r"|doorverwijspagina|неоднозначность|曖昧さ回避|消歧义|ujednoznacznienie)\s*[|}]",
    re.IGNORECASE,
)

# Tags whose content is no text: what is in the first is no wikitext either, so it ends at the first closing tag.
OPAQUE = frozenset(
    "categorytree ce chem gallery graph hiero imagemap includeonly indicator inputbox math nowiki pre ref "
    "references score source syntaxhighlight templatedata timeline".split()
)
FORMULAS = frozenset("ce chem math".split())
LETTER = re.compile(r"\s*([A-Za-z]|\d{1,9})\s*\Z", re.ASCII)  # a formula that is text as well
DROPPED = frozenset("dl h1 h2 h3 h4 h5 h6 ol rp rt table ul".split())
BLOCKS = frozenset("blockquote center div hr p poem".split())
INLINE = frozenset(
    "abbr b bdi bdo big caption cite code data dd del dfn dt em font i ins kbd li mapframe maplink mark noinclude "
    "onlyinclude q rb ruby s samp section small span strike strong sub sup tbody td templatestyles th time tr tt u "
    "var wbr".split()
)
TAG = re.compile(
    rf"<(/?)({'|'.join(sorted(OPAQUE | DROPPED | BLOCKS | INLINE | {'br'}))})(?![\w-])([^<>]*)>", re.IGNORECASE
)
MARK = re.compile(rf"\{{\{{|\}}\}}|\[\[|\]\]|\n[ \t:]*\{{\||\n[ \t]*\|\}}(?!\}})|{TAG.pattern}", re.IGNORECASE)
"""Brackets, tables and tags: each alternative begins with a character of its own, which is found fast."""
PARTNER = {"}}": "{{", "]]": "[[", "|}": "{|"}
DEEPEST_LINK, DEEPEST_TEMPLATE = 30, 20  # each level copies what is in it
MARKUP = frozenset("[]{}|'*#:;=!<>_-&")
REFERENCE = re.compile(r"<ref(?![\w-])[^<>]*(?<!/)>", re.IGNORECASE)
HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)

COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
REMARK_LINE = re.compile(rf"\n[ \t]*{Sign.REMARK}[ \t{Sign.REMARK}]*(?=\n)")
TWO_BREAKS = re.compile(f"{Sign.BREAK}(?:[ {NOTHING}]*{Sign.BREAK})+")
ARGUMENT = re.compile(r"\{\{\{[^{}]*\}\}\}")
EXTERNAL_LINK = re.compile(r"\[(?<!\[\[)((?:(?:https?:|ftps?:|news:|irc:)?//|mailto:)[^\[\]\n]*)\]", re.IGNORECASE)
LIST, ITEMS = ("*", "#", ":", ";"), "list items"
NO_PASSAGE = re.compile(r"[*#:;|]|!(?!\w)|----|\{[{|]")
WORD = re.compile(r"[^\W_]")
SENTENCE = re.compile(r"[.!?…。！？][\"”»’')\]]*\Z")
FEWEST_WORDS = 6  # an indented line with fewer is no prose
VARIANT = re.compile(r"-\{(?!\{)(?:([A-Za-z;+-]{0,40})\|)?([^{}\n]*)\}-")
HIDDEN_VARIANT = re.compile(r"(?:\A|;)[HTN-](?:;|\Z)")
NEXT_VARIANT = re.compile(r";\s*(?=[a-z]{2,3}(?:-[a-z]+)*\s*:|\Z)")
OF_VARIANT = re.compile(r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*:\s*")


def is_disambiguation(title: str, text: str) -> bool:
    """Tells whether a page only lists what its title may mean."""
    return title.lower().endswith("(disambiguation)") or DISAMBIGUATION.search(text) is not None


def remove_tags(text: str) -> str:
    """Frees a text of the tags that wikitext may have; other uses of < and > stay."""
    if "<" not in text:
        return text
    return TAG.sub(lambda tag: " " if tag[2].lower() == "br" else "", text).replace("  ", " ")


class Wikitext:
    """Finds the text in the pages of one wiki."""

    def __init__(self, skipped_prefixes: Iterable[str] = (), no_text: Counter[str] | None = None) -> None:
        """`no_text` counts the items of lists, which are left out."""
        self._skipped = SKIPPED_PREFIXES | frozenset(skipped_prefixes)
        self._no_text = Counter[str]() if no_text is None else no_text

    def passages(self, text: str) -> list[str]:
        """Lists the paragraphs of a page."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        for sign in SIGNS:
            text = text.replace(sign, "")
        text = REMARK_LINE.sub("", "\n" + COMMENT.sub(Sign.REMARK, text) + "\n").replace(Sign.REMARK, "")
        text = EXTERNAL_LINK.sub(_link_title, ARGUMENT.sub(Sign.GONE, text))
        plain = EXTERNAL_LINK.sub(_link_title, _Page(self._skipped).plain(text))  # those with links in their titles
        if "-{" in plain:
            plain = VARIANT.sub(_variant, VARIANT.sub(_variant, plain))  # they may be nested
        parts = (part for lines in _paragraphs(plain, self._no_text) for part in TWO_BREAKS.split(lines))
        return [passage for part in parts if WORD.search(passage := tidy(remove_tags(part)))]


def _paragraphs(plain: str, no_text: Counter[str]) -> Iterator[str]:
    """Finds the lines that belong together, and are no lists, headings or cells of tables."""
    lines: list[str] = []
    in_list = False  # whether this is a list of terms, whose explanations are indented
    for line in (*plain.split("\n"), ""):
        line = line.strip(" \t")
        in_list = line.startswith(";") or (in_list and line.startswith(":"))
        indented = "" if in_list or not line.startswith(":") else line.lstrip(": \t")
        if Sign.FORMULA in indented and len(indented.split()) < FEWEST_WORDS and not NO_PASSAGE.match(indented):
            line = indented  # stands in the sentence before it
        if line.strip(NOTHING) and not NO_PASSAGE.match(line) and not _is_heading(line):
            lines.append(line)
            continue
        if lines:
            yield " ".join(lines)
        lines = []
        if _is_prose(indented):
            yield indented
        elif line.startswith(LIST):
            no_text[ITEMS] += 1


def _is_prose(indented: str) -> bool:
    """Tells what is a paragraph though it is indented; a line in italics only says where to read more."""
    text = indented.strip(NOTHING)
    if len(text.split()) < FEWEST_WORDS or NO_PASSAGE.match(text) or (text.startswith("''") and text.endswith("''")):
        return False
    return SENTENCE.search(plain_quotes(text[-20:])) is not None


class _Page:
    """One pass over the brackets and tags of a page."""

    def __init__(self, skipped_prefixes: frozenset[str]) -> None:
        self._skipped = skipped_prefixes
        self._out: list[str] = []
        self._open: list[tuple[str, int]] = []  # marks without their partners so far, and their places in _out
        self._count: Counter[str] = Counter()  # how many of the open marks are of a kind
        self._closing: dict[str, re.Match[str] | None] = {}  # where an opaque tag is closed next

    def plain(self, text: str) -> str:
        """Writes the text with links as their titles, and without what is no text."""
        done = 0
        for mark in MARK.finditer(text):
            start = mark.start()
            if start < done:
                continue  # within an opaque tag
            start += text[start] == "\n"  # before a table
            self._out.append(text[done:start])
            done = mark.end()
            if mark[2]:
                done = self._tag(text, mark, done)
            else:
                self._bracket(text[start:done])
        self._out.append(text[done:])
        return "".join(self._out)

    def _bracket(self, whole: str) -> None:
        """Opens a bracket, or closes one and writes what stands between them as the text that it is."""
        kind = whole.lstrip(" \t:")
        if kind not in PARTNER:
            if kind != "[[" or self._count[kind] < DEEPEST_LINK:
                self._push(kind)
            self._out.append(whole)
        elif not self._count[PARTNER[kind]]:
            self._out.append(whole)
        else:
            content = self._pop(PARTNER[kind])
            if kind == "]]":
                self._out.append(self._link("".join(content)[2:]))
            else:
                self._out.append(self._template(content[1:]) if kind == "}}" else Sign.GONE)

    def _push(self, kind: str) -> None:
        """Opens a mark at the present end of what is written."""
        self._open.append((kind, len(self._out)))
        self._count[kind] += 1

    def _pop(self, kind: str) -> list[str]:
        """Takes back what was written since the last open mark of a kind, with the mark."""
        while True:
            last, at = self._open.pop()
            self._count[last] -= 1
            if last == kind:
                content = self._out[at:]
                del self._out[at:]
                return content

    def _link(self, content: str) -> str:
        """Writes a link as its title, or as nothing if it shows a file, names a category or leads to another wiki."""
        target, pipe, title = content.partition("|")
        prefix, colon, _ = target.partition(":")
        if "\n" in target:
            return content  # the brackets belong to different links
        prefix = " ".join(prefix.replace("_", " ").split())  # which MediaWiki takes for spaces
        if colon and (prefix.lower() in self._skipped or (not pipe and OTHER_WIKI.match(prefix))):
            return Sign.GONE
        if pipe or not colon:
            return title if pipe else target.strip()
        return SISTER.sub("", target.strip(), 1).removeprefix(":")

    def _template(self, pieces: list[str]) -> str:
        """Writes a template as its text, as far as that is known."""
        text = expand(pieces) if self._count["{{"] < DEEPEST_TEMPLATE else None
        if not text:
            return Sign.HOLE if text is None else Sign.GONE
        if text[0] in "*#:;" and "\n" in text:
            text = f"\n{text}"  # a list
        if self._count["{{"]:
            text = text.replace("|", "&#124;").replace("=", "&#61;")  # these part no arguments of those around it
        return f"{Sign.JOINT}{text}{Sign.JOINT}"

    def _tag(self, text: str, tag: re.Match[str], done: int) -> int:
        """Writes what a tag stands for; returns where to read on."""
        closing, name, rest = tag[1] == "/", tag[2].lower(), tag[3]
        if closing:
            if self._count[name]:
                self._pop(name)
                self._out.append(Sign.GONE)
        elif not rest.endswith("/"):
            if name in OPAQUE:
                return self._opaque(text, name, done)
            if name in DROPPED or self._count[name] or HIDDEN.search(rest):
                self._push(name)
        if name == "br":
            self._out.append(Sign.BREAK)
        elif name in ("sub", "sup") and not closing:
            self._out.append(Sign.RAISED if name == "sup" else Sign.LOWERED)
        elif name in BLOCKS:
            self._out.append("\n\n" + Sign.GONE)  # what follows begins no list
        return done

    def _opaque(self, text: str, name: str, done: int) -> int:
        """Leaves out all up to the closing tag, or writes it as it stands where the tag says so; returns its end."""
        end = self._closing.get(name)
        if name not in self._closing or (end and end.start() < done):
            end = self._closing[name] = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, done)
        if end is None or (name == "ref" and REFERENCE.search(text, done, end.start())):
            return done  # never closed; or what is closed next is another one, as references do not nest
        if name in FORMULAS:
            letter = LETTER.match(text, done, end.start())
            content = letter[1] if letter else Sign.FORMULA
        else:
            content = unescape(text[done : end.start()]) if name == "nowiki" else Sign.GONE
        self._out.append("".join(f"&#{ord(c)};" if c in MARKUP else c for c in content))
        return end.end()


def _link_title(link: re.Match[str]) -> str:
    """Writes an external link as its title, which follows the address."""
    return "".join(link[1].split(None, 1)[1:])


def _is_heading(line: str) -> bool:
    """Tells a heading by the = at both ends of a line."""
    line = line.strip(NOTHING + " ")
    return line.startswith("=") and line.endswith("=")


def _variant(choice: re.Match[str]) -> str:
    """Writes the first of several spellings, one for each variant of a language."""
    if choice[1] and HIDDEN_VARIANT.search(choice[1]):
        return Sign.GONE
    return OF_VARIANT.sub("", NEXT_VARIANT.split(choice[2], 1)[0], 1) or Sign.GONE
