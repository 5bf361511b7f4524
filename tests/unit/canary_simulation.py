"""Simulation of flaky canaries and of the monitor's sequential tests: many sets in parallel, in numpy.

Written independently of ``monitor.trends.cusum``, from docs/explanation/canary-alarms.md, so each verifies the other.
``python -m tests.unit.canary_simulation`` prints the results on that page; it takes long.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, betaln
from scipy.stats import beta, betabinom

ALTERNATIVES = np.array([0.2, 0.5, 0.95])
WEIGHTS = np.array([0.5, 0.25, 0.25])
PASSES, RECENT = 3, 10
PRIORS = [(m * s, (1 - m) * s) for m in 1 / (1 + np.exp(5.3 - 0.354 * np.arange(16))) for s in (120, 1000, 10_000)]
OUTLIERS = 0.0005
RATES_GRID = 1 / (1 + np.exp(-np.linspace(-20, 5, 800)))
"""Failure rates for the numerical integration of the null hypothesis, denser than the most concentrated prior."""


@dataclass
class Outcome:
    """Result of a simulation.

    Attributes:
        runs: Runs of a set, over all sets.
        alerts: Runs in which canaries alarmed.
        repeats: Repeated questions.
        first: For each set, the run (from 1) of the first alarm; 0: none.
        alarmed: (runs, sets, canaries), whether a canary alarmed in the run; None unless requested.
    """

    runs: int
    alerts: int
    repeats: int
    first: np.ndarray
    alarmed: np.ndarray | None


def upper_end(failed, asked, confidence=0.8):
    """One-sided Clopper-Pearson bound."""
    return np.clip(betaincinv(failed + 1, np.maximum(asked - failed, 1e-9), confidence), 0.005, 1)


def lasting(failed, asked):
    """One-sided Clopper-Pearson bound at 97.5 %; 0 without a failure."""
    return np.where(failed > 0, betaincinv(failed + 1, np.maximum(asked - failed, 1e-9), 0.975), 0.0)


def select_by_e_bh(stakes, budget):
    """e-BH, by an exhaustive search over k."""
    picked = np.zeros(stakes.shape, bool)
    for row in np.flatnonzero(stakes.sum(-1) >= budget):
        for k in range(1, stakes.shape[-1] + 1):
            largest = (-stakes[row]).argsort(kind="stable")[:k]
            if stakes[row][largest[-1]] * k >= budget:
                picked[row] = np.isin(np.arange(stakes.shape[-1]), largest)
    return picked


def tail_of(flake):
    """P(at least k failures), by convolution: (canaries + 1,)."""
    distribution = np.array([1.0])
    for p in flake:
        distribution = np.append(distribution * (1 - p), 0) + np.append(0, distribution * p)
    return distribution[::-1].cumsum()[::-1]


def simulate(
    draws,
    truth,
    asked,
    failed,
    *,
    budget=1000.0,
    confirm=5,
    weights=None,
    keep=False,
    echo=None,
    after=(0, 0, 0, 0),
    ended=False,
    sticky=None,
):
    """Runs the tests.

    Args: draws: Function (runs so far) -> uniform numbers of one run, (confirm + 1, sets, canaries). truth: Function
    (runs so far) -> failure rates, broadcast to (sets, canaries); None ends the simulation. asked: Runs of the baseline
    that did not follow a failure, a number or (sets, canaries). failed: Failures in these, (sets, canaries). budget:
    Runs for one false alarm. confirm: Repetitions. weights: (canaries,). keep: Whether to return which canaries
    alarmed. echo: Rate at which repetitions fail, where it is not that of the first question. after: Answers after
    failed ones in the baseline: runs after a failed run, failures among them, repetitions, failures among them; each a
    number or (sets,). ended: Whether the last run of the baseline failed, (sets, canaries). sticky: Rate at which the
    run after a failed one fails; None: as any other.
    """
    sets, n = failed.shape
    null = Null(failed, asked, after)
    mean = np.maximum((failed + 0.5) / (asked + 1), 0.005)
    share = np.full(n, 1 / n) if weights is None else weights / weights.sum()
    sums = np.zeros((sets, n, 3))
    bad, lasting = np.zeros((sets, n), bool), np.broadcast_to(ended, (sets, n))
    streak, fails, since = (np.zeros((sets, n), int) for _ in range(3))
    tails = np.array([tail_of(m) for m in mean])
    runs = alerts = repeats = 0
    first, kept = np.zeros(sets, int), []
    while (rate := truth(runs)) is not None:
        u = draws(runs)
        failing = u[0] < (rate if sticky is None else np.where(lasting, sticky, rate))
        fresh = failing & ~bad
        first_ratio = ratio = null.first(failing, lasting)
        start = np.where((sums @ WEIGHTS > 1)[..., None], sums, 1)
        again, refailed = np.zeros((sets, n), int), np.zeros((sets, n), int)
        live, alarm = fresh, np.zeros((sets, n), bool)
        for number in range(confirm + 1):
            now = start * ratio
            stakes = np.where(fresh, now @ WEIGHTS * share, 0)
            counted = fresh & ~lasting & (2 * refailed >= again)
            many = _many(counted, bad | lasting, mean, tails) <= 1 / (4 * budget)
            alarm = select_by_e_bh(stakes, 2 * budget) | (counted & many[:, None])
            live = fresh & (~alarm | (many[:, None] & (number == 0)))
            if number == confirm or not live.any():
                break
            refail = u[number + 1] < (rate if echo is None else echo)
            again += live
            refailed += live & refail
            repeats += live.sum()
            ratio = first_ratio * null.repeated(refailed, again - refailed)
        sums = np.where((bad | alarm)[..., None], 0, start * ratio)
        null.count(sums @ WEIGHTS > 1, failing)
        lasting, (bad, streak, fails, since) = failing, _after(bad, alarm, failing, sums, (streak, fails, since))
        runs, alerts = runs + 1, alerts + int(alarm.any(-1).sum())
        first = np.where((first == 0) & alarm.any(-1), runs, first)
        if keep:
            kept.append(alarm)
    return Outcome(runs * sets, alerts, repeats, first, np.array(kept) if keep else None)


class Null:
    """The distribution of answers under the null hypothesis of no change."""

    def __init__(self, failed, asked, after):
        shape = failed.shape
        self.p0 = upper_end(failed, asked)[..., None]
        next_asked, next_failed, self.trials, repeats_failed = (
            np.broadcast_to(np.reshape(v, (-1, 1)), shape)[..., None] for v in after
        )
        self.next_bound, self.repeat_bound = lasting(next_failed, next_asked), lasting(repeats_failed, self.trials)
        self.density = null_density(failed, np.broadcast_to(asked, shape))
        self.usual = _chance(self.density, 0, 0)
        self.x, self.y = np.zeros(shape, int), np.zeros(shape, int)

    def first(self, failing, lasting):
        """Likelihood ratios of the first answers of a run."""
        chance, active = self.usual.copy(), self.x + self.y > 0
        chance[active] = _chance(self.density[active], self.x[active][:, None], self.y[active][:, None])
        rate = np.where(lasting[..., None], np.maximum(chance[..., None], self.next_bound), chance[..., None])
        up, down = _ratios(rate, np.maximum(rate, self.p0))
        return np.where(failing[..., None], up, down)

    def repeated(self, failed, passed):
        """Likelihood ratios of the repetitions of a run."""
        f, p = failed[..., None], passed[..., None]
        fixed = np.maximum(np.maximum(self.p0, self.repeat_bound), 0.1)
        up, down = _ratios(fixed, fixed)
        null = np.exp(betaln(2 + f, 18 + self.trials + p) - betaln(2, 18 + self.trials))
        free = ALTERNATIVES**f * (1 - ALTERNATIVES) ** p / null
        return np.where((self.repeat_bound > 0) | (self.p0 > 0.1), up**f * down**p, free)

    def count(self, counts, failing):
        """Counts answers while the evidence is above one."""
        self.x, self.y = np.where(counts, self.x + failing, 0), np.where(counts, self.y + ~failing, 0)


def null_density(failed, asked):
    """Posterior of each canary's failure rate on the grid, by naive sums: (sets, canaries, grid).

    The rates of a set have one of the Beta distributions, or each with a small probability Beta(1/2, 1/2).
    """
    slab = betabinom.pmf(failed, asked, 0.5, 0.5)
    likelihood = np.array([(1 - OUTLIERS) * betabinom.pmf(failed, asked, a, b) + OUTLIERS * slab for a, b in PRIORS])
    others = np.log(likelihood).sum(-1, keepdims=True) - np.log(likelihood)  # (priors, sets, canaries)
    weights = np.exp(others - others.max(0))
    weights /= weights.sum(0)
    step = RATES_GRID * (1 - RATES_GRID)  # the grid is uniform in the logit
    inside = np.array([beta.pdf(RATES_GRID, a, b) * step for a, b in PRIORS])
    prior = (1 - OUTLIERS) * np.einsum("hsc,hg->scg", weights, inside)
    prior += OUTLIERS * beta.pdf(RATES_GRID, 0.5, 0.5) * step
    return prior * RATES_GRID ** failed[..., None] * (1 - RATES_GRID) ** (asked - failed)[..., None]


def _chance(density, failed, passed):
    """Predictive probability of a failure after some answers."""
    now = density * RATES_GRID**failed * (1 - RATES_GRID) ** passed
    return np.maximum((now * RATES_GRID).sum(-1) / now.sum(-1), 0.005)


def _ratios(p0, least):
    """Likelihood ratios of a failure and of a pass."""
    tells = least < ALTERNATIVES
    return np.where(tells, ALTERNATIVES / p0, 1), np.where(tells, (1 - ALTERNATIVES) / np.where(tells, 1 - p0, 1), 1)


def _many(counted, bad, mean, tails):
    """P-value of the number of failures in each set."""
    k = counted.sum(-1)
    chance = np.take_along_axis(tails, k[:, None], axis=-1)[:, 0]
    for i in np.flatnonzero(bad.any(-1) & (k > 0)):  # alarmed canaries are excluded
        chance[i] = tail_of(mean[i][~bad[i]])[k[i]]
    return np.where(k > 0, chance, 1)


def _after(bad, alarm, failing, sums, counts):
    """Canaries alarmed after a run: from their alarm until enough consecutive passes."""
    streak, fails, since = counts
    idle = ~bad & ~alarm & (sums @ WEIGHTS <= 1)
    since = np.where(idle, 0, since + 1)
    fails = np.where(idle, 0, fails + failing)
    streak = np.where(failing, 0, np.minimum(streak + 1, RECENT))
    rate = (fails + 0.5) / (np.maximum(since - streak, fails) + 1)
    need = np.clip(np.ceil(np.log(0.05) / np.log1p(-rate)), PASSES, RECENT)
    well = bad & (streak >= need)
    return (bad | alarm) & ~well, streak, np.where(well, 0, fails), np.where(well, 0, since)


def uniform(seed, sets, n, confirm=5):
    """Fresh uniform numbers for each run."""
    rng = np.random.default_rng(seed)
    return lambda run: rng.random((confirm + 1, sets, n))


def quiet(runs, rate):
    """Constant failure rates."""
    return lambda run: rate if run < runs else None


def baseline(seed, sets, n, asked, rate):
    """Failures in a baseline of ``asked`` runs."""
    return np.random.default_rng(seed).binomial(asked, np.broadcast_to(rate, (sets, n)))


def sticky_baseline(seed, sets, n, asked, rate, sticky, echo):
    """A baseline in which failures last.

    Returns:
        Runs that did not follow a failure and failures in them, each (sets, canaries); and what else ``simulate`` needs
        about the baseline.
    """
    u = np.random.default_rng(seed).random((2, asked, sets, n))
    fails, lasting = np.zeros((asked, sets, n), bool), np.zeros((sets, n), bool)
    for run in range(asked):
        fails[run] = lasting = u[0, run] < np.where(lasting, sticky, rate)
    ends = ~fails.all(0)  # no baseline shows that the failures of the other canaries end
    after = np.concatenate([np.zeros((1, sets, n), bool), fails[:-1]])
    counted = (after, fails & after, fails, fails & (u[1] < echo))
    more = {"after": tuple((c & ends).sum((0, 2)) for c in counted), "ended": fails[-1]}
    return (~after).sum(0), (fails & ~after).sum(0), more


def interval(events, runs):
    """Events per 1,000 runs, with the 95 % interval of a Poisson count."""
    from scipy.stats import chi2

    low = chi2.ppf(0.025, 2 * events) / 2 if events else 0.0
    return [1000 * x / runs for x in (events, low, chi2.ppf(0.975, 2 * events + 2) / 2)]


def delays(rate, asked, base, *, sets=2000, n=50, confirm=5, broken=1, weights=None, longest=300):
    """Runs until one of the broken canaries alarms, if they fail at a rate from the first run on."""
    rates = np.full(n, base)
    rates[:broken] = rate
    failed = baseline(5, sets, n, asked, base)
    found = simulate(
        uniform(6, sets, n, confirm), quiet(longest, rates), asked, failed, confirm=confirm, weights=weights, keep=True
    )
    hit = found.alarmed[:, :, :broken].any(-1)
    return np.where(hit.any(0), hit.argmax(0) + 1, longest + 1)


MIXED = np.concatenate([np.full(40, 0.002), np.full(8, 0.05), np.full(2, 0.1)])
RATES = {"1 % each": np.full(50, 0.01), "40 at .2 %, 8 at 5 %, 2 at 10 %": MIXED}


def alarms(label, asked, confirm, runs, echo=None):
    """False alarms of 50 canaries, in 500 sets."""
    sets, rate = 500, RATES[label]
    failed = baseline(1, sets, 50, asked, rate)
    draws = uniform(2, sets, 50, confirm)
    found = simulate(draws, quiet(runs // sets, rate), asked, failed, confirm=confirm, echo=echo)
    per, low, high = interval(found.alerts, found.runs)
    burst = "" if echo is None else f", repetitions fail at {echo}"
    print(
        f"{label}, baseline {asked}, confirm {confirm}{burst}: {found.alerts} alarms in {found.runs:,} runs, in 1,000 "
        f"{per:.4f} ({low:.4f} to {high:.4f}), asked again {found.repeats / found.runs:.2f} a run",
        flush=True,
    )


def late(label, **options):
    """Detection delay for one broken canary."""
    d = delays(**options)
    print(f"{label}: median {np.median(d):.0f}, mean {d.mean():.2f}, 95 % {np.quantile(d, 0.95):.0f} runs", flush=True)


def main(wanted):
    """The results on docs/explanation/canary-alarms.md: false mixed echo always half many critical."""
    for section in (_counted, _late):
        section(wanted)


def _counted(wanted):
    if "false" in wanted:
        for asked, confirm in ((20, 5), (100, 5), (1000, 5), (1000, 0)):
            alarms("1 % each", asked, confirm, 1_000_000)
    if "mixed" in wanted:
        for asked, confirm in itertools.product((20, 100, 1000), (0, 5)):
            alarms("40 at .2 %, 8 at 5 %, 2 at 10 %", asked, confirm, 200_000)
    if "echo" in wanted:
        for echo in (0.1, 0.2, 0.3, 0.5):
            alarms("1 % each", 100, 5, 100_000, echo)


def _late(wanted):
    for name, rate in {"always": 1.0, "half": 0.5}.items():
        for asked, confirm, base in itertools.product((20, 50, 100, 200), (0, 3, 5), (0.0, 0.01)):
            if name in wanted:
                label = f"fails {name}, flaked {base}, baseline {asked}, confirm {confirm}"
                late(label, rate=rate, asked=asked, base=base, confirm=confirm, sets=400, longest=150)
    for broken, confirm in itertools.product((5, 10, 25), (0, 5)):
        if "many" in wanted:
            label = f"{broken} of 50 fail always, baseline 20, confirm {confirm}"
            late(label, rate=1.0, asked=20, base=0.01, broken=broken, confirm=confirm, sets=400, longest=50)
    weights = np.where(np.arange(50) == 0, 4.0, 1.0)
    for asked, confirm in itertools.product((20, 50, 100, 200), range(3, 7)):
        if "critical" in wanted:
            label = f"one critical, never flaked in {asked}, confirm {confirm}"
            late(label, rate=1.0, asked=asked, base=0.0, confirm=confirm, weights=weights, sets=50, longest=50)


if __name__ == "__main__":
    main(sys.argv[1:])
