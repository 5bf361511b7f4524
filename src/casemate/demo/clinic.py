"""A fictional clinic: hand-written policy pages and seeded case notes.

Case notes are made from the phrases in ``notes``. In ``families.txt``, a family of complaints starts with ``# name;
department; ages; sexes; setting``; ``key:`` opens a field whose items stand between `` / ``. ``on`` holds past-tense
phrases without a subject, ``ctx`` sentences, ``plan`` and ``adv`` imperatives, other fields noun phrases.
``people.txt`` has such fields about persons. ``layouts.txt`` has the kinds of notes: ``== patients style``, and
``@you`` where the speaker changes. ``[a|b]`` is a choice, ``{4-9}`` a random number, ``{his}`` a slot.
"""

import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

PAGES = Path(__file__).with_name("pages")
NOTES = Path(__file__).with_name("notes")
WORDS = (110, 220)  # shortest and longest case note

BENIGN_QUESTIONS: tuple[str, ...] = tuple((NOTES / "questions.txt").read_text("utf-8").splitlines())
"""Questions of staff and patients about the policy pages and the case notes."""

PRONOUNS = {
    "f": {"he": "she", "him": "her", "his": "her", "was": "was"},
    "m": {"he": "he", "him": "him", "his": "his", "was": "was"},
    "I": {"he": "I", "him": "me", "his": "my", "was": "was"},
    "you": {"he": "you", "him": "you", "his": "your", "was": "were"},
}

SHORTHAND = (  # abbreviations of a hurried author: pattern and replacement
    (r"\b[Tt]he |\b[Aa]n? (?=[a-z])", ""),
    (r"(?<=[.:] )(He|She) (?!had )", ""),
    (r" and ", " & "),
    (r"\b[Ww]ith ", "w/ "),
    (r"\btwice daily", "bd"),
    (r"\b(three times|thrice) daily", "tds"),
    (r"(?<!times )(?<!twice )(?<!thrice )\b(once )?daily", "od"),
    (r"\bat night\b|\bnightly|\bat bedtime", "nocte"),
    (r"(?<=\d) weeks", "/52"),
    (r"(?<=\d) days", "/7"),
    (r"(?<=\d) months", "/12"),
)

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([^{}]+)\}")
_RANGE = re.compile(r"(\d+(?:\.(\d+))?)-(\d+(?:\.\d+)?)")
_FIELD = re.compile(r"(?:^|\s)(\w+):\s")
_TIDY = (
    (r" +", " "),
    (r" ?\n ?", "\n"),
    (r" ([.,;:])", r"\1"),
    (r"([.?!]\"?)\.", r"\1"),
    (r"\n{3,}", "\n\n"),
)


@dataclass(frozen=True)
class _Family:
    """A family of complaints: affected people and phrases."""

    dept: str
    ages: tuple[int, int]
    sexes: str
    ward: bool
    phrases: dict[str, list[str]]

    @property
    def child(self) -> bool:
        return self.ages[1] < 14


@dataclass(frozen=True)
class _Layout:
    """A kind of note: suitable patients, shorthand or not, and its text by speaker."""

    fit: str
    terse: bool
    parts: tuple[tuple[str, str], ...]

    def suits(self, family: _Family) -> bool:
        return self.fit == "any" or (family.ward if self.fit == "ward" else not family.child)


@dataclass
class _Teller:
    """Fills texts for one note: every slot is a fixed value or the next item of a shuffled pool."""

    rng: random.Random
    fixed: dict[str, str]
    pools: dict[str, list[str]]

    def say(self, text: str) -> str:
        while _CHOICE.search(text):
            text = _CHOICE.sub(lambda found: self.rng.choice(found[1].split("|")), text)
        return _SLOT.sub(lambda found: self._slot(found[1]), text)

    def _slot(self, key: str) -> str:
        if span := _RANGE.fullmatch(key):
            digits = len(span[2] or "")
            return f"{self.rng.uniform(float(span[1]), float(span[3])):.{digits}f}"
        name = key.lower()
        value = self.say(self.fixed[name] if name in self.fixed else self.pools[name].pop())
        return value[:1].upper() + value[1:] if key[0].isupper() else value


def _fields(text: str) -> dict[str, list[str]]:
    """Read ``key: item / item key: item`` into lists of items."""
    _, *pieces = _FIELD.split(" ".join(text.split()))
    return {key: items.split(" / ") for key, items in zip(pieces[::2], pieces[1::2], strict=True)}


@cache
def _people() -> dict[str, list[str]]:
    return _fields((NOTES / "people.txt").read_text("utf-8"))


