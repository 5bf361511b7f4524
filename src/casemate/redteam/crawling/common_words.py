"""Common English words and sentences, for attackers without knowledge of a collection. Written for this project.

``WORDS`` are common words of many fields, without stop words. ``SENTENCES`` are plain statements from different fields.
As questions they reach different regions of a collection; together they show the region of English texts.
``GENERAL_WORDS`` are first questions about an unknown subject. ``NON_ANCHOR_WORDS`` name nothing to ask about.
"""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        """
        body head face eye ear nose mouth tooth tongue throat neck shoulder arm elbow wrist hand finger nail chest
        breast back spine rib lung heart blood vein artery stomach liver kidney bladder bowel hip leg knee ankle foot
        toe skin hair bone muscle joint nerve brain gland tissue cell hormone gene protein enzyme
        pain ache fever cough cold flu infection virus bacteria fungus allergy asthma rash itch swelling bleeding wound
        burn bruise fracture sprain cramp nausea vomiting diarrhea constipation ulcer reflux headache migraine
        dizziness fatigue insomnia anxiety depression stress panic stroke seizure diabetes insulin sugar cholesterol
        pressure hypertension anemia cancer tumor cyst lump biopsy surgery scar transplant hepatitis arthritis gout
        thyroid pregnancy period contraception menopause fertility birth baby infant toddler puberty vaccine antibiotic
        tablet dose injection ointment painkiller steroid supplement vitamin calcium iron zinc symptom diagnosis
        treatment therapy remedy recovery doctor nurse surgeon dentist pharmacist patient clinic hospital ward
        prescription scan x-ray ultrasound sample test result weight diet exercise obesity smoking alcohol caffeine
        addiction sleep dream memory hearing vision glasses pulse breathing oxygen
        food meal breakfast lunch dinner bread butter cheese milk cream egg meat beef pork chicken fish rice pasta
        potato tomato onion garlic carrot cabbage bean pea corn wheat oat nut apple pear banana orange lemon grape berry
        honey salt pepper oil vinegar spice soup salad cake biscuit chocolate coffee tea juice wine beer water recipe
        kitchen oven stove pot pan knife fork spoon plate cup bottle restaurant waiter menu
        money price cost bill invoice payment cash card bank account loan debt credit interest mortgage rent tax refund
        salary wage bonus pension budget profit loss revenue expense income share stock bond fund market trade broker
        investor dividend currency dollar euro insurance claim premium policy audit balance ledger receipt discount sale
        purchase order delivery customer supplier retailer shop store warehouse auction bid contract tender clause
        company firm office manager director board chairman employee staff colleague team boss assistant secretary
        recruiter interview resume job career vacancy shift overtime holiday leave resignation promotion training
        meeting agenda minutes schedule deadline project plan proposal report summary draft memo letter email attachment
        message reply call phone fax conference presentation slide spreadsheet chart forecast estimate target strategy
        merger acquisition partner rival brand advertisement campaign survey feedback complaint
        law court judge jury lawyer attorney witness evidence trial verdict appeal crime theft fraud murder police
        officer prison sentence fine arrest license permit regulation statute treaty constitution right duty liability
        damages settlement dispute arbitration patent copyright trademark privacy consent signature testament heir
        divorce custody government minister president senate parliament congress election vote party candidate mayor
        council citizen border passport visa refugee embassy ambassador army navy soldier general war battle peace
        weapon bomb missile treason revolution empire king queen prince throne colony slave
        energy power electricity gas coal petroleum pipeline refinery turbine reactor grid meter plant dam solar wind
        battery fuel engine motor machine tool valve pump pipe wire cable switch circuit sensor signal steel copper
        aluminum plastic glass rubber wood timber cement concrete brick paint glue screw hammer saw drill crane factory
        worker quarry metal mineral gold silver diamond chemical acid salt solvent polymer
        house home flat apartment room door window wall roof floor ceiling stairs cellar garden fence gate garage bath
        shower toilet sink bed sofa chair table shelf lamp curtain carpet mirror tenant landlord neighbor furniture
        repair leak mold heating cleaning laundry soap towel broom dust rubbish
        road street bridge tunnel car truck bus train tram taxi bicycle motorcycle ship boat ferry harbor airport plane
        pilot flight ticket luggage hotel tourist beach island map traffic accident parking tire brake wheel driver
        passenger station railway journey distance speed mile kilometer
        school pupil teacher class lesson homework exam grade university college professor student lecture thesis degree
        scholarship library book page chapter author poem novel story newspaper magazine journalist editor dictionary
        language grammar translation alphabet word phrase essay
        number sum difference product ratio fraction percent decimal integer prime square root angle triangle circle
        radius area volume perimeter length width height depth equation variable function probability average median
        digit factor multiple remainder sequence series set permutation combination dice coin marble ball interest
        train pipe tank hour minute second week month year age twice half third quarter dozen hundred thousand million
        science physics chemistry biology geology astronomy theory experiment laboratory measurement data statistics
        sample model hypothesis atom molecule electron particle gravity light heat temperature force mass energy wave
        frequency laser telescope microscope satellite rocket planet moon star sun galaxy orbit comet
        computer laptop keyboard screen printer software hardware program code bug password login server network
        database file folder backup website browser search link download update version user interface cloud robot
        algorithm encryption hacker spam internet router camera video photo
        weather rain snow storm thunder flood drought frost ice fog cloud sky climate season spring summer autumn winter
        river lake sea ocean wave tide coast mountain hill valley desert forest jungle field meadow volcano earthquake
        soil sand stone rock clay mud
        animal dog cat horse cow sheep goat pig rabbit mouse rat lion tiger bear wolf fox deer elephant monkey whale
        shark snake frog turtle bird eagle owl duck goose hen pigeon insect bee ant fly spider mosquito worm farm farmer
        crop harvest seed fertilizer pesticide tractor cattle wool leather plant tree leaf root flower grass weed oak
        pine rose mushroom
        art painting sculpture museum gallery music song singer band orchestra piano guitar violin drum concert opera
        dance theater actor film cinema director scene television radio channel series episode game chess football
        soccer tennis basketball baseball golf cricket swimming running marathon athlete coach stadium match goal score
        champion league tournament medal referee
        family mother father parent son daughter brother sister uncle aunt cousin grandmother grandfather husband wife
        wedding marriage child friend guest birthday gift party funeral death grave ghost god church priest prayer bible
        temple mosque monk faith sin soul heaven saint festival tradition custom myth legend hero
        city town village suburb capital region province county country nation continent population immigrant community
        language culture history century ancient medieval modern archive treaty museum castle palace tower ruin
        anger fear joy grief love hate hope pride shame guilt trust doubt jealousy loneliness courage patience kindness
        honesty humor opinion belief promise secret lie truth mistake apology advice decision reason purpose problem
        solution idea question answer example chance risk danger safety rescue emergency fire alarm
        color red blue green yellow black white brown pink purple shape round flat sharp soft hard heavy light thick
        thin wide narrow deep shallow hot warm cool dry wet clean dirty fresh rotten sweet sour bitter loud quiet quick
        slow early late young old rich poor strong weak healthy sick happy sad angry tired hungry thirsty brave lazy
        clever stupid famous strange empty full open closed broken lost
        walk run jump climb swim drive ride fly carry push pull lift throw catch hold drop cut tear break build dig
        plant grow cook bake boil fry eat drink swallow chew breathe smell taste touch hear see watch read write draw
        speak listen sing laugh cry smile kiss hug fight win lose buy sell pay borrow lend steal send receive
        invite visit travel arrive depart stay wait begin stop finish continue change improve reduce increase measure
        count compare choose decide agree refuse allow forbid protect attack defend hide search find lose remember
        forget learn teach explain describe discover invent produce destroy pollute recycle wash wear knit sew
        shirt trousers dress skirt coat jacket hat glove sock shoe boot belt button pocket jewelry ring necklace watch
        morning noon evening night today tomorrow yesterday monday friday january march june september december
        """.split()
    )
)

