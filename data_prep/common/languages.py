"""The languages that --language may name, and by whose rules sentencex finds the sentences of each."""

from __future__ import annotations

DEFAULT = "en"
"""The language whose rules are used where none is given."""
NAMES = {
    language[:2]: language[3:]
    for language in (
        "am Amharic, ar Arabic, bg Bulgarian, bn Bengali, ca Catalan, da Danish, de German, el Greek, en English, "
        "es Spanish, fi Finnish, fr French, gu Gujarati, hi Hindi, hy Armenian, it Italian, ja Japanese, kk Kazakh, "
        "kn Kannada, ml Malayalam, mr Marathi, my Burmese, nl Dutch, pa Punjabi, pl Polish, pt Portuguese, "
        "ru Russian, sk Slovak, ta Tamil, te Telugu, uk Ukrainian"
    ).split(", ")
}
"""The languages with rules of their own."""
RELATED = {
    "ar": "aeb arq ary arz",
    "ca": "oc",
    "da": "jut kl",
    "de": "bar de-at de-ch dsb frr gsw hrx hsb ksh lb nds pdc pdt pfl rm sli stq vmf",
    "el": "pnt",
    "es": "an arn ast ay cbk-zam ext gn guc lad nah qu qug",
    "fi": "fit krl olo smn vot",
    "fr": "atj avk bm frc frp gcr ht kab kbp ln mg pcd ses sg shy ty wa wo",
    "hi": "anp awa mai sa",
    "hy": "hyw",
    "it": "co egl eml fur lij lld lmo nap pms rgn roa-tara scn sdc vec",
    "kk": "kaa",
    "nl": "li nds-nl srn vls",
    "pl": "csb szl",
    "pt": "gl mwl pt-br tet",
    "ru": "ab alt av ba bxr ce cv inh koi krc kum kv lbe lez mdf mhr mrj myv os sah sty tt tyv udm xal",
    "sk": "cs",
    "uk": "rue",
}
"""The languages whose sentences are found by the rules of a relative."""
OTHERS = (
    "aa af ak as az be bi bo br bs ch cr cu cy dv dz ee en-gb eo et eu fa ff fj fo fy ga gd gv ha he ho hr hu hz ia id "
    "ie ig ii ik io is iu jv ka kg ki kj km ko kr ks ku kw ky la lg lo lt lu lv mh mi mk mn ms mt na nb nd ne ng nn no "
    "nr nv ny oj om or pi ps rn ro rw sc sco sd se sh si sl sm sn so sq sr ss st su sv sw tg th ti tk tl tn to tr "
    "ts tw ug ur uz ve vi vo xh yi yo za zh zh-hans zh-hant zu"
)
"""The languages without rules: their sentences end at the full stops of all scripts, but for English abbreviations."""
FITTING = frozenset("bo dz km ko th vi zh zh-hans zh-hant".split())
"""Those of them for which that is right: they abbreviate without full stops, or splitting.py knows how they do."""

RULES = {
    **{code: code for code in NAMES},
    **{code: rules for rules, codes in RELATED.items() for code in codes.split()},
    **dict.fromkeys(OTHERS.split(), DEFAULT),
}
"""For every language that there is, the one whose rules find its sentences."""


def language_fault(code: str) -> str:
    """Says what is wrong with a code, and which have rules; nothing if it is known."""
    if code in RULES:
        return ""
    rules = ", ".join(f"{known} {name}" for known, name in NAMES.items())
    return f"no language of this code; with rules of their own: {rules}"


def language_label(code: str | None) -> str:
    """Tells by which rules the sentences of a text are found, for the line that shard.py prints about it."""
    if code is None:
        return f"sentences as in {NAMES[DEFAULT]} (no --language)"
    rules = RULES.get(code, DEFAULT)
    if code in FITTING:
        return f"sentences as in {code}"
    is_foreign = rules == DEFAULT and code in OTHERS.split()
    return f"sentences as in {NAMES[rules]}" + f" ({code} has no rules of its own)" * is_foreign
