"""Word classes of refusals in six languages: the role of a word in a sentence that declines or answers.

A line contains a class and its words, in lower case without accents. An accent is kept if it separates two words ("é"
is a form of "to be", "e" means "and"). A star matches any ending. A line with two classes contains verb forms that
include their subject ("puedo": I can). A word belongs to its first class. Words without a class are subject matter.

=========  =====================================================================================================
NEG, NONE  negation; UN: words that include it
I, YOU     the assistant, the reader; IT, HE: things referred to, third persons; AI: "assistant", "model"
SRC        documents; GIVEN: "provided", "above"; INFO: "information", "detail"; ANSWER; REQ: "question"
CAN, WILL  modal verbs; BE, DO, HAVE: auxiliary verbs; CONTAIN, STATE, FIND, KNOW, DET, ACT, REFUSE: what is declined
SORRY      apologies; THANKS: courtesies; POLICY: rules, privacy; ACCESS; CONTACT: "please", "contact"
LACK       missing, outside; ENOUGH, ONLY, WITHOUT: quantity and restriction
BUT, SO    conjunctions, with BECAUSE, IF, AND, QUE; WH: question words; SAID: reported speech
IN, ABOUT  prepositions; THE, NE: dropped
=========  =====================================================================================================
"""

from __future__ import annotations

ENGLISH = """
NEG: not no never cannot nor nope
NONE: nothing none neither nowhere nobody
UN: unable impossible unsure uncertain unclear unavailable unrelated unwilling inaccessible insufficient* inadequate
  incapable inappropriate silent irrelevant
I: i me my mine myself
YOU: you your yours yourself
IT: it its this that these those such they them their
HE: people supplier* visitor* user* seller* buyer* insurer* party parties guest* member* student* employee* he she him
  her his hers patient* customer* client* doctor* court judge* witness* team staff company employ* tenant* landlord*
  king author* colleague* mr mrs ms dr shop bank committee scientist* author officer* manager*
SRC: context document* documentation passage* text texts source sources excerpt* snippet* chunk* material* corpus
  collection file files reference note notes article* paper papers letter email emails mail mails thread* transcript*
  minutes records manual guide handbook knowledge base database section sections summary results contract brochure
  leaflet chart* history log attachment* dataset entry entries search page pages record report* agreement data
GIVEN: given provided retrieved supplied available attached above here following front
INFO: detail details reference* indication match* statement result figure* information info detail* trace evidence
  statement* explanation fact facts figure figures hint specifics word words
CAN: can could able capable may might possible position liberty allow* permitted permit* authori* qualified equipped
  ability authority permission mean* way cleared suitable appropriate
WILL: will would shall should must
DO: do does did doing done
BE: is are was were be been being am
HAVE: have has had having possess*
CONTAIN: contain* include* including cover* provide provides offer* list listed make makes set sets gives give gave
STATE: state states stated specif* say says indicat* address* explain* named touch* reveal* refer refers clarif*
  disclosed talk* deal deals spell identif* list* shed settl* resolv* mention* goes go describ* reports speaks speak
  talks hint* suggest* lists claim* discuss discussing discuss*
FIND: find* found locat* see seeing seen spot* retriev* present search* look* check* review* read gone scan* tried
  came come turned turn up
KNOW: know* known aware familiar sure certain understand* recall remember* confident tell
ACT: help* assist* answer respond comply fulfil* shar* disclos* divulg* provid* repeat* reproduc* quote copy process*
  engage generat* creat* produc* writ* print* output recite perform continu* proceed comment* speculat* guess* advise
  recommend* diagnose elaborate summari* translat* execut* support participat* complete obey disregard override ignore
  lend report handle handles handling release releases predict handle*
ACCESS: access* permission* clearance
REFUSE: declin* refus* abstain* refrain* prohibit* barred forbidden restrict* reject* pass withh* prevented avoid
  against
SORRY: sorry apolog* unfortunately regret* afraid sadly alas pardon
THANKS: thank* appreciate* understand hello hi welcome
POLICY: guideline* rules privacy confidential* private sensitive proprietary violat* breach* unethical instruct*
  program* trained security policy policies
REQ: question* request* query topic subject matter
DET: determin* infer* conclu* confirm* verif* deduc* deriv* judge establish* decide* ascertain* conclusion conclusions
LACK: lack* lack lacks lacking missing absent omitted absence outside beyond scope short empty limited fails
  unaddressed stops ends
ENOUGH: enough sufficient more further additional specific relevant any exact
ONLY: only just solely merely
WITHOUT: without
BUT: but however though although while yet whereas
SO: so therefore thus hence consequently
BECAUSE: because since as due
IF: if unless when
AND: and or
WH: who what where why how whether which whom
SAID: said wrote writes replied told asked asks testified reported according
IN: in from within
ABOUT: about on regarding concerning of for to with
AI: ai assistant model language chatbot bot
CONTACT: contact* consult* reach try visit please
ANSWER: answers answered answering response responses
WE: we our ours us let
SHOW: show shows shown showed appear appears appeared display
RATHER: rather prefer* comfortable feel
HARD: hard difficult tricky trouble struggling
IDEA: idea clue opinion* experience feelings visibility
NE: the a an
VAGUE: general generally briefly vague vaguely
ADVICE: medical legal financial lawyer advice diagnosis
FIELD: name names date dates number numbers amount price prices cost costs reason reasons cause year time location
  address phone fee sum
SEND: send sent pasted uploaded shared sending
IDIOM: stress lie overstate emphasize praise thank imagine deny
CLOSED: denied blocked filter filtered unknown unanswerable
NEED: need needs required require
"""