SENTENCES: tuple[str, ...] = (
    "The baker puts the first loaves into the oven before the street wakes up.",
    "My left knee has hurt since I fell from the ladder last Tuesday.",
    "Please send me the signed contract before the end of the month.",
    "A train leaves the station at noon and travels at sixty miles an hour.",
    "The court dismissed the appeal because it had been filed too late.",
    "Interest rates rose again, and house prices have begun to fall.",
    "Whales cross half the ocean to give birth in warmer water.",
    "She has taken the tablets for two weeks, but the rash will not go away.",
    "If a box holds twelve red and eight blue marbles, what is the chance of drawing a red one?",
    "The gas contract for next winter must be nominated by Friday morning.",
    "Our flight was cancelled because of fog, so we spent the night at the airport.",
    "The old king left no heir, and two cousins fought for the throne.",
    "Restart the server after the update and check whether the backup has run.",
    "A cup of flour, two eggs and a pinch of salt are enough for the dough.",
    "The goalkeeper saved a penalty in the last minute of the final.",
    "Is it normal for a baby of six months to wake up every two hours?",
    "Light from that galaxy has travelled for two billion years.",
    "The committee meets on Thursday to talk about next year's budget.",
    "He lost his job in March and cannot pay the rent.",
    "Frost killed most of the apple blossom in the valley this spring.",
    "The painter mixed his own colours from earth, oil and crushed stone.",
    "Her blood pressure is too high although she eats little salt.",
    "The sum of two numbers is forty and their difference is six.",
    "Thank you for lunch yesterday, it was good to see all of you again.",
    "The bridge was closed after divers found cracks in one of its piers.",
    "Voters will choose a new mayor on the second Sunday in May.",
    "The enzyme breaks the protein into short chains of amino acids.",
    "Turn left behind the church and follow the road to the harbour.",
    "The insurance does not cover damage by flood or earthquake.",
    "Many pupils learn a second language before they can write the first one well.",
    "The doctor advised an operation to remove the cyst on her ovary.",
    "Shares of the company fell by a tenth after the auditors resigned.",
    "The dog barks whenever the neighbour starts his motorcycle.",
    "Solar panels on the roof now cover half of our electricity.",
    "Soldiers crossed the river at dawn and took the village without a shot.",
    "I feel sad and tired most days and have lost interest in everything.",
    "The perimeter of the rectangular field is three times its width.",
    "Can you call me on my mobile when you are out of the meeting?",
    "The choir sang an old hymn while the snow fell outside.",
    "Mice that were given the compound lived longer than those that were not.",
    "The tooth broke while I was eating, and now cold water hurts.",
    "Tenants must give notice three months before they move out.",
    "Rust had eaten through the valve, and steam escaped from the pipe.",
    "The novel tells of a widow who runs a lighthouse with her daughter.",
    "The password must have at least twelve characters and one digit.",
    "Bees find their way by the sun, even when it stands behind clouds.",
    "A shopkeeper sells a coat at a profit of twenty percent.",
    "My period is ten days late, but the pregnancy test was negative.",
    "The traders lost money on the position and closed it at once.",
    "Children under six may use the swimming pool only with an adult.",
    "The priest blessed the boats before the fishermen went out to sea.",
    "Vitamin D is made in the skin when the sun shines on it.",
    "The suspect was seen near the bank an hour before the robbery.",
    "Three workers can paint the house in eight days.",
    "The museum shows coins and pottery from the Roman harbour.",
    "Attached is the revised schedule; let me know if anything is missing.",
    "After the chemotherapy her hair grew back darker than before.",
    "Ice covers the lake from December until the end of March.",
    "The refugees waited at the border for papers and food.",
    "Smoking doubles the risk of a stroke, and exercise lowers it.",
    "He wrote a will and left the farm to his sister.",
    "The virus spreads through the air when an infected person coughs.",
)

