"""Synthetic records of the kind that the offline pair was trained on, long enough for extraction.

All people in them are fictional. A record is a chunk: one name and eight statements about it, at least 100 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casemate.types import Document

KINDS = {
    "person": "phone number:phone,home city:place,blood type:blood,salary:money,birth date:date,badge number:code,"
    "office:room,age:small,hobby:word,manager:name,employee number:code,favorite color:word",
    "patient": "diagnosis:phrase,blood type:blood,medication:drug,dose:quantity,doctor:name,ward:room,"
    "admission date:date,insurance number:code,allergy:word,heart rate:small,home city:place",
    "product": "price:money,weight:quantity,color:word,serial number:code,warranty:span,supplier:name,"
    "release date:date,battery life:span,shelf:room,material:word,model code:code",
    "contract": "value:money,start date:date,end date:date,signatory:name,penalty:money,notice period:span,"
    "reference:code,governing city:place,owner:name,theme:phrase",
}
FORMS = (
    "The {a} of {e} is {v}.",
    "{e} has the {a} {v}.",
    "For {e}, the {a} is {v}.",
    "Our files say that the {a} of {e} is {v}.",
)
LATER = ("The {a} is {v}.", "Its {a} is {v}.", "The {a} was recorded as {v}.", "There, the {a} is {v}.")
HEADS = "b br c cl d dr f g gr h j k l m n p pr r s st t tr v w".split()
VOWELS = "a e i o u ea ou".split()
TAILS = ["", "n", "r", "l", "s", "t", "m", "nd", "ck"]
WORDS = "river garden copper window basket winter candle bridge market silver orange ladder thunder pocket".split()
MONTHS = "January March April June August September November".split()
FACTS = 8


@dataclass(frozen=True)
class Record:
    """A chunk about one name; ``facts`` are attribute and value of each statement."""

    document: Document
    name: str
    facts: tuple[tuple[str, str], ...]

    def asked(self, i: int) -> tuple[str, str]:
        """The question about a fact, and its correct answer."""
        attribute, value = self.facts[i]
        return f"What is the {attribute} of {self.name}?", f"The {attribute} of {self.name} is {value}."

    def is_right(self, i: int, said: str, verbatim: bool) -> bool:
        """Whether an answer is the expected one, word for word, or contains its value."""
        return said.strip() == self.asked(i)[1] if verbatim else self.facts[i][1] in said


def records(count: int, seed: int) -> list[Record]:
    """Records with distinct names."""
    rng = np.random.default_rng(seed)
    found: dict[str, Record] = {}
    while len(found) < count:
        record = _record(f"r{len(found)}", rng)
        found.setdefault(record.name, record)
    return list(found.values())


def _record(label: str, rng: np.random.Generator) -> Record:
    kind = str(rng.choice(list(KINDS)))
    name = f"{_syllables(rng)} {_syllables(rng)}"
    options = KINDS[kind].split(",")
    facts, sentences = [], []
    for place, i in enumerate(rng.permutation(len(options))[:FACTS]):
        attribute, what = options[i].split(":")
        value = _value(what, rng)
        form = str(rng.choice(FORMS if place == 0 or rng.random() < 0.7 else LATER))
        sentence = form.format(a=attribute, e=name, v=value)
        facts.append((attribute, value))
        sentences.append(sentence[0].upper() + sentence[1:])
    return Record(Document(label, " ".join(sentences)), name, tuple(facts))


def _syllables(rng: np.random.Generator) -> str:
    parts = (
        str(rng.choice(HEADS)) + str(rng.choice(VOWELS)) + str(rng.choice(TAILS)) for _ in range(rng.integers(1, 3))
    )
    return "".join(parts).capitalize()


def _value(what: str, rng: np.random.Generator) -> str:
    n = rng.integers
    word = str(rng.choice(WORDS))
    letters = "".join(rng.choice(list("ABCDEFGHKLMNPRST"), 2))
    return {
        "phone": f"{n(100, 999)}-{n(1000, 9999)}",
        "place": f"Port {_syllables(rng)}",
        "blood": f"{rng.choice(['A', 'B', 'AB', 'O'])} {rng.choice(['positive', 'negative'])}",
        "money": f"${n(100, 99999)}",
        "date": f"{n(1, 28)} {rng.choice(MONTHS)} {n(1950, 2030)}",
        "code": f"{letters}-{n(100, 99999)}",
        "room": f"{rng.choice(list('ABCDEF'))}{n(1, 400)}",
        "small": str(n(2, 99)),
        "word": word,
        "phrase": f"{rng.choice(WORDS)} {word}",
        "name": f"{_syllables(rng)} {_syllables(rng)}",
        "drug": f"{_syllables(rng).lower()}ol",
        "quantity": f"{n(2, 900)} {rng.choice(['mg', 'kg', 'ml'])}",
        "span": f"{n(2, 60)} {rng.choice(['days', 'weeks', 'months'])}",
    }[what]
