"""Personal data by Presidio (https://github.com/microsoft/presidio): patterns, check digits and context words.

Names of persons need a model of spaCy, which must be installed: nothing is downloaded. Presidio's list of internet
domains is the one that it brings; it is not updated over the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from casemate.errors import ConfigError, needs, require_range
from casemate.protocols import PersonalDataFinder
from casemate.types import PersonalData

KINDS = (
    "CREDIT_CARD",
    "CRYPTO",
    "EMAIL_ADDRESS",
    "IBAN_CODE",
    "MEDICAL_LICENSE",
    "PERSON",
    "PHONE_NUMBER",
    "UK_NHS",
    "US_ITIN",
    "US_PASSPORT",
    "US_SSN",
)


@dataclass(eq=False)
class Presidio(PersonalDataFinder):
    """Finds personal data with Presidio's analyzer.

    Attributes:
        model: Installed model of spaCy, such as en_core_web_lg. Empty: none, and so no names of persons.
        language: Language of the texts.
        kinds: Presidio's entities that count as personal data.
        min_score: Least confidence of Presidio, from 0 to 1. Phone numbers without a context word have 0.4.
    """

    model: str = ""
    language: str = "en"
    kinds: tuple[str, ...] = KINDS
    min_score: float = 0.4

    def __post_init__(self) -> None:
        require_range("presidio", self, "min_score", at_least=0, at_most=1)
        with needs("casemate[presidio]"):
            import tldextract
            from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
        tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
        registry = RecognizerRegistry(supported_languages=[self.language])
        registry.load_predefined_recognizers(languages=[self.language])
        known = {kind for recognizer in registry.recognizers for kind in recognizer.supported_entities}
        if unknown := [kind for kind in self.kinds if kind not in known]:
            raise ConfigError(f"presidio.kinds: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        self._analyzer = AnalyzerEngine(
            registry=registry, nlp_engine=self._language_engine(), supported_languages=[self.language]
        )

    def find(self, text: str) -> Sequence[PersonalData]:
        found = self._analyzer.analyze(
            text, language=self.language, entities=list(self.kinds), score_threshold=self.min_score
        )
        return sorted((PersonalData(one.entity_type, one.start, one.end) for one in found), key=lambda one: one.start)

    def _language_engine(self) -> Any:
        import spacy
        from presidio_analyzer.nlp_engine import SpacyNlpEngine

        engine: Any = SpacyNlpEngine(models=[{"lang_code": self.language, "model_name": self.model or "blank"}])
        try:  # not engine.load(), which downloads a model that is not installed
            engine.nlp = {self.language: spacy.load(self.model) if self.model else spacy.blank(self.language)}
        except (OSError, ImportError) as error:
            raise ConfigError(
                f"presidio.model: no installed model of spaCy is named {self.model!r}; install it, or leave it empty"
            ) from error
        return engine