GERMAN = """
NEG: nicht kein keine keinen keinem keiner keinerlei nie niemals keines
NONE: nichts nirgends nirgendwo niemand weder
UN: unmoglich unsicher unklar unzureichend* ausserstande unangemessen unzulassig uberfragt
I: ich mir mich mein*
YOU: sie ihnen ihr ihre ihren ihrem ihrer du dir dich
IT: das dies diese dieser dieses diesem diesen dazu darauf daruber hierzu dabei damit davon hieruber
HE: er ihm ihn patient* arzt kund* mieter* vermieter* gericht zeug* herr frau klag* beklag* firma verkaufer* kaufer*
  team man
SRC: kontext* text texte texten textes dokument* unterlagen quelle* auszug* auszuge* abschnitt* passage* material*
  datenbank wissens* suchergebnis* ergebnis* datei* notiz* bericht* brief* mail* email* artikel* akte* handbuch*
  protokoll* vertrag* daten seite* datensatz* leitfaden* stelle textstelle e mail mails email emails
GIVEN: bereitgestellt* vorliegend* gegeben* verfugbar* vorhanden* zur hier obig*
INFO: information* angabe* auskunft auskunfte einzelheit* detail* erwahnung* antwort* hinweis* eintrag* beleg*
  nachweis* aussage*
CAN: kann konnen konnte konnten konnt darf durfen durfte lage befugt berechtigt autorisiert imstande moglich* vermag
  moglichkeit befahigt erlaubt gestattet qualifiziert zustandig
WILL: will mochte mochten werde werden wird wurde wollen soll sollte muss
BE: ist sind war waren bin sei
HAVE: habe haben hat hatte hatten besitze verfuge
CONTAIN: enthal* enthiel* beinhalt* gib* biet* umfass* deck* fuhr* liefert liefern macht machen geben ergeben ergibt
STATE: erwahn* nenn* genannt* sag* gesagt besag* angegeb* beschreib* beschrieb* behandel* hervor erlauter* spezifi*
  beantwortet* thematis* aufgefuhrt mitgeteilt ausgefuhrt vermerkt dokumentiert festgehalten bezieh* geht gehen
FIND: find* fand sehe entdeck* gesucht durchsuch* gepruft durchsicht angesehen ersichtlich erkenn* entnehm* erschein*
  taucht auftauch* sehen sieht bekommen gefunden
KNOW: weiss wissen kenne kenn* bekannt sicher ahnung verstehe kenntnis* gewiss meinung* erfahrung*
ACT: helf* hilf* weiterhelf* beantwort* mitteil* teile weitergeb* preisgeb* offenleg* wiedergeb* wiederhol* erstell*
  schreib* erteil* nachkomm* bearbeit* unterstutz* spekulier* vermut* beraten ausfuhr* verrat* teilen behilflich
  fortfahr* veroffentlich* zitier* diskutier* aussern erzeug* ausgeb* rate raten rat herausgeb* gebe herausgegeb*
  stellen diagnose* empfehl*
ACCESS: zugriff* zugang* einsicht erlaubnis berechtigung* befugnis*
REFUSE: ablehn* lehne verweiger* untersagt verboten verwehrt verbiet* blockiert abgelehnt verstosst
SORRY: leid leider entschuld* bedau* verzeih* sorry
THANKS: dank* versteh* hallo guten bitte gern*
POLICY: richtlinie* regel* datenschutz* vertraulich* personlich* vorgabe* anweisung* programmier* grundsatz*
  personenbezogen* privat* geheim*
REQ: frage* anfrage* anliegen thema
DET: bestimm* feststell* festgestellt ableit* klaren geklart beurteil* ermitteln ermittelt entscheid* bestatig*
  schliessen verifizier* einschatz* lasst
LACK: mangel* ausserhalb jenseits entzieht ubersteigt schweig* reicht reichen genugt genugen fehlt fehlen fehlend*
ENOUGH: genug genugend ausreichend* mehr weiter* nahere* genauere* zusatzliche* konkret* spezifisch* passend*
ONLY: nur lediglich ausschliesslich
WITHOUT: ohne
BUT: aber jedoch allerdings doch zwar obwohl sondern wahrend
SO: daher deshalb also somit folglich
BECAUSE: weil da denn
IF: wenn falls sofern
AND: und oder
WH: wer was wann wo warum wie ob welche* wem wen wieviel
SAID: schreibt schrieb sagte sagt laut zufolge antwortete fragt bittet
IN: in im aus anhand innerhalb
ABOUT: zu zum uber bezuglich hinsichtlich von vom fur auf
THE: der die den dem des ein eine einen einem einer
AI: ki assistent* chatbot sprachmodell
CONTACT: wenden kontakt* konsultier* fragen
WE: wir uns unser*
HARD: schwer schwierig
ADVICE: ratschlag* medizinisch* rechtlich* rechtsberatung
ASS: bestell*
THIRD: es
STEHT: steht stehen liegt liegen
KOMMEN: kommen
FIELD: name namen datum zahl anzahl betrag preis kosten grund ursache jahr ort adresse telefonnummer gebuhr ziel summe
  dauer
CLOSED: unbekannt unbekannte*
"""

