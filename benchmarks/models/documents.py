"""Generator of synthetic documents: facts about invented entities, and plain sentences.

Words come from ``lexicon`` or are invented from syllables. The same seed gives the same documents. Do not change the
order of the random draws: the figures in the model card depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from benchmarks.models.lexicon import (
    ADJECTIVES,
    ADVERBS,
    DAYS,
    FIRST_NAMES,
    JOBS,
    MONTHS,
    NOUNS,
    PREPOSITIONS,
    SENTENCES,
    VERBS,
)
from benchmarks.models.values import Values, capital


def _domains(**lists: str) -> dict[str, list[tuple[str, str]]]:
    """Attributes with their value types, by domain."""
    return {
        name: [(a.strip(), kind) for a, kind in (x.rsplit(":", 1) for x in text.split(","))]
        for name, text in lists.items()
    }


DOMAINS: Mapping[str, list[tuple[str, str]]] = _domains(
    person="phone number:phone,email address:email,home city:place,blood type:blood,job title:phrase,salary:money,"
    "birth date:date,employee number:code,favorite color:word,manager:name,office:room,badge number:code,age:small,"
    "hobby:word",
    patient="diagnosis:phrase,blood type:blood,medication:drug,dose:qty,doctor:name,ward:room,admission date:date,"
    "insurance number:code,allergy:word,heart rate:num,blood pressure:bp,room:room",
    product="price:money,weight:qty,color:word,serial number:code,warranty:dur,supplier:name,release date:date,"
    "battery life:dur,shelf:room,stock count:num,model code:code,material:word",
    company="chief executive:name,headquarters:place,revenue:money,founding year:year,ticker:code,main product:phrase,"
    "contact email:email,head count:num,auditor:name,bank account:code,opening time:time",
    server="address:ip,root password:code,operating system:phrase,owner:name,location:place,uptime:dur,port:num,"
    "disk size:qty,backup day:day",
    contract="value:money,start date:date,end date:date,signatory:name,penalty:money,notice period:dur,reference:code,"
    "governing city:place",
    project="budget:money,leader:name,deadline:date,code name:word,sponsor:name,status:word,location:place,ticket:code,"
    "progress:pct",
    event="start time:time,venue:place,host:name,ticket price:money,number of guests:num,theme:phrase,day:day,"
    "speaker:name",
)
HELD_OUT = _domains(
    vessel="captain:name,home port:place,cargo:phrase,call sign:code,hull length:qty,crew size:num,launch year:year,"
    "engine type:word"
)
"""Excluded from training."""
_SLOT = re.compile(r"\b(Ns|Ds|N|A|V|D|P|J|R|L|Y|M|W)\b|#")


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about an entity: the value of an attribute, and its type."""

    entity: str
    attribute: str
    value: str
    kind: str


@dataclass(frozen=True, slots=True)
class Deed:
    """A plain sentence with its questions.

    Attributes:
        asked: Questions and their answers.
        past: The action in the past tense.
        verb: The action in the infinitive.
    """

    asked: list[tuple[str, str]]
    past: str
    verb: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document.

    Attributes:
        sentences: Its sentences in order.
        entity: The entity of its facts, if any.
        domain: The domain of its facts.
        facts: Its facts in order.
        deeds: Its plain sentences that have questions.
    """

    sentences: list[str]
    entity: str = ""
    domain: str = ""
    facts: list[Fact] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All sentences, joined."""
        return " ".join(self.sentences)


def shown(texts: list[Text]) -> str:
    """The documents of a context, numbered, one per line."""
    return "\n".join(f"[{i}] {text.text}" for i, text in enumerate(texts, 1))


