import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from casemate.errors import DataError
from casemate.lab.topic_map import picture
from casemate.reindexing.residual import mapped
from casemate.reindexing.topics import NOISE
from tests.fakes import BagOfWords
from tests.topical import TOPICS, drawn, topical


@pytest.fixture
def documents():
    return topical()


def test_a_picture_is_a_document_that_shows_every_drawn_chunk_and_both_figures(documents):
    E = BagOfWords().embed([d.content for d in documents])
    labels = np.array([NOISE if i % 9 == 0 else i % TOPICS for i in range(len(E))])
    text = picture(E, mapped(E, drawn(documents, BagOfWords()).weights), labels)
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert "href" not in text
    dots = [p.get("d").count("M") for p in root.iter(f"{name}path")]
    assert sum(dots) == 2 * len(E)
    said = " ".join(t.text for t in root.iter(f"{name}text"))
    assert len(re.findall(r"silhouette -?\.\d\d", said)) == 2
    assert len(re.findall(r"neighbours of another topic \d", said)) == 2
    assert "180 chunks, 6 topics, 11 % without one" in said


def test_what_does_not_fit_is_refused():
    E = np.eye(8, dtype=np.float32)
    for before, after, labels in (
        (E, E[1:], np.zeros(8, int)),
        (E, E, np.zeros(7, int)),
        (E[:4], E[:4], np.zeros(4, int)),
    ):
        with pytest.raises(DataError, match="a picture needs"):
            picture(before, after, labels)
