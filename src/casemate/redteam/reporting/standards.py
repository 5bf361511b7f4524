"""Public standards and laws that a check gives evidence about. No entry states conformity.

Each entry names its document; the relation is stated in our own words. An entry applies to a report that contains a
check with one of its techniques (MITRE ATLAS ids, which each check carries).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from casemate.redteam.lab.results import Check, CheckStatus

INFERENCE, LEAKAGE, INJECTION = "AML.T0024.000", "AML.T0057", "AML.T0051.001"
"""MITRE ATLAS: infer training data membership; LLM data leakage; indirect LLM prompt injection."""
_BOTH = frozenset({INFERENCE, LEAKAGE})
_ALL = frozenset({*_BOTH, INJECTION})
DISCLAIMER = (
    "The checks are evidence for an assessment of these requirements. They do not show conformity with any of them, "
    "and they cover the tested attacks only."
)


@dataclass(frozen=True, slots=True)
class Standard:
    """A published document: its short name, its edition (title, number and year) and its address."""

    name: str
    edition: str
    url: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """One item of a standard, and its relation to the checks.

    Attributes:
        title: Title of the item; for a long text, its subject.
        evidence: What a report contributes, in one sentence.
        techniques: ATLAS ids of the checks that concern it.
    """

    standard: Standard
    item: str
    title: str
    evidence: str
    techniques: frozenset[str]


_OWASP = Standard("OWASP LLM", "OWASP Top 10 for LLM Applications 2025", "https://genai.owasp.org/llm-top-10/")
_ATLAS = Standard("MITRE ATLAS", "MITRE ATLAS, techniques", "https://atlas.mitre.org/techniques")
_NIST = Standard(
    "NIST AI 600-1", "Generative Artificial Intelligence Profile, July 2024", "https://doi.org/10.6028/NIST.AI.600-1"
)
_AI_ACT = Standard("EU AI Act", "Regulation (EU) 2024/1689", "https://eur-lex.europa.eu/eli/reg/2024/1689/oj")
_GDPR = Standard("GDPR", "Regulation (EU) 2016/679", "https://eur-lex.europa.eu/eli/reg/2016/679/oj")

REQUIREMENTS = (
    Requirement(_OWASP, "LLM01:2025", "Prompt Injection",
                "Measures how often instructions in retrieved documents are followed, guard off and on.",
                frozenset({INJECTION})),
    Requirement(_OWASP, "LLM02:2025", "Sensitive Information Disclosure",
                "Measures how much answers disclose about single documents, and how many texts they return.", _BOTH),
    Requirement(_OWASP, "LLM08:2025", "Vector and Embedding Weaknesses",
                "Attacks the retrieval step, guard off and on.", _BOTH),
    Requirement(_ATLAS, INFERENCE, "Infer Training Data Membership",
                "Runs membership inference and reports its success with intervals.", frozenset({INFERENCE})),
    Requirement(_ATLAS, LEAKAGE, "LLM Data Leakage",
                "Runs crawlers and reports the recovered share of the collection.", frozenset({LEAKAGE})),
    Requirement(_ATLAS, INJECTION, "LLM Prompt Injection: Indirect",
                "Plants instructions in documents of a copy of the collection, and reports the share that is followed.",
                frozenset({INJECTION})),
    Requirement(_NIST, "MS-2.10-001", "Red-teaming for data extraction and membership inference",
                "Is a red-teaming exercise of this kind, and can be repeated from its seed.", _BOTH),
    Requirement(_NIST, "MS-2.7-007", "Red-teaming of resilience against attacks",
                "Reports the success of published attacks against the deployed configuration.", _ALL),
    Requirement(_AI_ACT, "Article 9", "Risk management system",
                "Contributes test results with limits that were set before the test (Article 9(8)).", _ALL),
    Requirement(_AI_ACT, "Article 10", "Data and data governance",
                "Tests a measure that protects personal data in the collection. It does not assess the quality of the "
                "data.", _BOTH),
    Requirement(_AI_ACT, "Article 15", "Accuracy, robustness and cybersecurity",
                "Tests attacks on confidentiality (Article 15(5)), and states the cost of the guard to benign "
                "questions.", _ALL),
    Requirement(_GDPR, "Article 25", "Data protection by design and by default",
                "States what the guard withholds, compared with the system without it.", _BOTH),
    Requirement(_GDPR, "Article 32", "Security of processing",
                "Contributes to regular testing of a technical measure (Article 32(1)(d)).", _BOTH),
)  # fmt: skip


def related_requirements(checks: Iterable[Check]) -> list[Requirement]:
    """The requirements that completed checks give evidence about, in the order of ``REQUIREMENTS``.

    A check that failed to run, or was inconclusive, is not evidence.
    """
    completed = (c for c in checks if c.status in (CheckStatus.PASS, CheckStatus.FAIL))
    tested = {technique for check in completed for technique in check.atlas}
    return [r for r in REQUIREMENTS if r.techniques & tested]
