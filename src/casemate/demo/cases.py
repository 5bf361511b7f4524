"""Data of the fictional clinic's case notes: families of complaints and people, in a small notation.

A family starts with ``# name; department; ages; sexes; setting``; ``key:`` opens a field whose items stand
between `` / ``. ``[a|b]`` is a choice, ``{4-9}`` a random number, ``{his}`` a slot. ``on`` holds past-tense
phrases without a subject, ``ctx`` sentences, ``plan`` and ``adv`` imperatives, other fields noun phrases.
"""

FAMILIES = """
# atrial fibrillation; Cardiology; 52-86; fm; ward
on: woke at [two|four] with {his} heart [galloping|thumping out of step] / felt a fluttering in the chest
[halfway up the stairs|in the post office queue] that would not settle / nearly passed out [in the shower|at
the bus stop] after an hour of uneven heartbeats / learned from [a smart watch|the blood donor nurse] that
{his} pulse was all over the place ctx: It lasted [forty minutes|most of the night] and left {him}
[drained|light-headed]. / [Three strong coffees|Plum brandy] the evening before may have set it off. / There
was no chest pain, only [puffing|breathlessness] on the flat.
pmh: raised blood pressure since {2011-2026} / a mitral valve repair {4-12} years back / borderline kidney
function ex: an irregularly irregular pulse of {104-148} / a clear chest and no ankle swelling / heart sounds
of varying loudness / an unreadable jugular pulse lab: ventricular rate {98-151} on ECG with absent P waves /
TSH {0.9-3.4} mU/L / potassium {3.4-4.6} mmol/L / left atrium {41-52} mm on echo dx: new atrial fibrillation /
a fast, probably paroxysmal atrial fibrillation rx: bisoprolol [1.25|2.5|5] mg each morning / apixaban [2.5|5]
mg twice daily / flecainide 100 mg as pill in the pocket plan: fit a [three|seven]-day Holter recorder /
discuss cardioversion once anticoagulated for three weeks / work out the stroke score and repeat the ECG adv:
never skip the blood thinner / cut down to one coffee and no spirits / count the pulse for a full minute at
breakfast
# heart failure; Cardiology; 61-90; fm; ward
on: slept [upright in an armchair|on four pillows] for {4-11} nights / could no longer get {his} shoes on for
swelling / gained {4-9} kg within a fortnight and grew breathless [making the bed|crossing the yard] / coughed
up [frothy|pinkish] spit before dawn ctx: {He} had left out the water tablet [during a coach trip|because of
the constant running to the toilet]. / A salted [ham|herring] supper preceded the worst night. / The trousers
no longer closed and the belly felt tight.
pmh: an anterior heart attack in {2014-2027} / a leaking aortic valve / a stent in the right coronary artery
ex: fine crackles up to the [mid zones|shoulder blades] / pitting oedema to the [knees|thighs] / neck veins
distended to the ear lobe / a gallop rhythm with displaced apex lab: NT-proBNP {1900-9400} ng/L / ejection
fraction {24-41}% / sodium {127-136} mmol/L / blunted costophrenic angles on film dx: decompensated left heart
failure / fluid overload from a weak left ventricle rx: furosemide [40|80|120] mg intravenously / sacubitril
with valsartan 24/26 mg twice daily / spironolactone 25 mg at noon / dapagliflozin 10 mg daily plan: weigh
every morning and chart fluid balance / check creatinine and potassium on day three / ask the heart failure
nurse to telephone weekly adv: drink no more than 1.5 litres a day / put the salt cellar in the cupboard /
report a gain of two kilos in three days
# asthma attack; Chest medicine; 22-59; fm; ward
on: wheezed all night after [sanding floorboards|a hay barn dance] / could not finish a sentence after [a cold
foggy run|feeding the rabbits] / went through a whole blue inhaler in {2-5} days / sat coughing on the bed
edge since {3-5} o'clock ctx: A head cold from the office had gone to the chest. / The brown inhaler ran out
[a month|six weeks] ago and was not replaced. / The last steroid tablets date from {2024-2028}.
pmh: hay fever to birch and hazel / nasal polyps, operated once / childhood eczema ex: polyphonic wheeze in
all fields / a respiratory rate of {24-32} and shoulders working / a prolonged expiration with quiet bases /
an oxygen saturation of {89-93}% on air lab: peak flow {160-290}, own best {410-560} / eosinophils {0.5-1.3}
per nL / carbon dioxide {4.1-5.2} kPa / exhaled nitric oxide {38-92} ppb dx: acute severe asthma / a viral
flare of under-treated asthma rx: salbutamol nebules 5 mg back to back / prednisolone 40 mg for five days /
budesonide-formoterol [200/6|160/4.5] as maintenance and reliever / ipratropium 0.5 mg by nebuliser plan:
write a personal action plan with three colour zones / check inhaler technique with the placebo device /
repeat spirometry in [four|six] weeks adv: rinse the mouth after each steroid puff / carry a spacer in the bag
/ come back if the reliever holds under three hours
# type 2 diabetes; Diabetes clinic; 38-79; fm; clinic
on: got up {4-6} times a night to pass water / lost {5-11} kg without trying and never stopped being thirsty /
noticed [blurred road signs|numb toes in the bath] / came for the yearly check with a diary full of readings
above {13-17} ctx: [Night shifts|A new job in a cake factory] turned meals upside down. / The metformin caused
[cramps|loose stools] and was quietly dropped. / Sweet tea, {5-9} mugs a day, was the main drink.
pmh: fatty liver on a scan / gestational-type sugar trouble in the family / cholesterol treated since
{2016-2028} ex: absent vibration sense at both great toes / a callus under the [second|fifth] metatarsal head
/ a waist of {98-124} cm / dot haemorrhages in one retina lab: HbA1c {68-104} mmol/mol / fasting glucose
{9.1-16.8} mmol/L / urine albumin ratio {3.2-18.5} mg/mmol / LDL {2.6-4.4} mmol/L dx: poorly controlled type 2
diabetes / type 2 diabetes with early nerve damage rx: metformin slow-release 500 mg with supper / semaglutide
0.25 mg under the skin weekly / empagliflozin 10 mg / insulin glargine {8-14} units at bedtime plan: enrol for
the Sweet Sense course / photograph both retinas / repeat HbA1c in three months adv: look at the soles with a
mirror daily / swap juice for water / test before breakfast and two hours after supper
# overactive thyroid; Endocrinology; 24-63; fm; clinic
on: lost {5-9} kg despite eating [like a wolf|second helpings] / started dropping [teacups|tools] because
{his} hands trembled / slept with the window open in [January|frost] and still sweated / snapped at everyone
for {5-10} weeks ctx: A [sister|grandfather] had a goitre taken out. / Collars became tight over the summer. /
Stairs made {his} thighs give way.
pmh: vitiligo on the forearms / two courses of iodine-rich kelp tablets / a panic diagnosis made elsewhere ex:
a fine tremor of outstretched fingers / a smooth goitre with a bruit / lid lag and a slight stare / warm moist
palms and pulse {102-124} lab: TSH below 0.01 mU/L / free T4 {31-58} pmol/L / receptor antibodies {4.8-22.5}
IU/L / free T3 {11.2-19.6} pmol/L dx: Graves' disease / autoimmune hyperthyroidism rx: carbimazole [20|30|40]
mg once daily / propranolol 40 mg three times daily until calm / selenium 100 micrograms plan: repeat thyroid
values every four weeks / obtain an uptake scan / hold radioiodine in reserve adv: stop at once and have a
blood count done for a sore throat with fever / give up smoking for the eyes' sake / avoid seaweed
# duodenal ulcer; Gastroenterology; 31-77; fm; ward
on: passed [tarry|pitch-black] stools for {2-4} days / {was} woken nightly by gnawing pain that [milk|a
biscuit] eased / brought up what looked like coffee grounds [after a wedding|on the late shift] / felt faint
on rising, with a burning under the ribs ctx: {He} had taken ibuprofen for [a bad hip|toothache] for {2-5}
weeks. / Two packets of cigarettes and little food a day were normal. / An uncle had half the stomach removed
for the same.
pmh: heartburn for decades / a hiatus hernia / daily aspirin since {2018-2027} ex: tenderness just above the
navel, no guarding / pale conjunctivae / melaena on the glove / a drop of {18-31} mmHg on standing lab:
haemoglobin {71-109} g/L / urea {9.8-17.4} mmol/L / a {8-16} mm ulcer in the duodenal bulb at endoscopy /
rapid urease test positive dx: a bleeding duodenal ulcer / a Helicobacter-related ulcer of the duodenum rx:
pantoprazole 40 mg twice daily / amoxicillin 1 g, clarithromycin 500 mg and omeprazole for a week / iron
infusion 1000 mg plan: repeat the gastroscopy only if bleeding recurs / do the breath test {5-8} weeks after
eradication / cross-match two units adv: replace anti-inflammatories with paracetamol / look at the stool
colour each day / leave the evening schnapps
# gallstones; Surgery; 29-74; fm; ward
on: doubled up [an hour after fondue|after Sunday roast] with pain under the right ribs / vomited bile through
the night, the ache drilling into {his} shoulder blade / noticed tea-coloured urine and yellow eyes / went
through the {4-6}th colic since spring ctx: Fried food had been off the table for a year. / A crash diet took
off {12-21} kg [before a class reunion|since winter]. / Hot-water bottles no longer helped.
pmh: stones in mother and grandmother / a sleeve operation in {2025-2028} / sickle trait ex: arrest of
inspiration under the costal margin / yellow sclerae / a soft abdomen away from the right upper corner /
shivering with {38.1-39.2} C lab: bilirubin {38-96} umol/L / CRP {44-188} mg/L / wall {4-8} mm thick with
{3-9} stones on ultrasound / gamma-GT {188-640} U/L dx: acute cholecystitis / stones in the gallbladder and
probably in the duct rx: cefuroxime 1.5 g with metronidazole 500 mg / hyoscine butylbromide 20 mg / metamizole
1 g by drip plan: take the gallbladder out by keyhole within 72 hours / ask for MR cholangiography / keep nil
by mouth from midnight adv: eat small low-fat meals / lift nothing above five kilos for three weeks / ring if
the skin turns yellow again
# migraine; Neurology; 22-52; ffm; clinic
on: lost half {his} visual field behind [zigzag|shimmering] lines [while driving|at choir] / spent {2-3} days
in a dark room with one-sided hammering / mixed up words for {15-40} minutes before the headache / counted
{9-16} headache days last month ctx: [Red wine|Skipped lunches|Thunderstorms] and [neon light|perfume] were
reliable triggers. / Vomiting brought relief. / Daily codeine had crept in since the move.
pmh: travel sickness as a child / a mother and aunt with sick headaches / low ferritin ex: normal fundi / a
supple neck without stiffness / full fields to confrontation / tender temples and no focal sign lab: MR of the
head without lesion / ESR {4-12} mm / ferritin {9-22} ug/L / headache impact score {58-71} dx: migraine with
aura / frequent migraine plus painkiller overuse rx: rizatriptan 10 mg at onset / topiramate from 25 mg
upwards / candesartan [8|16] mg / erenumab 70 mg monthly plan: stop codeine by calendar in {2-4} steps / go
through the headache diary / offer relaxation training adv: limit triptans to nine days a month / eat and
sleep at fixed hours / take the tablet early, not when the pain peaks
# broken wrist; Fracture clinic; 24-83; fm; clinic
on: slipped on [wet leaves|spilt oil|a kitchen tile] and landed on {his} {side} hand / flew over the
handlebars [on the towpath|by the weir] onto the outstretched {side} arm / fell off [a step-ladder|a hay cart]
and heard the {side} wrist crack ctx: The hand looked like a dinner fork. / A passer-by splinted it with [a
magazine|an umbrella]. / The ring had to be cut off.
pmh: a previous ankle break / early menopause and thin bones in the family / left-handedness in a right-handed
trade ex: dorsal angulation and bruising at the {side} wrist / intact finger flexion / tingling of thumb and
index that faded / good capillary refill lab: distal radius fracture, {12-28} degrees tilted, on film /
vitamin D {21-48} nmol/L / T-score [-3.1|-2.6|-1.9] at the spine / radial shortening {2-5} mm dx: a Colles
fracture of the {side} radius / an extra-articular fracture of the {side} distal radius rx: paracetamol 1 g
four times daily / a haematoma block with lidocaine 1% / vitamin D 20,000 units weekly / a split plaster plan:
re-X-ray on day [7|10] / arrange plating if the tilt slips past 15 degrees / book hand therapy after cast
removal adv: keep the arm above heart height / move every finger hourly / come at once for blue or numb
fingers
# gout; Rheumatology; 36-78; mmf; clinic
on: could not bear the bed sheet on {his} {side} big toe / limped in wearing one sandal / woke with a
[crimson|plum-coloured] joint at the base of the {side} great toe / felt the {side} foot catch fire after [a
stag night|venison stew] ctx: A new water tablet was begun in [May|autumn]. / {He} had eaten mussels three
days running. / This was attack number {3-7}.
pmh: kidney gravel / psoriasis on the elbows / hypertension on indapamide ex: a swollen, glossy first
metatarsophalangeal joint / a chalky nodule on the ear rim / warmth spreading to the instep / a temperature of
{37.4-38.2} lab: urate {498-672} umol/L / needle-shaped negative crystals in fluid / creatinine {88-141}
umol/L / CRP {31-97} mg/L dx: acute gout of the {side} foot / crystal-proven podagra rx: colchicine 0.5 mg
twice daily / prednisolone 30 mg for five days / allopurinol 100 mg, later more / etoricoxib 90 mg plan: aim
for urate under 360 / swap the thiazide for losartan / ultrasound both feet for tophi adv: cool the joint with
wrapped ice / leave beer and offal alone / keep taking allopurinol during a flare
# sciatica; Orthopaedics; 27-66; fm; clinic
on: bent to lift [a piano stool|a crate of apples] and felt a bolt down {his} {side} leg / could not sit
through [a film|a lesson] for buttock pain / dragged the {side} toes on stairs for {4-9} days / slept on the
floor for {5-12} nights ctx: Coughing shot it to the little toe. / A vertebra-cracking session [at a fair|from
a cousin] made it worse. / Bladder and bowel behaved.
pmh: lumbago each haymaking season / a disc operation at L4/5 / a leg-length difference of {9-16} mm ex:
straight-leg raise {20-45} degrees on the {side} / a dulled {side} ankle jerk / weak heel walking / numbness
along the outer foot lab: disc bulge touching the S1 root on MRI / Oswestry score {38-62}% / post-void
residual {10-40} mL / CRP under 5 dx: {side} S1 radiculopathy / a herniated lumbar disc with {side} leg pain
rx: naproxen 500 mg with a stomach guard / amitriptyline 10 mg at night / a transforaminal steroid injection /
gabapentin 300 mg plan: send to the Monday back group / decide about surgery after six weeks / retest foot
strength in [7|10] days adv: walk ten minutes every two hours / ring at once if the saddle area goes numb /
hinge at the hips, not the waist
# hand eczema; Dermatology; 22-61; fm; clinic
on: split the skin of {his} fingertips [kneading dough|mixing mortar] / scratched {his} knuckles raw since
[changing gloves|Lent] / developed watery blisters between the fingers / wore cotton gloves to shake hands
ctx: It healed completely during a [fortnight|month] by the sea. / Hands were washed {25-60} times a shift. /
A herbal balm burned.
pmh: milk crust in infancy / nickel earrings that wept / athlete's foot ex: fissures over the finger pulps /
scaly plaques sparing the wrists / tiny vesicles along both thumbs / thick, leathery knuckles lab: patch test
++ to [thiuram|chromate|fragrance mix] / IgE {140-890} kU/L / negative fungal scraping / severity index
{28-74} dx: allergic contact dermatitis of both hands / irritant and atopic hand eczema rx: clobetasol
ointment nightly for {2-3} weeks / tacrolimus 0.1% / urea 10% cream / alitretinoin 30 mg plan: notify the
occupational insurer / book {18-24} light sessions / read the patches again at 96 hours adv: wear
[nitrile|vinyl] over cotton for wet work / grease hands before bed / use a soap-free wash
# ear infection; Children's clinic; 2-8; fm; clinic
on: screamed through the night holding {his} {side} ear / ran a fever and tugged at the {side} ear / refused
[porridge|bottles] and kept saying "bee in my ear" / woke with yellow crust on the pillow ctx: A runny nose
had gone round [playgroup|the cousins]. / Onion wraps and {2-3} doses of syrup had been tried. / The week
before had been spent in a paddling pool.
pmh: grommets discussed last winter / tonsils of impressive size / birth at {34-38} weeks ex: a bulging red
{side} drum / a temperature of {38.3-39.6} and a lively mood / pus in the {side} canal / nothing tender behind
the ear lab: flat tympanogram / CRP {18-64} mg/L by finger prick / white cells {12.1-18.7} / hearing loss of
{20-35} dB dx: acute {side} middle-ear infection / otitis media, drum perforated rx: amoxicillin suspension
[250|320|400] mg three times daily / ibuprofen syrup [80|100|150] mg / xylometazoline child drops plan: look
into the ear again after [48|72] hours / repeat the hearing test in eight weeks / write a note for nursery
adv: keep bath water out / offer drinks often / hold paracetamol and ibuprofen four hours apart
# uveitis; Eye clinic; 22-57; fm; clinic
on: could not look at [the sea|a laptop|headlights] for pain in {his} {side} eye / woke with a red {side} eye
and a pupil like a clover leaf / saw fog and floating soot for {3-6} days ctx: A chemist's drops for
conjunctivitis did nothing. / Morning back stiffness had gone on for [years|months]. / Contact lenses had
stayed in overnight.
pmh: two earlier attacks on the other side / Crohn's disease / HLA-B27 in a brother ex: ciliary flush of the
{side} eye / cells ++ and flare in the chamber / fine deposits on the inner cornea / sticky iris at {4-7}
o'clock lab: acuity 0.{4-7} {side} / eye pressure {9-13} mmHg / HLA-B27 positive / sacroiliac film with grade
[1|2] change dx: acute anterior uveitis, {side} / recurrent {side} iritis rx: prednisolone 1% drops hourly by
day / cyclopentolate 1% three times daily / dexamethasone ointment at night plan: slit-lamp in [two|three]
days / refer to rheumatology over the back / taper drops over six weeks adv: wear dark glasses / never stop
steroid drops abruptly / ring if sight dims
# positional vertigo; Ear, nose and throat; 41-80; ffm; clinic
on: saw the ceiling spin on turning over in bed / grabbed the [washing line|shelf] when reaching up and the
garden whirled / threw up after [a dentist's chair|yoga] tipped {him} back / veered into hedges for {3-8} days
ctx: Each spell lasted {15-40} seconds. / A bump on [a low beam|the boot lid] came a week earlier. / Hearing
stayed as it was.
pmh: osteoporosis on alendronate / Meniere's in an aunt / a whiplash in {2020-2028} ex: rotatory nystagmus on
{side} Dix-Hallpike / a steady gait heel to toe / a normal head-impulse test / dry clean ear canals lab:
audiogram normal for age / Romberg sway {2-4} cm / vitamin D {24-41} nmol/L / nystagmus latency {3-8} s dx:
benign positional vertigo of the {side} posterior canal / loose otoliths, {side} rx: dimenhydrinate 50 mg for
journeys / an Epley manoeuvre, {2-3} rounds / cholecalciferol 1000 units plan: repeat the manoeuvre next week
/ teach Brandt-Daroff exercises / scan only if hearing falls adv: rise in stages / stay off ladders for a
fortnight / sleep with head raised tonight
# kidney stone; Urology; 23-64; mf; ward
on: paced the [platform|kitchen] all night with cramp from {side} flank to groin / passed blood on [day two of
a hike|a flight] / vomited from waves of {side} loin pain / caught something like a peppercorn in a sieve ctx:
It was harvest and {he} drank [barely a litre|only cola]. / Nothing, not even a scalding bath, gave rest. /
Two brothers form stones.
pmh: a lithotripsy in {2019-2028} / short bowel / gout tablets taken off and on ex: {side} renal angle
tenderness / restless pacing without peritonism / a temperature of {36.4-37.3}, no rigor / an otherwise quiet
abdomen lab: a {4-9} mm stone at the {side} ureter on CT / red cells ++++ on dipstick / calcium {2.3-2.7}
mmol/L / creatinine {84-137} dx: {side} ureteric colic / an obstructing stone in the {side} distal ureter rx:
diclofenac 75 mg into the muscle / tamsulosin 0.4 mg at night / morphine {3-6} mg titrated plan: place a
double-J stent if fever sets in / sieve all urine for analysis / collect 24-hour urine in six weeks adv: drink
till the urine is pale / squeeze lemon into water / eat salt sparingly
# fibroids; Gynaecology; 34-51; f; clinic
on: flooded [a theatre seat|the car] and passed clots / changed towels hourly on {2-4} days each cycle / felt
a firm lump above the pubic bone / nodded off at work, white as chalk ctx: The coil had fallen out in
[March|August]. / Tights and skirts bought last year no longer fitted. / Family planning was complete.
pmh: a myoma shelled out in {2021-2028} / three miscarriages / von Willebrand excluded ex: a bulky uterus of
{12-18} weeks / a knobbly, mobile pelvic mass / pallor of nail beds / a healthy cervix on speculum lab:
haemoglobin {76-104} g/L / ferritin {4-11} ug/L / {2-5} fibroids, largest {48-92} mm, on scan / endometrium
{6-11} mm dx: heavy bleeding from uterine fibroids / submucous myoma with iron lack rx: tranexamic acid 1 g
during flow / ferrous sulphate 200 mg alternate days / relugolix combination daily plan: talk through
embolisation versus hysterectomy / take an endometrial sample / send for hysteroscopy adv: keep a bleeding
chart / take iron with orange juice / come in if soaked hourly for three hours
# gestational diabetes; Maternity; 23-42; f; clinic
on: failed the sugar drink at {25-28} weeks / craved [sherbet|iced buns] and drank from the tap all night /
measured {3-5} cm large at the midwife's check ctx: A first baby weighed {4.1-4.8} kg. / Nausea had only let
white toast stay down. / Kicks were plentiful.
pmh: polycystic ovaries / a father on insulin / one caesarean in {2026-2029} ex: fundus {29-35} cm / fetal
heart {136-152} and reactive / ankle puffiness by evening / no glucose but a trace of protein on stick lab:
fasting {5.3-6.4} and one-hour {10.2-12.1} mmol/L / HbA1c {36-44} / belly on {84-89}th centile / amniotic
index {17-24} dx: diabetes of pregnancy / gestational diabetes, diet not sufficing rx: isophane insulin {6-12}
units at night / metformin 500 mg with dinner / folic acid and iodine as before plan: scan growth every
[two|three] weeks / book a Thursday slot with Ms Fenwick / induce by {39-40} weeks adv: test four times a day
/ split carbohydrate over six meals / walk after lunch
# depression; Mental health; 23-71; fm; clinic
on: stopped [opening post|answering the door] after [the shop closed|a divorce|a sister's funeral|early
retirement] / woke at three and brooded until dawn / cried [in a lay-by|at the till] without knowing why /
lost all taste for {his} old pleasures within {6-12} weeks ctx: Guilt about [money|a brother] went round and
round. / Work slipped and a warning letter came. / {He} had no plans to die and named two reasons to stay.
pmh: a low spell after school / post-viral exhaustion / shaky months off alcohol in {2023-2028} ex: slowed
speech with long pauses / tearful yet warm contact / no delusions or voices / unironed clothes, poor eye
contact lab: PHQ-9 {14-22} / B12 {180-390} ng/L / TSH {1.1-3.6} / sleep diary {3.5-5.5} hours dx: a moderate
depressive episode / recurrent depression without psychosis rx: sertraline 50 mg after breakfast / mirtazapine
15 mg at bedtime / escitalopram 10 mg plan: start behavioural activation / agree a written safety plan / ring
between visits on [Tuesday|Friday] adv: get outdoors before ten / give the tablets four weeks / tell one
trusted person
# sleep apnoea; Sleep lab; 35-72; mmf; clinic
on: fell asleep at [a red light|a christening] / {was} banished to the spare room for sawing snores / woke
choking and with a dry mouth / needed {3-5} naps to get through a Sunday ctx: Collar size had gone from
{39-41} to {43-46}. / A pub bet filmed {him} not breathing for {20-45} seconds. / Morning headaches lifted by
ten.
pmh: stubborn hypertension / a broken nose from boxing / tonsils taken out late ex: a crowded throat,
Mallampati [3|4] / a neck {42-47} cm round / a septum bent to the {side} / drowsiness with full orientation
lab: {22-61} pauses per hour at home / Epworth {13-20} / lowest oxygen {71-84}% / bicarbonate {25-29} mmol/L
dx: severe obstructive sleep apnoea / sleep apnoea with daytime drowsiness rx: auto-titrating CPAP at 6 to
{11-14} cm / a mandibular splint / mometasone spray nightly plan: spend a night in the lab for mask fitting /
download usage after 30 days / tell the licensing office adv: sleep on the side / avoid nightcaps / do not
drive when drowsy
# giardiasis; Travel clinic; 23-68; fm; clinic
on: belched like rotten eggs since [the lake camp|a river tour] / ran to the toilet {5-9} times daily after
[trekking|aid work] / dropped {3-7} kg with greasy floating stools / blew up like a drum after every bowl of
porridge ctx: Water came from [a goat-herd's spring|melted snow], unfiltered. / Four of {6-9} companions had
it too. / Pharmacy charcoal did nothing.
pmh: lactose trouble since a child / typhoid vaccine in {2027-2028} / a missing spleen ex: a drum-like belly
with loud gurgling / a dry tongue / no blood on the glove / sunburn and {36.5-37.4} C lab: Giardia antigen
positive / stool fat raised / eosinophils normal at 0.{1-3} / albumin {33-38} g/L dx: giardiasis / imported
parasitic diarrhoea rx: metronidazole 400 mg thrice daily for [five|seven] days / tinidazole 2 g once /
rehydration salts plan: re-test stool in a month / tell public health / screen housemates adv: skip milk for
weeks / shun alcohol with the tablets / boil stream water
# deep vein thrombosis; Vascular medicine; 26-76; fm; ward
on: found {his} {side} calf hard and {3-6} cm thicker / hobbled after [a long-haul flight|weeks in plaster]
with a bursting {side} leg / thought it a pulled muscle from [badminton|digging] / could not pull a boot over
the {side} calf any more ctx: The veins on the shin stood out like cords. / Hormone tablets or a blood thinner
had not been in use. / Breathing was easy.
pmh: a clot in a sister's lung / knee surgery {3-7} weeks ago / varicose stripping ex: pitting {side} calf,
bluish on standing / pain on squeezing the {side} calf / equal foot pulses / no swelling in the groin lab:
D-dimer {2.1-9.8} mg/L / non-compressible {side} popliteal vein / platelets {168-341} / factor V Leiden
pending dx: {side} leg deep vein thrombosis / a popliteal clot, {side} rx: rivaroxaban 15 mg twice daily for
21 days / tinzaparin by weight / class two stocking plan: treat for [three|six] months / look for cancer by
age-fit screening / recheck duplex in spring adv: keep walking / call if chest pain comes / carry the
anticoagulant card
# falls; Care of older people; 75-94; fm; ward
on: {was} found [beside the commode|among the tomato pots] after a night on the floor / tripped over [the
cat|a rug] for the {4-6}th time / toppled backwards getting out of a taxi / sat down hard on the bathroom
tiles [at dusk|before breakfast] ctx: {He} could not reach the alarm cord. / The glasses were from
{2015-2022}. / A new sleeping pill was begun last month.
pmh: cataracts, one done / Parkinsonism under watch / bladder urgency ex: pressure sagging by {27-44} mmHg
within a minute of rising / a hip bruise the size of a plate / timed up-and-go {19-38} s / full hip rotation
lab: CK {480-2900} U/L / no bleed on head CT / sodium {126-137} / clock drawing {2-4} of 5 dx: repeated falls
with postural hypotension / a fall with long lie rx: fludrocortisone 0.1 mg / melatonin 2 mg in place of
zopiclone / cholecalciferol and calcium daily plan: let Mr Quill order a frame and rails / join Wednesday's
balance group / trim tablets from {9-13} to six adv: sit two minutes before standing / wear the pendant, even
in bed / clear the hallway
# dog bite; Minor Injuries Unit; 23-73; fm; clinic
on: {was} bitten on the {side} [forearm|thigh] by [a farm collie|a tethered mastiff] / got {his} {side} wrist
caught in a spaniel's jaws at the groomer's / stepped between two fighting terriers and {was} bitten in the
{side} calf / reached through a gate and tore {his} {side} hand free ctx: The owner gave a name and a vaccine
booklet. / It was rinsed under a [yard tap|garden hose]. / [Two|Five|Nine] hours passed before anyone looked
at it.
pmh: tetanus cover from {2013-2022} / a spleen lost in a crash / blood thinners ex: {3-6} punctures and a
{2-5} cm flap / clean edges, tendons gliding / a throbbing red margin / sensation kept to the tip lab: no
tooth fragment on film / CRP {4-39} / wound swab growing Pasteurella / white count {8.2-13.9} dx: a dog bite
wound / an infected animal bite rx: co-amoxiclav 875/125 mg for [five|seven] days / tetanus booster / saline
irrigation and loose strips plan: inspect at 24 and 48 hours / leave the wound open / file the animal report
adv: raise the limb / watch for red streaks / change dressing daily
"""

