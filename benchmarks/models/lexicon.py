"""English words and sentence templates for the offline pair, written by hand; no text is from another source."""

from __future__ import annotations

NOUNS = """
apple arm baby bag ball bank basket bath beach bean bear bed bee bell belt bench bike bird blanket board boat body
book boot bottle bowl box branch bread brick bridge broom brother brush bucket bus bush butter button cake camera camp
candle car card carpet cart case castle cat chain chair chalk cheese chest chicken child clock cloth cloud coach coat
coffee coin collar comb copper corn cotton couch cow crowd cup curtain cushion daughter desk dinner dish doctor dog
doll door drawer dream dress drink drum duck dust ear earth egg engine envelope evening eye face family farm farmer
father feather fence field finger fire fish flag floor flour flower fork forest fountain fox friend frog fruit garden
gate gift girl glass glove goat gold grain grandmother grape grass ground group guitar hall hammer hand harbor hat
head heart hill hole home honey hook horn horse hospital hotel hour house ice ink iron island jacket jar juice key
king kitchen kite knife ladder lake lamp land leaf leather leg lemon letter library light line lion lock machine mail
map market mask meal meat medal message metal milk mill mirror money monkey moon morning mother motor mountain mouse
mouth museum music nail neck needle nest net newspaper night noise nose note nut oak oar office oil onion orange oven
owl page paint painting pan paper parcel parent park party path pear pen pencil pepper phone photo piano picture pie
pig pillow pin pipe plane plant plate pocket poem poet pond potato prize pump puppy purse queen rabbit radio rail rain
report rice ring river road rock roof room rope rose route rug sail salt sand school scissors sea seat seed sheep
sheet shelf ship shirt shoe shop shoulder silk silver singer sister skin skirt sky sled smoke snail snake snow soap
sock sofa song soup spade spoon spring stage stair stamp star station stick stocking stone store storm story stove
street string student suit summer sun surface table tail tailor tea teacher team tent theater thread throat thumb
ticket tiger time tin toe tool tooth tower town toy track train tray tree trip truck trunk turkey turtle umbrella
uncle valley vase village violin voice wagon wall watch water wave wax weather wheel whistle wind window wine wing
winter wire wood wool word worker world worm wrist writer yard year zebra answer area article artist attack battle
birth blood business cause center century chance change choice city class college color company control cost country
course court data day death decision degree department design detail direction disease distance division doubt effect
effort energy event example experience fact failure fear feature figure film force form front future game goal
government growth guide habit health help history hope idea industry interest issue job journey judge knowledge
language law lawyer leader level life list loss manager material matter meaning measure medicine meeting member memory
method middle minute mistake model moment month movement name nation nature need network news number nurse object
officer opinion order owner part patient peace people period person piece place plan player point police policy
population position power president pressure price problem process product program project public purpose quality
question race range rate reason record region relation research response result return risk role rule safety sale
scale science season section sense series service shape side sign size skill soldier solution sound source space
speech speed spirit sport staff start state step stock strength stress structure study subject success supply support
system task tax technology test thing thought title top total trade training travel treatment trial truth type unit
use value view visit vote war waste way week weight work worry youth zone
""".split()
ADJECTIVES = """
able angry bad beautiful big bitter black blue bold brave brief bright broad broken brown busy calm careful cheap
clean clear clever cold common cool correct crazy curious dark deep dirty dry dull eager early easy empty equal even
exact false famous fast fat final fine firm first flat foreign free fresh friendly full funny gentle glad golden good
grand gray great green happy hard healthy heavy high hollow honest hot huge hungry important kind large last late lazy
light little local lonely long loose loud low lucky main modern narrow near neat new nice noisy normal odd old open
orange orderly other pale perfect pink plain polite poor pretty private proud public pure purple quick quiet rare
ready real red regular rich right ripe rough round sad safe salty same secret serious shallow sharp short shy sick
silent silver simple slow small smart smooth soft solid sour special square steady steep sticky strange strict strong
sudden sweet tall tame thick thin tidy tight tiny tired true ugly useful usual violet warm weak wet white whole wide
wild wise wooden wrong yellow young
""".split()
VERBS = [
    (verb.split("/")[0], verb.split("/")[1])
    for verb in """
accept/accepted add/added admire/admired bake/baked borrow/borrowed bring/brought build/built burn/burned buy/bought
carry/carried catch/caught check/checked clean/cleaned close/closed collect/collected cook/cooked count/counted
cover/covered cut/cut deliver/delivered describe/described design/designed discover/discovered draw/drew drop/dropped
eat/ate examine/examined find/found finish/finished fix/fixed follow/followed forget/forgot get/got give/gave
guard/guarded hear/heard help/helped hide/hid hold/held inspect/inspected invent/invented keep/kept leave/left
lift/lifted like/liked lose/lost love/loved make/made measure/measured meet/met mend/mended miss/missed move/moved
name/named notice/noticed open/opened order/ordered own/owned pack/packed paint/painted pay/paid
photograph/photographed pick/picked plant/planted play/played polish/polished prepare/prepared print/printed
promise/promised protect/protected pull/pulled push/pushed put/put read/read receive/received remember/remembered
remove/removed rent/rented repair/repaired return/returned save/saved see/saw sell/sold send/sent serve/served
share/shared show/showed sign/signed steal/stole study/studied take/took taste/tasted teach/taught test/tested
throw/threw touch/touched trade/traded use/used visit/visited want/wanted wash/washed watch/watched wear/wore win/won
wrap/wrapped write/wrote
""".split()
]
"""Infinitive and past tense."""
ADVERBS = """
quickly slowly carefully quietly suddenly often always never again together finally usually sometimes early soon
nearly almost already easily well badly gladly
""".split()
FIRST_NAMES = """
Maria John Anna Peter Lucy Tom Sarah David Emma Paul Nina Mark Clara Henry Julia Simon Alice George Laura Robert Helen
Daniel Rosa Frank Ruth Oscar Grace Victor Irene Walter Diana Hugo Sofia Martin Olga Edward Nora Philip Eva Arthur Mary
James Lena Samuel Kate Leo Jane Adam Vera Carl Ida Ben Ella Max
""".split()
PREPOSITIONS = (
    "near",
    "in",
    "behind",
    "beside",
    "at",
    "inside",
    "outside",
    "under",
    "across from",
    "next to",
    "in front of",
    "on the far side of",
    "close to",
)
DAYS = """
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""".split()
MONTHS = """
January February March April May June July August September October November December
""".split()
JOBS = """
teacher doctor farmer painter driver baker lawyer nurse pilot singer writer engineer gardener sailor tailor judge
clerk guard cook librarian mechanic captain dentist butcher carpenter accountant designer professor manager mayor
""".split()
SENTENCES = """
Although the N was A, P decided to V the A N.
There were # A Ns in the N, but nobody D them.
P is a J who lives in L with # Ns.
When the N is A, people often V their Ns.
The A N was built in the year # and has been A ever since.
Because of the A N, the J could not V the N.
However, the N near L is not as A as it was before.
They would like to V the N, if the weather is A.
It was a A N, and P D it R.
The J said that the N should be A and A.
Many people think that the N is more A than the N.
After the N, P went to L and D a A N.
Every Y the J R Ds the N.
In M, the N of L becomes very A.
She D the N with her A N, and then she D the other one.
He has # Ns, which he keeps in a A N.
We do not know why P D the N, but it made everyone A.
First, V the N. Then V the A N and wait for # minutes.
You can V the N only when the N is A.
The N is about # meters long and # meters wide.
Most of the Ns are A, while some of them are A.
P told the J that there was something A about the N.
The N between L and L is the most A in the country.
If you want to V a N, you must first V the N.
Since then, the N has been R D by the J.
This N was the first of its kind, and it is still A today.
The people of L V their Ns during the A N.
One of the reasons for the N is that the Ns are A.
Both P and P wanted to V the same N.
From the N you can see the N, the N and the A N.
At the end of the N, the A J gave P a N.
For more than # years, the N was used by the J of L.
The N that P D was A, so the J D it R.
Some Ns are A and some Ns are A, but all of them have a N.
Without a N, it is not possible to V the A N.
P had never seen such a A N before.
It takes # hours to go from L to L by N.
What they D was not a N but a A N.
The N also has a N, a N, and # Ns.
During the N, the N was A and the N was A.
The J of the N, P, was A about the A N.
Its N is A, its N is A, and its N is W.
According to P, the W is a kind of N found near L.
Each N must be A before it can be D.
P and the J D together for # days.
The A N costs # dollars at the N in L.
Before that, no one had D the N of W.
Water from the N makes the N A and A.
Over time, the Ns of L grew A, and their N changed.
The W, also called the A N, can V # Ns in a N.
""".strip().split("\n")
"""Slots of the templates:

N noun, Ns plural noun, A adjective, V infinitive, Ds present tense, D past tense. P person, J job, R adverb, L place, Y
day, M month, W invented word, # number.
"""
