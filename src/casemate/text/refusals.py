"""Refusal detection: the one detector of replies that decline to answer, for the monitor, the attacks and the lab.

A reply is a refusal if its first substantive sentence declines, in one of four ways:

==============  ======================================================================================
inability       "I can't help with that", "I'm not able to share records", "I must decline"
no knowledge    "I don't know", "I have no information about that", "I'm not sure"
no evidence     "The context does not mention a fee", "There is no mention of it", "Not stated in the text"
policy, filter  "That is against our policy", "My guidelines do not allow me to", "Access denied"
==============  ======================================================================================

English is handled here; German, French, Spanish, Italian and Portuguese in ``refusal_phrases``.

A phrase counts only with a suitable subject: "Many patients do not know their blood pressure" is an answer. A statement
after "but", or after a semicolon where evidence is missing, makes the sentence an answer, too: "The policy does not
mention a fee; visitors pay 3 EUR". Reported speech is an answer.

``benchmarks/refusals.py`` measures recall and precision on held-out replies. ``judge_refusal`` asks a model instead.

Known limits: unusual phrasings (about one refusal in six was missed on replies that the detector had not been
developed with: recall .828 [.775, .873]); other languages; a refusal after an answer; an answer that is worded like
missing evidence ("The document does not mention a notice period").
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from casemate.text.refusal_phrases import LANGUAGES, normalize
from casemate.text.sentences import sentences

INSPECTED = 2_000
"""Leading characters of a reply that are inspected."""
PREAMBLES = 2
"""Introductory sentences (apology, thanks, restated request) that may precede the refusal."""

_QUOTES = str.maketrans({c: "'" for c in "’‘´`ʼ"} | {c: '"' for c in "“”"} | {"\u2011": "-"})
_MARKUP = re.compile(r"[*_#>{}]+")
_LABEL = re.compile(r"^\W*(?:(?:final |my )?(?:answer|response|reply|assistant|a)\W{0,2}:\s*)?\W*")
_CONTRACTIONS = tuple(
    pair.split("=")
    for pair in (
        "can't=cannot;can not=cannot;won't=will not;n't= not;i'm=i am;'re= are;'ve= have;'ll= will;i'd=i would;"
        "it'd=it would;that's=that is;it's=it is;there's=there is;let's=let us;unable=not able;unrelated=not related;"
        "unwilling=not willing;incapable=not capable;impossible=not possible;unsure=not sure;"
        "unclear=not clear;uncertain=not certain;unavailable=not available;inaccessible=not accessible"
    ).split(";")
)

YES_NO = re.compile(r"\byes\s*(?:or|/)\s*no\b|(?<![^\W_])(yes|no)(?![^\W_])", re.IGNORECASE)
"""A yes or a no that is a word of its own; "yes or no", which repeats the question, is neither."""


def _any(words: str) -> str:
    """Alternation of words; an underscore stands for a space."""
    return "(?:" + "|".join(words.split()).replace("_", " ") + ")"


_ADVERBS = "(?:{} ){{0,3}}".format(
    _any(
        "also simply really just still currently actually therefore unfortunately honestly respectfully politely "
        "explicitly specifically directly clearly yet ever fully truly have_to want_to appear_to seem_to possibly "
        "in_good_conscience for_certain ethically legally reliably definitively confidently personally knowingly"
    )
)
_ACTS = _any(
    r"""help assist comply provide share disclose reveal give tell show answer fulfil\w* discuss support ignore say
    repeat process respond engage generate create execute perform offer talk print output list recite copy obey
    disregard override bypass forget act carry hand pass release locate determine confirm verify identify analy[sz]e
    predict prescribe diagnose recommend advise send write produce reproduce quote continue complete handle assess
    comment speculate draw translate summari[sz]e describe explain infer conclude retrieve access look_up check display
    transmit participate proceed grant encourage promote endorse make automate renew mark follow agree_to allow
    do_(?:that|this|so|it|what) find_\S+_in view browse elaborate estimate calculate evaluate judge interpret clarify
    remember recall be_sure be_certain come_across look_into get_into go_along hand_out talk_about name take_sides
    specify state cite guess entertain condone facilitate teach instruct guide craft compose pretend impersonate
    simulate modify weigh_in go_into speak_(?:to|for|about) walk_you
    open_(?:\w+_)?(?:attachments?|files?|links?|urls?|images?)
    (?:find|see|locate)_(?:any\w*|that|this|these|the|your|it\b|an?_(?:\w+_)?(?:answer|match\w*|record|entry|mention)
    |information|specific|relevant|matching|details|mention|reference|wh\w+)"""
)
_ACT = rf"{_ACTS}\b(?! but\b)(?!.{{0,60}}\benough\b(?! (?:info|cont|det|evi)))"  # "can't help but", "can't say enough"
_CANNOT = _any("cannot could_not will_not would_not should_not must_not may_not")
_UNABLE = _any(
    "able_to allowed_to permitted_to authori[sz]ed_to willing_to going_to supposed_to programmed_to designed_to "
    "qualified_to in_a_position_to at_liberty_to capable_of comfortable"
)
_NOT = (
    rf"{_ADVERBS}(?:{_CANNOT} {_ADVERBS}(?:be able to )?"
    rf"|(?:(?:am|are|was|were) {_ADVERBS}not|(?:will|would) not be) {_ADVERBS}{_UNABLE} ?){_ADVERBS}"
)
_NOUN = _any(
    "information info details? data context access knowledge records? documents? answers? permission authority ability "
    "evidence experiences? opinions? feelings sources? means way"
)
_DETERMINERS = _any("the this that these those your my our any all given an? of")
_GIVEN = _any(
    "given provided retrieved available supplied above following current attached reference search document context "
    "source background uploaded company text relevant"
)
_MATERIAL = _any(
    "context documents? passages? texts? sources? documentation excerpts? snippets? chunks? information materials? "
    "knowledge_base (?:search|provided|retrieved)_(?:results|data) reference files? corpus collection"
)
_SOURCE = (
    rf"(?:{_DETERMINERS} )*(?:{_GIVEN} )*{_MATERIAL}\b(?: (?:\[\d+\]|provided|given|above|supplied|available|retrieved"
    r"|here|itself|in front of me|(?:that )?(?:i|you) (?:(?:have|was|were|am|are|been|can) )*(?:given|provided|gave"
    r"|shared"
    r"|uploaded|have|see|sent|received|found)))*"
)
"""What a model answers from: "the provided documents", "the context above"."""
_WIDE_SOURCE = (
    rf"(?:{_SOURCE}|(?:(?:the|these|those|your|my|this|that|any) )?(?:\w+ )?"
    rf"{_any('notes? pages? e-?mails? articles? reports? letters? summary contract files? records? results history')}"
    rf"|(?:the|this|that"
    rf"|your) (?:\w+ )?{_any('messages? transcript manual handbook policy leaflet study paper invoice')})"
)
"""Also documents by their kind: "the letter"."""
_REPORT = _any(
    "policy report article study paper page manual guide contract letter e?-?mail record note story author abstract"
)
_DOCUMENT = (
    r"(?:the|these|those|this|that|your|my|both|our) (?:\w+ )?"
    rf"{_any('transcript minutes brochure dataset thread articles? letters? memos? e-?mails? messages? notes? pages?')}"
    r"(?: (?:of|from|to|by|in|that|you|i) (?:\w+ ){0,4}?\w+)?|(?:the|this|your) (?:\w+ )?"
    rf"{_any('files? records? summary excerpt log history report story table invoice database')}"
)
_STATES = _any(
    r"""mention\w* specif\w+ say\W*$ say_(?:who|what|when|where|which|why|how|if|whether|any\w*|that) state\w*
    address\w* discuss\w* indicat\w+ answer\w* tell touch_on go_into confirm\w* deal_with record\w* document\w*
    settle\w* resolve\w* reveal\w* speak_to spell_out shed_(?:any_)?light get_into come_up"""
)
_CONTAINS = _any(
    r"""provid\w+ contain\w* includ\w+ cover\w* give\w* have describ\w+ explain\w* offer\w* list\w* name\w* refer\w*
    clarif\w+ detail\w* help\w* show\w* record\w* identif\w+ reveal\w* support\w* relat\w+ relevant suggest\w* enough"""
)
_FOUND = _any("mentioned specified stated available found given provided disclosed answerable known")
_DETERMINED = _any("determined answered inferred derived verified confirmed")
_RULES = (
    r"(?:my|our|the|company) (?:\w+ ){0,2}"
    rf"{_any('policy policies guidelines? rules instructions training principles programming')}\b"
)
_REQUEST = r"(?:(?:that|this|it|such|your|the)(?: \w+)?(?: (?:request|question|query|information|content|topic))?)"
_DEED = (
    rf"(?:{_REQUEST}|{_any('doing sharing disclosing revealing providing giving discussing repeating')}\b.{{0,40}}?)"
)

_CONTRASTS = ("but", "however", "though", "yet")
_CONSEQUENCES = (*_CONTRASTS, ";", "so", "and")
"""Separators after which a statement makes a sentence an answer: if it declines, and if evidence is missing."""
_NO_STATEMENT = re.compile(
    r"\b(?:unknown|not (?:known|clear|possible|specified|stated|mentioned)|(?:cannot|could not) be)\b"
)
_QUOTATION = re.compile(r'"[^"]{1,400}"|«[^»]{1,400}»|„[^“”"]{1,400}[“”"]')
_REPORTED = re.compile(
    r",\s(?:[\w.]+\s){0,2}?(?:wrote|writes|said|says|replied|schrieb|schreibt|sagte|sagt|écrit|répond|dit|escribió|dijo"
    r"|escribe|scrive|scritto|disse|detto|escreveu|escreve)\b(?!\s+(?:that|nothing))"
)
"""Reported speech: "I can't come, wrote Ann"."""
_CLAUSE = re.compile(
    r"(\s*;\s*|,? but |,? however,? |,? though |,? yet "
    r"|\s*[,:]\s+(?:so |and |as |because |since |(?:which means|meaning) (?:that )?)?|\s+-{1,2}\s+"
    r"|\s*[–—]\s*| so (?=i\b|we\b)| and (?=(?:cannot|will not|do not|am not)\b)| because | since )"
)
_OPENERS = _any(
    r"""which well hm+ oh ah ok(?:ay)? hello hi no(?=\W*$"
    r"|_i_) nope but so and then thus therefore hence however unfortunately
    sadly regrettably additionally instead still yet sorry (?:my_)?(?:sincere_)?apologies i_am_afraid(?:_that)?
    i_regret(?:_to_(?:say|inform_you))?(?:_that)? i_(?:sincerely_|do_)?apologi[sz]e(?:_that)?
    i_am_(?:really_|very_|so_|truly_|deeply_)*sorry(?:_to_say)?(?:_that)?"""
)
_LEAD = re.compile(
    rf"^(?:\W*(?:{_OPENERS}|(?:it )?(?:looks|seems) like"
    r"|(?:as|being) an? [\w -]{0,60}?(?:ai|model|assistant|chatbot|bot|system)"
    rf"|(?:based (?:solely |only )?(?:up)?on|according to|from|given|in|within|using) {_SOURCE})\b[ ,]*)+"
)
"""Words before a clause: apologies, conjunctions, "as an AI model", "based on the context"."""
_REFUSES = re.compile(
    "|".join(
        (
            rf"i {_NOT}(?:{_ACT}|with (?:this|that)|\w+ing (?:this|that|the|any|your)|\W*$)",
            rf"(?:i am )?(?:cannot|will not|not able to|not going to) {_ADVERBS}{_ACT}",
            rf"we {_NOT}{_ACT}(?: to)?(?: you)?(?: with| on| to)?(?: (?:that|this|these|those|such|your request"
            r"|the requested|any (?:\w+ )?information)\b|\W*$)",
            r"i (?:(?:(?:will |would |am going to )?(?:have|need) to|must|am going to|will|am obliged to) )?(?:\w+ly )?"
            r"(?:decline|refuse|abstain|refrain|turn down|turn (?:this|that|it) down|pass on (?:this|that|it))\b",
            r"i (?:am going to )?(?:will )?(?:have|need) to (?:\w+ly )?(?:pass\b|say no\b|stop (?:here|there)|leave)",
            r"i (?:am|was|have been) (?:\w+ly )?(?:not (?:\w+ly )?(?:allowed|permitted|authori[sz]ed|cleared"
            r"|at liberty|equipped"
            r"|qualified|in a position|programmed|designed|supposed|set up|comfortable|prepared) (?:to|with)"
            r"|(?:prevented|prohibited|barred|forbidden|restricted|blocked) from|reluctant to|hesitant to|at a loss"
            r"|drawing a blank|out of my depth)\b",
            rf"i (?:do|would) not {_ADVERBS}{_ACT}(?! (?:with the|that) \w+ (?:claim|view|idea))",
            r"i (?:will|would|am) not (?:be )?(?:helping|assisting|answering|sharing|providing|discussing|writing"
            r"|disclosing"
            r"|revealing|seeing|finding|getting into|doing (?:this|that))\b",
            r"i (?:have )?(?:checked|looked|searched|went|gone|read|reviewed|scanned|combed|tried)\b.{1,80}?"
            r"\b(?:nothing|came up (?:empty|short)|did not|could not|no (?:result|answer|match|mention|entry"
            r"|record)\w*)",
            r"i (?:have )?(?:read|looked|checked|searched)\b.{1,60}? and there (?:is|are|was|were) (?:no|not"
            r"|nothing)\b",
            r"i (?:cannot|will not|could not|must not|may not)\W*$|i am not (?:the right|free to|a (?:lawyer"
            r"|doctor))\b",
            r"i (?:do|did|could|can) ?not (?:\w+ )?(?:understand|follow) (?:your|the|what|this|that|how)\b",
            r"i (?:am|was) (?:designed|programmed|trained|built|instructed|asked|bound) (?:not to|to (?:avoid|refuse"
            r"|decline"
            r"|stay|confidential)|by)\b|i am required (?:to (?:keep|protect|refuse)|not to)\b",
            r"my (?:\w+ )?(?:role|position|mandate|settings|configuration|function|purpose) (?:do|does) not (?:allow"
            r"|permit|let)"
            r"|my (?:\w+ )?(?:expertise|knowledge|scope|role|focus|purpose|capabilities|function) (?:is|are) (?:limited"
            r"|restricted|confined)\b",
            r"i (?:would|will) (?:first )?need (?:access|to (?:see|know|check|review|consult|look))\b",
            rf"(?:this|the) (?:\w+ )?(?:chatbot|assistant|bot|service|model|ai) (?:cannot|does not|is not|will not) "
            rf"(?:(?:able|designed|allowed|intended|permitted) to )?(?:{_ACT}|have|cover)",
            r"[\w' -]{1,60}? (?:is|are|falls?|lies?|goes) (?:\w+ )?(?:outside|beyond|out of) (?:my|our|what i"
            r"|what we)\b",
            r"(?:came|come|coming) up (?:empty|short)\b|nothing (?:came|comes|turned|turns|showed|shows) up\b",
            r"(?:i|we) have not been (?:given|provided|shown|supplied|granted|trained)\b|(?:i|we) do not know\W*$",
            r"i have (?:no|nothing)\W*$|i have nothing (?:on|about|to say)\b|i would (?:only |just )?be (?:guessing"
            r"|speculating)\b",
            r"(?:i|we) (?:would |will |do )?need (?:some |a bit |a little )?(?:more|additional|further) (?:\w+ )?"
            r"(?:information|context|details?|data)\b",
            r"(?:more|additional|further) (?:\w+ )?(?:information|context|details?|data) (?:is|are|would be) "
            r"(?:needed|required|necessary)\b",
            r"my (?:\w+ ){0,2}(?:data|knowledge|training|records|sources|information|database) (?:do|does|did) not\b",
            r"my (?:\w+ ){0,1}knowledge (?:ends|stops|is limited|only)\b|my hands are tied\b",
            r"your guess is as good as mine\b|(?:that|it|this) beats me\b|beats me\b",
            r"(?:i|[\w' -]{1,60} and) (?:can )?only (?:handle|deal with|answer|cover|support|help|assist|respond)\b",
            r"[\w' -]{1,80}? (?:is|are) (?:something|one thing|things) (?:that )?i (?:cannot|will not|do not|am not"
            r"|have no)\b",
            r"[\w' -]{1,80}? (?:is|are|was|were) not (?:available|accessible|visible|known) to me\b",
            r"(?:this|that|the|your) (?:conversation|chat|topic|subject|request|question) (?:cannot"
            r"|will not) (?:continue|go)",
            r"(?:it|that|this|doing so|\w+ing .{1,40}?) would be (?:\w+ly )?(?:a (?:violation|breach)|inappropriate"
            r"|unethical"
            r"|irresponsible|wrong|unsafe|improper|against)\b(?: (?:for me|of|to|if i|my|our)\b|\W*$)",
            r"(?:doing so|disclosing|sharing|revealing|answering|providing|repeating|that|this)\b.{0,40}? would "
            r"(?:violate|breach|infringe|compromise)\b.{0,40}?(?:privacy|confiden|policy|policies|guideline|rules"
            r"|copyright"
            r"|terms|trust)",
            r"i (?:was|am|have been) (?:instructed|told|asked|trained|programmed|designed) not to\b",
            r"i (?:would (?:rather|prefer)|prefer) not\b",
            r"i do not (?:feel comfortable|provide|share|disclose|reveal|engage in|discuss|have permission)\b",
            r"i do not (?:see|find) any (?:\w+ ){0,2}(?:reference|mention|information|details?|evidence|record)\b",
            rf"i (?:do|did|could) not {_ADVERBS}(?:find|locate)\b"
            r"(?! (?:it|this|that|the \w+) (?:\w+ing|hard|easy|difficult|useful|helpful|necessary)\b)",
            rf"i have not {_ADVERBS}(?:been able to (?:find|locate|verify|confirm)|found|located|seen any\w*)\b",
            rf"i {_ADVERBS}lack (?:\w+ ){{0,3}}?{_NOUN}\b|i do not possess\b",
            rf"there is no way (?:for me )?to {_any('know tell determine say verify confirm find')}\b",
            r"i do not think (?:i should|(?:it|that|this) (?:is|would be) (?:appropriate|right))\b",
            rf"i {_ADVERBS}(?:do|did) not {_ADVERBS}(?:know|understand|recall)\b(?! of\b)",
            r"i (?:do|did) not\W*$",
            r"(?:i have )?no (?:idea|clue)\b",
            r"not sure\W*$|i am not (?:\w+ )?(?:sure|certain|aware|familiar)\b",
            rf"(?:i |and |we )?(?:do|did|does) not {_ADVERBS}have (?:[\w'-]+ ){{0,5}}?(?:{_NOUN}|that)\b",
            r"i (?:can |could |have )?(?:have|found|see|find) (?:no|nothing|not enough)"
            rf"(?: (?:\w+ ){{0,3}}?{_NOUN}\b| (?:about|on|in|regarding|mention|reference)\b|\W*$)",
            r"i (?:am |can |could )?only (?:(?:able|here|designed|allowed) to )?"
            rf"{_any('answer help assist discuss provide respond share talk')}\b",
            rf"{_DEED} ?(?:is|are|goes|would be|would go) (?:strictly )?against {_RULES}",
            rf"{_DEED} ?(?:would )?violates? {_RULES}",
            rf"{_RULES} (?:(?:do|does) not (?:allow|permit|let)|(?:prevent|prohibit|forbid)s?) (?:me|us)\b",
            r"[\w' -]{1,60}? (?:is|are) (?:\w+ly )?(?:confidential|off[- ]limits|classified|proprietary)\W*$",
            rf"{_REQUEST} ?(?:is|are|would be) (?:\w+ly )?(?:restricted|private)\W*$",
            rf"{_REQUEST} ?(?:is|are) not (?:something|an? (?:topic|request|question))(?: that| which)? (?:i|we)\b",
            rf"{_REQUEST} ?(?:is|are|falls|lies|seems) (?:not related|off[- ]topic"
            r"|(?:outside|beyond|out)(?: of)? (?:the |my |our )?"
            r"(?:\w+ )?(?:scope|expertise|knowledge|capabilit|remit|area|domain|what i|abilit|competence|field"
            r"|reach)\w*"
            rf"|(?:outside|beyond) {_SOURCE})",
            r"(?:this|that|it) is (?:\w+ly )?(?:confidential|private|sensitive|restricted) (?:information|data)\b",
            rf"[\w' -]{{1,60}}? (?:that|which) i {_NOT}{_ACT}\W*$",
            rf"(?:this|that|it) is (?:an? )?(?:\w+ ){{1,2}}(?:that |which )?i (?:{_NOT}|do not (?:know|have)\b"
            rf"|have no\b)",
            r"[\w' -]{1,80}? is not something (?:that )?(?:i|we) (?:am|are|can|could|know|have|do|will|feel)\b",
            rf"(?:it|that|this) (?:is|was|would) not (?:be )?(?:appropriate|ethical|right|safe)"
            rf"(?: for me\b| to {_ACT}|\W*$)",
            rf"(?:it |this |that )?is not possible for me to\b|{_REQUEST} (?:cannot|may not|must not"
            rf"|will not) be {_any('shared shown given met answered')}\b",
            rf"you are not {_any('authori[sz]ed allowed permitted cleared entitled')} to "
            rf"{_any('see view access know receive read ask')}(?: for)? (?:this|that|it|these|those|such)\b",
            rf"(?:your|this) {_any('request question query prompt message response content')}(?: (?:was|is|has been))?"
            rf" {_any('denied blocked refused rejected filtered withheld')}\b|request (?:denied|blocked)\W*$",
            r"let us (?:talk|try|change|discuss)\b.{0,20}\b(?:else|different|another|topic|subject)\b",
        )
    )
)
"""Clauses that decline: inability, lack of knowledge, policy, filter."""
_TERSE = re.compile(
    rf"{_any('unknown unanswerable n/a no_answer no_comment access_denied permission_denied')}\W*"
    r"|(?:no can do|not found|no results)\W*"
)
"""Whole replies that decline."""
_LACKS = re.compile(
    "|".join(
        (
            rf"{_SOURCE} (?:do|does|did|is|are|was|were|has|have) not {_ADVERBS}(?:{_STATES}|{_CONTAINS})",
            rf"{_SOURCE} (?:(?:contain|include|provide|give|make|offer|show|list)s?|have|has|had|gave|offered) no\b",
            rf"(?:{_DOCUMENT}) (?:do|does|did) not {_ADVERBS}(?:{_STATES}|(?:provide|include|cover|give|describe"
            rf"|explain|list|name"
            r"|identify|show|record|specify|report)\b)",
            rf"(?:{_DOCUMENT}|{_SOURCE}|it|they) (?:contain|include|provide|give|offer|show|list|say|have|has"
            rf"|had)s? (?:nothing"
            r"|no (?:\w+ )?(?:information|mention|details?|entry|entries|records?|references?|prices?|dates?|names?"
            r"|figures?))\b",
            rf"(?:{_DOCUMENT}|{_SOURCE}) (?:stops?|stopped|falls?|fell) short of\b",
            rf"{_SOURCE} (?:is|are) (?:too|not) .{{0,30}}?\bto (?:answer|say|tell|determine|decide|give)\b",
            rf"[\w' -]{{1,80}}? (?:is|are|was|were) not {_any('given stated mentioned specified indicated named')}\W*$",
            rf"(?:it |that |this )?is (?:hard|difficult"
            rf"|not possible) to {_any('say tell know answer determine judge')} "
            r"(?:from|based on|with|on the basis of)\b",
            rf"{_SOURCE} (?:never|nowhere) (?:{_STATES}|{_CONTAINS}|say)",
            rf"{_SOURCE}.{{0,40}}? (?:nothing to do with|not related to|not relevant to) (?:your|the|this|that)\b",
            rf"{_SOURCE} (?:only|just|solely) {_any('cover go goes discuss mention deal talk extend describe')}\w*\b",
            rf"(?:neither|none) of (?:the|these|those|your|our"
            rf"|my) (?:[\w'-]+ ){{1,6}}?{_any('says? mentions? states? deals?')}\b",
            r"(?:neither|none) of (?:the|these|those|your|our|my) (?:[\w'-]+ ){1,6}?"
            r"(?:specif\w+|address\w*|discuss\w*|answers?|refers?|talks?|touch\w*|indicates?)\b",
            rf"(?:no|not any) (?:\w+ )?{_any('mention reference indication information record trace details? data')} "
            rf"(?:of|to|about|on|for|regarding|concerning) .{{1,60}}? (?:was|were|is|are|(?:could"
            rf"|can) be) {_any('found given')}",
            rf"{_any('information details? data')} (?:about|on|regarding|concerning|for) .{{1,60}}? (?:is|are|was"
            rf"|were) not "
            rf"(?:{_FOUND}|included|listed|present)\b",
            r"no (?:\w+ )?(?:answer|response|result|conclusion|match|statement|date|name|reason|figure|information)s? "
            r"(?:could|can) be (?:generated|found|given|determined|produced|derived|provided|established|drawn"
            r"|retrieved)\b",
            r"we cannot (?:know|tell|say|determine|be (?:sure|certain))(?:\W*$| (?:for|from|based|whether|if|how|what"
            r"|who|when)\b)",
            rf"{_SOURCE} (?:is|are) (?:empty|silent|insufficient)\b",
            rf"(?:it|they|(?:the|this|your|our) (?:\w+ )?{_REPORT}) (?:do|does|did) not {_ADVERBS}{_STATES}",
            rf"(?:none of|nothing in|nowhere in|neither(?: of)?|no) {_SOURCE} (?!(?:is|are|was|were|has|have) )\w+",
            r"there (?:is|was|are|were) (?:no|not any|not enough|insufficient) (?:\w+ ){0,3}?"
            r"(?:information|mention|answer|details?|context|response available)(?:\W*$| (?:about|on|regarding"
            r"|concerning|of"
            r"|for|in|from|within|that|which|to|as|available|provided|given|here|whether|how|who|i)\b)",
            rf"there (?:is|was|are|were) (?:no|nothing|not any|insufficient|not enough)\b.{{0,80}}\b(?:in|from|within)"
            rf" {_WIDE_SOURCE}",
            r"there (?:is|was) nothing (?:here|there|about|on|regarding|concerning)\b",
            r"no (?:(?:relevant|specific|such|further|matching) )?"
            rf"{_any('information mention answer details? results? documents? context data records?')}"
            rf"(?: (?:was|were|is|are|could be))?(?: (?:returned|retrieved|{_FOUND}))?"
            r"(?: (?:about|on|regarding|concerning|for|in|from)\b.*)?\W*$",
            rf"(?:not enough|insufficient) (?:\w+ )?{_any('information context details? data evidence')}\b",
            r"(?:(?:the|this|that|your|an) )?(?:(?:exact|specific|requested) )?"
            rf"{_any('answer question query information request document')}(?: \w+){{0,4}}? (?:cannot|could not) be "
            rf"(?:\w+ly )?(?:{_DETERMINED}|{_FOUND}|{_any('shared revealed located retrieved fulfilled')})\b",
            rf"(?:it|this|that) (?:cannot|could not) be (?:\w+ly )?{_DETERMINED}\b",
            r"(?:it |this )?is not possible (?:for me )?to (?:\w+ly )?"
            rf"{_any('determine say tell answer confirm know infer verify')}\b",
            r"it is (?:unknown|not (?:clear|known|stated|specified|mentioned))\W*$",
            rf"(?:it|this|that) is not (?:\w+ )?clear (?:from|in|within|based on) {_SOURCE}",
            r"(?:it |that |this )?(?:is )?(?:hard|difficult|not possible) (?:for me )?to (?:\w+ly )?"
            rf"{_any('say tell know answer determine judge give')}\b.{{0,40}}\b(?:without|not knowing)\b",
            r"(?:my|the|your|this|a) (?:\w+ ){0,3}?(?:search|query|lookup)(?: \w+){0,6}? "
            rf"{_any('returned found gave yielded produced turned_up')} (?:no|nothing|zero)\b",
            rf"(?:nothing|none of (?:that|it|these|them|those))(?: (?:there|here|i (?:found|have|see)))? "
            rf"{_any('addresses answers mentions discusses covers says matches')}\b.{{0,40}}"
            rf"\b(?:that|this|it|your|question|{_MATERIAL})\b",
            rf"not (?:\w+ly )?{_FOUND}(?: (?:in|by|from|within)\b.*)?\W*$|not in {_SOURCE}\W*$",
        )
    )
)
"""Clauses by which the evidence is missing."""
_LACKS_ANYWHERE = re.compile(
    rf"\b(?:is|are|was|were) (?:missing|absent|omitted|left out) (?:from|in) {_WIDE_SOURCE}"
    rf"|\b(?:is|are|was|were) not (?:\w+ly )?(?:{_FOUND}|listed|recorded|shown|explained"
    rf"|named)(?: anywhere)? in {_WIDE_SOURCE}"
    rf"|\b(?:is|are) not (?:anywhere )?in {_SOURCE}|\b(?:not|never|nowhere|not \w+ly) (?:{_FOUND}"
    rf"|{_any('included present contained discussed covered addressed')}"
    rf"|{_any('described listed part_of explained recorded indicated named')}|be (?:found|{_DETERMINED}))(?: anywhere"
    rf"| at all| directly)?(?: {_any('in by within from among based_on using with')})?(?: any of)? {_SOURCE}"
)
_UNSTATED = re.compile(
    rf"\W*(?:based (?:solely |only )?(?:up)?on|according to|from|in) {_SOURCE},? .{{1,80}}? (?:is|are|was|were) not"
    rf" (?:\w+ly )?{_FOUND}\b"
)
"""Sentences that name the source first: "Based on the context, the year is not stated"."""
_SEARCHED = re.compile(
    r"\W*i (?:have )?(?:looked|searched|checked|read|reviewed|scanned|went)\b.{1,80}?\b(?:but|and"
    r"|yet)\b.{0,20}?(?:found (?:no|nothing)"
    r"|there (?:is|are|was|were) (?:no|not|nothing)|(?:did|could|do|can) ?not (?:find|see|come across|locate)"
    r"|came up empty)\b"
)
"""Sentences about a search without result."""
_OFFERS = re.compile(
    r"(?!i (?:think|believe|guess|suspect|know|found|recall|remember)\b|i can (?:say|tell you|confirm) that)"
    rf"(?:{_any('i we you please if feel let perhaps maybe try contact ask would is_there happy')}\b"
    r"|.*\b(?:can|could|may|might|should|will)\W*$)"
)
"""Help instead of the answer."""
_PREAMBLE = re.compile(
    rf"\b{_any('sorry apolog thank appreciate understand unfortunately request question query you your i_am hello')}\b"
    rf"|^{_SOURCE} (?:is|are) empty"
)
"""Sentences before the answer proper."""


def is_refusal(reply: str) -> bool:
    """Detects a reply that declines to answer: for lack of knowledge, by policy, or cut off after "I don't".

    Only the first ``INSPECTED`` characters are read, in linear time. An empty reply is not a refusal.

    >>> [is_refusal(reply) for reply in ("I'm sorry, I can't help with that.", "The context does not mention that.")]
    [True, True]
    >>> [is_refusal(reply) for reply in ("It fell to 7. The year is not stated.", "I can't stress enough: at 8.", "")]
    [False, False, False]
    >>> [is_refusal(reply) for reply in ("Das weiß ich leider nicht.", "Je ne peux pas répondre.", "No lo sé.")]
    [True, True, True]
    """
    text = _without_quotations(_MARKUP.sub("", reply[:INSPECTED]).translate(_QUOTES).strip())
    for sentence in sentences(text)[: PREAMBLES + 1]:
        plain, words = _normalize(sentence), normalize(sentence)
        if not _REPORTED.search(sentence.lower()):
            if _declines(plain) or any(phrases.matches(sentence, words) for phrases in LANGUAGES):
                return True
        preamble = _PREAMBLE.search(plain) or any(phrases.preamble.search(words) for phrases in LANGUAGES)
        if not preamble and len(words.split()) > 3:
            return False
    return False


def _without_quotations(text: str) -> str:
    """Removes quotations from a text, unless fewer than three words remain."""
    rest = _QUOTATION.sub(" ", text)
    return rest if len(rest.split()) > 2 else text


JUDGE_PROMPT = """Does the reply decline to answer the question, or say that it does not know the answer?
A reply that gives part of the answer does not decline. Write Yes or No and nothing else.

Question: {question}
Reply: {reply}
Declines:"""
"""Prompt of ``judge_refusal``."""


async def judge_refusal(ask: Callable[[str], Awaitable[str]], question: str, reply: str) -> bool:
    """Asks a language model whether a reply is a refusal. Falls back on ``is_refusal`` if it says neither yes nor no.

    Args:
        ask: Sends a prompt to the model; returns its output.
        question: The question.
        reply: The reply to judge. An empty reply is not a refusal and is not sent.

    >>> import asyncio
    >>> async def model(prompt):
    ...     return "Yes."
    >>> asyncio.run(judge_refusal(model, "Who paid?", "That would be telling."))
    True
    """
    if not reply.strip():
        return False
    verdict = await ask(JUDGE_PROMPT.format(question=question[:INSPECTED], reply=reply[:INSPECTED]))
    found = next((m[1].lower() for m in YES_NO.finditer(verdict) if m[1]), "")
    return found == "yes" if found else is_refusal(reply)


def says_yes(reply: str) -> bool:
    """Returns whether the first yes or no of a reply is a yes.

    >>> [says_yes(reply) for reply in (" Yes. ", "**No**, yes is wrong", "Yes or no? _Yes_!", "Nobody knows", "")]
    [True, False, True, False, False]
    """
    return next((m[1].lower() == "yes" for m in YES_NO.finditer(reply) if m[1]), False)


def _declines(sentence: str) -> bool:
    """Matches the clauses of a normalized sentence, unless a later clause answers."""
    if _TERSE.fullmatch(sentence):
        return True
    parts = _CLAUSE.split(sentence)  # clause, separator, clause, ...
    if _SEARCHED.match(sentence):
        return True
    if _UNSTATED.match(sentence):
        return not _answers(parts[1:], _CONSEQUENCES)
    for i in range(0, len(parts), 2):
        clause = _LEAD.sub("", parts[i]).strip(" .…")
        if _REFUSES.match(clause) or _TERSE.fullmatch(clause):
            return not _answers(parts[i + 1 :], _CONTRASTS)
        if _LACKS.match(clause) or _LACKS_ANYWHERE.search(clause):
            return not _answers(parts[i + 1 :], _CONSEQUENCES)
    return False


def _answers(rest: Sequence[str], contrasts: Sequence[str]) -> bool:
    """Returns whether a contrasting clause states something, rather than offers help or declines, too."""
    for separator, text in zip(rest[::2], rest[1::2], strict=True):
        clause = _LEAD.sub("", text).strip(" .…")
        if separator.strip(" ,") in contrasts and len(clause.split()) > 2:
            declines = _REFUSES.match(clause) or _LACKS.match(clause) or _NO_STATEMENT.search(clause)
            return not (_OFFERS.match(clause) or declines)
    return False


def _normalize(sentence: str) -> str:
    """Lower case, straight quotes, no label, contractions written out.

    >>> _normalize("Answer: I’m unable; it isn't there, you can't")
    'i am not able; it is not there, you cannot'
    """
    plain = _LABEL.sub("", " ".join(sentence.lower().translate(_QUOTES).split()))
    for short, full in _CONTRACTIONS:
        plain = plain.replace(short, full)
    return plain
