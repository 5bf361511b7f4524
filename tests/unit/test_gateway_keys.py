import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import BackendError, ConfigError, QueryError
from casemate.gateway.auth import keys as module
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.types import Event
from tests.fakes import Memory


def test_a_key_is_found_only_by_its_text():
    keys = ApiKeyStore(Memory())
    made, text = keys.create(Grant("a", tenant="t", labels=("x",), trust_user=True))
    assert keys.find(text) == made
    for other in ("", "cmk_", text[:-1], text[:-1] + ("A" if text[-1] != "A" else "B"), text + "A", text.upper()):
        assert keys.find(other) is None


def test_the_store_does_not_contain_the_secret():
    store = Memory()
    _, text = ApiKeyStore(store).create(Grant("a"))
    kept = json.dumps([dict(e.body) for e in store.events])
    secret = text.split("_", 2)[2]
    assert len(secret) == 43  # 256 bits
    assert secret not in kept
    assert "cmk_" not in kept


def test_revoked_key_is_refused_by_all_gateways():
    store = Memory()
    here, there = ApiKeyStore(store), ApiKeyStore(store)
    made, text = here.create(Grant("a"))
    there.sync()
    assert there.find(text) == made
    assert here.revoke(made.id).revoked is not None
    assert here.find(text) is None
    there.sync()
    assert there.find(text) is None
    assert there.all()[0].revoked is not None


def test_a_revocation_applies_in_any_order_of_events():
    store = Memory()
    keys = ApiKeyStore(store)
    made, text = keys.create(Grant("a"))
    keys.revoke(made.id)
    store.events.reverse()
    reader = ApiKeyStore(store)
    reader.sync()
    assert reader.find(text) is None


def test_only_new_events_are_read():
    asked = []

    class Store(Memory):
        def read_since(self, kind, after, since=None):
            asked.append(after)
            return super().read_since(kind, after, since)

    keys = ApiKeyStore(Store())
    keys.create(Grant("a"))
    keys.sync()
    keys.sync()
    assert asked == [0, 1]


def test_name_or_id_of_a_valid_key_is_refused_as_name_of_a_new_key():
    store = Memory()
    made, _ = ApiKeyStore(store).create(Grant("web"))
    keys = ApiKeyStore(store)  # another process, which must read the event first
    for name in ("web", made.id):
        with pytest.raises(
            ConfigError, match=f"the valid key {made.id} has the name 'web' already; no key was created"
        ):
            keys.require_unused_name(name)
    keys.require_unused_name("web-2")
    keys.revoke(made.id)
    keys.require_unused_name("web")


def test_valid_key_with_permission_to_ask_is_found_by_id_name_or_prefix():
    keys = ApiKeyStore(Memory())
    roles = {"web": "client", "web-2": "admin", "scrape": "metrics"}
    made = {name: keys.create(Grant(name, role=role))[0] for name, role in roles.items()}
    assert [keys.named(name) for name in ("web", made["web"].id)] == [made["web"]] * 2
    assert [keys.named(name) for name in ("web-", made["web-2"].id[:15])] == [made["web-2"]] * 2
    refused = {
        "scrape": "choose a key that may ask",
        "": "no valid key",
        "x": "no valid key",
        "w": "2 valid keys match",
    }
    for name, says in refused.items():
        with pytest.raises(ConfigError, match=says):
            keys.named(name)
    keys.revoke(made["web"].id)  # the name of a revoked key is not used as a prefix
    with pytest.raises(ConfigError, match="no valid key"):
        keys.named("web")


def test_invalid_event_does_not_invalidate_other_keys():
    store = Memory()
    keys = ApiKeyStore(store)
    _, text = keys.create(Grant("a"))
    store.events.insert(0, Event("e", datetime.now(UTC), "key", {"action": "created"}))
    store.events.insert(0, Event("f", datetime.now(UTC), "key", {"action": "created", "key": "k", "name": ""}))
    later = ApiKeyStore(store)
    later.sync()
    assert later.find(text)


@pytest.mark.parametrize("action", ["created", "renamed"])
def test_a_later_event_does_not_change_a_key(action):
    store = Memory()
    made, text = ApiKeyStore(store).create(Grant("a"))
    body = {**store.events[0].body, "action": action, "digest": "0" * 64, "role": "admin"}
    store.events.append(Event("e", datetime.now(UTC), "key", body))
    keys = ApiKeyStore(store)
    keys.sync()
    assert keys.find(text) == made


def test_event_of_another_action_creates_no_key():
    store = Memory()
    _, text = ApiKeyStore(store).create(Grant("a"))
    store.events = [Event("e", datetime.now(UTC), "key", {**store.events[0].body, "action": "renamed"})]
    keys = ApiKeyStore(store)
    keys.sync()
    assert keys.find(text) is None


def test_key_is_returned_only_after_it_is_stored():
    class UnconfirmedStore(Memory):
        def flush(self, timeout_s=10.0):
            return False

    with pytest.raises(BackendError, match="did not confirm the key"):
        ApiKeyStore(UnconfirmedStore()).create(Grant("a"))


def test_revoking_an_unknown_key_is_an_error():
    with pytest.raises(ConfigError, match="no key has the id"):
        ApiKeyStore(Memory()).revoke("0" * 16)


@pytest.mark.parametrize(
    "grant",
    [{"name": ""}, {"name": "a\nb"}, {"name": "a", "role": "root"}, {"name": "a", "labels": ("",)}]
    + [{"name": "a", "requests_per_minute": 0}, {"name": "a", "tokens_per_day": -1}],
)
def test_an_invalid_grant_is_refused(grant):
    with pytest.raises(ConfigError, match="a key's"):
        Grant(**grant)


def test_an_empty_tenant_is_refused():
    with pytest.raises(QueryError):
        Grant("a", tenant="")


def test_the_placeholder_key_is_never_found():
    keys = ApiKeyStore(Memory())
    assert keys.find("cmk_" + "0" * 16 + "_" + "0" * 43) is None
    keys._revoked[""] = datetime.now(UTC)
    assert keys.find("") is None


@given(st.text(max_size=200))
def test_arbitrary_text_is_not_a_key(text):
    keys = ApiKeyStore(Memory())
    keys.create(Grant("a"))
    assert keys.find(text) is None


def test_each_lookup_computes_one_hash_and_one_comparison(monkeypatch):
    """Malformed, unknown, wrong and revoked keys cost the same: one hash, and one comparison in constant time."""
    keys = ApiKeyStore(Memory())
    made, text = keys.create(Grant("a"))
    revoked_key, revoked_text = keys.create(Grant("b"))
    keys.revoke(revoked_key.id)
    seen = []
    real_digest, real_compare = module._digest, module.hmac.compare_digest
    monkeypatch.setattr(module, "_digest", lambda *a: seen.append("hash") or real_digest(*a))
    monkeypatch.setattr(module.hmac, "compare_digest", lambda *a: seen.append("compare") or real_compare(*a))
    for sent in ("", "nonsense", f"cmk_{'f' * 16}_{'s' * 43}", f"cmk_{made.id}_{'s' * 43}", revoked_text):
        seen.clear()
        assert keys.find(sent) is None
        assert seen == ["hash", "compare"]
