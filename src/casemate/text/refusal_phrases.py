r"""Phrases of refusals in German, French, Spanish, Italian and Portuguese, as patterns on normalized clauses.

A normalized clause is in lower case without accents and punctuation; only the Spanish verb ``sé`` (I know) becomes
``sse``, because ``se`` is a pronoun. In the patterns, ``~n`` stands for up to n words.

Each language has two families, as in English: ``declines`` (inability, lack of knowledge, policy; in the first person)
and ``lacks`` (the documents do not contain the answer). All gaps are bounded, so time is linear in the length.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_GAP = re.compile(r"~(\d+) ?")
_SPANISH_I_KNOW = re.compile(r"\bsé\b")
_NOT_WORD = re.compile(r"[^\w']+")


@dataclass(frozen=True, slots=True)
class RefusalPhrases:
    """Patterns of one language.

    Attributes:
        negation: Words of which a refusal contains at least one; a fast first test.
        declines: Clauses that decline in the first person.
        lacks: Clauses that say that the documents lack the answer.
        conjunctions: Start of a clause that may contain an answer.
        contrasts: Conjunctions after which a statement makes a ``declines`` sentence an answer.
        offers: Start of a clause that offers help instead of an answer.
        preamble: Sentences that may precede the refusal: apologies, thanks, sympathy.
    """

    negation: re.Pattern[str]
    declines: re.Pattern[str]
    lacks: re.Pattern[str]
    conjunctions: re.Pattern[str]
    contrasts: re.Pattern[str]
    offers: re.Pattern[str]
    preamble: re.Pattern[str]

    def matches(self, sentence: str, normalized: str) -> bool:
        """Returns whether a sentence is a refusal: a clause matches, and no later clause contains an answer.

        Args:
            sentence: The sentence.
            normalized: Its normal form.
        """
        if not self.negation.search(normalized) or not (
            self.declines.search(normalized) or self.lacks.search(normalized)
        ):
            return False
        clauses = self._clauses(sentence)
        for i, clause in enumerate(clauses):
            if self.declines.search(clause):
                return not any(self.contrasts.match(c) and self._answers(c) for c in clauses[i + 1 :])
            if self.lacks.search(clause):
                return not any(self._answers(c) for c in clauses[i + 1 :])
        return False

    def _clauses(self, sentence: str) -> list[str]:
        """Splits a sentence at semicolons, colons, dashes, and commas before a conjunction."""
        parts = re.split(r"[;:]\s|\s[-–—]+\s", sentence)
        clauses = []
        for part in parts:
            clauses.append("")
            for piece in part.split(","):
                words = normalize(piece)
                if self.conjunctions.match(words):
                    clauses.append("")
                clauses[-1] = f"{clauses[-1]} {words}".strip()
        return [clause for clause in clauses if clause]

    def _answers(self, clause: str) -> bool:
        """Returns whether a clause contains a statement, rather than an offer or another refusal."""
        statement = self.conjunctions.sub("", clause).strip()
        return (
            len(statement.split()) > 2
            and not self.offers.match(statement)
            and not self.declines.search(clause)
            and not self.lacks.search(clause)
        )


def normalize(text: str) -> str:
    """Lower case, no accents, no punctuation except apostrophes, single spaces.

    >>> normalize("Je n’ai pas accès, désolé. No lo sé.")
    "je n'ai pas acces desole no lo sse"
    """
    plain = _SPANISH_I_KNOW.sub("sse", unicodedata.normalize("NFC", text).casefold().replace("’", "'"))
    plain = "".join(c for c in unicodedata.normalize("NFD", plain) if unicodedata.category(c) != "Mn")
    return " ".join(_NOT_WORD.sub(" ", plain).split())


def _pattern(*alternatives: str) -> re.Pattern[str]:
    """Compiles alternatives that begin and end at word boundaries."""
    joined = "|".join(_GAP.sub(r"(?:[\\w']+ ){0,\1}", a) for a in alternatives)
    return re.compile(rf"\b(?:{joined})")


def _starts(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{words})\b")


_DE_SOURCE = (
    r"(?:kontext\w*|text\w*|dokument\w*|unterlagen|quellen?|quelltext\w*|auszug\w*|auszuge\w*|abschnitt\w*|passagen?"
    r"|material\w*|informationen|daten|datenbank|wissens\w+|angaben|suchergebniss\w*|ergebniss\w*|dateien|notizen)"
)
_DE_NOT = r"(?:nicht|kein\w*|nichts|nirgends|nirgendwo|keinerlei)"
_DE_INFORMATION = r"(?:information\w*|angaben?|daten|auskunft|auskunfte|einzelheiten|details?|erwahnung\w*)"
_DE_OTHER_ACTS = (  # what people write in mails, or idioms
    r"(?:kommen|teilnehmen|dabei sein|zahlen|bezahlen|unterschreiben|unterzeichnen|warten|schlafen|reisen|treffen"
    r"|glauben|klagen|leugnen|genug|oft genug|zustimmen|vorbeikommen|mitkommen|da sein|anwesend sein|arbeiten|essen)"
)
GERMAN = RefusalPhrases(
    negation=_pattern(
        r"nicht\b|kein\w*|nichts\b|nirgends\b|nur\b|lediglich\b|ausschliesslich\b|un(?:klar|bekannt|moglich)\b|ohne\b"
        r"|schwer\b|schwierig\b|kaum\b|untersagt\b|verboten\b|verwehrt\b"
        r"|uberfragt\b|entzieht\b|ubersteigt\b|brauch\w*|benotig\w*|offen\b|schweig\w*|mehr\b|weitere\b"
        r"|ausserhalb\b|jenseits\b|ablehnen\b|lehne\b|verweiger\w*|fehl\w+|unzureichend\w*|zu wenig\w*|verstosst\b"
    ),
    declines=_pattern(
        rf"(?:ich (?:kann|konnte|darf|durfte|mochte|will|werde|vermag)|(?:kann|konnte|darf|mochte|will"
        rf"|werde) ~2 ?ich)\b "
        rf"~7{_DE_NOT}\b(?!(?: [\w']+){{0,6}} {_DE_OTHER_ACTS}\b)(?! nur\b)",
        rf"(?:wir (?:konnen|konnten|durfen)|(?:konnen|konnten|durfen) wir)\b ~5{_DE_NOT} ~5(?:beantworten|helfen"
        r"|weiterhelfen|mitteilen|finden|auskunft|nachkommen|bearbeiten)\b",
        r"(?:ich bin|bin ich|wir sind|sind wir)\b ~4(?:nicht|kaum) ~2(?:in der lage|befugt|berechtigt|autorisiert"
        r"|befahigt"
        r"|imstande|sicher|zustandig|programmiert|dafur|dazu|ermachtigt|qualifiziert|bereit|der richtige|im bilde)\b",
        r"(?:ich weiss|weiss ich|wissen wir|wir wissen|ich kenne|kenne ich|ich erkenne|ich verstehe"
        r"|verstehe ich)\b ~4(?:nicht|kein\w*|nichts)\b",
        rf"(?:ich habe|habe ich|ich besitze|ich verfuge|ich sehe|sehe ich"
        rf"|ich erhalte)\b ~5{_DE_NOT}\b "
        rf"~5(?:{_DE_INFORMATION}|zugriff|zugang|kenntnis\w*|hinweis\w*|eintrag\w*|antwort\w*|unterlagen|ahnung"
        r"|moglichkeit\w*|befugnis\w*|berechtigung\w*|erlaubnis|meinung\w*|gefunden|finden|entdeckt|dazu|daruber"
        r"|passend\w*"
        r"|fahigkeit\w*|genug|genugend|ausreichend\w*)\b",
        rf"(?:wir haben|haben wir|wir finden|finden wir)\b ~4{_DE_NOT} ~3(?:{_DE_INFORMATION}|antwort\w*|eintrag\w*)\b",
        rf"(?:ich finde|finde ich|fand ich|ich fand)\b ~6{_DE_NOT}\b",
        rf"(?:mir|uns) (?:ist|sind|liegen|liegt|stehen|steht|fehlen|fehlt)\b ~5(?:{_DE_NOT}|die|der|das|weitere\w*)\b",
        rf"(?:ist|sind|liegen|liegt|stehen|steht) (?:mir|uns)\b ~4(?:{_DE_NOT}|un(?:bekannt|moglich))\b",
        r"(?:fehlen|fehlt) (?:mir|uns)\b",
        r"(?:helfe|antworte|gebe|teile|schreibe|erstelle|unterstutze|wiederhole|nenne|verrate|beantworte|spekuliere"
        r"|rate)"
        r" ich\b ~5(?:nicht|kein\w*)\b",
        r"ich (?:helfe|antworte|gebe|teile|schreibe|erstelle|unterstutze|wiederhole|nenne|verrate|beantworte"
        r"|spekuliere)\b"
        r" ~6(?:nicht|kein\w*)\b",
        r"(?:ich lehne|lehne ich|ich muss|muss ich|ich verweigere|verweigere ich)\b ~6(?:ab|ablehnen|verweigern|passen"
        r"|auskunft|antwort)\b",
        r"verstosst gegen (?:mein\w*|unser\w*|die)\b ~2(?:richtlinien|regeln|grundsatze|vorgaben|nutzungs\w+)\b",
        r"mein\w* (?:richtlinien|regeln|vorgaben|anweisungen|programmierung)\b ~2(?:erlaub\w+|verbiet\w+|untersag\w+"
        r"|hindern|lassen)\b",
        r"(?:ausserhalb|jenseits|nicht in|nicht zu|nicht teil)\b ~1(?:mein\w*|unser\w*|des rahmens)\b",
        r"(?:kann|darf|konnen|bin|werde) ~1?(?:ich|wir)?\b ?(?:leider )?(?:nur|ausschliesslich|lediglich)\b ~9"
        r"(?:beantworten|helfen|weiterhelfen|auskunft|unterstutzen|behilflich)\b",
        r"kein\w* ~1(?:auskunft|auskunfte) ~1?(?:geben|erteilen|moglich)\b",
        r"(?:mir|uns) ~3(?:untersagt|verboten|verwehrt)\b|ich ~2nicht aus\b|nicht mein\w* (?:gebiet|thema|bereich"
        r"|aufgabe)\b",
        r"keine ahnung\b|uberfragt\b|entzieht sich meiner kenntnis|ubersteigt mein\w*",
        r"(?:brauche|brauchte|benotige) ~2(?:mehr|weitere|genauere|zusatzliche) ~1(?:information\w*|angaben|details"
        r"|kontext)\b|(?:mehr|weitere) (?:information\w*|angaben|details) ~2(?:notig|erforderlich|benotigt)\b",
    ),
    lacks=_pattern(
        rf"{_DE_SOURCE} ~3(?:enthal\w+|enthielt\w*|erwahn\w+|nenn\w+|mach\w+|geb\w+|gib\w+|biet\w+|liefer\w+"
        rf"|beinhalt\w+"
        r"|besag\w+|sag\w+|steh\w+|find\w+|beschreib\w+|behandel\w+|beantwort\w+|reich\w+|geh\w+|verrat\w+|ist|sind"
        rf"|lass\w+|erlaub\w+|wird|werden|gibt|liegt|liegen|erlauter\w+|spezifizier\w+)\b ~6{_DE_NOT}\b",
        rf"(?:im|in|aus|laut|dem|den|anhand|mithilfe|grundlage|basis|basierend auf)\b ~4{_DE_SOURCE} ~8{_DE_NOT}\b ~4"
        r"(?:erwahnt|enthalten|angegeben|genannt|hervor|ableiten|beantworte\w+|entnehmen|bestimmen|sagen|finden"
        r"|vorhanden"
        r"|ersichtlich|aufgefuhrt|beschrieben|beantwortbar|feststellen|klaren|belegt|moglich)\b",
        rf"{_DE_NOT} ~3(?:aus|in|im) ~3{_DE_SOURCE} ~2(?:enthalten|erwahnt|angegeben|hervor|zu finden|genannt)\b",
        r"geht ~6nicht hervor\b",
        rf"(?:frage|antwort|information|angabe)\b ~8{_DE_NOT} ~6(?:beantworte\w+|enthalten|verfugbar|angegeben"
        rf"|zu finden"
        r"|gefunden|beantwortbar|vorhanden|hervor)\b",
        r"lasst sich ~6nicht ~2(?:beantworten|sagen|bestimmen|feststellen|ermitteln|ableiten|beurteilen|klaren"
        r"|entnehmen)\b",
        rf"(?:gibt es|es gibt|es liegen|liegen|es finden sich|finden sich"
        rf"|es findet sich) ~5kein\w* ~2{_DE_INFORMATION}\b",
        rf"kein\w* ~2{_DE_INFORMATION} ~3(?:verfugbar|vorhanden|gefunden|vor|enthalten|dazu|daruber)\b",
        r"ohne (?:weitere|mehr|zusatzliche|genauere|nahere|zugriff|einsicht|kenntnis)\b ~6(?:schwer|nicht|unmoglich"
        r"|kaum)\b",
        rf"(?:nicht genug|nicht genugend|nicht ausreichend\w*|unzureichend\w*|zu wenig\w*) {_DE_INFORMATION}\b",
        rf"(?:unklar|nicht klar|unbekannt)\b ~12{_DE_SOURCE}",
        rf"{_DE_SOURCE} ~4(?:unklar|nicht klar|offen)\b",
        rf"(?:steht|stehen|findet sich|finden sich|ist|sind) ~2(?:in|im) ~3{_DE_SOURCE} ~3(?:nichts|kein\w*)\b",
        r"kann man ~4nicht ~2(?:entscheiden|sagen|beantworten|beurteilen|feststellen|bestimmen|wissen)\b",
        r"(?:kann|konnte|konnen|konnten) ~4(?:keine antwort ~2|nicht ~1(?:beantwortet|ermittelt"
        r"|festgestellt) )werden\b",
        rf"kein\w* (?:der|dieser|von|meiner) ~3{_DE_SOURCE}",
        rf"(?:gibt|geben|enthalt|enthalten|liefert|liefern|macht|machen|nennt|nennen|sagt"
        rf"|sagen)\b ~2{_DE_SOURCE} ~4{_DE_NOT}\b",
        r"(?:schwer|schwierig|unmoglich|kaum) ~1zu (?:sagen|beurteilen|beantworten|bestimmen|entscheiden)\b",
        rf"(?:fehlt|fehlen) ~2(?:in|im) ~3{_DE_SOURCE}|{_DE_SOURCE} ~2schweig\w+",
        rf"{_DE_INFORMATION} ~3(?:reichen|reicht|genugen|genugt) ~3nicht\b",
    ),
    conjunctions=_starts(
        r"aber|jedoch|allerdings|doch|sondern|daher|deshalb|also|somit|folglich|weshalb|in der praxis|hingegen|dafur"
    ),
    contrasts=_starts(r"aber|jedoch|allerdings|doch|sondern|hingegen|dafur"),
    offers=_starts(
        r"ich|wir|gern\w*|bitte|wenden|wenn|falls|kann|konnen|konnten|sie konnen|mochten|vielleicht|ihr arzt|fragen"
        r"|versuchen|kontaktieren"
    ),
    preamble=_pattern(
        r"entschuld\w+|leid\b|leider\b|dank\w*|versteh\w*|bedau\w+|frage\b|anfrage\b|anliegen\b|guten tag\b|hallo\b"
        r"|bitte\b|als ki\b"
    ),
)

_FR_SOURCE = (
    r"(?:contextes?|textes?|documents?|documentation|sources?|extraits?|passages?|elements?|informations?|donnees"
    r"|base de connaissances|resultats|fichiers?|fragments?|archives)"
)
_FR_NE = r"(?:ne|n'(?=\w))"
_FR_INFORMATION = (
    r"(?:d'|l')?(?:informations?|mentions?|precisions?|donnees?|reponses?|references?|details?|indications?)"
)
_FR_OTHER_ACTS = r"(?:venir|assister|participer|me rendre|etre present\w*|payer|signer|attendre|dormir|croire|assez)"
FRENCH = RefusalPhrases(
    negation=_pattern(
        r"ne\b|n'|aucun\w*|rien\b|impossible\b|incapable\b|ignore\b|refuse\w*|decline\w*|uniquement\b|seulement\b"
        r"|sans\b"
        r"|depasse\b|hors\b|dehors\b|manque\b|insuffisant\w*|pas\b|contraire\b|faudrait\b|besoin\b|echappe\b"
        r"|interdit\w*|tenu\b|muet\w*|silencieu\w+|regrette\b|au dela\b|difficile\b"
    ),
    declines=_pattern(
        rf"je {_FR_NE} ?(?:[\w']+ )?(?:peux|puis|pourrai|pourrais|parviens|arrive|saurais|veux|vais|dois|souhaite)\b"
        rf"(?!(?: [\w']+){{0,4}} {_FR_OTHER_ACTS}\b)(?: [\w']+)?(?: pas| rien| aucun\w*| point| plus| malheureusement"
        rf"| vous"
        r"| repondre| dire| qu'| que| me| communiquer| fournir| donner| divulguer| determiner| trouver)",
        r"je ne (?:le |la |les |vous )?sais (?:\w+ )?(?:pas|rien|trop)\b|je n'en sais rien|j'ignore\b|je l'ignore\b",
        r"(?:aucune|pas la moindre) idee\b",
        r"je n'ai ~2(?:pas|aucun\w*|rien|jamais|malheureusement|point)\b ~5(?:d'informations?|informations?|acces"
        r"|donnees?"
        r"|elements?|details?|precisions?|connaissance|trouver?|retrouver?|trouvee?|pu|reussi|possibilite|autorisation"
        r"|reponse|capacite|droit|mention|a ce sujet|de quoi|assez|suffisamment|vu|moyen|certitude|renseignements?)\b",
        r"je ne (?:dispose|possede|connais|trouve|vois|detiens)\b ~3(?:pas|aucun\w*|rien|malheureusement)\b",
        r"je ne (?:reponds|donne|fournis|partage|divulgue|communique|traite|redige|cree|genere)\b ~2(?:pas|qu'|que"
        r"|aucun\w*)",
        r"je ne suis ~2(?:pas|malheureusement)\b ~2(?:en mesure|autorise\w*|habilite\w*|capable|sure?|certaine?|a meme"
        r"|en position|qualifie\w*|concue?|programme\w*|au courant|informe\w*|l'aise|competente?|cense\w*"
        r"|en capacite)\b",
        r"je suis ~2(?:incapable|dans l'impossibilite|dans l'incapacite)\b",
        r"(?:il )?(?:m'est|ne m'est)\b ~3(?:impossible|possible|permis|interdit|difficile)\b",
        r"je (?:me vois |suis )?(?:refuse|decline|contraint\w* de (?:refuser|decliner)|oblige\w* de (?:refuser"
        r"|decliner))\b",
        r"je (?:dois|prefere|prefererais)\b ~2(?:decliner|refuser|m'abstenir|ne pas|eviter)\b",
        r"nous (?:ne|n') ?(?:pouvons|sommes|avons)\b ~4(?:repondre|vous aider|donner suite|traiter votre"
        r"|en mesure de vous"
        r"|vous communiquer|(?:pu )?(?:trouver?|retrouver?) ~1(?:votre|d'informations?|de reponse"
        r"|aucune (?:information|reponse)))\b",
        r"je (?:peux|suis en mesure de|reponds) ~2(?:uniquement|seulement|exclusivement)\b",
        r"(?:depasse|sort du|en dehors|hors|au dela|ne releve pas|ne fait pas partie)\b ~2(?:(?:mon|mes|ma|notre|nos)\b"
        r"|(?:cadre|champ|domaine|perimetre) (?:de (?:mes|mon|ma|nos)|d'))",
        r"(?:contraire\w* a|enfreint|viole|contre) (?:mes|nos|les) (?:principes|regles|directives|consignes"
        r"|politiques)\b",
        r"mes (?:directives|regles|consignes|instructions|principes)\b ~2(?:m'interdisent|m'empechent|permettent)\b",
        r"je ne comprends ~2pas\b|je ne (?!(?:viendrai|serai|irai|paierai|assisterai|participerai"
        r"|signerai)\b)\w+rai ~1pas\b",
        r"(?:on m'interdit|m'est interdit|je suis tenu)\b|(?:ce )?n'est pas (?:mon|ma|de mon|de ma|dans mes)\b",
        r"(?:il me faudrait|j'aurais besoin|j'ai besoin) ~1(?:de )?(?:plus|davantage|d'autres) ~1d'?(?:informations?"
        r"|elements?"
        r"|details?|precisions?)\b|m'echappe\b",
    ),
    lacks=_pattern(
        rf"{_FR_SOURCE} ~5{_FR_NE} ?~1(?:contien\w+|contenai\w+|mentionn\w+|precis\w+|indiqu\w+|donn\w+|fourni\w+"
        rf"|parl\w+"
        r"|permet\w*|figur\w+|specifi\w+|comport\w+|evoqu\w+|trait\w+|abord\w+|inclu\w+|repond\w*|dit|disent|font|fait"
        r"|comprend|comprennent|revel\w+|offr\w+|suffi\w+|apport\w+|dis|decri\w+|nomm\w+|detaill\w+"
        r"|sont pas suffisant\w*)\b",
        rf"aucun\w* ~3{_FR_SOURCE} ~3{_FR_NE}",
        rf"aucune? ~2{_FR_INFORMATION} ~3(?:dans|concernant|sur|a ce sujet|disponible|trouvee?|relative?|pertinente?"
        r"|n'est (?:disponible|mentionnee?|fournie?|indiquee?|presente?|donnee?))\b",
        rf"il n'y a\b ~2(?:pas|aucune?|rien)\b ~3(?:{_FR_INFORMATION}|dans)\b",
        r"(?:reponse|information|question|renseignement)s? ~5(?:ne|n') ?~3(?:figure\w*|trouve\w*|apparait|apparaissent"
        r"|disponibles?|presente?s?|mentionnee?s?|fournie?s?|precisee?s?|indiquee?s?|contenue?s?|repondue?"
        r"|peut etre)\b",
        r"(?:impossible|pas possible|difficile|ne peut ~1pas|on ne peut|ne permet\w* ~1pas)\b ~1(?:de "
        r"|d')?~2(?:repondre"
        r"|determiner|dire|savoir|prononcer|conclure|confirmer|etablir|donner une reponse)\b",
        rf"(?:rien|nulle part)\b ~5{_FR_SOURCE}",
        rf"{_FR_SOURCE} ~4(?:rien|nulle part)\b",
        r"^(?:cela|ceci|ce|cette information|l'information|ce point|la reponse) n'(?:est|a|y) ~2pas ~1(?:precis\w+"
        r"|mentionn\w+"
        r"|indiqu\w+|specifi\w+|disponible|fourni\w*|donn\w+)\b",
        r"sans (?:plus|autres?|davantage|informations?|precisions?|details?|acces|contexte|elements?)\b ~8(?:difficile"
        r"|impossible|ne\b|n')",
        rf"{_FR_SOURCE} ~2(?:mue(?:t|ts|tte|ttes)|silencieu\w+)\b|(?:difficile|impossible) (?:a|de) ~1(?:dire"
        rf"|determiner|juger)\b",
        r"(?:manque d'informations?|informations? ~3insuffisante?s?|pas (?:assez|suffisamment) d'(?:informations?"
        r"|elements?))",
        rf"{_FR_NE} ?(?:est|sont|a) ~1pas ~1(?:mentionn\w+|precis\w+|indiqu\w+|specifi\w+) ~3{_FR_SOURCE}",
    ),
    conjunctions=_starts(
        r"mais|cependant|toutefois|en revanche|pourtant|donc|alors|ainsi|c'est pourquoi|en pratique|neanmoins"
        r"|par contre"
    ),
    contrasts=_starts(r"mais|cependant|toutefois|en revanche|pourtant|neanmoins|par contre"),
    offers=_starts(
        r"je|j'\w+|nous|veuillez|n'hesitez|vous pouvez|vous pourriez|si|peut etre|puis je|essayez|contactez|adressez"
        r"|demandez|consultez|votre"
    ),
    preamble=_pattern(
        r"desole\w*|excus\w+|pardon\b|merci\b|comprends\b|malheureusement\b|regrette\b|question\b|demande\b|bonjour\b"
        r"|en tant qu"
    ),
)

_ES_SOURCE = (
    r"(?:contextos?|textos?|documentos?|documentacion|fuentes?|fragmentos?|pasajes?|extractos?|informacion|datos"
    r"|base de (?:datos|conocimientos?)|resultados|material\w*|archivos?|secciones|notas)"
)
_ES_INFORMATION = r"(?:informacion|mencion\w*|datos?|detalles?|respuestas?|referencias?|indicacion\w*)"
_ES_OTHER_ACTS = r"(?:asistir|ir|venir|acudir|pagar|firmar|esperar|dormir|creer|negar|quejarme|imaginar\w*|participar)"
SPANISH = RefusalPhrases(
    negation=_pattern(
        r"no\b|ning\w+|nada\b|ni\b|desconozco\b|ignoro\b|niego\b|rehuso\b|declin\w+|rechaz\w+|solo\b|unicamente\b"
        r"|fuera\b|sin\b|imposible\b|falta\w*|carezco\b|insuficiente\w*|contra\b|excede\b|necesit\w*|hace falta\b"
        r"|prohib\w+|silencio\b|call\w+|omite\w*|haria falta\b|supera\b|escapa\b|tampoco\b|dificil\b"
    ),
    declines=_pattern(
        r"no (?:me |te |le |les |os |lo |la |se lo |se los )?(?:puedo|podre|podria|pude|consigo|logro|logre|sabria)\b"
        rf"(?!(?: [\w']+){{0,2}} {_ES_OTHER_ACTS}\b)(?!(?: [\w']+){{0,6}} (?:suficiente|bastante)$)",
        r"no (?:lo )?sse\b|no lo se\b|(?:ni|no tengo) ~2idea\b",
        r"no tengo ~4(?:informacion|datos?|acceso|constancia|conocimiento\w*|detalles?|respuesta|permiso|permitido"
        r"|capacidad|registros?|autorizacion|forma|manera|modo|certeza|claro|suficientes?|opinion\w*|experiencia\w*"
        r"|nada)\b",
        r"no (?:dispongo|cuento|poseo) ~1(?:de|con|informacion|datos|acceso|esa|ese|ningun\w*|suficient\w+)\b",
        r"no (?:encuentro|encontre|veo|hallo|localizo|localice|conozco|recuerdo)\b",
        r"no (?:he|hemos) (?:podido|encontrado|logrado|conseguido|hallado|visto|localizado)\b",
        r"no estoy ~1(?:seguro|segura|autorizad\w|capacitad\w|en condiciones|al tanto|disenad\w|programad\w|en posicion"
        r"|facultad\w|habilitad\w|cualificad\w|comod\w|en disposicion|al corriente)\b",
        r"no soy (?:capaz|la persona|el indicado|experto)\b",
        r"no (?:voy a|debo|quiero|deseo) (?!(?:ir|asistir|pagar|firmar|olvidar|renovar)\b)\w+",
        r"no (?:me |se me )(?:es|esta|permite\w*|corresponde|ha|han|resulta|siento)\b",
        r"no (?:comparto|proporciono|respondo|ofrezco|doy|facilito|genero|escribo|divulgo|redacto|revelo|discuto)\b",
        r"no (?:lo |le |te )?(?:hare|escribire|dare|compartire|revelare|respondere|generare|creare|divulgare"
        r"|proporcionare"
        r"|ayudare|redactare|repetire)\b|no (?:entiendo|comprendo)\b|(?:me prohiben|tengo prohibido"
        r"|me esta prohibido)\b",
        r"no creo (?:contenido|ese tipo|este tipo|mensajes|textos)\b|se me escapa\b|me supera\b",
        r"(?:necesito|necesitaria|haria falta|hace falta|se necesita) ~1mas (?:informacion|datos|detalles|contexto)\b",
        r"no (?:podemos|es posible) ~1(?:ayudarle|ayudarte|responder|procesar su|procesar tu|facilitarle|atender su"
        r"|atender tu)\b",
        r"(?:desconozco|ignoro|lo ignoro|me niego|rehuso|me abstengo|carezco de)\b",
        r"(?:declino|debo|tengo que|prefiero|preferiria|lamento|siento|temo que) ~1?(?:declinar|rechazar|no"
        r"|responder)\b",
        r"(?:solo|unicamente|solamente) (?:puedo|estoy|me es)\b|puedo (?:unicamente|solamente|solo)\b",
        r"(?:fuera|mas alla|excede|escapa|no forma parte|no entra|no es)\b ~2(?:mi|mis|nuestr\w+)\b",
        r"(?:va contra|en contra de|contraviene|infringe|viola) (?:mis|nuestras|las) (?:normas|politicas|directrices"
        r"|reglas)\b",
        r"mis (?:normas|politicas|directrices|reglas|instrucciones) ~1(?:permiten|impiden|prohiben)\b",
    ),
    lacks=_pattern(
        rf"{_ES_SOURCE} ~5no ~2(?:contien\w+|mencion\w+|especific\w+|indic\w+|inclu\w+|proporcion\w+|ofrec\w+|permit\w+"
        r"|dice\w*|dicen|hablan?|aparec\w+|abord\w+|trat\w+|detall\w+|aclar\w+|revel\w+|respond\w+|aport\w+|dan?|hacen?"
        r"|recog\w+|constan?|es suficiente|son suficientes|reflejan?|precisan?|figuran?|describ\w+|nombran?"
        r"|explic\w+)\b",
        rf"no (?:hay|existen?|aparecen?|constan?|figuran?|se (?:menciona|indica|especifica|encuentra|proporciona|ofrece"
        rf"|incluye|detalla|describe|aclara|recoge|hace)\w*)\b ~4(?:{_ES_INFORMATION}\b(?! personal)|suficiente\w*"
        rf"|nada)",
        rf"no (?:aparecen?|constan?|figuran?|se (?:menciona|indica|especifica|encuentra|incluye|detalla)\w*)\b"
        rf" ~6(?:en|por) ~3{_ES_SOURCE}",
        rf"(?:ningun\w*|nada)\b ~4{_ES_SOURCE}",
        rf"{_ES_SOURCE} ~5(?:no ~3)?(?:nada|ningun\w*) ~2(?:{_ES_INFORMATION}|sobre|al respecto|indica|menciona)\b",
        r"(?:no es posible|no se puede|imposible|no resulta posible|dificil) ~1(?:determinar|responder|saber|decir|dar"
        r"|confirmar|establecer|contestar|concluir|afirmar|precisar|deducir)\b",
        rf"no (?:queda|esta|es) claro\b ~4{_ES_SOURCE}",
        rf"{_ES_SOURCE} ~2(?:guardan? silencio|callan?|omiten?)\b|en ningun\w* (?:momento|lugar|parte"
        rf"|punto)\b ~8{_ES_SOURCE}",
        r"(?:dificil|imposible) (?:de )?(?:decir|decirlo|saber|saberlo|determinar|responder)\b",
        rf"{_ES_SOURCE} ~3no (?:queda|esta|es) claro\b",
        r"(?:respuesta|pregunta|informacion|dato) ~5no ~2(?:encuentran?|aparece|figura|puede (?:ser |)respond\w+"
        r"|menciona"
        r"|consta|se puede|esta (?:en|disponible|incluid\w|mencionad\w|presente|recogid\w|especificad\w))\b",
        r"sin (?:mas|informacion|acceso|contexto|otros|datos|detalles)\b ~6(?:dificil|imposible|no)\b",
        r"(?:falta|insuficiente|no hay suficiente|no tengo suficiente) ~1(?:informacion|contexto|datos)\b",
        r"(?:informacion|datos) ~3insuficientes?\b",
        r"^(?:eso |esto |ese dato )?no se (?:menciona|especifica|indica|precisa|detalla|aclara)\b",
    ),
    conjunctions=_starts(
        r"pero|sino|sin embargo|no obstante|asi que|por lo que|por tanto|por lo tanto|por eso|en la practica|en cambio"
        r"|aunque"
    ),
    contrasts=_starts(r"pero|sino|sin embargo|no obstante|en cambio|aunque"),
    offers=_starts(
        r"puedo|podria|podemos|estare|por favor|le|te|si|quizas?|tal vez|puede|puedes|consulte|consulta|pongase"
        r"|contacte"
        r"|intente|pregunte|estoy|con gusto"
    ),
    preamble=_pattern(
        r"siento\b|lament\w+|disculp\w+|perdon\w*|gracias\b|entiendo\b|comprendo\b|pregunta\b|solicitud\b|consulta\b"
        r"|hola\b"
        r"|como (?:modelo|ia|asistente)\b"
    ),
)

_IT_SOURCE = (
    r"(?:contesto|contesti|test[oi]|document[oi]|documentazione|font[ei]|bran[oi]|estratt[oi]|passagg[io]+|informazioni"
    r"|dati|base di conoscenz\w+|risultati|material[ei]|file|sezioni|note)"
)
_IT_INFORMATION = r"(?:informazion[ei]|menzion[ei]|dat[oi]|dettagli\w*|rispost[ae]|riferiment[oi]|indicazion[ei])"
_IT_OTHER_ACTS = (
    r"(?:venire|partecipare|essere presente|pagare|firmare|aspettare|dormire|credere|negare|lamentarmi|andare)"
)
ITALIAN = RefusalPhrases(
    negation=_pattern(
        r"non\b|nessun\w*|nulla\b|niente\b|ignoro\b|rifiut\w+|declin\w+|solo\b|soltanto\b|unicamente\b|esula\b|fuori\b"
        r"|senza\b|impossibile\b|oltre\b|bisogno\b|serv\w+|sfugge\b|proibito\b|vietato\b|tac\w+|manca\w*"
        r"|insufficient\w+|esclusivamente\b|contro\b"
        r"|viola\b|astengo\b"
        r"|difficile\b"
    ),
    declines=_pattern(
        r"non (?:mi |ti |le |vi |lo |la |li |ne |glielo |ci )?(?:posso|potrei|potro|riesco|saprei|riusciro)\b"
        rf"(?!(?: [\w']+){{0,2}} {_IT_OTHER_ACTS}\b)(?!(?: [\w']+){{0,6}} abbastanza$)",
        r"non (?:lo |ne )?so\b|non ne ho ~4idea\b|non (?:capisco|comprendo)\b|non do ",
        r"non (?:lo |le |ti )?(?:faro|scrivero|daro|rivelero|rispondero|condividero|generero|creero|divulghero|aiutero"
        r"|forniro|ripetero)\b|mi e (?:proibito|vietato)\b",
        r"non ho (?:potuto|trovato|individuato|rinvenuto|visto|reperito)\b",
        r"non abbiamo (?:trovato|reperito|potuto trovare) ~2(?:informazion\w+|rispost\w+|il suo|la sua|risultat\w+)\b",
        r"(?:non sono|non siamo) riuscit\w a (?:trovare|individuare|rispondere|reperire|recuperare|verificare"
        r"|determinare)\b",
        r"non ho ~4(?:informazion\w+|dati|accesso|dettagli|idea|modo|risposta|risposte|conoscenza|elementi|notizie"
        r"|possibilita|permesso|l'autorizzazione|abbastanza|sufficient\w+|capacita|opinioni|questa|certezza)\b",
        r"non (?:dispongo|possiedo|conosco|trovo|vedo|ricordo)\b",
        r"(?:^|io |e |ma |quindi |purtroppo |spiacente |dispiace |linguaggio |linguistico |ia |assistente |percio )"
        r"non (?:ne )?sono ~1(?:in grado|autorizzat[oa]|sicur[oa]|cert[oa]|a conoscenza|abilitat[oa]|qualificat[oa]"
        r"|capace"
        r"|programmat[oa]|progettat[oa]|nella posizione|tenut[oa]|competente|al corrente|a mio agio)\b",
        r"non (?:intendo|voglio|desidero|devo) (?!(?:venire|pagare|firmare|dimenticare|rinnovare)\b)\w+",
        r"non (?:fornisco|condivido|rispondo|offro|divulgo|genero|scrivo|rivelo|discuto|redigo)\b",
        r"non creo (?:contenut\w|questo tipo|messaggi|testi)\b|mi sfugge\b|non ho (?:alcun|nessun)\w*\b",
        r"(?:ho bisogno di|avrei bisogno di|mi servono|mi servirebbero|servirebbero|servono) ~1(?:piu|ulteriori"
        r"|maggiori"
        r"|altre) (?:informazioni|dettagli|dati|elementi)\b",
        r"non mi (?:e|viene|sento|risulta|e stato)\b",
        r"(?:mi e impossibile|mi rifiuto|mi astengo|ignoro|lo ignoro)\b",
        r"(?:devo|sono costrett\w a|preferisco|preferirei|temo)\b ~1(?:rifiutare|declinare|non)\b",
        r"non possiamo ~1(?:aiutarla|aiutarti|rispondere|fornirle|elaborare la sua|soddisfare la sua)\b",
        r"posso ~2(?:solo|soltanto|unicamente|esclusivamente)\b|(?:solo|soltanto) posso\b",
        r"(?:esula|fuori|al di fuori|oltre|al di la|non rientra|non e)\b ~2(?:mi[aoe]i?|mie|nostr\w+)\b",
        r"(?:va contro|contrari\w a|viola|contro) (?:le mie|le nostre|le|i miei) (?:linee guida|regole|politiche|norme"
        r"|principi)\b",
        r"le mie (?:linee guida|regole|istruzioni) ~2(?:permettono|consentono|impediscono|vietano)\b",
    ),
    lacks=_pattern(
        rf"{_IT_SOURCE} ~5non ~2(?:contien\w*|contengono|menzion\w+|specific\w+|indic\w+|inclu\w+|forni\w+|offr\w+"
        r"|permett\w+|consent\w+|dice|dicono|parla\w*|riport\w+|tratt\w+|rivel\w+|rispond\w+|precis\w+|chiarisc\w+|da"
        r"|danno"
        r"|descriv\w+|compare|compaiono|e sufficiente|sono sufficienti|fa|fanno|cita\w*|figura\w*|nomina\w*"
        r"|spiega\w*)\b",
        rf"non (?:c'e|ci sono|esist\w+|vi e|vi sono|risulta\w*|compare|compaiono|figura\w*|viene|vengono|e)\b ~4"
        rf"(?:{_IT_INFORMATION}\b|sufficient\w+|nulla|menzionat\w|indicat\w|specificat\w) ?~2(?!personal)"
        r"(?:nel\w*|su\w*|in|riguard\w+|per|al|a|relativ\w+|disponibil\w+|utili|circa|$)",
        rf"(?:nel|nei|nelle|nella|dal|dai|dalle|dalla)\b ~1{_IT_SOURCE} ~4non ~1(?:e|viene|vengono|si|c'e|ci|compare"
        r"|risulta\w*|figura\w*|emerge|emergono)\b",
        rf"(?:nessun\w*|nulla|niente)\b ~4{_IT_SOURCE}",
        rf"{_IT_SOURCE} ~4(?:nulla|niente)\b|{_IT_SOURCE} ~1(?:tace|tacciono)\b",
        rf"(?:in|nei|nel|nelle) ~2{_IT_SOURCE} non si parla\b",
        r"(?:difficile|impossibile) (?:da )?(?:dire|dirlo|saperlo|stabilirlo|determinarlo|rispondere)\b",
        r"(?:non e possibile|non si puo|impossibile|non risulta possibile|difficile) ~1(?:determinare|rispondere|sapere"
        r"|dire|dare|confermare|stabilire|concludere|affermare|precisare)\b",
        rf"non e (?:chiaro|specificato|indicato|menzionato)\b ~4{_IT_SOURCE}",
        r"(?:risposta|domanda|informazione|dato) ~5non ~2(?:presente|trova|compare|figura|disponibile|contenut\w"
        r"|inclus\w"
        r"|menzionat\w|specificat\w|puo|indicat\w)\b",
        r"senza (?:ulteriori|altre|altri|piu|maggiori|informazioni|accesso|contesto)\b ~6(?:difficile|impossibile"
        r"|non)\b",
        r"^(?:questo |cio |questa informazione )?non (?:e|viene|e stat\w) (?:specificat|menzionat|indicat|precisat"
        r"|riportat)\w\b",
        r"(?:mancano|informazioni ~3insufficienti|non abbastanza|non sufficienti) ?(?:informazioni|dati|elementi)?\b",
    ),
    conjunctions=_starts(
        r"ma|pero|tuttavia|invece|bensi|quindi|percio|dunque|pertanto|in pratica|nella pratica|comunque|cosi"
    ),
    contrasts=_starts(r"ma|pero|tuttavia|invece|bensi|comunque"),
    offers=_starts(
        r"posso|potrei|possiamo|per favore|la|ti|se|forse|puo|puoi|consulti|contatti|provi|prova|chieda|chiedi|sono"
        r"|saro"
        r"|si rivolga|volentieri"
    ),
    preamble=_pattern(
        r"dispiace\b|spiace\b|spiacente\b|scus\w+|grazie\b|capisco\b|comprendo\b|purtroppo\b|domanda\b|richiesta\b"
        r"|salve\b|ciao\b|in quanto\b"
    ),
)

_PT_SOURCE = (
    r"(?:contextos?|textos?|documentos?|documentacao|fontes?|trechos?|passagens?|passagem|extratos?|informacoes|dados"
    r"|base de (?:dados|conhecimentos?)|resultados|materia\w+|arquivos?|ficheiros?|secoes|notas|excertos?)"
)
_PT_INFORMATION = r"(?:informac\w+|menc\w+|dados?|detalhes?|respostas?|referencias?|indicac\w+)"
_PT_OTHER_ACTS = r"(?:ir|vir|comparecer|participar|pagar|assinar|esperar|dormir|acreditar|negar|reclamar)"
PORTUGUESE = RefusalPhrases(
    negation=_pattern(
        r"nao\b|nenhum\w*|nada\b|nem\b|desconheco\b|ignoro\b|recus\w+|declin\w+|so\b|somente\b|apenas\b|fora\b|foge\b"
        r"|sem\b"
        r"|impossivel\b|falta\w*|insuficiente\w*|alem\b|precis\w+|necessari\w+|proibid\w|vedad\w|omiss\w+|silencia\w*"
        r"|calam?\b|escapa\b|contra\b|viola\b|tampouco\b"
        r"|ultrapassa\b|dificil\b"
    ),
    declines=_pattern(
        r"nao (?:me |te |lhe |o |a |os |as )?(?:posso|poderei|poderia|consigo|conseguirei|saberia)\b"
        rf"(?!(?: [\w']+){{0,2}} {_PT_OTHER_ACTS}\b)(?!(?: [\w']+){{0,6}} (?:suficiente|bastante)$)",
        r"nao (?:consegui|pude)\b (?!(?:ir|vir|dormir)\b)\w+",
        r"nao (?:o )?sei\b|(?:nao faco|nao tenho|nenhuma) ~2ideia\b",
        r"nao tenho ~4(?:informac\w+|dados?|acesso|conhecimento|detalhes?|resposta|permissao|permitido|capacidade"
        r"|registros?|registos?|autorizacao|forma|como|certeza|suficientes?|opinio\w+|experiencia\w*|nada)\b",
        r"nao (?:disponho|possuo|conto com|encontro|encontrei|achei|localizei|vejo|vi|conheco|recordo|lembro)\b",
        r"nao estou ~1(?:certo|certa|segur[oa]|autorizad\w|capacitad\w|em condicoes|ciente|habilitad\w|apt[oa]"
        r"|em posicao"
        r"|programad\w|a vontade|qualificad\w|a par)\b",
        r"nao sou (?:capaz|a pessoa|especialista)\b",
        r"nao (?:vou|devo|quero|desejo|pretendo) (?!(?:ir|pagar|assinar|esquecer|renovar)\b)\w+",
        r"nao me (?:e|foi|sinto|cabe|permitem)\b|nao (?:e-me|me e) \w+",
        r"nao (?:compartilho|partilho|forneco|respondo|ofereco|divulgo|gero|escrevo|revelo|discuto|redijo)\b",
        r"nao (?:o |lhe |te )?(?:farei|escreverei|darei|revelarei|responderei|compartilharei|partilharei|gerarei"
        r"|criarei"
        r"|divulgarei|ajudarei|fornecerei|repetirei)\b|nao (?:entendo|compreendo)\b|nao dou\b",
        r"(?:e me|me e|estou) (?:proibid\w|vedad\w)\b",
        r"nao crio (?:conteudo|esse tipo|este tipo|mensagens|textos)\b|me escapa\b|foge me\b",
        r"(?:preciso|precisaria|seriam? necessari\w+|sao necessari\w+) ~2mais (?:informac\w+|dados|detalhes"
        r"|contexto)\b",
        r"nao (?:conseguimos|podemos|pudemos) ~1(?:ajudar|responder|processar|fornecer ess\w|atender|localizar"
        r"|encontrar)\b",
        r"(?:desconheco|ignoro|recuso me|me recuso|abstenho me)\b",
        r"(?:devo|tenho que|tenho de|prefiro|preferia|preferiria|receio|lamento|sinto muito mas|infelizmente) ~1"
        r"(?:recusar|declinar|nao (?:posso|poder|consigo|tenho|responder|adivinhar|comentar|dizer|sei)|nao)\b",
        r"(?:so|somente|apenas) (?:posso|consigo|estou|me e)\b|(?:posso|consigo) (?:apenas|somente|so)\b",
        r"(?:foge|fora|alem|ultrapassa|nao faz parte|nao esta|nao e|nao se enquadra)\b ~2(?:meu|minha|meus|minhas|nosso"
        r"|nossa|nossos|nossas)\b",
        r"(?:vai contra|contra|viola|contraria) (?:as minhas|minhas|as nossas|nossas|as) (?:diretrizes|regras|politicas"
        r"|normas)\b",
        r"minhas (?:diretrizes|regras|instrucoes) ~1(?:permitem|impedem|proibem)\b",
    ),
    lacks=_pattern(
        rf"{_PT_SOURCE} ~5nao ~2(?:cont\w+|mencion\w+|especific\w+|indic\w+|inclu\w+|fornec\w+|oferec\w+|permit\w+"
        rf"|diz\w*"
        r"|fala\w*|aparec\w+|abord\w+|trat\w+|detalh\w+|esclarec\w+|revel\w+|respond\w+|traz\w*|da|dao|faz\w*|consta\w*"
        r"|e suficiente|sao suficientes|apresent\w+|cita\w*|descrev\w+|inform\w+|explic\w+)\b",
        rf"nao (?:ha|existem?|aparecem?|constam?|foram? encontrad\w+|se (?:menciona|indica|encontra)\w*)\b ~4"
        rf"(?:{_PT_INFORMATION}\b(?! pessoa)|suficiente\w*|nada)",
        rf"nao (?:aparece\w*|consta\w*|e mencionad\w|esta\w* (?:mencionad\w|presente|disponive\w+))\b ~6(?:em|n[oa]s?)"
        rf" ~2{_PT_SOURCE}",
        rf"(?:nenhum\w*|nada)\b ~4{_PT_SOURCE}",
        rf"{_PT_SOURCE} ~4nada\b|{_PT_SOURCE} ~2(?:omiss\w+|silencia\w*|calam?)\b",
        rf"em nenhum\w* (?:momento|lugar|parte|ponto)\b ~8{_PT_SOURCE}",
        r"(?:nao e possivel|nao se pode|impossivel|dificil) ~1(?:determinar|responder|saber|dizer|dar|confirmar"
        r"|estabelecer|concluir|afirmar|precisar)\b",
        rf"nao (?:fica|esta|e) claro\b ~4{_PT_SOURCE}",
        rf"{_PT_SOURCE} ~3nao (?:fica|esta|e) claro\b",
        r"(?:resposta|pergunta|informacao|dado) ~5nao ~2(?:encontra\w*|aparece|consta|pode|presente|disponivel"
        r"|mencionad\w"
        r"|esta (?:em|n[oa]s?|disponivel|incluid\w|mencionad\w|presente))\b",
        r"sem (?:mais|informac\w+|acesso|contexto|outros|dados|detalhes)\b ~6(?:dificil|impossivel|nao)\b",
        r"(?:falta\w*|insuficientes?|nao ha suficientes?) ~1(?:informac\w+|contexto|dados)\b"
        r"|(?:informac\w+|dados) ~3insuficientes?\b",
        r"^(?:isso |isto |essa informacao )?nao (?:e|foi|se) (?:especific|mencion|indic|precis|inform)\w+\b",
    ),
    conjunctions=_starts(
        r"mas|porem|contudo|no entanto|todavia|entretanto|portanto|entao|por isso|logo|na pratica|assim|e sim|por outro"
    ),
    contrasts=_starts(r"mas|porem|contudo|no entanto|todavia|entretanto|e sim|por outro"),
    offers=_starts(
        r"posso|poderia|podemos|por favor|se|talvez|pode|consulte|contate|entre em contato|tente|pergunte|estou|fico"
        r"|sugiro|recomendo|procure"
    ),
    preamble=_pattern(
        r"desculp\w+|lament\w+|sinto\b|obrigad\w|entendo\b|compreendo\b|infelizmente\b|pergunta\b|pedido\b"
        r"|solicitacao\b"
        r"|ola\b|como (?:modelo|ia|assistente)\b"
    ),
)

LANGUAGES = (GERMAN, FRENCH, SPANISH, ITALIAN, PORTUGUESE)
