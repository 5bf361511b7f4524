"""Function words of languages that put spaces between words, and which of these languages a text has."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import chain

from casemate.text.tokens import STOP_WORDS, find_words

NEGATIONS = frozenset(
    "no not never none neither nor without cannot"
    " nicht kein keine keinen keinem keiner keines nie niemals ohne weder noch"
    " ne pas non jamais aucun aucune sans ni rien nul nulle nunca sin ningún ninguno ninguna nada"
    " senza nessun nessuno nessuna né não sem nenhum nenhuma nem niet geen nooit zonder noch"
    " لا ليس ليست لم لن بدون غير نه نیست هیچ نہ نہیں לא אין בלי नहीं न मत না নেই".split()
)
"""Words that reverse a statement. They carry content in every language.

The Italian "mai" is missing, because it is the month of May in German and French.
"""
_LISTS = {
    "de": """aber als also am an auch auf aus bei beim bis da damit dann darf das dass dem den denn der deren des
    dessen die dies diese diesem diesen dieser dieses doch dort du durch dürfen ein eine einem einen einer eines er
    es für gegen gibt haben hat hatte hier ich ihm ihn ihnen ihr ihre ihrem ihren ihrer ihres im in ist ja jede
    jedem jeden jeder jedes jene kann können man mein mit muss müssen nach nur ob oder sehr sein seine seinem seinen
    seiner sich sie sind so soll sollen sowie um und uns unser unter viel viele vom von vor wann war waren warum was
    wegen weil welche welchem welchen welcher welches wem wen wenn wer werden wessen wie wird wo woher wohin wollen
    wurde wurden zu zum zur zwischen über""",
    "fr": """a afin ai alors après au aux avant avec avez avons c car ce ceci cela celle celles celui ces cet cette
    ceux chaque combien comme comment d dans de depuis des dès dont du elle elles en encore entre est et étaient était
    étant êtes être eu faut fait faire font il ils j je jusqu l la laquelle le lequel les lesquels leur leurs lors
    lorsqu lorsque lui m ma mais mes moi mon même n nos notre nous on ont ou où par parce pendant peut peuvent plus
    pour pourquoi puis puisqu qu quand que quel quelle quelles quels qui quoi s sa se selon sera seront ses si soit son
    sont sous suis sur t ta te tes toi ton tous tout toute toutes tu un une vers vos votre vous y""",
    "es": """a además al algo antes aquel aquella así aunque cada como cómo con cual cuál cuales cuáles cuando cuándo
    cuánto cuánta cuántos cuántas de debe deben del desde después donde dónde durante e el él ella ellas ellos en entre
    era eran es esa esas ese eso esos esta está están estas este esto estos fue fueron ha haber hace hacer hacia han
    hasta hay la las le les lo los más me mi mientras mis muy nos nosotros o otra otras otro otros para pero por porque
    puede pueden pues que qué quién quiénes se sea según ser si sido siempre sobre son su sus también tan tanto te
    tiene tienen todo todos toda todas tu tus un una uno unos unas usted ustedes y ya yo""",
    "it": """a ad agli ai al all alla alle allo anche c che chi ci ciò col come con cosa cui d da dagli dai dal dall
    dalla dalle dei degli del dell della delle dello deve devono di dopo dove due e è ed era erano essere fra fu gli ha
    hanno i il in io l la le lei lo loro lui ma mentre mi nei negli nel nell nella nelle nello noi o ogni oltre per
    perché però più poi può possono prima qual quale quali quando quanta quante quanti quanto quella quelle quelli
    quello quest questa queste questi questo qui se sei si sia sono sta stata stati stato su sua sue sugli sui sul sull
    sulla sulle suo suoi ti tra tu tutti tutto un una uno vi voi""",
    "pt": """a à ao aos aquela aquele as às até com como da das de depois desde do dos e é ela elas ele eles em entre
    era eram essa esse esta está estão este eu foi foram há isso isto já lhe mais mas me mesmo meu minha muito na nas
    no nos o onde os ou para pela pelas pelo pelos pode podem por porque qual quais quando quanta quantas quanto
    quantos que quem se seja sem ser seu seus sobre sua suas são só também te tem têm todo todos tu um uma umas uns
    você vocês""",
    "nl": """aan al als ander bij daar dan dat de der deze die dit door een en er het heeft hebben hem hier hij hoe hun
    ik in is je kan kunnen maar me meer men met mij moet moeten na naar nog nu of om omdat ons onder ook op over te tot
    tussen uit u uw van veel voor waar waarom wanneer was wat we welk welke wel werd wie wij worden wordt zal ze zich
    zij zijn zo zou""",
    "ar": """أحد أخرى آخر إذا إذ إلا إلى أم أما أن أنا أنت أنه أنها أو أول أي أية أيضا أين الآن التي الذي الذين
    اللذان بأي بعد بعض بكم بل بما بن به بها بين تحت تكون تلك تم ثم جميع حتى حسب حول حيث حين خارج
    خلال داخل دون ذلك سوف ضد عبر عدة على عليه عليها عن عند عندما غير فإن فقط فوق في فيه فيها قبل
    قد كان كانت كل كلا كم كما كيف لأن لدى لكل لكن لم لماذا لن له لها لهم ليس ليست ما ماذا متى مثل
    مع معه من منذ منه منها نحن نعم هذا هذه هل هم هنا هناك هو هي وقد وكان ولا ولكن وما ومن وهو وهي
    يا يتم يجب يكون يمكن لا بدون""",
    "bn": """আছে আর আমরা আমাদের আমার আমি আপনি আপনার ই এ এই এক একটি এবং এর এখন ও ওই কবে কখন কত কতটি কতজন করা করে
    করেন কার কারা কি কী কিছু কিন্তু কে কেন কেমন কোথায় কোন কোনটি ছিল ছিলেন জন্য তা তার তারা তাদের
    থেকে দিয়ে দ্বারা না নিয়ে নেই পর পরে প্রতি বা মধ্যে যদি যা যে যার সঙ্গে সব সাথে সে হয় হয়েছে
    হবে হল হলে হয়েছিল""",
    "fa": """آن آنها آیا از است اش اگر اما او این با باشد باید بر برای به بود بودند بوده پس پیش تا تو چرا چقدر
    چطور چگونه چند چه چی چیست چیزی حتی خود در دارد دارند را روی شد شده شود شما شان کجا کجاست کدام
    کرد کرده کنند کنید کند که کی کیست ما می من نه نیز نیست ها های هر هست هستند هم همه هنوز هیچ و
    ولی وقتی یا یک""",
    "he": """אבל או אותה אותו אותם אז אחרי איך איזה איזו אילו אין איפה אל אלא אלה אם אני אנחנו אפשר את אתה אתם
    באיזה באיזו בו בה בין בכל בלי גם היא הוא היה היו היתה הייתה הם הן הזאת הזה הרבה ואת וגם ולא
    וכן זאת זה זו יהיה יותר יש כאן כאשר כבר כדי כולם כי כך כל כמה כמו כן לא לאחר לאן לבין לה להיות
    להם לו לי לכל למה לנו לפי לפני מה מדוע מי מתי מאיפה ממה מן מתוך נגד עבור עד עוד על עליו עליה
    עם פה רק של שלא שלה שלהם שלו שלי שם תחת""",
    "hi": """अगर अपना अपनी अपने अब अभी आप आपका आपकी आपके इन इनका इनके इस इसका इसकी इसके इसे उन उनका उनकी उनके
    उन्हें उस उसका उसकी उसके उसे एक एवं और कब कर करता करती करते करना करने करें कहाँ कहां का कि
    कितना कितनी कितने किन किस किसका किसकी किसके किसने किसी किसे की कुछ के केवल कैसा कैसी कैसे को
    कोई कौन कौनसा क्या क्यों गई गए गया चाहिए जब जहाँ जा जाता जाती जाते जिस जिसके जैसे जो तक तब तथा
    तो था थी थीं थे दिया दी दिए द्वारा न नहीं ने पर फिर बाद बीच भी मत में मैं मेरा मेरी मेरे यदि
    यह यहाँ या ये रहा रही रहे लिए लेकिन वह वहाँ वाला वाली वाले वे सकता सकती सकते सब सभी साथ से सा
    सी हम हमारा हमारी हमारे हर ही हुआ हुई हुए हूँ है हैं हो होगा होगी होता होती होते होना""",
    "ur": """اب اپنا اپنی اپنے اس اسے اگر ان انہیں اور ایک آپ بعد بھی پر تک تم تو تھا تھی تھے جا جاتا جاتی جاتے
    جب جس جن جو جہاں دیا سب سکتا سکتی سکتے سے کا کب کتنا کتنی کتنے کر کرتا کرتی کرتے کرنا کرنے کس
    کسی کو کوئی کون کونسا کہ کہاں کی کیا کیسے کیوں کے گا گئی گئے گی گیا لیکن لیے میں میرا نہ نہیں
    نے وہ ہر ہم ہو ہوا ہوئی ہوئے ہوتا ہوتی ہوتے ہوں ہی ہے ہیں یا یہ""",
}
_ENGLISH = "en"
_FUNCTION_WORDS = {_ENGLISH: STOP_WORDS - NEGATIONS} | {
    language: frozenset(listed.split()) - NEGATIONS for language, listed in _LISTS.items()
}
ENGLISH = _FUNCTION_WORDS[_ENGLISH]
"""English function words."""
ALL_FUNCTION_WORDS = NEGATIONS.union(*_FUNCTION_WORDS.values())
"""Function words and negations of all languages."""
_LANGUAGES_OF = {
    word: tuple(name for name, listed in _FUNCTION_WORDS.items() if word in listed)
    for word in frozenset().union(*_FUNCTION_WORDS.values())
}
_ELIDED = re.compile(
    r"(?<![^\W_])(?:[cdjlmnst]|qu|jusqu|lorsqu|puisqu|dall|dell|all|nell|sull|un|quest)['’](?=[^\W\d_]{2})",
    re.IGNORECASE,
)
"""A French or Italian function word without its last vowel, before the word that it belongs to."""
_ELIDING = frozenset(("fr", "it"))
_LEAST = 2
"""Function words of a text in another language than English, at least: "Los Angeles" is not Spanish."""
_SHARE = 0.5
_READ = 2000
"""Characters of a text whose words are counted."""
_CACHED = 4096


@lru_cache(maxsize=_CACHED)
def languages_of(text: str) -> frozenset[str]:
    """Returns the languages whose function words are most frequent in a text, as ISO 639-1 codes.

    It is English if no other language has more, and two at least. Else it is each with at least half as many as the
    best: languages share function words. Words with a capital do not count, but for the first: they may be parts of
    names. The first 2,000 characters are read. Cached.

    >>> sorted(languages_of("When does the bridge open?")), sorted(languages_of("Wann wird die Brücke geöffnet?"))
    (['en'], ['de'])
    """
    counts = _counts(text)
    most = max(counts.values(), default=0)
    if most < _LEAST or counts[_ENGLISH] == most:
        return frozenset((_ENGLISH,))
    return frozenset(name for name, count in counts.items() if count >= _SHARE * most)


def _counts(text: str) -> Counter[str]:
    read = text[:_READ]
    found = find_words(read)
    found[:1] = map(str.lower, found[:1])
    counts = Counter(chain.from_iterable(map(_LANGUAGES_OF.__getitem__, filter(_LANGUAGES_OF.__contains__, found))))
    if "'" in read or "’" in read:
        elided = len(_ELIDED.findall(read))
        counts.update(dict.fromkeys(_ELIDING, elided))
    return counts


@lru_cache(maxsize=_CACHED)
def function_words(languages: frozenset[str]) -> frozenset[str]:
    """Returns the function words of some languages, and of English. No negation is one."""
    return ENGLISH.union(*(_FUNCTION_WORDS[name] for name in languages))


def without_elision(text: str, languages: frozenset[str]) -> str:
    """Separates elided function words from the words that they belong to, if French or Italian is one of the languages.

    >>> without_elision("Quand commence l’isolement ?", frozenset({"fr"}))
    'Quand commence l’ isolement ?'
    """
    return text if _ELIDING.isdisjoint(languages) else _ELIDED.sub(r"\g<0> ", text)
