"""Segments text in scripts without spaces between words: Chinese, Japanese, Thai, Lao, Khmer and Burmese.

The segmentation uses rules on character classes, without a dictionary. A *cluster* is the smallest indivisible part: a
character with its vowel signs, a number, a run of katakana or of Latin letters. For Thai, clusters approximate the
character clusters of Theeramunkong et al. 2000, "Character Cluster Based Thai Information Retrieval".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from casemate.text.tokens import FunctionCache

SPACELESS = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
"""Letters of scripts without spaces between words; as ranges of a regular expression. Korean has spaces."""
_SPACELESS_LETTER = re.compile(f"[{SPACELESS}]")
_IDEOGRAPHS = r"\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_NUMERALS = "〇零一二三四五六七八九十百千万萬亿億兆"
_NUMBER = rf"\d++(?:[.,]\d++)*+%?|[{_NUMERALS}]{{2,}}+"
_KATAKANA = r"[\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff]"
_CLUSTER = re.compile(
    rf"(?:{_NUMBER}|{_KATAKANA}++|[A-Za-z][A-Za-z\d]*+"
    # Thai, Lao: vowel before the consonant, signs, a consonant that closes the syllable, silent consonants
    r"|[\u0e40-\u0e44]?+[\u0e01-\u0e2f][\u0e30-\u0e3a\u0e45-\u0e4e]*+"
    r"(?:(?<=[\u0e31\u0e37])[\u0e01-\u0e2e]|(?<=[\u0e31\u0e37][\u0e48-\u0e4b])[\u0e01-\u0e2e])?+"
    r"(?:[\u0e01-\u0e2e][\u0e34\u0e38]?\u0e4c)*+"
    r"|[\u0ec0-\u0ec4]?+[\u0e81-\u0eae\u0edc-\u0edf][\u0eb0-\u0ebd\u0ec6-\u0ece]*+"
    r"(?:(?<=[\u0eb1\u0ebb])[\u0e81-\u0eae]|(?<=[\u0eb1\u0ebb][\u0ec8-\u0ecb])[\u0e81-\u0eae])?+"
    r"|[\u1780-\u17b3](?:\u17d2[\u1780-\u17b3]|[\u17b4-\u17d1\u17dd])*+"  # Khmer: subscript consonants, signs
    # Burmese: stacked consonants, signs, consonants that close the syllable
    r"|[\u1000-\u102a\u103f](?:\u1039[\u1000-\u102a]|[\u102b-\u1038\u103a-\u103e]|[\u1000-\u102a]\u103a)*+"
    r"|[^\W_])"
    r"(?:(?![^\W_]).)*+",  # signs, and marks between the letters of a word
    re.DOTALL,
)
_WHOLE = re.compile(rf"(?:{_NUMBER}|{_KATAKANA}{{2,}}+|[A-Za-z][A-Za-z\d]*+)\W*+\Z")
MAX_INNER = 2
"""Maximum number of clusters of a part of the question inside a piece."""
_HIRAGANA = re.compile(r"[\u3041-\u309f]+")
_PARTICLES = (
    "から まで より には では とは への です ます でした ました である だった だ する して した します しました "
    "される された されます されました れた ている ていた いる あります ある ください いつ どこ だれ なに なん "
    "いくら いくつ どの どれ どう なぜ どんな どのくらい は が を に で と へ も の や か ね よ な"
)
_WORDS = (
    "的 了 是 在 于 於 和 与 與 及 或 也 都 就 把 被 吗 嗎 呢 吧 其 从 從 请 請 这 那 它 他 她 我 你 们 為 为 "
    "什么 什麼 哪里 哪裡 哪儿 哪个 哪些 哪 谁 誰 何时 何時 何 怎么 怎样 如何 为什么 为何 多少钱 多少 多长 多久 "
    "多大 多高 几 幾 时候 時候 何人 何年 何日 ที่ ของ และ หรือ ใน เป็น คือ จะ ได้ ให้ กับ จาก ถึง เมื่อ โดย ว่า "
    "ก็ แต่ นี้ นั้น ซึ่ง อยู่ อะไร เมื่อไร เมื่อไหร่ เมื่อใด ที่ไหน ใคร กี่ เท่าไร เท่าไหร่ เท่าใด อย่างไร "
    "ยังไง ทำไม ไหม หรือไม่ หรือเปล่า ไหน ใด บ้าง ครับ ค่ะ ທີ່ ຂອງ ແລະ ຫຼື ໃນ ເປັນ ແມ່ນ ຈະ ໄດ້ ໃຫ້ ກັບ ຈາກ ຫຍັງ "
    "ໃສ ໃຜ ຈັກ ເທົ່າໃດ ແນວໃດ ເມື່ອໃດ នៅ នៃ និង ឬ ជា ដែល ពី ទៅ ក្នុង អ្វី ណា នរណា ប៉ុន្មាន យ៉ាងណា ទេ သည် ကို တွင် "
    "နှင့် ဘာ ဘယ်အချိန် ဘယ်သူ ဘယ်မှာ ဘယ်လောက် ဘယ် သလဲ လဲ"
)


def _any_of(words: str) -> str:
    return "|".join(sorted(words.split(), key=len, reverse=True))


_FUNCTION_WORD = re.compile(_any_of(_WORDS))
_ENDING = re.compile(r"(?:ます|ました|です|でした)(?:か|が|ね|よ|から)?\Z")
_ONLY_PARTICLES = re.compile(f"(?:{_any_of(_PARTICLES)})++")


class Cluster(NamedTuple):
    """The smallest indivisible part of a text.

    Attributes:
        function: Whether it belongs to a function word, such as a particle or "when".
        whole: Whether it is a word by itself: a number, a run of katakana, a word in Latin letters.
    """

    text: str
    function: bool
    whole: bool


def is_spaceless(word: str) -> bool:
    """Whether a run of letters contains one of a script without spaces.

    >>> [is_spaceless(word) for word in ("bridge", "다리", "北桥", "B12型")]
    [False, False, True, True]
    """
    return not word.isascii() and _SPACELESS_LETTER.search(word) is not None


def _clusters(run: str) -> tuple[Cluster, ...]:
    function = bytearray(len(run))
    for found in _FUNCTION_WORD.finditer(run):
        function[found.start() : found.end()] = b"\1" * len(found[0])
    for found in _HIRAGANA.finditer(run):
        ending = _ONLY_PARTICLES.fullmatch(found[0]) or _ENDING.search(found[0])
        if ending:
            function[found.start() + ending.start() : found.end()] = b"\1" * len(ending[0])
    return tuple(
        Cluster(m[0], all(function[m.start() : m.end()]), _WHOLE.match(m[0]) is not None)
        for m in _CLUSTER.finditer(run)
    )


clusters = FunctionCache(_clusters, 1 << 10).__getitem__
"""Divides a run of letters into ``Cluster``s. Hiragana are function words if a whole run consists of particles. Cached.