PEOPLE = """
job: bell founder / bus driver / beekeeper / tax clerk / tiler / piano tuner / lock keeper / dental nurse /
roofer / florist / geography teacher / chimney sweep / night porter / cheese maker / surveyor / hairdresser /
translator / ferry hand / welder / bookbinder / court usher / forester / swimming instructor / baker /
call-centre agent / stonemason / librarian / vet / software tester / lorry driver / puppeteer / shepherd /
upholsterer / cellist / postal worker / estate agent / cook / optician
first: Ilse / Tomas / Berit / Odo / Nadia / Wendel / Petra / Caspar / Yola / Anselm / Mirre / Leonie / Bram /
Orla / Viggo / Salma last: Oakhollow / Tansley / Fennimark / Brandreth / Ketterby / Achterlund / Sorrel /
Mbeki-Lowe / Vantongeren / Quince / Dray / Pellworth / Ishikuro / Starling / Wetherfold / Abelard / Crane /
Nwosu-Bell / Thistlewood / Haverkamp / Lisle / Ruiz-Marten town: Sallowbridge / Ostley / Mirrenford /
Brackwell Moor / Dunmere / Upper Tolver / Ennerby / Crale / Wexcombe / Nether Pool kin: sister Ilse / brother
Odo / neighbour Wendel / cousin Petra / aunt Berit / godfather Caspar / lodger Viggo / colleague Nadia /
stepson Bram / flatmate Yola / sister-in-law Leonie / old friend Anselm / brother-in-law Tomas / cousin Salma
hobby: restoring [accordions|church organs|clocks|a steam launch] / training [homing pigeons|two whippets|a
sheepdog] / painting [tin soldiers|inn signs|orchids] / singing in the [chamber|mill] choir / fly-fishing
below the weir / pressing cider from windfalls / calling bingo numbers at the parish hall / [digging|mapping]
Roman drains / knitting [socks|jackets] for penguins / keeping [bantams|Angora rabbits|silkworms] / dancing
tango on Thursdays / carving [spoons|chess pieces] / ringing the bells at St Oda's / growing [leeks|dahlias]
for show / watching comets from the shed roof / playing table tennis in the second league / writing crime
stories / repairing [mopeds|radios|dolls] / swimming at dawn in [Dunmere|the quarry] / collecting [beer
mats|fossils|tram tickets] event: the regatta / a niece's wedding / the leek show / the tram museum's open day
/ a ferry crossing to Skarne / the harvest fair / an evening class in Norwegian / the chess final / a
pilgrimage / the choir's jubilee / exam week / the pigeon auction / stocktaking
kidhobby: building card castles / collecting snails / riding a balance bike / drawing excavators / dancing in
puddles / feeding the ducks at the mill pond / playing postman / lining up toy tractors kidlife: {Kidhobby} is
the great passion at present. / {His} [mother|father|grandmother] brought {him} straight from [nursery|a
birthday party|the allotment]. / A plush [hedgehog|octopus|walrus] had to be examined first. / There are {2-5}
children in the house in {town} and one [hamster|tortoise]. / A sticker of a [lorry|fox|comet] bought {his}
cooperation. / Nobody at home smokes; the [stove|dog] has been there for years. / {He} counted the ceiling
tiles up to [eleven|nineteen] while waiting.
life: {He} shared [a flat|a cottage|two rooms] [above a bakery|beside the weir|over a saddler's] in {town}
with {his} {kin}. / Most free evenings go to {hobby}. / {His} {kin} drove {him} in [from {town}|through the
hail|on a quad bike]. / What troubled {him} most was missing {event}. / {He} had been {hobby} only the weekend
before. / The declared goal is {hobby} by [All Saints|midsummer|Carnival]. / Small talk turned to {hobby}. /
{His} {kin}, [newly retired|a trainee baker|never lost for words], waited outside with [knitting|a crossword|a
thermos of broth]. / {He} grew up in {town} and moved [after the flood|for love|when the mill closed]. / On
the table stood a jar of [quince jelly|pickled walnuts|heather honey] for the team. / [Eight|Eleven|Fourteen]
questions, numbered, were on {his} list. / Smoking stopped in {2021-2028}; wine on Sundays only. / Twenty
roll-ups a day, [no wish|no plan] to stop. / A certificate for {3-14} days was needed because of {event}. /
{His} {kin} looks after the [goats|till|allotment] meanwhile. / Money is tight since the [roof|boiler] gave
out. / {He} had written a page for us in green ink. / {He} had last seen a doctor in {2012-2027}. / A bus
strike made {him} [an hour|forty minutes] late. / Sleep comes only with the radio on. / {He} asked whether
{hobby} was still allowed. / Two [cats|goats|parrots] were left with {his} {kin}. / Since {event} nothing has
been quite right at home. / Work as before is out of the question until after {event}. / The new
[boss|landlord] shows little patience. / {His} {kin} had the same thing, and says so often. / {His}
[niece|nephew] rings every evening from {town}. / English is {his} third language; [{kin} interpreted|the
handset was used].
also: an appendix out at [nine|twenty] / an allergy to [latex|nickel|sticking plaster] / a shoulder once
dislocated at handball / varicose veins / tonsils out as a child / a cracked rib in {2012-2025} / mild hearing
loss / a [tick|jellyfish] rash in {2019-2028} / shingles before an exam / a cataract in one parent / travel
sickness on ferries / no operations ever / a deviated nasal septum / tinnitus after a concert / vaccinations
complete / a scar from a scythe / a tooth implant / frozen feet in the army / a curved spine from school days
/ one kidney donated to a twin / restless legs / flat feet / a mumps deafness on one side / a removed mole /
coeliac disease in the family / a burst eardrum from diving kidalso: a milk rash long outgrown / a collarbone
broken on the slide / vaccinations to plan / a bead once lodged in the nose / croup last winter / speech
therapy twice a week / a heat rash each summer / no stays in hospital
street: [Tolver|Quarry|Candle|Weir] Street {2-88} / [Lower|Upper] Mill Row {3-41} / Tanners' Yard {1-9} / the
last farm before {town} caller: the patient / {his} {kin} / the patient on a borrowed telephone / {his} {kin}
with the patient beside kidcaller: {his} mother / {his} father / {his} grandmother in {town} escort: alone /
with {kin} / with a neighbour / by taxi / by bus [14|31] kidescort: with mother / with father, very pale /
with gran and a plush rabbit
date: {d} [January|March|April|May|July|August|October|November] {year} / {year}-0{1-9}-{dd} /
{dd}/0{1-9}/{year} / {dd}.1{0-2}.{year} / the {d}th of [February|June|September|December] {year} doc: Dr
{last} / Dr {last} / Dr {first} {last} / Dr {letter}. {last} / Professor {last} obs: BP {112-138}/{64-86},
weight {54-97} kg. / weight {54-97} kg, BP {112-138}/{64-86}. / {154-189} cm, {54-97} kg. kidobs: weight
{13-26}.{0-9} kg. / {88-127} cm tall. / lively, drinking.
"""

PRONOUNS = {
    "f": {"he": "she", "him": "her", "his": "her", "was": "was"},
    "m": {"he": "he", "him": "him", "his": "his", "was": "was"},
    "I": {"he": "I", "him": "me", "his": "my", "was": "was"},
    "you": {"he": "you", "him": "you", "his": "your", "was": "were"},
}

SHORTHAND = (  # abbreviations of a hurried author: pattern and replacement
    (r"\b[Tt]he |\b[Aa]n? (?=[a-z])", ""),
    (r"(?<=[.:] )(He|She) (?!had )", ""),
    (r" and ", " & "),
    (r"\b[Ww]ith ", "w/ "),
    (r"\btwice daily", "bd"),
    (r"\b(three times|thrice) daily", "tds"),
    (r"(?<!times )(?<!twice )(?<!thrice )\b(once )?daily", "od"),
    (r"\bat night\b|\bnightly|\bat bedtime", "nocte"),
    (r"(?<=\d) weeks", "/52"),
    (r"(?<=\d) days", "/7"),
    (r"(?<=\d) months", "/12"),
)