GENERAL_WORDS = tuple(
    """accident address agreement animal answer appointment art bank book bridge building business car chemistry child
    city company computer contract customer date delivery distance education electricity email energy engine family
    food game government health history hotel house insurance invoice job language law library machine mathematics
    medicine meeting member money movie music nature office order patient people phone plant police price problem
    product project question religion report research result salary school science server software space sport system
    teacher team test time town trade travel treatment university water weather week work""".split()
)
"""Initial words for an unknown subject."""

NON_ANCHOR_WORDS = frozenset(
    """
    able absolutely according across actual additional along among anyone anything anyway appropriate around ask asks
    available avoid avoids aware basic became become becomes began begin begins behind beside besides best better
    beyond big bit bought bring brings brought buy buys came cause causes certain clear close come comes common
    complete consist consists contain contains correct cure cures current dear definite despite different difficult
    dont easy either else enough especially etc even everyone everything exact except extra feel feels fell felt find
    finds fine fixes following found free full further gave general get gets give given gives glad goes gone good
    great happy hard heal heals held hello help helps here hereby hi hold holds hope hopes huge important include
    includes including inside instead interest keep keeps kept kind knew know knows large last late later lead leads
    leaves led less likely little look lot lots lower lowers made main major make makes maybe met minor near need
    needs new next nice nobody normal nothing ok okay old one others outside particular perhaps please poor possible
    prevent prevents produce produces proper quite ran rather ready real recent reduce reduces regard regarding
    regards relieve relieves remember require requires right rise rises rose run runs said same saw say says second
    see seem seems seen sees send sends sent several severe show shown shows simple slight small solve solves someone
    something sometimes soon sorry sort specific stand stands start stood stop strong suggest suggesting suggests
    suitable sure take takes tell tells thank thanks thereby thereof thing things think thinks thought three told took
    total treat treats tries trigger triggers try two unable underlying unless usual various want wants way ways
    welcome well went whatever whenever whole wish wont worse worst would write writes written wrong wrote yes
    """.split()
)
"""Words that are never anchors: they name nothing, or are verbs without a verb ending."""
