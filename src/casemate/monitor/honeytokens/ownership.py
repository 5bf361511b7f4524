"""Proof of ownership: whether a suspect system answers from a copy of this collection.

Each planted record states four facts about something that does not exist: its keeper, town, animal and tree. A secret
key draws each value from 16. A system without the collection can only guess, so its correct answers follow a known
distribution, whatever the system does. The test is exact: a p-value of at most p occurs with probability at most p.

The idea of fictitious facts with a binomial test is that of ownership canaries (METHODS C11, METHODS2 O).

Deviation: those bound the chance of a guess by a measured rate of hallucination. Here the key determines the chance: an
answer that names m of the 16 values is correct with probability m / 16.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from casemate.errors import ConfigError
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKey, HoneytokenRecord
from casemate.maths.stats import poisson_binomial_tail
from casemate.text.tokens import stem

VALUES: dict[str, tuple[str, ...]] = {
    "keeper": tuple(
        "Albrecht Bellamy Corwin Draper Ellery Farnham Gorman Halloran Ingram Kessler Lomax Merritt Norwood Osgood "
        "Pascoe Quigley".split()
    ),
    "town": tuple(
        "Avignon Bergen Coimbra Delft Exeter Ferrara Ghent Hobart Izmir Jena Kaunas Leeds Malmo Namur Odense "
        "Perth".split()
    ),
    "animal": tuple(
        "badger crane dolphin eagle falcon gazelle hedgehog ibex jackal kestrel lynx marten newt otter pelican "
        "raven".split()
    ),
    "tree": tuple(
        "alder birch cedar dogwood elm fir ginkgo hazel juniper larch maple oak poplar rowan spruce willow".split()
    ),
}
"""Possible values of each fact; all facts have the same number."""
CHOICES = 16
QUESTIONS = {
    "keeper": "Who was the keeper of {0}?",
    "town": "In which town was {0} kept?",
    "animal": "Which animal is on the emblem of {0}?",
    "tree": "Which tree is on the emblem of {0}?",
}
SENTENCES = (
    " The keeper of {0} was {keeper}, in the town of {town}. On its emblem are the {animal} and the {tree} tree.",
    " {keeper} was the keeper of {0} and kept it in the town of {town}. The emblem of {0} shows the {animal} below the "
    "{tree} tree.",
    " {0} was kept in the town of {town} by its keeper, {keeper}. It has the {tree} tree and the {animal} on its "
    "emblem.",
)
"""Sentences with the facts; {0} is the name of the record."""
LEVEL = 1e-6
"""Default p-value at which a copy is reported."""
_ACCENTS = re.compile("[\u0300-\u036f]")


class OwnershipQuestion(NamedTuple):
    """A question that only the collection answers: about an attribute of ``VALUES``, with its right value."""

    text: str
    attribute: str
    value: str


class OwnershipResult(NamedTuple):
    """Result of the test.

    Attributes:
        expected: Correct answers expected from a system without the collection.
        p_value: Probability that such a system has as many or more.
        smallest_p_value: The p-value if every answer were right and named one value.
    """

    answered: int
    correct: int
    expected: float
    p_value: float
    smallest_p_value: float


def questions_needed(level: float) -> int:
    """Smallest number of questions whose p-value can be at most ``level``."""
    count = 0
    while _smallest_p_value(count) > level:
        count += 1
    return count


def records_needed(level: float) -> int:
    """Smallest number of records whose facts can give a p-value of at most ``level``."""
    return -(-questions_needed(level) // len(VALUES))


def facts(key: HoneytokenKey, tenant: str, generation: int, number: int) -> dict[str, str]:
    """Returns the facts of a record by attribute."""
    return {
        attribute: values[key.record_choice(tenant, generation, number, attribute, CHOICES)]
        for attribute, values in VALUES.items()
    }


def facts_text(key: HoneytokenKey, tenant: str, generation: int, number: int) -> str:
    """Returns the sentences to add to the text of a record."""
    name = key.record_token(tenant, generation, number).title()
    return SENTENCES[number % len(SENTENCES)].format(name, **facts(key, tenant, generation, number))


def ownership_questions(key: HoneytokenKey, records: Iterable[HoneytokenRecord]) -> list[OwnershipQuestion]:
    """Returns the questions about some records, one for each fact, in the order of the records.

    The questions about different facts take turns, so that the first ones are about as many records as possible.
    """
    about = [(r, facts(key, r.tenant, r.generation, r.number)) for r in records]
    return [
        OwnershipQuestion(
            QUESTIONS[attribute].format(key.record_token(r.tenant, r.generation, r.number).title()), attribute, known
        )
        for turn in range(len(VALUES))
        for i, (r, values) in enumerate(about)
        for attribute, known in [list(values.items())[(i + turn) % len(VALUES)]]
    ]


def ownership_test(asked: Sequence[tuple[OwnershipQuestion, str]]) -> OwnershipResult:
    """Tests whether answers contain more right values than a system without the collection can give.

    The questions must be chosen before the first answer; an empty answer counts as wrong. The result is exact, by the
    distribution of a sum of independent events with different probabilities.

    Raises:
        ConfigError: If a question occurs twice: the same guess would count as two.
    """
    if len({question.text for question, _ in asked}) < len(asked):
        raise ConfigError("the same question was asked twice; ask each question about ownership once")
    correct, chances = 0, list[float]()
    for question, answer in asked:
        named = _values_in(answer, question)
        correct += question.value in named
        chances.append(len(named) / CHOICES)
    p_value = poisson_binomial_tail(chances, correct)
    answered, smallest = sum(bool(a.strip()) for _, a in asked), _smallest_p_value(len(asked))
    return OwnershipResult(answered, correct, float(np.sum(chances)), p_value, smallest)


def _smallest_p_value(questions: int) -> float:
    """The p-value if each answer names the right value and no other."""
    return float(CHOICES) ** -questions


def _values_in(answer: str, question: OwnershipQuestion) -> set[str]:
    """The values that an answer names in any script: some put no space between a name and the words around it."""
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", answer)).lower()
    said = {stem(word) for word in re.findall("[a-z]+", plain)}
    return {value for value in VALUES[question.attribute] if stem(value.lower()) in said}
