import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError, DataError, MissingExtra
from casemate.reindexing import mapping
from casemate.reindexing.mapping import train
from casemate.reindexing.residual import mapped
from casemate.reindexing.supcon import Sampler, TrainSettings, supcon_loss
from casemate.reindexing.topics import NOISE, silhouette

torch = pytest.importorskip("torch")
NONE = np.empty((0, 24), np.float32)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def topical(each=40, seed=0, dim=24):
    """Five topics that overlap, and some chunks without one."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation([*np.repeat(np.arange(5), each), *[NOISE] * 20])
    centres = rng.standard_normal((6, dim))
    return unit(centres[labels] * 0.7 + rng.standard_normal((len(labels), dim))), labels


def loss_of_the_definition(z, labels, tau):
    """Eq. 1 by loops, as a mean over the anchors that have a partner."""
    terms = []
    for i in range(len(z)):
        partners = [p for p in range(len(z)) if p != i and labels[p] == labels[i] != NOISE]
        if not partners:
            continue
        others = sum(np.exp(z[i] @ z[a] / tau) for a in range(len(z)) if a != i)
        terms.append(-np.mean([np.log(np.exp(z[i] @ z[p] / tau) / others) for p in partners]))
    return np.mean(terms) if terms else 0.0


@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from([0.1, 0.5]))
def test_the_loss_is_that_of_equation_1(n, seed, tau):
    rng = np.random.default_rng(seed)
    z, labels = unit(rng.standard_normal((n, 4))).astype(np.float64), rng.integers(-1, 3, n)
    found = float(supcon_loss(torch.from_numpy(z), torch.from_numpy(labels), tau))
    assert found == pytest.approx(loss_of_the_definition(z, labels, tau), abs=1e-9)


def test_who_has_no_partner_costs_nothing_and_breaks_nothing():
    z = torch.eye(3, requires_grad=True)
    loss = supcon_loss(z, torch.tensor([0, 1, NOISE]), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(z.grad, torch.zeros(3, 3))


def test_noise_pushes_others_away_and_is_not_drawn_together():
    """Two chunks without a topic are no pair, but a pair is the worse off for one that is near."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    alone = supcon_loss(z, torch.tensor([0, 0, NOISE, NOISE]), 0.1)
    near = supcon_loss(z[[0, 1, 0, 2]], torch.tensor([0, 0, NOISE, NOISE]), 0.1)
    assert float(near) > float(alone) + 0.5


class TestSampler:
    labels = np.array([*np.repeat([0, 1, 2, 5], 30), 7, 7, *[NOISE] * 50])
    settings = TrainSettings(classes=3, each=8, negatives=10)

    def test_draws_so_many_topics_chunks_and_others(self):
        for step in range(50):
            drawn = Sampler(self.labels, self.settings).batch(step)
            counts = {int(c): int((self.labels[drawn] == c).sum()) for c in np.unique(self.labels[drawn])}
            assert counts.pop(NOISE) == 10
            assert len(counts) == 3
            assert all(count == (2 if c == 7 else 8) for c, count in counts.items())
            assert len(set(drawn.tolist())) == len(drawn)

    def test_draws_every_chunk_sooner_or_later(self):
        sampler = Sampler(self.labels, self.settings)
        assert set(np.concatenate([sampler.batch(s) for s in range(200)]).tolist()) == set(range(len(self.labels)))

    def test_draws_the_same_at_the_same_step(self):
        one, other = (Sampler(self.labels, self.settings) for _ in range(2))
        assert np.array_equal(one.batch(7), other.batch(7))
        assert not np.array_equal(one.batch(7), one.batch(8))


def test_the_map_starts_as_the_embedder_itself():
    E, labels = topical()
    start = mapping._Map(E, NONE, seed=7)
    np.testing.assert_allclose(start.held(np.arange(len(E))), E, atol=1e-6)


def test_training_draws_topics_apart_also_where_it_did_not_look():
    E, labels = topical()
    trained = train(E, labels, NONE, TrainSettings(keep=0, steps=300))
    (_, before), after = trained.separations[0], max(s for _, s in trained.separations)
    assert after > before + 0.1
    assert silhouette(mapped(E, trained.weights), labels) > silhouette(E, labels) + 0.2
    assert dict(trained.separations)[trained.step] == after  # the best step is kept, not the last