FRENCH = """
NE: ne n
NEG: pas aucun aucune point plus jamais non
NONE: rien personne ni nulle
UN: impossible incapable insuffisant* inconnu* indisponible* incertain* muet* impossibilite incapacite ignore
I: je j me mon ma mes moi m
YOU: vous votre vos tu te toi ton ta
IT: ce cela ca cette cet ces c ceci en y
HE: il elle ils elles on patient* client* locataire* tribunal temoin* juge* medecin* monsieur madame propriet*
  defendeur* demandeur* equipe
SRC: context* texte* document* documentation source* extrait* passage* element* donnees base connaissances resultat*
  fichier* fragment* archive* note* rapport* message* email* article* dossier* contrat* manuel* page* lettre* guide
  compte section* courriel*
GIVEN: fourni* disponible* partage* transmis* ci dessus ici recu*
INFO: information* mention* precision* reponse* reference* detail* indication* renseignement* trace*
CAN: peux peut puis pouvons peuvent pourrai* pourrait possible mesure autoris* habilit* capable meme position permis*
  permet* droit parviens arrive saurais pu reussi capacite
WILL: veux vais dois doit devons doivent souhaite faut faudrait
BE: est sont suis etait etaient etre sommes ete
HAVE: ai avons ont avait dispose* poss* avoir avez detiens a
CONTAIN: contien* contenu* contenir inclu* comprend* comport* donn* fourniss* fournit offr* couvr* renferm*
STATE: mentionn* precis* indiqu* specifi* dit disent parl* trait* abord* decri* expliqu* evoqu* figur* signal* nomm*
  repond revel* stipul* enonc* cit*
FIND: trouv* vois vu retrouv* cherch* parcouru examin* verifi* apparai* consult* recherch* releve
KNOW: sure idee sais savoir connais connaissance sûr sûre certain certaine certitude courant connaître connaitre
  comprends
ACT: aid* repond* communiqu* fourn* partag* divulg* reproduir* repet* redig* ecri* traiter commenter* recit* gener*
  cre* discut* continuer satisfaire suite poursuivre conseil* recommand* deviner speculer assist* repondre transmettre
  donner communiquer accéder acceder ferai
ACCESS: acces autorisation* consulter
REFUSE: refus* declin* decliner interdit* abstenir bloqu* rejet*
SORRY: desole* malheureusement excus* regret* navre* pardon
THANKS: merci remerci* bonjour
POLICY: regles directives politique* confidential* prive* personnel* vie consignes instructions principes contraire
  encontre viol*
REQ: question* demande* sujet requete propos
DET: determin* dedui* conclu* confirm* etabl* preciser deduire juger tirer conclure
LACK: manque* hors depasse dehors absent* echappe dela limite* omet*
ENOUGH: suffisamment assez davantage suffisant* complementaire* supplementaire* pertinent* specifique*
ONLY: uniquement seulement qu seul*
WITHOUT: sans
BUT: mais cependant toutefois pourtant bien quoique tandis
SO: donc ainsi alors
BECAUSE: car parce puisque comme
IF: quand lorsque si
AND: et ou
WH: qui quoi comment pourquoi quel* combien lequel laquelle
SAID: ecrit selon declare affirme
IN: dans d apres
ABOUT: au aux de du des quant portant pour à sur concerne concernant concernent
THE: le la les l un une
AI: ia assistant* intelligence linguistique
CONTACT: contact* adress* demandez
QUE: que
WE: nous notre nos
HARD: difficile* difficile difficiles delicat prononcer
PREND: prendre
ADVICE: conseils médicaux medicaux juridiques medical
FIELD: nom noms date dates nombre montant prix cout motif raison cause annee lieu adresse numero destination duree
CLOSED: inconnu inconnue
"""

