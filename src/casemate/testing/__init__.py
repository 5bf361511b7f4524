"""Conformance suites: one ``check_<role>`` for each plug-in role, for use in a third party's own tests.

A check raises ``AssertionError`` with the requirement that is not met. Example::

    def test_my_defense():
        check_defense(MyDefense())

    def test_my_index(tmp_path):
        folders = itertools.count()
        path = [tmp_path]

        def make(fresh):
            if fresh:
                path[0] = tmp_path / str(next(folders))
            return MyIndex(path[0])

        check_index(make)

The page ``docs/reference/extension-points.md`` shows every role with its signature and an example.
"""

from casemate.testing.attacks import check_extraction_attack as check_extraction_attack
from casemate.testing.attacks import check_injection_attack as check_injection_attack
from casemate.testing.attacks import check_membership_attack as check_membership_attack
from casemate.testing.attacks import check_poisoning_attack as check_poisoning_attack
from casemate.testing.channels import check_channel as check_channel
from casemate.testing.collections import check_collection as check_collection
from casemate.testing.defenses import DEFENSE_OBLIGATIONS as DEFENSE_OBLIGATIONS
from casemate.testing.defenses import check_defense as check_defense
from casemate.testing.embedders import check_embedder as check_embedder
from casemate.testing.event_stores import check_event_store as check_event_store
from casemate.testing.executors import check_executor as check_executor
from casemate.testing.generators import check_generator as check_generator
from casemate.testing.generators import check_language_model as check_language_model
from casemate.testing.generators import check_token_model as check_token_model
from casemate.testing.indexes import INDEX_OBLIGATIONS as INDEX_OBLIGATIONS
from casemate.testing.indexes import MakeIndex as MakeIndex
from casemate.testing.indexes import check_index as check_index
from casemate.testing.personal_data_finders import check_personal_data_finder as check_personal_data_finder
from casemate.testing.targets import check_target as check_target

CHECKS = {
    "embedder": check_embedder,
    "index": check_index,
    "generator": check_generator,
    "store": check_event_store,
    "language_model": check_language_model,
    "token_model": check_token_model,
    "target": check_target,
    "collection": check_collection,
    "channel": check_channel,
    "cluster": check_executor,
    "personal_data_finder": check_personal_data_finder,
    "defense": check_defense,
    "attack": check_membership_attack,
    "crawler": check_extraction_attack,
    "poisoner": check_poisoning_attack,
    "injector": check_injection_attack,
}
"""The suite of each plug-in role (``casemate.plugins.ROLES``)."""
