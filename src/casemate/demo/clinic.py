"""A fictional clinic: hand-written policy pages and seeded case notes."""

import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from casemate.demo.cases import FAMILIES, PEOPLE, PRONOUNS, SHORTHAND

PAGES = Path(__file__).with_name("pages")
WORDS = (110, 220)  # shortest and longest case note

BENIGN_QUESTIONS: tuple[str, ...] = (
    "Until what time can I walk into the Minor Injuries Unit in the evening?",
    "How old may a referral letter be before it is sent back?",
    "Who gets the flu jab for free, and what does it cost everyone else?",
    "Where do I throw away used needles and leftover tablets?",
    "How long do I have to wait for my thyroid and HbA1c results?",
    "A colleague looked up her neighbour's file. What happens now, and who should be told?",
    "Can my two sisters and I all sit with our father on Heron ward at noon?",
    "What does a whole day in the visitors' car park cost?",
    "I forgot my appointment. Will I be charged, and is there a way round it?",
    "May I drink coffee before my iron level is measured?",
    "Is it possible to have an MRI with a pacemaker?",
    "What papers and how many days of medicine do patients take home from the ward?",
    "How long may the clinic take to reply to a complaint?",
    "Can a twelve-year-old translate for her mother when she signs for an operation?",
    "How many physiotherapy sessions are usual and do I need a doctor's letter for them?",
    "Which problems are not suitable for a video appointment?",
    "How many days' supply does a warfarin renewal cover and what is checked first?",
    "What does an orange card on an isolation room door mean?",
    "Which number do I dial and what do I shout when a child stops breathing?",
    "I left my umbrella and glasses behind; who keeps lost property, and for how long?",
    "How should I prepare for a night in the sleep laboratory?",
    "Which tablets do our doctors usually give for an acute attack of gout?",
    "What do patients with migraine typically report as their triggers?",
    "How is a child with a painful infected ear generally treated here?",
)

