import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError, DataError, MissingExtra
from casemate.maths.clustering import NOISE, silhouette
from casemate.reindexing import supcon
from casemate.reindexing.space import apply_map
from casemate.reindexing.supcon import Sampler, TrainSettings, supcon_loss, train_map

torch = pytest.importorskip("torch")
NONE = np.empty((0, 24), np.float32)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def topical(each=40, seed=0, dim=24):
    """Five overlapping topics, and some chunks without a topic."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation([*np.repeat(np.arange(5), each), *[NOISE] * 20])
    centres = rng.standard_normal((6, dim))
    return unit(centres[labels] * 0.7 + rng.standard_normal((len(labels), dim))), labels


def naive_loss(z, labels, tau):
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
def test_loss_equals_equation_1(n, seed, tau):
    rng = np.random.default_rng(seed)
    z, labels = unit(rng.standard_normal((n, 4))).astype(np.float64), rng.integers(-1, 3, n)
    found = float(supcon_loss(torch.from_numpy(z), torch.from_numpy(labels), tau))
    assert found == pytest.approx(naive_loss(z, labels, tau), abs=1e-9)


def test_anchors_without_a_partner_have_zero_loss_and_gradient():
    z = torch.eye(3, requires_grad=True)
    loss = supcon_loss(z, torch.tensor([0, 1, NOISE]), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(z.grad, torch.zeros(3, 3))


def test_chunks_without_a_topic_are_negatives_and_never_positives():
    """Two chunks without a topic are not a positive pair; one of them near a pair increases the loss of the pair."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    alone = supcon_loss(z, torch.tensor([0, 0, NOISE, NOISE]), 0.1)
    near = supcon_loss(z[[0, 1, 0, 2]], torch.tensor([0, 0, NOISE, NOISE]), 0.1)
    assert float(near) > float(alone) + 0.5


class TestSampler:
    labels = np.array([*np.repeat([0, 1, 2, 5], 30), 7, 7, *[NOISE] * 50])
    settings = TrainSettings(classes=3, per_class=8, negatives=10)

    def test_batch_has_the_configured_composition(self):
        for step in range(50):
            drawn = Sampler(self.labels, self.settings).batch(step)
            counts = {int(c): int((self.labels[drawn] == c).sum()) for c in np.unique(self.labels[drawn])}
            assert counts.pop(NOISE) == 10
            assert len(counts) == 3
            assert all(count == (2 if c == 7 else 8) for c, count in counts.items())
            assert len(set(drawn.tolist())) == len(drawn)

    def test_every_chunk_is_drawn_eventually(self):
        sampler = Sampler(self.labels, self.settings)
        assert set(np.concatenate([sampler.batch(s) for s in range(200)]).tolist()) == set(range(len(self.labels)))

    def test_batch_depends_on_the_step_only(self):
        one, other = (Sampler(self.labels, self.settings) for _ in range(2))
        assert np.array_equal(one.batch(7), other.batch(7))
        assert not np.array_equal(one.batch(7), one.batch(8))


def test_map_starts_as_the_identity():
    E, labels = topical()
    start = supcon._ResidualMap(E, NONE, seed=7)
    np.testing.assert_allclose(start.evaluate(np.arange(len(E))), E, atol=1e-6)


def test_training_separates_topics_on_held_out_chunks_too():
    E, labels = topical()
    trained = train_map(E, labels, NONE, TrainSettings(keep_weight=0, steps=300))
    (_, before), after = trained.separations[0], max(s for _, s in trained.separations)
    assert after > before + 0.1
    assert silhouette(apply_map(E, trained.weights), labels) > silhouette(E, labels) + 0.2
    assert dict(trained.separations)[trained.step] == after  # the best step is kept, not the last one


