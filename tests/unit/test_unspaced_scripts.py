"""Scripts without spaces between words, and non-Latin alphabets: words, copies, disclosure."""

import random
import re

import pytest

from casemate.guard.defenses.quorum.keywords import AskedQuestion, Word, best_sentences, statements
from casemate.text.disclosure import DisclosureCounter
from casemate.text.edited_copies import is_edited_copy, text_words
from casemate.text.sentences import extract_sentences, sentences
from casemate.text.tokens import character_pairs, words

TEXTS = {
    "Chinese": (
        "北桥于去年十月关闭，因为潜水员在两个北侧桥墩上发现了很深的裂缝。卡车必须改走隧道，直到维修工程结束为止。市政府预计费用将超过四千万元。",
        "患者今年六十三岁，因持续咳嗽和夜间发热入院。胸部影像显示右肺下叶有阴影，医生给他开了抗生素，并建议两周后复查。",
        "公司规定员工每年可享受十五天带薪假期。未使用的假期可以延至次年三月底，逾期作废。部门经理负责审批申请，人事部保存记录。",
        "博物馆位于老城区的南门附近，周一闭馆。门票为成人三十元，学生半价。馆内收藏了近八百件瓷器，其中最著名的是一只大花瓶。",
    ),
    "Japanese": (
        "北の橋は去年の十月に閉鎖されました。潜水士が二本の橋脚に深いひび割れを見つけたためです。工事が終わるまで、トラックはトンネルを使わなければなりません。",
        "患者は六十三歳の男性で、続く咳と夜の発熱のために入院しました。胸の画像で右の肺に影があり、医師は抗生物質を処方しました。",
        "社員は毎年十五日の有給休暇を取ることができます。使わなかった休暇は翌年の三月末まで繰り越せますが、その後は無効になります。",
        "美術館は旧市街の南門の近くにあり、月曜日は休館です。入場料は大人三百円、学生は半額です。館内には八百点の陶器があります。",
    ),
    "Thai": (
        "สะพานเหนือปิดเมื่อเดือนตุลาคมเพราะนักดำน้ำพบรอยร้าวลึกในตอม่อสองต้น รถบรรทุกต้องใช้อุโมงค์จนกว่างานซ่อมจะเสร็จ",
        "ผู้ป่วยอายุหกสิบสามปีเข้าโรงพยาบาลเพราะไอและมีไข้ตอนกลางคืน แพทย์สั่งยาปฏิชีวนะและนัดตรวจอีกครั้งในสองสัปดาห์",
        "พนักงานมีสิทธิลาพักร้อนปีละสิบห้าวัน วันที่ไม่ได้ใช้สามารถเลื่อนไปถึงสิ้นเดือนมีนาคมของปีถัดไป",
        "พิพิธภัณฑ์ตั้งอยู่ใกล้ประตูด้านใต้ของเมืองเก่า ปิดวันจันทร์ ค่าเข้าชมผู้ใหญ่สามสิบบาท",
    ),
    "Korean": (
        "북쪽 다리는 지난해 시월에 폐쇄되었다. 잠수부들이 교각 두 개에서 깊은 균열을 발견했기 때문이다. "
        "공사가 끝날 때까지 트럭은 터널을 이용해야 한다.",
        "환자는 예순세 살 남성으로 계속되는 기침과 밤의 발열 때문에 입원했다. "
        "의사는 항생제를 처방하고 두 주 뒤에 다시 오라고 했다.",
        "직원은 해마다 십오 일의 유급 휴가를 쓸 수 있다. 쓰지 않은 휴가는 다음 해 삼월 말까지 이월된다.",
        "박물관은 구시가지 남문 근처에 있으며 월요일은 쉰다. 입장료는 어른 삼천 원이고 학생은 반값이다.",
    ),
}
RUSSIAN = (
    "Мост закрыли в октябре, потому что водолазы нашли глубокие трещины в северных опорах. Грузовики должны ехать "
    "через тоннель, пока работы не закончатся."
)
HINDI = "उत्तरी पुल अक्टूबर में बंद कर दिया गया। गोताखोरों को दो खंभों में गहरी दरारें मिलीं। मरम्मत पर चार करोड़ रुपये खर्च होंगे।"
DISGUISES = {
    "as it is": str,
    "without punctuation and spaces": lambda text: re.sub(r"[\s。，、.,]", "", text),
    "without every seventh letter": lambda text: "".join(c for i, c in enumerate(text) if i % 7),
    "without every third letter": lambda text: "".join(c for i, c in enumerate(text) if i % 3),
    "a line for each letter": "\n".join,
    "another letter after each": "x".join,
    "reversed": lambda text: text[::-1],
}


def disclosed_share(answer, text, *others):
    counter = DisclosureCounter([text, *others])
    return (counter.read(answer)[0].bit_count() + counter.unreadable_words) / counter.lengths[0]


def test_a_sentence_without_spaces_has_many_words():
    for text, *_ in TEXTS.values():
        assert DisclosureCounter([text]).lengths[0] > 0.6 * len(re.sub(r"\W", "", text))


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("script", TEXTS)
def test_disclosure_counts_copies_of_a_text_without_spaces(script, disguise):
    text, *others = TEXTS[script]
    assert disclosed_share(DISGUISES[disguise](text), text, *others) > (0.3 if "third" in disguise else 0.5)


@pytest.mark.parametrize("disguise", [d for d in DISGUISES if "without every" not in d])
def test_disclosure_counts_copies_in_the_cyrillic_alphabet(disguise):
    assert disclosed_share(DISGUISES[disguise](RUSSIAN), RUSSIAN, *TEXTS["Chinese"]) > 0.5


