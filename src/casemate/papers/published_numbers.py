"""Figures that the Mirabel paper prints for NFCorpus (its Table 3: for question answering), as data.

Choi, Park, Byun, Lee and Park 2025, "Safeguarding Privacy of Retrieval Data against Membership Inference Attacks: Is
This Query Too Close to Home?", EMNLP Findings (arXiv 2505.22061). Figures are kept as printed; a note marks the
questionable ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

FOUR = ("accuracy", "precision", "recall", "F1")


class Printed(NamedTuple):
    """A figure of the paper.

    Attributes:
        value: The printed value.
        odd: Why it is questionable, or how it was derived; empty otherwise.
    """

    value: float
    odd: str = ""


Numbers: TypeAlias = Mapping[str, Printed]
"""By column."""


def _row(columns: tuple[str, ...], *values: float, **odd: str) -> Numbers:
    """Figures by column, with ``odd`` by column."""
    return MappingProxyType({c: Printed(v, odd.get(c, "")) for c, v in zip(columns, values, strict=True)})


ROTATED = (
    "these are not the F1, precision and recall of one classifier. As precision, recall and F1, in this order, they "
    "agree with each other and with Table 8"
)
UNBALANCED = (
    "accuracy, precision and recall agree only if 58 % of the candidates were members, with and without a defense. "
    "With equal numbers, this precision and recall give {}"
)
IMPLIED = "not printed; follows from precision and recall: recall (1 / precision - 1)"
AVERAGED = "a mean of p-values is no test: it can be above .05 although most questions reject"
OWN_MEMORY = "above R@k: the model also answers from memory what was not retrieved"

NORMALITY = ("S_q", "without s_max")
TABLE_1: Mapping[str, Numbers] = {
    "harmless": _row(NORMALITY, 0.469, 0.400, **dict.fromkeys(NORMALITY, AVERAGED)),
    "S2MIA": _row(NORMALITY, 0.001, 0.293, **dict.fromkeys(NORMALITY, AVERAGED)),
    "MBA": _row(NORMALITY, 0.027, 0.511, **dict.fromkeys(NORMALITY, AVERAGED)),
    "IA": _row(NORMALITY, 0.012, 0.226, **dict.fromkeys(NORMALITY, AVERAGED)),
}

TABLE_2: Mapping[str, Numbers] = {
    "S2MIA": _row(FOUR, 0.844, 0.762, 1.000, 0.865),
    "MBA": _row(FOUR, 0.847, 0.766, 1.000, 0.867),
    "IA": _row(FOUR, 0.799, 0.896, 0.817, 0.750, precision=ROTATED, recall=ROTATED, F1=ROTATED),
}

FIVE = (*FOUR, "harmless flagged")
TABLE_8: Mapping[str, Numbers] = {
    "S2MIA": _row(FIVE, 0.876, 0.802, 1.000, 0.890, 0.247, **{"harmless flagged": IMPLIED}),
    "MBA": _row(FIVE, 0.876, 0.802, 1.000, 0.890, 0.247, **{"harmless flagged": IMPLIED}),
    "IA": _row(FIVE, 0.824, 0.783, 0.895, 0.835, 0.248, **{"harmless flagged": IMPLIED}),
}

TABLE_2_AGENT: Mapping[str, Numbers] = {
    "S2MIA": _row(FOUR, 0.715, 0.644, 0.962, 0.772),
    "MBA": _row(FOUR, 0.727, 0.650, 0.986, 0.783),
    "IA": _row(FOUR, 0.482, 0.125, 0.006, 0.012),
}
"""The detector that asks GPT-4o for a label of the question."""
TABLE_8_AGENT: Mapping[str, Numbers] = {
    "S2MIA": _row(FIVE, 0.941, 0.925, 0.960, 0.942, 0.078, **{"harmless flagged": IMPLIED}),
    "MBA": _row(FIVE, 0.954, 0.927, 0.985, 0.955, 0.078, **{"harmless flagged": IMPLIED}),
    "IA": _row(FIVE, 0.464, 0.074, 0.006, 0.011, 0.078, **{"harmless flagged": IMPLIED}),
}

UTILITY = ("EM@5", "EM@20", "EM@100", "R@5", "R@20", "R@100")
TABLE_3: Mapping[tuple[str, str], Numbers] = {
    ("NQ", "no guard"): _row(UTILITY, 0.272, 0.263, 0.313, 0.222, 0.354, 0.474, **{"EM@5": OWN_MEMORY}),
    ("NQ", "Mirabel"): _row(UTILITY, 0.253, 0.253, 0.273, 0.172, 0.303, 0.443, **{"EM@5": OWN_MEMORY}),
    ("TriviaQA", "no guard"): _row(
        UTILITY, 0.730, 0.725, 0.755, 0.575, 0.705, 0.840, **{"EM@5": OWN_MEMORY, "EM@20": OWN_MEMORY}
    ),
    ("TriviaQA", "Mirabel"): _row(
        UTILITY, 0.700, 0.725, 0.740, 0.515, 0.675, 0.825, **{"EM@5": OWN_MEMORY, "EM@20": OWN_MEMORY}
    ),
}

SYSTEMS = ("no guard", "Mirabel", "DP-RAG", "DP-RAG-L")
"""The last two: differential privacy with epsilon 2, and 100."""
OF_TABLE_9 = "of Table 9's accuracy: " + UNBALANCED
TABLE_4: Mapping[str, Numbers] = {
    "S2MIA": _row(SYSTEMS, 0.188, 0.024, 0.021, 0.034),
    "MBA": _row(SYSTEMS, 0.377, 0.019, 0.004, 0.014),
    "IA": _row(
        SYSTEMS,
        0.403,
        0.008,
        0.038,
        0.267,
        **{"no guard": OF_TABLE_9.format(".416"), "Mirabel": OF_TABLE_9.format(".061")},
    ),
}

AVERAGE = "the mean of the distances of BLEU and of perplexity (Table 12); infinite perplexities were left out"
TABLE_5: Mapping[str, Numbers] = {
    "S2MIA": _row(SYSTEMS, 0.358, 0.057, 0.077, 0.060, **dict.fromkeys(SYSTEMS, AVERAGE)),
    "MBA": _row(SYSTEMS, 0.754, 0.038, 0.022, 0.036),
    "IA": _row(SYSTEMS, 0.805, 0.100, 0.088, 0.301),
}
TABLE_12: Mapping[str, Numbers] = {
    "similarity": _row(SYSTEMS[:2], 0.378, 0.064),
    "perplexity": _row(SYSTEMS[:2], 0.338, 0.050),
}

TABLE_9: Mapping[tuple[str, str], Numbers] = {
    ("S2MIA", "no guard"): _row(FOUR, 0.688, 0.636, 0.878, 0.738),
    ("S2MIA", "Mirabel"): _row(FOUR, 0.524, 0.526, 0.480, 0.502),
    ("MBA", "no guard"): _row(FOUR, 0.877, 0.859, 0.902, 0.880),
    ("MBA", "Mirabel"): _row(FOUR, 0.481, 0.425, 0.108, 0.172),
    ("IA", "no guard"): _row(FOUR, 0.903, 0.878, 0.967, 0.920, accuracy=UNBALANCED.format("an accuracy of .916")),
    ("IA", "Mirabel"): _row(FOUR, 0.492, 0.681, 0.230, 0.344, accuracy=UNBALANCED.format("an accuracy of .561")),
}
