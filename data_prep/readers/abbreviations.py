"""Says which abbreviations end no sentence, by language, where the library that splits paragraphs would end one.

It knows many, but not where a paragraph begins with one ("Dr. Who came."), nor those before a number ("vol. 2").
A rule asks what follows, so that "No. I will not." and "on Main St. He lives there." stay two sentences.
"""

from __future__ import annotations

from data_prep.common.languages import DEFAULT, RULES

ANYTHING, NAME, NUMBER, NAME_AT_START = "anything", "a name", "a number", "a name, at the start"
DATE = "a month or century"
DATES = frozenset(
    "Januar Jänner Februar Feber März April Mai Juni Juli August September Oktober November Dezember "
    "Jan Jän Feb Mär Apr Jun Jul Aug Sep Sept Okt Nov Dez "
    "Jahrhundert Jahrhunderts Jahrhunderte Jahrhunderten Jh".split()
)
OPENINGS = ("", *"(\"'“‘[„«")
AFTER = {
    "en": {
        NAME: "Dr. Mr. Mrs. Ms. Messrs. Prof. Gen. Col. Lt. Maj. Capt. Cmdr. Adm. Sgt. Rev. Hon. Gov. Sen. Rep. Pres.",
        NAME_AT_START: "St. Mt. Ft. Fr. Br. Sr. Mme. Mlle.",
        NUMBER: "vol. vols. no. nos. fig. figs. p. pp. ch. chap. chaps. sec. secs. eq. eqs. c. ca. b. d. fl. r. v. "
        "Vol. Vols. No. Nos. Fig. Figs. Ch. Chap. Sec. Eq. Op. op. Art. Pt. Bk. "
        "Jan. Feb. Mar. Apr. Aug. Sep. Sept. Oct. Nov. Dec.",
        ANYTHING: "e.g. i.e. E.g. I.e. cf. Cf. vs. viz. approx. Approx. a.k.a.",
    },
    "de": {
        NUMBER: "Bd. Nr. S. Abb. Kap. Abs. Art. Tab. Jg. H. vgl. ca. "
        "Jan. Jän. Feb. Apr. Jun. Jul. Aug. Sep. Sept. Okt. Nov. Dez.",
        DATE: " ".join(f"{number}." for number in range(1, 32)),
    },
    "fr": {
        NAME: "St. Ste. Mme. Mmes. Mlle. Dr. Mgr. Pr. Me.",
        NUMBER: "vol. no. nos. p. pp. fig. chap. t. art. v. n°. janv. févr. avr. juil. juill. sept. oct. nov. déc.",
        ANYTHING: "M. MM. cf. Cf. env. av. apr. c.-à-d.",
    },
    "es": {
        NUMBER: "vol. Vol. núm. n.º pág. págs. p. pp. cap. fig. art.",
        NAME: "Sr. Sra. Srta. Dr. Dra. D. Dña. Prof.",
    },
    "it": {NUMBER: "vol. n. p. pp. pag. cap. fig. art.", NAME: "Sig. Dott. Prof. Ing. Avv."},
}
"""What may follow which abbreviations within a sentence. Ends of sentences that look like them are those of others."""
NO_ENDS = {
    language: {
        f"{opening}{word} ": what for what, words in rules.items() for word in words.split() for opening in OPENINGS
    }
    for language, rules in AFTER.items()
}
"""The same, as the last words of what the library takes for sentences: with the space after them."""
TAIL = 4  # characters
TAILS = {
    language: frozenset(end[-TAIL:] for word in words for end in (word, f" {word}"))
    for language, words in NO_ENDS.items()
}
"""The last characters of sentences that may end with such a word: few others end so, and they are found at once."""


def rejoin(language: str, parts: list[str]) -> None:
    """Joins the parts of paragraphs, each with the space after it, where an abbreviation ended no sentence.

    An empty part ends a paragraph; one also takes the place of a part that was joined to the one before it.
    """
    rules = RULES.get(language, DEFAULT)
    tails = TAILS.get(rules, frozenset())
    for n in reversed([n for n, part in enumerate(parts) if part[-TAIL:] in tails]):
        before, after = parts[n : n + 2]
        what = NO_ENDS[rules].get(before[before.rfind(" ", 0, -1) + 1 :])
        if what and after and _goes_on(what, before, after):
            parts[n : n + 2] = before + after, ""


def _goes_on(what: str, sentence: str, after: str) -> bool:
    """Tells whether what may follow an abbreviation is what follows it."""
    first = after.lstrip("".join(OPENINGS))[:1]
    if what == NAME_AT_START:
        return first.isupper() and " " not in sentence[:-1]
    if what == DATE:
        return after.split(maxsplit=1)[0].rstrip(".,;:!?)") in DATES
    return what == ANYTHING or (first.isdigit() if what == NUMBER else first.isupper())