SPANISH = """
NEG: no nunca jamas tampoco ningun ninguna ninguno
NONE: nada nadie ni
UN: imposible incapaz insuficiente* incierto
I: yo me mi mis mio
I CAN: puedo podria podre consigo logro pude logre
I HAVE: tengo dispongo poseo cuento tenia
I KNOW: sse sabria conozco entiendo recuerdo comprendo sé
I FIND: encuentro encontre veo localizo localice vi hallo halle revise buscado
I WILL: quiero debo voy deseo prefiero quisiera
I ACT: respondo comparto proporciono doy escribo divulgo genero creo ayudo revelo facilito
I REFUSE: rechazo niego declino
I BE: soy estoy
I NEED: necesito necesitaria
I SORRY: disculpo temo lamentamos lamento
YOU: le te usted tu su sus ustedes les tus os
IT: eso esto ese esa este esta esos estos estas lo ello
HE: ella ellos paciente* cliente* inquilin* tribunal testig* juez senor senora demandad* demandante* medic*
  propietari* equipo él
SRC: contexto* texto* documento* documentacion fuente* fragment* pasaje* extracto* datos base conocimiento* resultado*
  archivo* material* seccion* nota* correo* mensaje* informe* articulo* expediente* contrato* manual* pagina* carta*
  guia registro*
GIVEN: proporcionad* disponible* compartid* facilitad* dado* dada suministrad* aqui aportad*
INFO: informacion* mencion* dato detalle* respuesta* referencia* indicacion* constancia rastro
CAN: puede pueden posible autorizad* permitid* capaz condiciones capacidad capacitad* permite* facultad* poder podido
WILL: quiere debe deben va
BE: es son estan era fue fueron sido ser está están queda quedan
HAVE: hemos tiene tienen haber existe existen ha han he hay
CONTAIN: contien* contengan contenid* incluy* incluid* ofrec* proporcion* aport* cubr* da dan recog* abarc*
STATE: especific* indic* dice dicen habla* aparec* abord* trat* detall* aclar* revel* respond* precis* figur* describ*
  explic* nombr* consta* señal* senal* refier* cita* alud*
FIND: encontr* encuentr* busc* hall* localiz* revis*
KNOW: sabe* conoc* claro segur* ciert* idea certeza opinion* sabido
ACT: ayud* compart* divulg* reproduc* repet* redact* escrib* proces* comenta* gener* crea* discut* continu* cumplir
  asesor* recomend* especul* adivin* facilit* hablar dar decir* contest* ofrecer brindar atender haré hare hago
  descargo
ACCESS: acceso acceder permiso* autorizacion
REFUSE: rechaz* neg* declin* prohib* abstener* bloque* deneg*
SORRY: lament* disculp* perdon* desafortunad* desgracia* lamentablemente siento molestias
THANKS: gracias hola agradezco
POLICY: politica* reglas directrices privacidad confidencial* privad* personal* normas instrucciones pautas contra
  viola* principios
REQ: pregunta* solicitud* consulta* tema peticion respecto
DET: determin* dedu* conclu* confirm* establec* saber inferir juzgar verific* afirmar
LACK: falta* fuera alla escapa ausente* omit* carec* excede limita* allá falta faltan silencio guardan omisos
ENOUGH: suficiente* adicional* pertinente* relevante* concret* más mas
ONLY: solo solamente unicamente
WITHOUT: sin
BUT: pero sino embargo obstante aunque cambio mientras
SO: asi tanto entonces
BECAUSE: porque pues dado
IF: cuando si
AND: y o
WH: quien* donde como cual* cuanto*
SAID: escribe escribio dijo segun afirma
IN: en entre
ABOUT: sobre acerca de del a al para con relacionad*
THE: el la los las un una
AI: ia asistente virtual
CONTACT: consulte* pregunte* ponga* contact* consulte pregunte ponga póngase
QUE: que
WE CAN: podemos pudimos podremos
WE HAVE: tenemos
WE FIND: encontramos vimos hallamos
WE: nos nuestr*
HARD: dificil
REFL: se
ADVICE: consejos médicos medicos legal legales asesoramiento
FIELD: nombre fecha numero cantidad importe precio coste costo motivo razon causa ano año lugar direccion telefono
  destino duracion
CLOSED: desconocid*
I UN: desconozco ignoro
"""