@pytest.mark.parametrize("mode", ["adapter", "compatible"])
def test_keep_weight_reduces_the_change_of_similarities(mode):
    """Mode compatible compares unmapped questions with mapped chunks."""
    E, labels = topical()
    Q = unit(E[:60] + 0.1 * np.random.default_rng(1).standard_normal((60, 24)))

    def changed(keep):
        weights = train_map(E, labels, Q, TrainSettings(mode=mode, keep_weight=keep, steps=100)).weights
        asked = apply_map(Q, weights) if mode == "adapter" else Q
        return np.square(asked @ apply_map(E, weights).T - Q @ E.T).mean()

    assert changed(1000) < changed(10) / 2 < changed(0)


def test_training_stops_early_without_separable_topics():
    E, _ = topical()
    labels = np.random.default_rng(5).integers(0, 5, len(E))
    trained = train_map(E, labels, NONE, TrainSettings(keep_weight=1000, steps=5000))
    assert trained.steps < 2000


def test_interrupted_training_resumes_exactly(tmp_path):
    E, labels = topical()
    Q, settings, file = E[:30], TrainSettings(steps=200), tmp_path / "x" / "checkpoint"
    whole = train_map(E, labels, Q, settings)
    taken = []

    def interrupt(steps):
        taken.append(steps)
        if len(taken) == 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_map(E, labels, Q, settings, file, interrupt)
    again = []
    resumed = train_map(E, labels, Q, settings, file, again.append)
    assert again[0] == 100  # the checkpoint already has the first steps
    assert again[1:] == [1] * 100
    assert (resumed.losses, resumed.separations) == (whole.losses, whole.separations)
    for name, weight in whole.weights.items():
        assert np.array_equal(resumed.weights[name], weight)


def test_checkpoint_of_another_training_is_ignored(tmp_path, caplog):
    """The collection may have changed since the interruption. The operator need not delete a file."""
    E, labels = topical()
    file, settings = tmp_path / "checkpoint", TrainSettings(steps=50)
    train_map(E, labels, NONE, settings, file)
    for others in ((E[1:], labels[1:], NONE, settings), (E, labels, NONE, TrainSettings(steps=50, seed=8))):
        found, alone = train_map(*others, file), train_map(*others)
        assert all(np.array_equal(found.weights[name], alone.weights[name]) for name in alone.weights)
    assert [r.message.count("for other chunks or settings") for r in caplog.records] == [1, 1]
    file.write_bytes(b"x" * 100)
    assert train_map(E, labels, NONE, settings, file).losses == train_map(E, labels, NONE, settings).losses
    assert "damaged" in caplog.records[-1].message
    assert train_map(E, labels, NONE, settings, file).steps == 50
    assert len(caplog.records) == 3  # the last run resumes from its own checkpoint


def test_training_is_deterministic_for_a_seed():
    E, labels = topical()
    one, other = (train_map(E, labels, NONE, TrainSettings(steps=50)).weights for _ in range(2))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_training_restores_torch_threads_and_random_state(monkeypatch):
    E, labels = topical()
    monkeypatch.setattr(torch, "set_num_threads", (counts := []).append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    drawn = torch.random.get_rng_state()
    train_map(E, labels, NONE, TrainSettings(steps=5))
    assert counts == [1, 5]
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_one_topic_is_an_error():
    E, labels = topical()
    with pytest.raises(DataError, match="training needs at least two topics"):
        train_map(E, np.where(labels == 0, 0, NOISE), NONE)


def test_small_topics_are_used_for_training_and_evaluation():
    E, labels = topical(each=4)
    assert train_map(E, labels, NONE, TrainSettings(steps=50)).steps == 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "gate"},
        {"temperature": 0},
        {"learning_rate": -1},
        {"keep_weight": -1},
        {"classes": 1},
        {"per_class": 1},
        {"steps": 0},
    ],
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainSettings(**wrong)


def test_missing_torch_raises_an_error_with_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    E, labels = topical()
    with pytest.raises(MissingExtra, match="pip install 'casemate\\[torch\\]'"):
        train_map(E, labels, NONE)
