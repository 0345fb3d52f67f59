"""Where sentences end, in text of any script.

Marks that only end sentences (`。`, `।`, `؟`, ...) are taken at their word. A full stop also ends
abbreviations, initials and numbers and stands inside addresses and file names, so what is on both
sides decides; a missing space after it is allowed before a capital letter.
"""

import re

_NEVER_FINAL = frozenset(
    "mr mrs ms dr prof gen col lt sgt capt maj cmdr rev hon gov sen rep pres fr ph messrs mme mlle "
    "sra srta dra vs eds cf viz mt ft approx est spp feat e.g i.e z.b d.h".split()
)
# Not final before a number: "No. 5", but "She said no. Then he left."
_NUMBERED = frozenset("no nos nr vol vols pp p fig figs ch chap sec art eq ca op".split())
# Final before a typical first word only: "in Dec. The", but "Dec. 5" and "Foo Co. Ltd".
_MAYBE_FINAL = frozenset(
    "jr sr inc ltd co corp bros etc al st ave blvd rd dept univ ed sp fl "
    "jan feb mar apr jun jul aug sept sep oct nov dec".split()
)
_STARTERS = frozenset(
    "a after although among an and as at before both but by despite during each for from he her "
    "his however i if in it its many most on one other she since some that the their then there "
    "these they this those though under until when where while who with".split()
)
# German writes ordinals with a full stop and nouns with a capital.
_AFTER_ORDINALS = frozenset(
    "januar jänner februar märz april mai juni juli august september oktober november dezember "
    "jahrhundert jahrhunderts".split()
)
_SUFFIXES = frozenset("com org net edu gov io js ts py md txt pdf csv json xml html exe".split())

_FINAL = "。｡！？．।॥؟۔։።፧፨។៕။།༎᠃᠉\u037e"
_EMOJI = "\U0001f300-\U0001faff"
_GREEK = "\u0370-\u03ff\u1f00-\u1fff"
_STOP = re.compile(
    rf"""(?P<stop>[.!?…‥‼⁇⁈⁉]+|[{_FINAL}]+|(?<=[{_GREEK}]);|[{_EMOJI}][{_EMOJI}\ufe0f\u200d]*)"""
    r"""(?P<close>(?:["'”’»)\]」』】）〕》〉]|“(?!\w))*)(?P<gap>\s*)"""
)
_OPENERS = "\"'“‘«„‚»(\\[¿¡「『（【《〈"
_NEXT_OPENS = re.compile(rf"[{_OPENERS}]*[^\W_]")
_NUMBER = re.compile(r"#?\d|[IVXLC]+\b")
_WORD = re.compile(r"\w+")
_ENUMERATOR = re.compile(r"\s*[(\[]?(?:\d{1,3}|[A-Za-z]|[ivx]+|[IVX]+)")
_HIRAGANA = re.compile(r"[\u3041-\u309f]")
_RUNS_ON = re.compile(r"[./@\\_(:=]\w")
_ADDRESS = re.compile(r"://|@|^www\.|[/\\]")
# Enough of what precedes a stop to know an abbreviation or an address by.
_LOOK_BACK = 64


def sentences(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The character spans of the sentences of `text[start:end]`, in order.

    They hold everything but white space between sentences. Time is linear in the text.
    """
    spans = []
    begin = after_stop = start
    lower_case = text[start:end].islower()
    for match in _STOP.finditer(text, start, end):
        if _ends_sentence(text, begin, after_stop, end, match, lower_case):
            spans.append((begin, match.end("close")))
            begin = match.end()
        after_stop = match.end()
    if begin < end:
        spans.append((begin, end))
    return spans


def _ends_sentence(
    text: str, begin: int, after_stop: int, end: int, match: re.Match[str], lower_case: bool
) -> bool:
    """Whether the sentence that began at `begin` ends at this stop.

    `after_stop` is where the stop before it ended; `lower_case`: the text has no capitals at all.
    """
    at = match.end()
    if at == end:
        return True
    stop, is_closed, has_gap = match["stop"], bool(match["close"]), bool(match["gap"])
    if stop[0] in _FINAL:
        return _final_mark_ends(text, match)
    opens = _NEXT_OPENS.match(text, at, end)
    if not opens:
        return False
    first = text[opens.end() - 1]
    before = text[max(after_stop, match.start() - _LOOK_BACK) : match.start()]
    if stop[0] >= "\U0001f300":
        return has_gap and first.isupper() and begin < match.start()
    if before[-1:] in ("(", "["):
        # "[...]" stands for words left out.
        return False
    # Before a stop that stands apart there is no abbreviation.
    words = before.split() if not before[-1:].isspace() else []
    word = words[-1].lstrip(_OPENERS) if words else ""
    next_match = _WORD.match(text, opens.end() - 1, end)
    next_word = next_match[0] if next_match else first
    if not has_gap:
        return _ends_without_space(text, match, word, next_word)
    if match.start() - begin < 8 and _ENUMERATOR.fullmatch(text, begin, match.start()):
        return False
    if first.islower() and not lower_case:
        return False
    if stop != ".":
        # '"What About Us?" (UK #122)' goes on.
        return not (is_closed and text[at] == "(")
    return _full_stop_ends(text, match, word.lower(), next_word)


def _final_mark_ends(text: str, match: re.Match[str]) -> bool:
    at = match.end()
    if match["stop"] == "．" and text[match.start() - 1].isdigit() and text[at].isdigit():
        return False
    # Quoted speech inside a Japanese sentence is followed by a particle.
    return text[at] not in ",，、" and not (match["close"] and _HIRAGANA.match(text, at))


def _full_stop_ends(text: str, match: re.Match[str], word: str, next_word: str) -> bool:
    """For a full stop with white space after it, before a word that could begin a sentence."""
    token = text[max(0, match.start() - _LOOK_BACK) : match.start()].lower().split()[-1:]
    if word in _NEVER_FINAL or (token and token[0].lstrip(_OPENERS) in _NEVER_FINAL):
        return False
    if word in _NUMBERED and _NUMBER.match(text, match.end()):
        return False
    if word.isdigit() and len(word) < 3 and next_word.lower() in _AFTER_ORDINALS:
        return False
    # A last initial ("J.", the S of "U.S.") is like an abbreviation.
    if (len(word) == 1 and word.isalpha()) or word in _MAYBE_FINAL:
        next_end = text.find(next_word, match.end()) + len(next_word)
        return next_word.lower() in _STARTERS and text[next_end : next_end + 1] != "."
    return True


def _ends_without_space(text: str, match: re.Match[str], word: str, next_word: str) -> bool:
    """Whether a space is missing here: "director.He" and "1998.The", not "U.S.A" or "Node.Js"."""
    known = word.lower() in _NEVER_FINAL or next_word.lower() in _SUFFIXES
    if len(word) < 2 or known:
        return False
    token = text[max(0, match.start() - _LOOK_BACK) : match.start()].split()[-1]
    next_end = text.find(next_word, match.end()) + len(next_word)
    if _ADDRESS.search(token) or _RUNS_ON.match(text, next_end):
        return False
    first, last = next_word[0], word[-1]
    if first.isupper():
        if last.isupper():
            return next_word.lower() in _STARTERS and not next_word[1:].isupper()
        if last.isdigit() and len(next_word) == 1 and not match["close"]:
            return next_word in "AI"
        return True
    # In scripts without capitals, between whole words: "했다.그는".
    has_case = first.islower() or last.islower() or last.isupper()
    return first.isalpha() and last.isalpha() and len(next_word) > 1 and not has_case
