"""Deletion of quotas of expired periods, and of no others."""

import asyncio
import threading
import time

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError
from casemate.guard.client_state import word_quotas
from casemate.guard.client_state.word_quotas import WantedWords, WordBlock, WordQuotas, quota_name, reset_quota
from casemate.guard.defenses.quorum import ledger as ledgers
from casemate.guard.defenses.quorum.ledger import Ledger

DAY = 86_400


@pytest.fixture
def store(tmp_path):
    made = SqlEventStore(path=tmp_path / "events.db")
    yield made
    made.close()


@pytest.fixture
def at(monkeypatch):
    """Sets the clock of the quotas to a day."""
    return lambda day: monkeypatch.setattr(time, "time", lambda: day * DAY + 60.0)


def test_deletes_quotas_of_clients_that_never_return(store, at, monkeypatch):
    monkeypatch.setattr(word_quotas, "KEPT_PERIODS", 1)
    for day in range(20_000, 20_010):
        at(day)
        quotas, others = WordQuotas(DAY, store), WordQuotas(7 * DAY, store)
        for client in ("ann", f"visitor {day}"):
            quotas.acquire([WantedWords(WordBlock(quota_name("default", client)), 10, 100)])
        others.acquire([WantedWords(WordBlock(quota_name("default", "weekly")), 10, 100)])
    daily = [name for name in store.quota_usage(word_quotas.PREFIX) if f"{DAY:g}s" in name]
    assert len(daily) == 4  # for the last two days
    assert len(store.quota_usage(quota_name("default", "weekly"))) == 2  # for this week and the last one
    reset_quota(store, "default", "ann")
    assert not any(store.quota_usage(f"{quota_name('default', 'ann')} ").values())


def test_words_acquired_in_one_period_are_not_usable_in_the_next(store, at, monkeypatch):
    at(20_000)
    quotas, block = WordQuotas(DAY, store), WordBlock(quota_name("default", "ann"))
    quotas.acquire([WantedWords(block, 10, 100)])
    at(20_001)
    quotas.acquire([WantedWords(block, 1, 100)])  # the first request in a period acquires only the needed words
    assert quotas.words_left(block) == 1
    at(20_002)
    assert quotas.words_left(block) == 0
    acquire = store.acquire
    monkeypatch.setattr(
        store, "acquire", lambda wanted: (acquire(wanted), at(20_003))[0]
    )  # the period ends during the request
    quotas.acquire([WantedWords(block, 10, 100)])
    assert (quotas.words_left(block), quotas.most_left(block, 100)) == (0, 100)


@pytest.mark.parametrize("shared", [False, True])
def test_acquires_at_most_the_words_of_the_quota(store, shared):
    quotas, block = WordQuotas(DAY, store if shared else None), WordBlock(quota_name("default", "ann"))
    for _ in range(2):
        quotas.acquire([WantedWords(block, 200, 100)])
        assert quotas.words_left(block) == quotas.most_left(block, 100) == 100


def test_acquires_words_even_if_outdated_quotas_cannot_be_deleted(store, monkeypatch, caplog):
    def fail(names):
        raise BackendError("down", backend="sql", retryable=True)

    monkeypatch.setattr(store, "discard_quotas", fail)
    block, quotas = WordBlock(quota_name("default", "ann")), WordQuotas(DAY, store)
    quotas.acquire([WantedWords(block, 10, 100)])
    assert quotas.words_left(block) == 10 and "could not be deleted: down" in caplog.text


@pytest.mark.parametrize("answers", [1, 2])
def test_restart_loses_at_most_a_sixteenth_of_the_remaining_words(store, at, answers):
    at(20_000)
    most, lost = 5_000, 0
    for _ in range(20):
        block, quotas = WordBlock(quota_name("default", "ann")), WordQuotas(DAY, store)
        for _ in range(answers):
            left = most - block.used
            quotas.acquire([WantedWords(block, 10 - block.left, most)])
            quotas.give(block, 10)
        lost += block.left  # the process ends
        assert block.left <= (left / 16 if answers > 1 else 0)
    assert block.used == 20 * answers * 10 + lost <= most * (1 - (15 / 16) ** 20) + 20 * answers * 10


def test_concurrent_deletions_never_exceed_a_quota(tmp_path, at):
    at(20_000)
    stores = [SqlEventStore(path=tmp_path / "events.db") for _ in range(4)]
    name = quota_name("default", "ann")
    stores[0].acquire([word_quotas.QuotaRequest(f"{name} {DAY:g}s{day}", 5, 100) for day in range(19_000, 20_000)])
    blocks = [WordBlock(name) for _ in stores]

    def acquire_words(store, block):
        quotas = WordQuotas(DAY, store)
        for _ in range(5):
            quotas.acquire([WantedWords(block, 10, 100)])

    threads = [threading.Thread(target=acquire_words, args=one) for one in zip(stores, blocks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(block.left for block in blocks) == 100
    kept = sorted(int(one.partition(f"{DAY:g}s")[2]) for one in stores[0].quota_usage(f"{name} "))
    assert kept == [*range(20_000 - word_quotas.KEPT_PERIODS, 20_001)]
    for one in stores:
        one.close()


def test_fast_clock_deletes_no_quota_in_use(store, at):
    for day, left in ((20_000, 100), (20_300, 100), (20_000, 0)):
        at(day)
        block = WordBlock(quota_name("default", "ann"))
        WordQuotas(DAY, store).acquire([WantedWords(block, 100, 100)])
        assert block.left == left


def test_budgets_of_units_are_kept_for_two_periods_and_never_reset(store, at):
    made, name = Ledger(store, "dp", 3, 1), ("source", "a")
    for day in (20_000, 20_001, 20_002, 20_005, 20_006, 20_007):
        at(day)
        assert asyncio.run(made.spend("default", [([name], 3)])) == [3]
    budgets = store.quota_usage("quorum dp 1d")
    assert sorted(int(one.split()[2].removeprefix("1d")) for one in budgets) == [20_006, 20_007]
    for day in (20_006, 20_001, 19_000):  # the clock is set back
        at(day)
        assert asyncio.run(made.spend("default", [([name], 1)])) == [0]
    assert ledgers.DAY_S == DAY