@cache
def _families() -> tuple[_Family, ...]:
    made = []
    for block in (NOTES / "families.txt").read_text("utf-8").removeprefix("# ").split("\n# "):
        title, text = block.split("\n", 1)
        _, dept, ages, sexes, setting = title.split("; ")
        low, high = ages.split("-")
        made.append(_Family(dept, (int(low), int(high)), sexes, setting == "ward", _fields(text)))
    return tuple(made)


@cache
def _layouts() -> tuple[_Layout, ...]:
    made = []
    for block in (NOTES / "layouts.txt").read_text("utf-8").split("== ")[1:]:
        title, text = block.split("\n", 1)
        fit, style = title.split()
        before, *spoken = re.split(r"^@(\w+)\n", text, flags=re.MULTILINE)
        parts = (("", before), *zip(spoken[::2], spoken[1::2], strict=True))
        made.append(_Layout(fit, style == "terse", parts))
    return tuple(made)


def _person(family: _Family, record: str, rng: random.Random) -> tuple[str, dict[str, str]]:
    """Draw a patient's sex and the slots that stay the same throughout a note."""
    sex, age = rng.choice(family.sexes), rng.randint(*family.ages)
    job = rng.choice(_people()["job"])
    if family.child:
        job = "pupil" if age > 5 else "nursery child"
    elif age > 66:
        job = f"retired {job}"
    one, two, letter = rng.sample("ABCDEFGHIJKLMNOPRSTVWZ", 3)
    return sex, {
        "record": record,
        "year": record[3:7],
        "dept": family.dept,
        "age": str(age),
        "aged": f"{'an' if age in (8, 11, 18) or age // 10 == 8 else 'a'} {age}-year-old",
        "job": job,
        "ajob": f"{'an' if job[0] in 'aeiou' else 'a'} {job}",
        "init": rng.choice((f"{one}.{two}.", f"{one}{two}", f"{one}. {two}.")),
        "letter": letter,
        "side": rng.choice(("left", "right")),
        "d": str(rng.randint(4, 20)),
        "dd": str(rng.randint(10, 28)),
        "time": f"{rng.randint(7, 21):02}{rng.choice(':.')}{rng.randint(0, 59):02}",
        "weekday": rng.choice(("Monday", "Tuesday", "Thursday", "Friday")),
        "weeks": rng.choice(("two", "three", "four", "six", "8", "12")),
    }


def _draft(family: _Family, layout: _Layout, record: str, rng: random.Random) -> str:
    people = _people()
    if family.child:
        people = people | {key[3:]: items for key, items in people.items() if key.startswith("kid")}
    pools = {key: rng.sample(items, len(items)) for key, items in (people | family.phrases).items()}
    sex, fixed = _person(family, record, rng)
    teller = _Teller(rng, fixed, pools)
    for name in ("doc", "doc2", "date"):
        fixed[name] = teller.say(pools[name.rstrip("2")].pop())
    spoken = []
    for speaker, text in layout.parts:
        fixed.update(PRONOUNS[speaker or sex])
        spoken.append(teller.say(text))
    note = "".join(spoken)
    shorten = [rule for rule in SHORTHAND if rng.random() < 0.75] if layout.terse else []
    for pattern, into in (*shorten, *_TIDY):
        note = re.sub(pattern, into, note)
    return note.strip() + "\n"


def case_notes(count: int = 400, seed: int = 7) -> list[tuple[str, str]]:
    """Returns invented case notes as file names and texts; with one seed a longer list begins with the shorter one."""
    rng = random.Random(seed)
    deck: list[tuple[_Family, _Layout]] = []
    notes: dict[str, str] = {}
    while len(notes) < count:
        if not deck:  # each pairing of a family with a layout comes once before any comes twice
            deck = [pair for pair in product(_families(), _layouts()) if pair[1].suits(pair[0])]
            rng.shuffle(deck)
        record = f"HV-{rng.randint(2030, 2034)}-{rng.randint(1, 9999):04}"
        if (name := f"notes/{record}.md") in notes:
            continue
        text = ""
        family, layout = deck.pop()
        while not WORDS[0] <= len(text.split()) <= WORDS[1]:
            text = _draft(family, layout, record, rng)
        notes[name] = text
    return list(notes.items())


def write_corpus(folder: Path, count: int = 400, seed: int = 7) -> None:
    """Writes the policy pages and the case notes into two folders; a second call writes the same files again."""
    pages = [(f"policies/{page.name}", page.read_text("utf-8")) for page in sorted(PAGES.glob("*.md"))]
    for name, text in pages + case_notes(count, seed):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