@pytest.mark.parametrize("mode", ["adapter", "compatible"])
def test_to_keep_similarities_is_to_change_them_less(mode):
    """In mode compatible it is the questions' own vectors that are compared with the mapped chunks."""
    E, labels = topical()
    Q = unit(E[:60] + 0.1 * np.random.default_rng(1).standard_normal((60, 24)))

    def changed(keep):
        weights = train(E, labels, Q, TrainSettings(mode=mode, keep=keep, steps=100)).weights
        asked = mapped(Q, weights) if mode == "adapter" else Q
        return np.square(asked @ mapped(E, weights).T - Q @ E.T).mean()

    assert changed(1000) < changed(10) / 2 < changed(0)


def test_where_there_is_nothing_to_draw_apart_training_ends_early():
    E, _ = topical()
    labels = np.random.default_rng(5).integers(0, 5, len(E))
    trained = train(E, labels, NONE, TrainSettings(keep=1000, steps=5000))
    assert trained.steps < 2000


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path):
    E, labels = topical()
    Q, settings, file = E[:30], TrainSettings(steps=200), tmp_path / "x" / "checkpoint"
    whole = train(E, labels, Q, settings)
    taken = []

    def interrupt(steps):
        taken.append(steps)
        if len(taken) == 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(E, labels, Q, settings, file, interrupt)
    again = []
    resumed = train(E, labels, Q, settings, file, again.append)
    assert again[0] == 100  # told first: what the last checkpoint holds
    assert again[1:] == [1] * 100
    assert (resumed.losses, resumed.separations) == (whole.losses, whole.separations)
    for name, weight in whole.weights.items():
        assert np.array_equal(resumed.weights[name], weight)


def test_the_checkpoint_of_another_training_is_passed_over(tmp_path, caplog):
    """The collection may have changed since it was interrupted: that is no reason to have somebody delete a file."""
    E, labels = topical()
    file, settings = tmp_path / "checkpoint", TrainSettings(steps=50)
    train(E, labels, NONE, settings, file)
    for others in ((E[1:], labels[1:], NONE, settings), (E, labels, NONE, TrainSettings(steps=50, seed=8))):
        found, alone = train(*others, file), train(*others)
        assert all(np.array_equal(found.weights[name], alone.weights[name]) for name in alone.weights)
    assert [r.message.count("another training") for r in caplog.records] == [1, 1]
    file.write_bytes(b"x" * 100)
    assert train(E, labels, NONE, settings, file).losses == train(E, labels, NONE, settings).losses
    assert "damaged" in caplog.records[-1].message
    assert train(E, labels, NONE, settings, file).steps == 50
    assert len(caplog.records) == 3  # the last one was our own again


def test_the_same_seed_gives_the_same_map():
    E, labels = topical()
    one, other = (train(E, labels, NONE, TrainSettings(steps=50)).weights for _ in range(2))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_training_leaves_torch_as_it_was():
    E, labels = topical()
    before, drawn = torch.get_num_threads(), torch.random.get_rng_state()
    train(E, labels, NONE, TrainSettings(steps=5))
    assert torch.get_num_threads() == before
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_one_topic_cannot_be_drawn_apart():
    E, labels = topical()
    with pytest.raises(DataError, match="fewer than two topics"):
        train(E, np.where(labels == 0, 0, NOISE), NONE)


def test_topics_of_a_few_chunks_are_taught_and_looked_at_alike():
    E, labels = topical(each=4)
    assert train(E, labels, NONE, TrainSettings(steps=50)).steps == 50


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "gate"}, {"temperature": 0}, {"rate": -1}, {"keep": -1}, {"classes": 1}, {"each": 1}, {"steps": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainSettings(**wrong)


def test_without_torch_the_message_is_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    E, labels = topical()
    with pytest.raises(MissingExtra, match="pip install 'casemate\\[torch\\]'"):
        train(E, labels, NONE)
