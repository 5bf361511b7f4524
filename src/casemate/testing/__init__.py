"""What an index and a defense must obey, as checks that a third party runs on its own.

A check that fails is an ``AssertionError`` that says what is wrong. Each obligation is a small function; all of them
are in ``INDEX_OBLIGATIONS`` and ``DEFENSE_OBLIGATIONS``, to be run one by one where that is wanted.

    def test_my_index(tmp_path):
        count = itertools.count()
        places = [tmp_path]

        def make(fresh):
            if fresh:
                places.append(tmp_path / str(next(count)))
            return MyIndex(places[-1])

        check_index(make)


    def test_my_defense():
        check_defense(MyDefense())
"""

from casemate.testing.defenses import DEFENSE_OBLIGATIONS as DEFENSE_OBLIGATIONS
from casemate.testing.defenses import check_defense as check_defense
from casemate.testing.indexes import INDEX_OBLIGATIONS as INDEX_OBLIGATIONS
from casemate.testing.indexes import MakeIndex as MakeIndex
from casemate.testing.indexes import check_index as check_index