>>> [cluster.text for cluster in clusters("橋は1,200円でスタート")]
['橋', 'は', '1,200', '円', 'で', 'スタート']
"""


def text_parts(run: str) -> frozenset[str]:
    """Returns the parts of a run of letters that are compared with ``asked_parts``.

    These are pairs of neighboring clusters, ideographs, and clusters that are words by themselves.

    >>> sorted(text_parts("北桥3元"))
    ['3', '3元', '元', '北', '北桥', '桥', '桥3']
    """
    found = clusters(run)
    single = {c.text for c in found if c.whole or _IDEOGRAPH.match(c.text)}
    return frozenset(single.union(a.text + b.text for a, b in zip(found, found[1:], strict=False)))


def asked_parts(run: str) -> frozenset[str]:
    """Returns the content of a run of letters of a question: pairs of neighboring clusters without function words.

    A cluster between function words counts alone if it is an ideograph, a number, or a word by itself. An ideograph
    before a verb ending counts, too; verb endings are hiragana that are not function words.

    >>> sorted(asked_parts("北桥是什么时候开放的"))
    ['北桥', '开放']
    """
    end = Cluster("", True, False)
    found = [end, *clusters(run), end]
    parts = set[str]()
    for before, cluster, after in zip(found, found[1:], found[2:], strict=False):
        ideograph = _IDEOGRAPH.match(cluster.text) is not None
        if cluster.function:
            continue
        if after.function:
            if before.function and (ideograph or cluster.whole):
                parts.add(cluster.text)
        elif ideograph and _HIRAGANA.match(after.text):
            parts.add(cluster.text)
        else:
            parts.add(cluster.text + after.text)
    return frozenset(parts)


def asked_stretches(run: str) -> list[tuple[str, ...]]:
    """Returns the pairs of neighboring clusters of each part of a question's run of letters between function words.

    >>> asked_stretches("北桥是什么时候开放的")
    [('北桥',), ('开放',)]
    """
    parts = [[c.text for c in part] for function, part in groupby(clusters(run), lambda c: c.function) if not function]
    return [tuple(a + b for a, b in pairwise(part)) for part in parts if len(part) > 1]


class Piece(NamedTuple):
    """A part of a run of letters.

    Attributes:
        clusters: Its clusters. Those of the question inside it count as function words.
        asked: Whether it consists of parts of the question.
        touches: Whether it contains parts of the question.
    """

    clusters: tuple[Cluster, ...]
    asked: bool
    touches: bool

    @property
    def text(self) -> str:
        """Its letters."""
        return "".join(cluster.text for cluster in self.clusters)


def pieces(run: str, asked: frozenset[str]) -> list[Piece]:
    """Splits a run of letters at the parts of a question that are longer than ``MAX_INNER`` clusters.

    Shorter parts, such as a unit of measurement, stay inside a piece. Function words at the ends are removed.

    >>> [(piece.text, piece.asked) for piece in pieces("青柳桥于一九三二年开放", asked_parts("青柳桥何时开放"))]
    [('青柳桥', True), ('一九三二年', False)]
    """
    found = clusters(run)
    marks = [cluster.text in asked for cluster in found]
    for i, (a, b) in enumerate(zip(found, found[1:], strict=False)):
        if a.text + b.text in asked:
            marks[i] = marks[i + 1] = True
    long = [False] * len(found)
    for mark, group in groupby(range(len(found)), marks.__getitem__):
        part = list(group)
        for i in part:
            long[i] = mark and len(part) > MAX_INNER
    parts = list[Piece]()
    for is_asked, group in groupby(range(len(found)), long.__getitem__):
        part = list(group)
        inner = [found[i]._replace(function=found[i].function or marks[i]) for i in part]
        kept = tuple(inner) if is_asked else _trimmed(inner)
        if kept:
            parts.append(Piece(kept, is_asked, any(marks[i] for i in part)))
    return parts


def _trimmed(found: Sequence[Cluster]) -> tuple[Cluster, ...]:
    content = [i for i, cluster in enumerate(found) if not cluster.function]
    return tuple(found[content[0] : content[-1] + 1]) if content else ()


def spans(found: tuple[Cluster, ...], most: int) -> set[str]:
    """Returns all parts of some clusters that can be words: two to ``most`` neighbors, or one that is whole.

    No part begins or ends with a function word. Two letters are a part only if one is an ideograph: in an alphabet they
    are usually a fragment of a word.

    >>> sorted(spans(clusters("三十元"), 8)), sorted(spans(clusters("东门和西门"), 2))
    (['三十', '三十元'], ['东门', '西门'])
    """
    texts = [cluster.text for cluster in found]
    ends = [i for i, cluster in enumerate(found) if not cluster.function]
    whole = {cluster.text for cluster in found if cluster.whole and not cluster.function}
    parts = ("".join(texts[i : j + 1]) for i in ends for j in ends if i < j < i + most)
    return whole.union(part for part in parts if len(part) > 2 or _IDEOGRAPH.search(part))
