"""A fictional corpus of towns with topics, names and figures: facts for questions."""

from __future__ import annotations

import numpy as np

from casemate.types import Document

TOPICS = {
    "harbours": "harbour ferry anchor lighthouse sailor pier cargo tide mooring buoy".split(),
    "mines": "mine shaft copper miner gallery ore lantern tunnel smelter pit".split(),
    "orchards": "orchard apple cider blossom grafting ladder beehive harvest press seedling".split(),
    "railways": "railway locomotive platform signal viaduct carriage timetable porter siding rail".split(),
    "theatres": "theatre stage actor curtain rehearsal playwright balcony costume prompter ticket".split(),
    "weavers": "weaver loom wool spindle dye guild shuttle tapestry thread bobbin".split(),
}
STARTS, ENDS = (
    "Bel Cor Dun Elm Fen Gar Hol Ist Kel Lor Mar Nor".split(),
    "bury field ham kirk mouth stead ton wick".split(),
)


def town(topic: str, number: int, seed: int = 0) -> Document:
    """A page about one town, in the words of its topic."""
    rng = np.random.default_rng([number, seed, len(topic), ord(topic[0])])
    name = f"{STARTS[number % len(STARTS)]}{ENDS[int(rng.integers(len(ENDS)))]}"
    a, b, c, d, e, f = rng.choice(TOPICS[topic], 6, replace=False)
    founder = f"{'ABCDEFGHIJ'[int(rng.integers(10))]}{'aeiou'[int(rng.integers(5))]}{'lmnrst'[int(rng.integers(6))]}vin"
    years = rng.integers(1500, 1990, 2)
    text = (
        f"The old {a} near the {b} of {name} was rebuilt by the settler {founder} when the {c} failed in {years[0]}. "
        f"Every {d} carried {int(rng.integers(20, 900))} barrels past the {e} while the {f} of {name} slept. "
        f"A {b} with a painted {d} has stood beside the {c} since {years[1]}, and few know why."
    )
    return Document(f"{topic}-{number}", text, title=f"{name} {topic}", digest=f"v1-{topic}-{number}")


def towns(each: int = 12, seed: int = 0, start: int = 0) -> list[Document]:
    """Pages on each topic, ``each`` per topic."""
    return [town(topic, start + n, seed) for topic in TOPICS for n in range(each)]