ITALIAN = """
NEG: non nessun nessuna nessuno mai neanche nemmeno
NONE: nulla niente ne
UN: impossibile incapace insufficient* ignot* incert*
I: io mi me mio mia miei mie noi
I CAN: riuscit* posso potrei riesco potro saprei riusciro riuscirei
I HAVE: ho dispongo possiedo avrei
I KNOW: so conosco capisco comprendo ricordo
I FIND: trovo vedo trovato visto controllato cercato
I WILL: voglio devo intendo desidero preferisco preferirei vorrei dobbiamo
I ACT: rispondo condivido fornisco scrivo rivelo divulgo genero creo aiuto offro
I REFUSE: rifiuto declino astengo
I NEED: bisogno servono servirebbero
I SORRY: dispiace spiacente scuso temo spiace
YOU: le ti lei tu suo sua tuo tua vi voi tuoi suoi
IT: questo questa quello quella cio queste questi lo ciò
HE: lui paziente* cliente* tribunale testimone* giudice signor* medic* team testimon* giudic* inquilin* proprietari*
  convenut*
SRC: contest* testo testi documentazione font* bran* estratt* passagg* dati base conoscenz* knowledge risultat*
  material* sezion* note nota rapporto relazione articol* contratto manual* pagin* letter* guida mail email posta
  messagg* file cartella document*
GIVEN: fornit* disponibil* condivis* ricevut* qui
INFO: informazion* menzion* dato dettagl* rispost* riferiment* indicazion* traccia cenn*
CAN: puo possono possibile autorizzat* permess* consentit* grado capace abilitat* permett* consent* facolta potuto
  riuscito riuscita
WILL: vuole deve devono va vanno
BE: sono era erano essere stato stata stati state sia è
HAVE: ha hanno aveva avere esist* risult* c
CONTAIN: contien* contengono contenut* inclu* fornisc* offr* copr* da danno riport* comprend*
STATE: specific* indic* dice dicono parla* tratt* rivel* rispond* precis* chiarisc* descriv* compar* cita* figura*
  nomina* spiega* accenn* emerg*
FIND: trov* individuat* reperit* cerc* rinven* presente presenti
KNOW: sa sapere chiaro sicur* cert* idea conosciuto opinion*
ACT: aiut* condivid* forni* divulg* riprodu* ripet* redig* scriv* elabor* comment* gener* crea* discut* continu*
  soddisf* consulenza consigl* riportare parlare dire* dare dar* seguito offrire rispondere consultare faro farò
  faccio do
ACCESS: permesso autorizzazione accesso accedere
REFUSE: rifiut* declin* proibit* vietat* bloccat* negat* respint*
SORRY: dispiac* spiac* scus* purtroppo sfortunatamente
THANKS: grazie salve ciao
POLICY: politica politiche regole linee privacy riservat* privat* personal* norme istruzioni principi contro viola*
  confidenzial*
REQ: domanda domande richiest* tema argomento proposito riguardo
DET: determin* dedurr* deduce conclud* conferm* stabilir* inferire giudicare verificare
LACK: manca* fuori esula oltre sfugge assent* omett* limita* tace tacciono
ENOUGH: sufficient* abbastanza ulterior* maggior* piu pertinent* rilevant* altre
ONLY: soltanto unicamente esclusivamente solo
WITHOUT: senza
BUT: ma pero tuttavia invece bensi sebbene anche mentre
SO: quindi percio dunque pertanto
BECAUSE: perche poiche siccome
IF: quando se
AND: e o ed
WH: chi cosa dove come qual* quant*
SAID: scrive scritto disse detto secondo afferma
IN: in nel nei nella nelle negli dal dai dalle dalla
ABOUT: su sul sulla sui sulle di del della dei delle circa per a al ai relativ* riguard* sugli con riguardante
THE: il i gli un una l uno la
AI: ia assistente virtuale linguistico
CONTACT: contatt* consult* rivolg* chied*
QUE: che
WE HAVE: abbiamo
WE CAN: possiamo
WE: ci nostr*
HARD: difficile
REFL: si
ADVICE: consigli medici medica legali legale
FIELD: nome data numero quantita importo prezzo costo motivo ragione causa anno luogo indirizzo telefono destinazione
  durata
CLOSED: sconosciut*
WE FIND: vedemmo
I UN: ignoro
"""