@pytest.mark.parametrize("script", TEXTS)
def test_unrelated_texts_in_the_script_are_readable_and_count_below_25_percent(script):
    for i, answer in enumerate(TEXTS[script]):
        others = [text for text in TEXTS[script] if text != answer]
        counter = DisclosureCounter(others)
        shares = [b.bit_count() / n for b, n in zip(counter.read(answer), counter.lengths, strict=True)]
        assert max(shares) < 0.25 and counter.unreadable_words == 0, i


@pytest.mark.parametrize("script", ["Chinese", "Korean"])
def test_a_substitution_cipher_within_the_script_counts_as_unreadable(script):
    text, *others = TEXTS[script]
    assert disclosed_share("".join(chr(ord(c) + 1) if c.isalpha() else c for c in text), text, *others) > 0.5


@pytest.mark.parametrize("script", TEXTS)
def test_edited_copies_without_spaces_are_one_unit(script):
    rng, (text, *others) = random.Random(2), TEXTS[script]
    kept = [part for part in re.findall(r"\S[^\s。]?", text) if rng.random() > 0.15]
    edited = "".join(kept[len(kept) // 2 :] + kept[: len(kept) // 2])
    if script == "Korean":
        edited = " ".join(word for word in text.split()[::-1] if rng.random() > 0.22)
    assert is_edited_copy(text_words(text), text_words(edited))
    assert not any(is_edited_copy(text_words(text), text_words(other)) for other in others)


def test_character_pairs_split_words_in_unspaced_scripts_only():
    assert character_pairs(["abc", "A型号B12", "橋", "ชั้น3"]) == ["abc", "A", "型号", "B12", "橋", *("ชั", "ั้", "้น"), "3"]


def test_vowel_signs_and_combining_marks_belong_to_the_word():
    assert words("गोताखोरों को re\u0301sume\u0301") == ["गोताखोरों", "को", "re\u0301sume\u0301"]
    assert DisclosureCounter([HINDI]).lengths == [len(HINDI.split())]
    assert disclosed_share(HINDI, HINDI) == 1


def test_sentence_marks_of_other_scripts_end_sentences():
    assert len(sentences(HINDI)) == 3 and len(sentences(TEXTS["Japanese"][0])) == 3
    assert sentences("他说：“好。”然后走了！？是。") == ["他说：“好。”", "然后走了！？", "是。"]
    assert extract_sentences("卡车走哪里？", TEXTS["Chinese"][0], 1) == "卡车必须改走隧道，直到维修工程结束为止。"


THAI = (
    "พิพิธภัณฑ์เปิดเวลาแปดโมงเช้า ค่าเข้าชมสามสิบบาทต่อคน นาย สมชาย ใจดี ดูแลห้องสมุดชั้นสอง ปี 2501 "
    "มีการซ่อมหลังคาครั้งใหญ่ เด็กๆ ชอบสนามหญ้าด้านหลังอาคาร"
)


def test_thai_text_is_split_at_spaces_between_clauses():
    """Spaces within names, after numbers and after the repetition mark end no clause."""
    found = sentences(THAI)
    assert found[:2] == ["พิพิธภัณฑ์เปิดเวลาแปดโมงเช้า", "ค่าเข้าชมสามสิบบาทต่อคน"]
    assert len(found) == 5 and "นาย สมชาย ใจดี ดูแล" in found[2] and "เด็กๆ ชอบ" in found[4]
    assert extract_sentences("ค่าเข้าชมเท่าไร", THAI, 1) == found[1]


def test_the_thai_test_fails_if_every_space_ends_a_clause(monkeypatch):
    monkeypatch.setattr("casemate.text.sentences.MIN_CLAUSE", 1)
    with pytest.raises(AssertionError):
        test_thai_text_is_split_at_spaces_between_clauses()


def test_spaces_end_no_sentence_in_scripts_with_sentence_marks():
    assert len(sentences("សារមន្ទីរនៅជិតផ្សារ បើកម៉ោងប្រាំបីព្រឹក។ ថ្លៃចូលគឺបីពាន់រៀល សម្រាប់មនុស្សពេញវ័យ។")) == 2
    assert len(sentences("សារមន្ទីរនៅជិតផ្សារធំក្នុងក្រុង បើកម៉ោងប្រាំបីព្រឹករាល់ថ្ងៃ")) == 2
    assert len(sentences("북쪽 다리는 지난해 시월에 폐쇄되었다 공사가 끝날 때까지")) == 1


def test_joined_clauses_equal_the_text():
    assert " ".join(sentences(THAI)) == THAI


def test_chat_messages_and_rows_are_sentences():
    chat = "[08:15] Mira: the pump is broken\n[08:17] Ahmed: I order a new one\n09:30 Mira: thanks"
    assert len(sentences(chat)) == 3
    assert len(sentences('{"city": "Gent"}\n{"city": "Lyon"}')) == 2


def test_a_clause_without_spaces_is_not_a_keyword():
    """As a keyword, the clause would disclose a whole sentence of a single unit."""
    text = "Acme 合同。 他的银行账户在瑞士苏黎世的一家银行。 Acme 价格 三元。"
    question = AskedQuestion.of("Acme 价格？")
    keywords_found = {
        item.lemma for item in statements(question, best_sentences(question, text, "", 3), 8) if isinstance(item, Word)
    }
    assert "三元" in keywords_found and not any(len(lemma) > 8 for lemma in keywords_found)
