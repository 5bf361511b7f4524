"""Questions about the policy pages of the sample corpus with words of the answer, and unanswerable questions."""

ANSWERABLE = """\
How many beds does the clinic have?|96 beds
Who is the medical director?|Maren Oakhollow
When was the clinic founded?|1987
What does a private room cost per night?|74 crowns
How much is the fee if I miss my appointment?|25 crowns
Until when is the cash desk open?|9:00 to 12:00
How soon do I have to pay a bill?|within 30 days
How long do I have to make a complaint?|12 months
Who signs the answers to complaints?|Ottilie Marsh
How can I get a copy of my record?|form D2
How long are X-ray images kept?|ten years
Who is the data protection officer?|Teodora Vance
What time does the diabetes course take place?|14:30 to 16:30
How many people can join a diabetes group?|12 members
By what time should patients leave their room on the day they go home?|10:30
Who arranges a walking frame for people who live alone?|Halvard Quill
Which form do I sign to leave against medical advice?|form W9
Which number do I dial in an emergency inside the house?|Dial 555
What does Code Red mean?|fire or smoke
Where are the defibrillators?|entrance hall of Alder House
How long must I fast before an iron test?|ten hours
Can I drink coffee before a fasting test?|Coffee, tea, juice
Do I need to fast for HbA1c?|do not need to fast
What does an orange card on an isolation room door mean?|orange adds a surgical mask
When must masks be worn in waiting rooms?|1 December to 15 March
What does an interpreter cost?|free of charge
How far ahead must a sign language interpreter be booked?|five working days
When are thyroid results ready?|next working day
How long are blood samples kept?|seven days
Where is lost property kept?|porters' lodge
How long are umbrellas kept?|six weeks
When does reception open on Saturday?|8:30 to 12:30
Until when can I register at the Minor Injuries Unit?|21:30
What is the number of the Night Line?|extension 700
How much does parking cost per day?|9 crowns a day
Where are the parking spaces for people with a disability badge?|blue borders
Which bus stops at the gate?|Bus 14
When is the pharmacy open?|8:00 to 19:00
How much do I pay for a medicine?|6 crowns for each
Where do I bring unused medicine?|red bin
Where do I throw away used needles?|yellow container
How warm is the pool?|33 degrees
How many physiotherapy visits are usual?|six visits
Do I need a referral for the skin clinic?|You do not need one
How old may a referral letter be?|last 90 days
How many days does a renewal cover?|56 days
How long is warfarin renewed for?|28 days
When should I arrive for a night in the sleep lab?|20:30
Who is the doctor in charge of the sleep lab?|Ivo Tansley
How many sensors are attached in the sleep lab?|22 of them
Are video appointments recorded?|never recorded
What does travel advice cost for a family?|50 for a family
How long before my trip should I come to the travel clinic?|six weeks before
What does the influenza vaccine cost?|18 crowns
How long should I wait after an injection?|15 minutes
Who runs the vaccination room?|Pilar Renn
When are visitors allowed on Heron ward?|14:00 to 19:30
How many visitors may sit at a bed?|two visitors
When is quiet time?|12:30 to 14:00
May I bring flowers?|Flowers may be brought
"""
"""A question, ``|``, and words that every correct answer contains."""
UNANSWERABLE = """\
Who won the football match on Sunday?
What is the capital of Mongolia?
How do I reset the password of my email account?
When was the Eiffel Tower built?
What is the population of Brazil?
Which engine does the Boeing 747 use?
How do I bake sourdough bread?
What is the interest rate of a mortgage?
Who wrote War and Peace?
How many moons does Jupiter have?
What is the quarterly dividend forecast?
When does the train to Vienna leave?
How do I change the oil of a tractor?
Which team won the world cup in 1998?
What is the boiling point of ethanol?
Who painted the ceiling of the Sistine Chapel?
How do I renew my passport?
What is the tax rate for small companies?
Which programming language is fastest?
What is the exchange rate of the yen?
Does the clinic offer laser eye surgery?
What are the opening hours of the swimming bath in the town?
Which school do the children of the staff attend?
How much does the medical director earn?
Which hotel is closest to the clinic?
Can I have a tattoo removed at the clinic?
Who built the pond behind Alder House?
What is the clinic's website address?
How many ambulances does the clinic own?
Which bank finances the clinic?
"""
"""Questions that no page answers; the last third is about the clinic."""