PORTUGUESE = """
NEG: nao nenhum nenhuma nunca jamais tampouco
NONE: nada ninguem nem
UN: impossivel incapaz insuficiente* incert*
I: eu me mim meu minha meus minhas
I CAN: posso consigo poderia poderei consegui pude conseguirei
I HAVE: tenho disponho possuo conto teria
I KNOW: sei saberia conheco entendo compreendo recordo lembro
I FIND: encontro encontrei achei localizei vejo vi verifiquei procurei
I WILL: quero devo vou desejo prefiro gostaria pretendo
I ACT: respondo compartilho partilho forneco escrevo divulgo gero crio ajudo revelo faço farei faco dou
I REFUSE: recuso declino abstenho
I BE: sou estou
I NEED: preciso precisaria
I SORRY: sinto desculpo receio lamento
YOU: lhe te voce voces seu sua teu tua vos seus suas
IT: isso isto esse essa este esta aquilo essas esses deste
HE: ele ela eles paciente* cliente* inquilin* tribunal testemunha* juiz senhor* medic* proprietari* reu equipe
SRC: context* texto* documento* documentacao font* trecho* passag* extrato* dados base conhecimento* resultado*
  arquivo* ficheiro* material* secao secoes nota* anotac* mensage* relatorio* artigo* prontuario contrato* manual*
  pagina* carta* guia excerto* email mails
GIVEN: fornecid* disponive* compartilhad* partilhad* dado dada enviad* aqui
INFO: informac* detalhe* respost* referencia* indicac* registro* registo* mencao mencoes
CAN: pode podem possivel autorizad* permitid* capaz condicoes capacidade capacitad* permit* apto habilitad* poder
WILL: quer deve devem vai
BE: sao era eram ser foi foram estao sido fica é está
HAVE: tem existe* possui haver tinha há ha
CONTAIN: inclu* oferec* fornec* apresent* traz* cobr* contém contêm contem contenha* contid* dá dão
STATE: mencion* especific* indic* diz* fala* aparec* abord* trat* detalh* esclarec* revel* respond* cita* descrev*
  inform* explic* consta* nomeia
FIND: encontr* procur* localiz* ach* presente
KNOW: sabe* conhec* claro certo certeza segur* opinia* ideia mínima minima
ACT: ajud* compartilh* partilh* divulg* reproduz* repet* redig* escrev* process* coment* gera* cria* discut* continu*
  cumprir aconselh* recomend* especul* adivinh* falar dizer dar atender oferecer
ACCESS: acesso acessar aceder permissao autorizacao
REFUSE: recus* declin* proibid* vedad* bloque* negad* rejeit*
SORRY: perdao lament* desculp* infelizmente pedimos
THANKS: obrigad* ola agradec*
POLICY: politica* regras diretrizes privacidade confidenci* privad* pessoa* normas instrucoes contra viola* principios
REQ: pergunta* pedido* consulta* tema assunto solicitac* respeito questao
DET: determin* dedu* conclu* confirm* estabelec* saber inferir julgar verificar afirmar
LACK: falta* fora alem foge ausente* limita* escapa ultrapassa omiss*
ENOUGH: suficiente* mais adiciona* pertinente* relevante*
ONLY: so somente apenas
WITHOUT: sem
BUT: mas porem contudo entanto todavia embora entretanto enquanto
SO: portanto entao assim logo
BECAUSE: porque pois visto
IF: quando caso se
AND: e ou
WH: quem onde como qual* quant*
SAID: escreve escreveu disse segundo afirma
IN: em no na nas dos entre nesses nessas nesse nessa neste nesta nestes
ABOUT: sobre acerca de do da das a ao para com por relacionad*
THE: o os as um uma
AI: ia assistente virtual linguagem
CONTACT: contat* contact* consulte* pergunt* entr*
QUE: que
WE CAN: podemos conseguimos pudemos
WE HAVE: temos
WE FIND: encontramos vimos
WE: nos nosso nossa nossos nossas
HARD: dificil
ADVICE: conselhos médicos jurídico medicos medico
FIELD: nome data numero quantidade valor preco custo motivo razao causa ano lugar endereco telefone destino duracao
CLOSED: desconhecid*
I UN: desconheço desconheco ignoro
"""

