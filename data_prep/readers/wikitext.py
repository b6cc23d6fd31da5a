"""Wikitext to paragraphs: the text passages alone, without tables, lists, headings, references or templates."""

from __future__ import annotations

import re
from collections.abc import Iterable

import mwparserfromhell
from mwparserfromhell.nodes import ExternalLink, HTMLEntity, Node, Tag, Text, Wikilink

SKIPPED_PREFIXES = frozenset(("file", "image", "category", "media"))
KEPT_TAGS = frozenset(
    "b i u s em strong small big span sub sup p div center font cite abbr bdi bdo code kbd samp var mark ins q tt "
    "nowiki onlyinclude includeonly".split()
)
LINE_BREAKS = frozenset(("br", "p", "div", "center", "blockquote"))
DISAMBIGUATION = re.compile(
    r"__DISAMBIG__|\{\{\s*(?:[\w ]*disambig(?:uation)?(?: page)?|dab|hndis|geodis|surname|given name|set index"
    r"|begriffsklärung|homonymie|desambiguaci[oó]n|disambigua|desambiguação|doorverwijspagina|неоднозначность"
    r"|曖昧さ回避|消歧义|ujednoznacznienie)\s*[|}\n]",
    re.IGNORECASE,
)
MAGIC_WORD = re.compile(r"__[A-Z]+__")
BLANK_LINES = re.compile(r"\n[ \t]*\n|\n(?=[*#:;|!{])")
NO_TEXT = re.compile(r"^[*#:;|!{}=-]")
EMPTY_BRACKETS = re.compile(r"[ \t]*\([\s,;:–-]*\)")
DANGLING = re.compile(r"\([\s,;]+(?=\S)")


def is_disambiguation(title: str, text: str) -> bool:
    """Whether a page only lists what its title may mean."""
    return title.lower().endswith("(disambiguation)") or DISAMBIGUATION.search(text) is not None


class Wikitext:
    """Strips pages of one wiki."""

    def __init__(self, skipped_prefixes: Iterable[str] = ()) -> None:
        self._skipped = SKIPPED_PREFIXES | frozenset(skipped_prefixes)

    def passages(self, text: str) -> list[str]:
        """The paragraphs of a page."""
        plain = self._plain(mwparserfromhell.parse(text, skip_style_tags=True).nodes)
        plain = MAGIC_WORD.sub("", plain.replace("'''", "").replace("''", ""))
        paragraphs = (" ".join(paragraph.split()) for paragraph in BLANK_LINES.split(plain))
        kept = (paragraph for paragraph in paragraphs if paragraph and not NO_TEXT.match(paragraph))
        return [DANGLING.sub("(", EMPTY_BRACKETS.sub("", paragraph)) for paragraph in kept]

    def _plain(self, nodes: Iterable[Node]) -> str:
        return "".join(self._node(node) for node in nodes)

    def _node(self, node: Node) -> str:
        """What a reader of the page sees of a node within running text."""
        if isinstance(node, Text):
            return str(node.value)
        if isinstance(node, Wikilink):
            return self._link(node)
        if isinstance(node, ExternalLink):
            return self._plain(node.title.nodes) if node.title else "" if node.brackets else str(node.url)
        if isinstance(node, HTMLEntity):
            return str(node.normalize()).replace("\xa0", " ")
        if isinstance(node, Tag):
            return self._tag(node)
        return "\n\n" if type(node).__name__ == "Heading" else ""

    def _link(self, link: Wikilink) -> str:
        prefix, colon, _ = str(link.title).partition(":")
        if colon and prefix.strip().lower() in self._skipped:
            return ""
        if link.text is not None:
            return self._plain(link.text.nodes)
        return str(link.title).strip().lstrip(":")

    def _tag(self, tag: Tag) -> str:
        name = str(tag.tag).strip().lower()
        mark = "\n\n" if name in LINE_BREAKS else ""
        if name in ("li", "dt", "dd") and tag.wiki_markup:
            return f"\n{tag.wiki_markup}"  # a line of a list: left out as a whole
        if name in KEPT_TAGS and tag.contents is not None:
            return mark + self._plain(tag.contents.nodes) + mark
        return mark
