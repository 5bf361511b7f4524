import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError, ConfigError, QueryError
from casemate.gateway import keys as module
from casemate.gateway.keys import Grant, Keys
from casemate.types import Event
from tests.fakes import Memory


def test_a_key_is_found_by_its_text_and_by_no_other():
    keys = Keys(Memory())
    made, text = keys.create(Grant("a", tenant="t", labels=("x",), trust_user=True))
    assert keys.find(text) == made
    for other in ("", "cmk_", text[:-1], text[:-1] + ("A" if text[-1] != "A" else "B"), text + "A", text.upper()):
        assert keys.find(other) is None


def test_what_is_kept_does_not_hold_the_secret():
    store = Memory()
    _, text = Keys(store).create(Grant("a"))
    kept = json.dumps([dict(e.body) for e in store.events])
    secret = text.split("_", 2)[2]
    assert len(secret) == 43  # 256 bits
    assert secret not in kept
    assert "cmk_" not in kept


def test_a_revoked_key_is_refused_here_and_by_another_gateway():
    store = Memory()
    here, there = Keys(store), Keys(store)
    made, text = here.create(Grant("a"))
    there.follow()
    assert there.find(text) == made
    assert here.revoke(made.id).revoked is not None
    assert here.find(text) is None
    there.follow()
    assert there.find(text) is None
    assert there.all()[0].revoked is not None


def test_a_revocation_counts_whichever_event_is_read_first():
    store = Memory()
    keys = Keys(store)
    made, text = keys.create(Grant("a"))
    keys.revoke(made.id)
    store.events.reverse()
    late = Keys(store)
    late.follow()
    assert late.find(text) is None


def test_only_what_is_new_is_read():
    asked = []

    class Store(Memory):
        def follow(self, kind, after, since=None):
            asked.append(after)
            return super().follow(kind, after, since)

    keys = Keys(Store())
    keys.create(Grant("a"))
    keys.follow()
    keys.follow()
    assert asked == [0, 1]


def test_a_damaged_event_locks_nobody_out():
    store = Memory()
    keys = Keys(store)
    _, text = keys.create(Grant("a"))
    store.events.insert(0, Event("e", datetime.now(UTC), "key", {"action": "created"}))
    store.events.insert(0, Event("f", datetime.now(UTC), "key", {"action": "created", "key": "k", "name": ""}))
    later = Keys(store)
    later.follow()
    assert later.find(text)


def test_a_key_that_was_not_written_is_not_handed_out():
    class Full(Memory):
        def flush(self, timeout_s=10.0):
            return False

    with pytest.raises(BackendError, match="not written"):
        Keys(Full()).create(Grant("a"))


def test_revoking_what_is_not_there_says_so():
    with pytest.raises(ConfigError, match="no key has the id"):
        Keys(Memory()).revoke("0" * 16)


@pytest.mark.parametrize(
    "grant",
    [{"name": ""}, {"name": "a\nb"}, {"name": "a", "role": "root"}, {"name": "a", "labels": ("",)}]
    + [{"name": "a", "requests_per_minute": 0}, {"name": "a", "tokens_per_day": -1}],
)
def test_a_grant_that_cannot_be_is_refused(grant):
    with pytest.raises(ConfigError, match="a key's"):
        Grant(**grant)


def test_a_tenant_without_a_name_is_refused():
    with pytest.raises(QueryError):
        Grant("a", tenant="")


def test_nobody_can_be_found():
    keys = Keys(Memory())
    assert keys.find("cmk_" + "0" * 16 + "_" + "0" * 43) is None
    keys._revoked[""] = datetime.now(UTC)
    assert keys.find("") is None


@given(st.text(max_size=200))
def test_any_text_at_all_is_no_key(text):
    keys = Keys(Memory())
    keys.create(Grant("a"))
    assert keys.find(text) is None


def test_a_hash_is_computed_and_compared_whatever_is_sent(monkeypatch):
    """Malformed, unknown, wrong and revoked take the same path: one hash, one comparison in constant time."""
    keys = Keys(Memory())
    made, text = keys.create(Grant("a"))
    gone, gone_text = keys.create(Grant("b"))
    keys.revoke(gone.id)
    seen = []
    real_digest, real_compare = module._digest, module.hmac.compare_digest
    monkeypatch.setattr(module, "_digest", lambda *a: seen.append("hash") or real_digest(*a))
    monkeypatch.setattr(module.hmac, "compare_digest", lambda *a: seen.append("compare") or real_compare(*a))
    for sent in ("", "nonsense", f"cmk_{'f' * 16}_{'s' * 43}", f"cmk_{made.id}_{'s' * 43}", gone_text):
        seen.clear()
        assert keys.find(sent) is None
        assert seen == ["hash", "compare"]