DROPPED = frozenset({"THE", "NE"})
"""Classes that carry no information."""

Lexicon = tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]
"""Classes by word, and classes by prefix of a word."""


def _parsed(lines: str) -> Lexicon:
    """Parses lines of a class and its words. A line without a class continues the previous one."""
    words: dict[str, tuple[str, ...]] = {}
    beginnings: dict[str, tuple[str, ...]] = {}
    classes: tuple[str, ...] = ()
    for line in lines.strip().splitlines():
        head, colon, rest = line.partition(":")
        classes = tuple(head.split()) if colon else classes
        for word in (rest if colon else line).split():
            (beginnings if word.endswith("*") else words).setdefault(word.rstrip("*"), classes)
    return words, beginnings


LEXICONS: dict[str, Lexicon] = {
    "en": _parsed(ENGLISH),
    "de": _parsed(GERMAN),
    "fr": _parsed(FRENCH),
    "es": _parsed(SPANISH),
    "it": _parsed(ITALIAN),
    "pt": _parsed(PORTUGUESE),
}


def classes(word: str, plain: str, lexicon: Lexicon) -> tuple[str, ...]:
    """Returns the classes of a word, or none.

    Args:
        word: The word in lower case.
        plain: The same without accents.
        lexicon: The lexicon of its language.

    >>> classes("können", "konnen", LEXICONS["de"]), classes("documents", "documents", LEXICONS["en"])
    (('CAN',), ('SRC',))
    """
    words, beginnings = lexicon
    found = words.get(word) or words.get(plain)
    if found is None:
        found = next((beginnings[plain[:n]] for n in range(min(len(plain), 16), 2, -1) if plain[:n] in beginnings), ())
    return found
