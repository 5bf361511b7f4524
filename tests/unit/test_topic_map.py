import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from casemate.maths.clustering import NOISE
from casemate.reindexing.space import apply_map
from casemate.reports.topic_map import picture
from tests.fakes import BagOfWords
from tests.topical import TOPICS, drawn, topical


@pytest.fixture
def documents():
    return topical()


def test_a_topic_map_is_an_svg_file_with_every_chunk_and_both_metrics(documents):
    E = BagOfWords().embed([d.content for d in documents])
    labels = np.array([NOISE if i % 9 == 0 else i % TOPICS for i in range(len(E))])
    text = picture(E, apply_map(E, drawn(documents, BagOfWords()).weights), labels)
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert "href" not in text
    dots = [p.get("d").count("M") for p in root.iter(f"{name}path")]
    assert sum(dots) == 2 * len(E)
    svg_text = " ".join(t.text for t in root.iter(f"{name}text"))
    assert len(re.findall(r"silhouette -?\.\d\d", svg_text)) == 2
    assert len(re.findall(r"neighbors of another topic \d", svg_text)) == 2
    assert "180 chunks, 6 topics, 11 % without one" in svg_text