LAYOUTS = """\
== any plain
# {record} - {dept}\n
[{date}, {time}, {doc}|Contact of {date} with {doc}|Seen {date} by {doc}]\n
S: [{Aged} {job}, {init}, who {on}.|{Init}, {job}, {age}. {On}.|{On}: so begins the account of {init}, \
{age}, {job}.] {ctx} [{life}|{ctx}] [Also reports|Background:|On file:] {pmh} and {also}. {life}\n
O: [{Ex} and {ex}.|{Ex}; {ex}; {ex}.|Found today: {ex}, {ex}.] {Obs} [Results:|Tests:|Measured:] {lab}, \
{lab}[, {lab}|].\n
A: [{Dx}[, in all likelihood|, fairly typical|].|Working diagnosis {dx}.|Most in keeping with {dx}.]\n
[P: {Rx}. {Plan}. {Adv}. Back in {weeks} weeks.|P: 1) {plan} 2) {rx} 3) {adv} 4) {plan}|P: {Plan}; {rx}. \
{He} {was} told to {adv}.]
== any plain
[Dear|To] {doc2},\n
[re|concerning|about] {init}, {record}, [aged {age}|{age} years old], of {town}\n
[Thank you for agreeing to see|I should be grateful for your opinion on|May I send you] this {job}[, well \
known to me|], who {on}. {ctx} {life} [Past history is {pmh}, besides {also}.|The record lists {pmh}; \
further {also}.] [When I examined {him} on {date} I found|My examination of {date} showed] {ex}, {ex} and \
{ex}. [We measured|Results so far:] {lab} and {lab}.\n
[My impression is of|To my mind this is|I have called it] {dx}[, though I would value a second view|]. I \
have [begun|ordered] {rx} and [asked|told|encouraged] {him} to {adv}. [Could you please|Would you be so kind \
as to] {plan}? {life}\n
[With kind regards,|Yours sincerely,|Best wishes from Alder House,] {doc}
== any plain
TELEPHONE CONTACT [{date} {time}|at {time} on {date}], [taken|answered] by Sister {last}. [File|Record] \
{record}.\n
[The voice belonged to {caller}.|{Caller} rang.|Call from {caller}[, line crackling|].] Matter: {aged} {job} \
({init}) {on}. {ctx} [{ctx}|{life}] I asked about [earlier illness|the past] and heard of {pmh}; also \
{also}.\n
[I read out the results|The last values were on my screen]: {lab}, {lab}. At the visit {doc} had noted {ex} \
and {ex}, and [had put it down to|had called it] {dx}. {life}\n
Agreed [before we hung up|after ringing {doc} back]: {rx}. [I repeated twice:|Please] {adv}. {Adv}. We \
[will|are to] {plan}. [Call lasted {6-19} minutes.|Caller repeated everything correctly.|It rang off in \
mid-sentence.]
== ward plain
# Discharge summary\n
**Patient** {init}, {age}, {job} | **Record** {record} | **[Kestrel|Heron] ward**, {3-9} days to {date}\n
**[Reason for admission|Why admitted]** {He} {on}. {ctx}\n
**[Diagnosis|Main problem]** {Dx}. **[Other conditions|Besides]** {Pmh}; {also}.\n
**Findings** {Ex}; {ex}. [Key results|Values]: {lab}; {lab}; {lab}.\n
**[Course|What happened here]** [Treated with|Improved on] {rx}[, then {rx}|]. [The second night was rough, \
the third calm.|Recovery was [brisk|uneventful|slower than hoped].|Appetite and humour returned on day \
{2-4}.] {life} {life}\n
**[For the family doctor|Please]** {Plan}. {Plan}. **Told to the patient** {Adv}; {adv}. Signed {doc}
== any terse
TRIAGE {date} {time} [RN|nurse] {last} / {record} / category [2|3|4]\n
[Pt|Presenting]: {init} {age} {job}, {escort}. {On}. {ctx} Distress {3-9} of 10. [Walked in|Wheelchair|\
Carried over the threshold].\n
Hx {pmh}, {also}. [Tetanus up to date.|Last ate {2-7} hours ago.|Meds in a carrier bag.] {life}\n
Obs: {obs} {ex}; {ex}. Quick tests: {lab}, {lab}.\n
[?{dx}|Looks like {dx}|Prob {dx}]. [{doc} informed {time}|Seen by {doc} at {time}]: {rx}; {rx}. To do: \
{plan}, {plan}. [Safety net|Told]: {adv}, {adv}. {life} [Moved to cubicle {2-9}.|Waits by the fish \
tank.|Blanket and tea given.]
== any plain
Home visit, {street} in {town}, {date}. {record}.\n
[The stairs were steep and the dog suspicious.|Fog on the lane, so I arrived on foot.|A lamp burned in the \
porch.|I was shown into the kitchen, where soup was on.|The front door stood open.] {Init}, {aged} {job}, \
received me [on the sofa|in bed|at the table]. {He} {on}, I was told. {ctx} {ctx} {life}\n
[By torchlight and touch|Examining {him} where {he} {was}], I noted {ex}, {ex} and {ex}. [From the bag of \
old letters|The record adds]: {pmh}; {also}. [Blood taken on the spot later gave|Values from the lab next \
day:] {lab} and {lab}.\n
[It all points to|Hence] {dx}. I left [a prescription for|instructions for] {rx}, and [made {him} promise \
to|begged {him} to] {adv}. [My office|Our desk] will {plan}. {life} [No reason for hospital tonight.|I shall \
drive by again.] {Doc}
== adult plain
@you
Harrowgate Valley Clinic, {dept}, {date}. Our reference: {record}\n
[Dear Patient {init},|Good day, {init},]\n
[this letter sums up our talk|as promised, here is what we found] on {weekday}. You came because you {on}. \
{ctx} You also mentioned {pmh} and {also}. [For {ajob} you told it very clearly.|You said that {ajob} cannot \
simply rest.|I have rarely met {ajob} so well prepared.] {life}\n
[What the examination showed:|On looking you over I found] {ex}, and {ex}. [Your values:|In figures:] {lab}; \
{lab}; {lab}. [In plain words|Put simply], we call this {dx}. [It is common and it is treatable.|I know that \
this word can frighten.|You are not to blame.]\n
[The treatment we chose is|You were given] {rx}. [Please|It would help to] {adv}. [And one more \
thing:|Also:] {adv}. On our side we shall {plan}[, and {plan}|]. [Ring extension 200 with any \
question.|Bring this sheet along.] {Doc}
== any plain
[SBAR handover|Handover sheet], {date}, {time}, from {last} to {doc}\n
Situation - {aged} {job}, {init} ({record}), {on}. [Stable now.|A worry.|Please look within the hour.]\n
Background - {Pmh}. {Also}. {ctx} {life}\n
Assessment - {Ex}; {ex}; {ex}. {Obs} Numbers: {lab}, {lab}, {lab}. [We think|The team thinks] {dx}.\n
Recommendation - [continue|give] {rx}; {plan}; {plan}. [{His} relatives know.|Nobody has been rung yet.] \
[Remind {him} to|{He} {was} reminded to] {adv}. {life} [Read back and confirmed.|Questions: none.|Bleep me \
on {20-79}.]
== any terse
{date} | {record} | {doc}\n
{init} {age} {job}. {On}. {ctx} {life}\n
PMH {pmh}. {Also}.\n
o/e {ex}, {ex}, {ex}. {obs} Ix {lab}, {lab}, {lab}.\n
Imp: {dx}. [Discussed with {doc2}, agrees.|DDx gone through, nothing sinister.|Not keen on admission.] \
{life}\n
Rx {rx}. {Rx}. Adv: {adv}; {adv}. [Will|To] {plan}. [f/u {weeks} weeks|rv {weeks} weeks|see again if no \
better in {weeks} weeks]. {life}
== adult plain
@I
Message in the patient portal, {date}, {time}, account {record}\n
"[Hello|Good evening|Dear team|To whoever reads this], [sorry to bother you|I hope this is the right form|I \
was not sure whether to write]. I am {age}, {ajob}[ from {town}|], and I {on}. {ctx} {ctx} In case it \
matters, you have on file: {pmh}, and {also}. {life} {life} [What should I do?|Is this dangerous?|Do I need \
to come in?|Can it wait until {weekday}?] {Init}"\n
@you
Answer by {doc} [the same day|the next morning]: [Thank you for writing.|It was right to ask.] At your visit \
we saw {ex} and {ex}, and the laboratory gave {lab} and {lab}. That fits {dx}. [Your pharmacy has an order \
for|What I suggest is] {rx}. Until we meet, {adv}; and {adv}. We shall {plan}.
== any plain
(Dictated by {doc} on {date}, typed by {last}, not proof-read. {record}.)\n
{Init} is {aged} {job} [whom I met|seen] in {dept} today full stop. {He} {on}. {ctx} {life} There is a \
history of {pmh}, and of {also}. {ctx} Going on to the examination, {ex}, {ex}, [new line, sorry, no new \
line,|and then] {ex}. {Obs} The investigations read {lab}, {lab} and {lab}. [So, summing up,|In conclusion] \
this will be {dx}. I have put {him} on {rx}[, and later perhaps {rx}|]. {He} {was} advised to {adv}. [Would \
the secretary please note that we are to {plan}.|The front desk should {plan}.] {life} End of dictation[, \
thank you|].
== ward terse
WARD ROUND day {2-6}, {date}, [Kestrel|Heron] bed {2-29}, {doc} with {last}. {record}\n
{init}, {age}, {job}; came in because {he} {on}. {ctx}\n
Night: [slept {3-7} hours|two buzzers|quiet]. {Ex}. {Ex}; {ex}. {life}\n
Charts: {lab}; {lab}; {lab}; {obs} Known {pmh}, {also}.\n
Problem list: 1 {dx}, 2 [constipation since admission|sore drip site|poor appetite|a noisy neighbour], 3 \
[going home to {town}|who feeds the cat].\n
Jobs: {plan} [(intern)|(today)]. {Plan}. Drugs: {rx}, {rx}. [Physio|Sister] to explain: {adv}; {adv}. {life}
== any plain
Case conference {date}, room A{10-29}. [Present|Round the table]: {doc}, {doc2}, Sister {last}, {last} \
(pharmacy).\n
{last} presented {record}: {init}, {age}, {job}, who {on}. {ctx} {life}\n
{doc2} asked about the past; there is {pmh}, and {also}. {doc} reported {ex}, {ex} as well as {ex}. On the \
screen: {lab}, {lab}, {lab}.\n
[Nobody doubted|After some to and fro the group settled on|Two of three voted for] {dx}. [One view was to \
watch and wait.|Cost was raised.|The pharmacist warned about interactions.] [Decision|Agreed]: {rx}; {plan}; \
{plan}. {last} will [explain it|sit down with {him}] and stress one point: {adv}. {life}
== any plain
[Review after {weeks} weeks|Second visit|Follow-up], {date}, {dept}, {doc}, {record}\n
[To recall|In short]: {init} ({age}, {job}) {on}; we diagnosed {dx}. {ctx}\n
[Things are [roughly half|two thirds|a good deal] better.|No real change so far.|Better, then worse, now \
better again.|"A different person," they say at home.] {life} {life} [Side effects: none.|A dry mouth is the \
price.|Two doses were forgotten.] Still on {rx}.\n
[Today|At this visit] {ex}; {ex}. {Obs} Compared with last time: {lab}, {lab}[, {lab}|]. [Unchanged in the \
background|As before]: {pmh}, {also}.\n
[Next|From here]: {plan}. [We add|New:] {rx}. {He} {was} [praised, and asked again to|once more urged to] \
{adv}. {Plan}.
== adult plain
MEDICATION REVIEW by pharmacist {last}, [room A03|by video], {date}, {record}\n
{Init} ({age}) emptied a [shoe box|sponge bag|biscuit tin] onto the table: {5-14} packets, {2-4} expired. \
Occupation: {job}. The story behind it: {he} {on}. {ctx} {life}\n
[Known|Relevant] conditions: {dx}; {pmh}; {also}. Values I used: {lab}, {lab}, {lab}. {doc}'s notes mention \
{ex}.\n
| item | [comment|verdict] |
| {rx} | [keep|continue, take with food|right dose, wrong hour] |
| {rx} | [clarify with {doc}|new, explained with the leaflet|watch for dizziness] |
| [St John's wort|grandmother's drops|magnesium from the market] | stop |\n
Talked over: {adv}. {Adv}. To {doc}: please {plan}. {life}
== any plain
Student clerking ([third|fourth] year, {first} {last}), checked by {doc}, {date}, {record}\n
I [had the pleasure of meeting|talked for {20-50} minutes with] {init}, {aged} {job}. [Main concern:|\
In {his} own words,] {he} {on}. {ctx} {ctx} [I forgot to ask about allergies at first and went back.|A good \
historian.|The story came out in loops.] Past: {pmh}; {also}. Social: {life} {life}\n
Examination (supervised): {ex}; {ex}; {ex}. Numbers I looked up: {lab}; {lab}.\n
My differential starts with {dx}, [because the picture fits|which Dr {last} accepted]. I would treat with \
{rx}, {plan}, and tell {him} to {adv}. [Learning point: look before you listen.|Feedback: present more \
briefly.|To read up: the dose.]
"""

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
def _families() -> tuple[_Family, ...]:
    made = []
    for block in FAMILIES.split("\n# ")[1:]:
        title, text = block.split("\n", 1)
        _, dept, ages, sexes, setting = title.split("; ")
        low, high = ages.split("-")
        made.append(_Family(dept, (int(low), int(high)), sexes, setting == "ward", _fields(text)))
    return tuple(made)


@cache
def _layouts() -> tuple[_Layout, ...]:
    made = []
    for block in LAYOUTS.split("== ")[1:]:
        title, text = block.split("\n", 1)
        fit, style = title.split()
        before, *spoken = re.split(r"^@(\w+)\n", text, flags=re.MULTILINE)
        parts = (("", before), *zip(spoken[::2], spoken[1::2], strict=True))
        made.append(_Layout(fit, style == "terse", parts))
    return tuple(made)


def _person(family: _Family, record: str, rng: random.Random) -> tuple[str, dict[str, str]]:
    """Draw a patient's sex and the slots that stay the same throughout a note."""
    sex, age = rng.choice(family.sexes), rng.randint(*family.ages)
    job = rng.choice(_fields(PEOPLE)["job"])
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
    people = _fields(PEOPLE)
    if family.child:
        people |= {key[3:]: items for key, items in people.items() if key.startswith("kid")}
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
