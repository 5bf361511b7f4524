"""Generator of invented words, names and values of facts."""

from __future__ import annotations

import random

from benchmarks.models.lexicon import ADJECTIVES, ADVERBS, DAYS, FIRST_NAMES, MONTHS, NOUNS, VERBS

ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fr gr kr pr tr bl cl fl gl pl sl st sk sp th sh ch qu".split()
VOWELS = "a e i o u ai ea ou ie oa y".split()
CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "x", "nd", "rt", "ck", "th"]
WORDS = NOUNS + ADJECTIVES + [word for verb in VERBS for word in verb] + ADVERBS
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[0].upper() + text[1:]


class Values:
    """Draws words and values.

    Args:
        seed: Seed of the random draws.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def made_up(self) -> str:
        """An invented word."""
        return "".join(self._syllable() for _ in range(self.rng.choice((1, 2, 2, 3))))

    def word(self) -> str:
        """An English word, or an invented one."""
        return self.rng.choice(WORDS) if self.rng.random() < 0.8 else self.made_up()

    def place(self) -> str:
        """An invented proper name of one word."""
        return capital("".join(self._syllable() for _ in range(self.rng.choice((1, 2, 2)))))

    def name(self) -> str:
        """An invented name of a person."""
        first = self.rng.choice(FIRST_NAMES) if self.rng.random() < 0.35 else self.place()
        return f"{first} {self.place()}"

    def value(self, kind: str) -> str:
        """A value of a type."""
        return str(getattr(self, f"_{kind}")())

    def _syllable(self) -> str:
        return self.rng.choice(ONSETS) + self.rng.choice(VOWELS) + self.rng.choice(CODAS)

    def _phone(self) -> str:
        return f"{self.rng.randrange(1000):03d}-{self.rng.randrange(10000):04d}"

    def _email(self) -> str:
        return f"{self.place()}@{self.place()}{self.rng.choice(['.com', '.org', '.net'])}".lower()

    def _place(self) -> str:
        return self.rng.choice(["", "", "Port ", "North ", "Saint "]) + self.place()

    def _blood(self) -> str:
        return self.rng.choice(["A", "B", "AB", "O"]) + self.rng.choice([" positive", " negative"])

    def _phrase(self) -> str:
        return f"{self.word()} {self.word()}"

    def _money(self) -> str:
        n = self.rng.choice([self.rng.randrange(10, 999), self.rng.randrange(1000, 99999)])
        if n < 1000 or self.rng.random() < 0.6:
            return self.rng.choice(["${}", "{} dollars"]).format(n)
        return f"${n:,}"

    def _date(self) -> str:
        return f"{self.rng.randrange(1, 29)} {self.rng.choice(MONTHS)} {self.rng.randrange(1950, 2030)}"

    def _code(self) -> str:
        return f"{self.rng.choice(LETTERS)}{self.rng.choice(LETTERS)}-{self.rng.randrange(100, 99999)}"

    def _word(self) -> str:
        return self.word()

    def _name(self) -> str:
        return self.name()

    def _room(self) -> str:
        return f"{self.rng.choice('ABCDEFG')}{self.rng.randrange(1, 400)}"

    def _drug(self) -> str:
        return self.place().lower() + self.rng.choice(["ol", "ine", "ax", "am"])

    def _qty(self) -> str:
        return f"{self.rng.randrange(1, 900)} {self.rng.choice(['mg', 'kg', 'ml', 'km', 'GB', 'meters'])}"

    def _num(self) -> int:
        return self.rng.randrange(2, 9999)

    def _small(self) -> int:
        return self.rng.randrange(2, 99)

    def _pct(self) -> str:
        return f"{self.rng.randrange(1, 100)} percent"

    def _time(self) -> str:
        return f"{self.rng.randrange(24)}:{self.rng.randrange(60):02d}"

    def _day(self) -> str:
        return self.rng.choice(DAYS)

    def _bp(self) -> str:
        return f"{self.rng.randrange(90, 190)}/{self.rng.randrange(50, 110)}"

    def _dur(self) -> str:
        return f"{self.rng.randrange(2, 60)} {self.rng.choice(['hours', 'days', 'weeks', 'months', 'years'])}"

    def _year(self) -> int:
        return self.rng.randrange(1800, 2030)

    def _ip(self) -> str:
        return f"10.{self.rng.randrange(256)}.{self.rng.randrange(256)}.{self.rng.randrange(256)}"