class Writer(Values):
    """Draws words, values, documents and contexts.

    Args:
        seed: Seed of the random draws.
        stage: Stage of the curriculum. 1: one short document; 2: up to three; 3: up to five, with prose between facts.
        held_out: Whether facts come from the domain that is excluded from training.
    """

    def __init__(self, seed: int, stage: int = 3, held_out: bool = False) -> None:
        super().__init__(seed)
        self.stage = stage
        self.domains = HELD_OUT if held_out else DOMAINS
        self.held_out = held_out

    def thing(self) -> str:
        """A noun with its article, usually with an adjective."""
        adjective = self.rng.choice(ADJECTIVES) + " " if self.rng.random() < 0.7 else ""
        return f"the {adjective}{self.rng.choice(NOUNS)}"

    def entity(self, domain: str) -> str:
        """A name of a person or thing that facts of a domain can describe."""
        if domain in {"person", "patient"}:
            return self.name()
        if domain == "vessel":
            return f"the {self.place()} {self.place()}"
        part = self.rng.random()
        if part < 0.4:
            first, number = self.place(), str(self.rng.randrange(10, 999))
            return f"{first} {self.rng.choice([number, self.place(), capital(self.word())])}"
        if part < 0.7:
            return f"{capital(self.word())} {capital(self.word())}"
        if part < 0.85:
            return f"the {self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}"
        return self.place()

    def prose(self) -> str:
        """A sentence from a template of ``SENTENCES``."""
        return capital(_SLOT.sub(lambda slot: self._slot(slot[0]), self.rng.choice(SENTENCES)))

    def fact_text(self, count: int, domain: str = "") -> Text:
        """A document of ``count`` facts about one entity.

        Args:
            count: Number of facts.
            domain: Domain of the facts; empty: any.
        """
        domain = domain or self.rng.choice(list(self.domains))
        entity = self.entity(domain)
        facts: list[Fact] = []
        sentences: list[str] = []
        for place, (attribute, kind) in enumerate(self.rng.sample(self.domains[domain], count)):
            if not self.held_out and self.rng.random() < 0.2:
                attribute = f"{self.word()} {self.word()}" if self.rng.random() < 0.6 else self.word()  # noqa: PLW2901
            fact = Fact(entity, attribute, self.value(kind), kind)
            facts.append(fact)
            sentences.append(self._stated(fact, place == 0))
            if self.stage > 2 and self.rng.random() < 0.06:
                sentences.append(self.prose())
        return Text(sentences, entity, domain, facts)

    def plain_text(self, count: int) -> Text:
        """A document of ``count`` sentences without facts."""
        sentences: list[str] = []
        deeds: list[Deed] = []
        scrambled = self.rng.random() < 0.25
        for _ in range(count):
            if scrambled:
                sentences.append(self._scramble())
                continue
            part = self.rng.random()
            if part < 0.5:
                text, deed = self.deed() if part < 0.22 else self._other_deed()
                deeds.append(deed)
            else:
                text = self.prose()
                first, *rest = text.split(" ")
                if first in FIRST_NAMES and len(rest) < 15:
                    deeds.append(Deed([(f"Who {' '.join(rest)[:-1]}?", text)], "found", "find"))
            sentences.append(text)
        return Text(sentences, deeds=deeds)

    def context(self, count: int = 0, plain: float | None = None) -> list[Text]:
        """The documents of one context.

        Args:
            count: Number of documents; 0: random, by the stage.
            plain: Share of documents without facts. None: .3, and some contexts are one long plain document.
        """
        rng, stage = self.rng, self.stage
        count = count or (1 if stage == 1 else rng.randint(1, 3) if stage == 2 else rng.randint(1, 5))
        if plain is None and stage == 3 and rng.random() < 0.12:
            return [self.plain_text(rng.randint(5, 12))]
        domain = rng.choice(list(DOMAINS)) if rng.random() < 0.35 and not self.held_out else ""  # same domain: harder
        share = 0.3 if plain is None else plain
        return [
            self.plain_text(self._sentences(count)) if rng.random() < share else self.fact_text(self._facts(), domain)
            for _ in range(count)
        ]

    def deed(self) -> tuple[str, Deed]:
        """A random action with person, object, place and time, and its sentence."""
        rng = self.rng
        verb, past = rng.choice(VERBS)
        who = rng.choice([rng.choice(FIRST_NAMES), self.place(), self._somebody(), self.name()])
        what = self.thing()
        where = f"{rng.choice(PREPOSITIONS)} {rng.choice([self.thing(), self.place()])}" if rng.random() < 0.6 else ""
        when = ""
        if rng.random() < 0.5:
            days = [f"on {rng.choice(DAYS)}", f"in {rng.choice(MONTHS)}", f"in {rng.randrange(1800, 2030)}"]
            when = rng.choice([*days, f"at {self._time()}"])
        text = capital(" ".join(part for part in (who, past, what, where, when) if part) + ".")
        asked = [(f"Who {past} {what}?", text), (f"What did {who} {verb}?", text)]
        asked += [(f"Where did {who} {verb} {what}?", text)] if where else []
        asked += [(f"When did {who} {verb} {what}?", text)] if when else []
        return text, Deed(asked, past, verb)

    def _other_deed(self) -> tuple[str, Deed]:
        """Seven further sentence templates; the answer is usually the sentence."""
        rng = self.rng
        form = rng.randrange(7)
        who = self.name() if rng.random() < 0.5 else rng.choice(FIRST_NAMES)
        job, thing, place = rng.choice(JOBS), self.thing(), self.place()
        verb, past = rng.choice(VERBS)
        what = self.thing()
        ed = rng.choice([v for v in VERBS if v[1].endswith("ed")])[1]
        when = rng.choice([str(rng.randrange(1500, 2030)), rng.choice(MONTHS), self._date()])
        number = str(rng.randrange(2, 2000))
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        on = "on" if when[0].isdigit() and " " in when else "in"
        if form == 0:
            text = f"{who}, the {job} of {place}, {past} {what}."
            asked = [(f"Who is the {job} of {place}?", f"{who} is the {job} of {place}.")]
            asked += [(f"Who {past} {what}?", f"{who} {past} {what}.")]
        elif form == 1:
            text = f"{capital(job)} {who} said that {thing} was {adjective}."
            asked = [(f"Who is the {job}?", f"The {job} is {who}."), (f"What did {who} say?", text)]
            asked += [(f"Who said that {thing} was {adjective}?", text)]
        elif form == 2:
            text = f"There {rng.choice(['are', 'were'])} {number} {adjective} {noun}s in {place}."
            asked = [(f"How many {noun}s are there in {place}?", text)]
            asked += [(f"How many {adjective} {noun}s are in {place}?", text)]
        elif form == 3:
            cost = rng.choice(["costs", "cost", "will cost"])
            text = f"{capital(thing)} {cost} {number} {rng.choice(['dollars', 'euros', 'coins'])}."
            asked = [(f"How much does {thing} cost?", text), (f"What does {thing} cost?", text)]
        elif form == 4:
            text = capital(f"{thing} was {ed} {on} {when} by {who}.")
            asked = [(f"Who {ed} {thing}?", text), (f"When was {thing} {ed}?", text)]
        elif form == 5:
            text = capital(f"{on} {when} {who} {past} {what}.")
            asked = [(f"Who {past} {what}?", text), (f"When did {who} {verb} {what}?", text)]
            asked += [(f"What did {who} {verb} in {when}?", text)]
        else:
            text = (
                f"{who}, who {past} {what}, {rng.choice(['lives in', 'works in', 'comes from', 'moved to'])} {place}."
            )
            other = f"Where does {who} live?" if "lives in" in text else f"What do you know about {who}?"
            asked = [(f"Who {past} {what}?", text), (other, text)]
        return text, Deed(asked, past, verb)

    def _stated(self, fact: Fact, first: bool) -> str:
        """A sentence that states the fact. The first names the entity; later ones may use a pronoun."""
        named = {1: 1.0, 2: 0.65}.get(self.stage, 0.4)
        e, a, v = fact.entity, fact.attribute, fact.value
        if first or self.rng.random() < named:
            forms = [
                f"The {a} of {e} is {v}.",
                f"{e} has the {a} {v}.",
                f"{e}'s {a} is {v}.",
                f"For {e}, the {a} is {v}.",
            ]
            forms += [f"{a} of {e}: {v}.", f"Our files say that the {a} of {e} is {v}.", f"The {a} of {e} was {v}."]
        else:
            forms = [f"The {a} is {v}.", f"Its {a} is {v}.", f"{a}: {v}.", f"The {a} was recorded as {v}."]
            forms += [f"There, the {a} is {v}.", f"It has the {a} {v}."]
        return capital(self.rng.choice(forms))

    def _facts(self) -> int:
        return self.rng.randint(1, {1: 2, 2: 3}.get(self.stage, 4))

    def _sentences(self, count: int) -> int:
        if self.stage == 1 or count > 2:
            return self.rng.randint(1, 2)
        return self.rng.randint(1, 3 if self.stage == 2 else 6 if count == 1 else 4)

    def _somebody(self) -> str:
        adjective = self.rng.choice(ADJECTIVES) + " " if self.rng.random() < 0.3 else ""
        return f"the {adjective}{self.rng.choice(JOBS)}"

    def _scramble(self) -> str:
        """Words, names, numbers and signs in random order."""
        rng = self.rng
        said = []
        for _ in range(rng.randint(5, 14)):
            part = rng.random()
            if part < 0.85:
                word = self.word() if part < 0.6 else self.place() if part < 0.75 else self.made_up()
            else:
                word = self.value(rng.choice(["num", "code", "date", "money", "qty", "small", "email"]))
            part = rng.random()
            signs = ((0.1, "{},"), (0.12, '"{}"'), (0.14, "({})"), (0.15, "{};"))
            said.append(next((form for limit, form in signs if part < limit), "{}").format(word))
        return capital(" ".join(said)).rstrip(",;") + "."

    def _slot(self, slot: str) -> str:
        """A random filler for a slot of a sentence template."""
        return str(self._SLOTS[slot](self))

    def _present(self) -> str:
        verb = self.rng.choice(VERBS)[0]
        return verb + ("es" if verb.endswith(("sh", "ch", "s", "x")) else "s")

    def _number(self) -> int:
        return self.rng.choice([self.rng.randrange(2, 20), self.rng.randrange(2, 999), self.rng.randrange(1500, 2030)])

    _SLOTS: ClassVar[Mapping[str, Callable[[Writer], object]]] = {
        "N": lambda w: w.rng.choice(NOUNS) if w.rng.random() < 0.93 else w.made_up(),
        "Ns": lambda w: w.rng.choice(NOUNS) + "s",
        "A": lambda w: w.rng.choice(ADJECTIVES),
        "V": lambda w: w.rng.choice(VERBS)[0],
        "Ds": lambda w: w._present(),
        "D": lambda w: w.rng.choice(VERBS)[1],
        "P": lambda w: w.rng.choice(FIRST_NAMES) if w.rng.random() < 0.6 else w.place(),
        "J": lambda w: w.rng.choice(JOBS),
        "R": lambda w: w.rng.choice(ADVERBS),
        "L": lambda w: w.place(),
        "Y": lambda w: w.rng.choice(DAYS),
        "M": lambda w: w.rng.choice(MONTHS),
        "W": lambda w: w.made_up(),
        "#": lambda w: w._number(),
    }
