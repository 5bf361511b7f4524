import asyncio
import json
import socket
import stat
import sys
from dataclasses import replace

import numpy as np
import pytest

from casemate.errors import ConfigError, DataError, MissingExtra
from casemate.guard.defenses.reindex import Reindex
from casemate.guard.guard import Guard
from casemate.maths.clustering import silhouette
from casemate.rag.pipeline import Rag
from casemate.reindexing import lora
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.lora import LoraSettings, TrainingTexts, TrainSettings, fine_tune
from casemate.reindexing.registry import ReindexRegistry, reindex_due
from casemate.reindexing.space import ADAPTER_FILES, adapter_digest, chunk_key, require_tunable
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Query
from tests import tiny_encoder
from tests.fakes import Parrot
from tests.topical import TOPICS, VOCABULARY, indexed, topical

REASON = "needs casemate[lora]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("sentence_transformers", reason=REASON)
pytest.importorskip("peft", reason=REASON)

SHORT = TrainSettings(
    classes=6,
    per_class=3,
    negatives=3,
    questions=6,
    learning_rate=5e-3,
    steps=30,
    eval_interval=10,
    keep_weight=0,
    identity_weight=0,
)
DOCUMENTS = topical(102)
CHUNKS = [d.content for d in DOCUMENTS]
LABELS = np.array([int(d.id[1:]) % TOPICS for d in DOCUMENTS])
QUESTION = "t2w3 t2w5 t3w1 t3w4"


def backend(folder):
    from casemate.backends.embedders.sentence_transformers import SentenceTransformers

    return SentenceTransformers(str(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A BERT with random weights and the vocabulary of the topics."""
    bert = tiny_encoder.bert(tmp_path_factory.mktemp("bert"), [*tiny_encoder.SPECIAL, *np.ravel(VOCABULARY).tolist()])
    return tiny_encoder.sentence_model(bert, tmp_path_factory.mktemp("models") / "tiny", 32)


@pytest.fixture(scope="module")
def embedder(model):
    return backend(model)


@pytest.fixture(scope="module")
def texts(embedder):
    asked = [" ".join(text.split()[1:6]) for text in CHUNKS[:30]]
    return TrainingTexts(CHUNKS, embedder.embed(CHUNKS), LABELS, asked, embedder.embed(asked))


@pytest.fixture(scope="module")
def trained(embedder, texts):
    return fine_tune(embedder, texts, SHORT)


@pytest.fixture(scope="module")
def reindexing(embedder, tmp_path_factory):
    """A re-indexing of the tiny collection with a high allowed recall loss."""
    index, _ = indexed(tmp_path_factory.mktemp("index"), DOCUMENTS, embedder)
    found = fit(index, embedder, ReindexSettings(mode="lora", questions=60, training=SHORT, recall_loss=0.5))
    index.close()
    return replace(found, strength=0.75, accepted=True)


class Setting:
    """A system that ranks with a fine-tuned encoder."""

    def __init__(self, folder, embedder, reindexing, mode="lora", **options):
        self.index, self.embedder = indexed(folder, DOCUMENTS, embedder)
        self.registry = ReindexRegistry(folder / "r", "default")
        self.reindexing = self.registry.write(replace(reindexing, mode=mode))
        self.defense = Reindex(mode, folder / "r", embedder=embedder, index=self.index, **options)
        self.guard = Guard(Rag(embedder, self.index, Parrot()), [self.defense])

    def found(self, text):
        return asyncio.run(self.guard.retrieve(Query(text)))[0]

    def expected(self, text, documents=DOCUMENTS):
        """Ids of the five nearest documents by definition."""
        encoder, t = self.embedder.with_adapter(self.reindexing.adapter), self.reindexing.strength

        def vectors(texts):
            E, T = (e.embed(texts).astype(float) for e in (self.embedder, encoder))
            return [((1 - t) * e + t * u) / np.linalg.norm((1 - t) * e + t * u) for e, u in zip(E, T, strict=True)]

        (q,) = vectors([text]) if self.defense.mode == "lora" else self.embedder.embed([text])
        near = {d.id: float(q @ z) for d, z in zip(documents, vectors([d.content for d in documents]), strict=True)}
        return sorted(near, key=lambda name: -near[name])[:5]


def ids(retrieval):
    return [h.document.id for h in retrieval.hits]


class TestFineTuning:
    def test_separates_topics_without_changing_the_embedder(self, model, embedder, texts, trained):
        adapter, result = trained
        T = embedder.with_adapter(adapter).embed(CHUNKS)
        assert silhouette(T, LABELS) > silhouette(texts.E, LABELS) + 0.1
        (_, before), *_ = result.separations
        assert max(dict(result.separations).values()) == dict(result.separations)[result.step] > before
        assert np.array_equal(embedder.embed(CHUNKS), texts.E)
        assert embedder.fingerprint == backend(model).fingerprint != embedder.with_adapter(adapter).fingerprint

    def test_starts_as_the_identity(self, embedder, texts):
        start = lora._Encoder(embedder, texts, LoraSettings(), 7)
        np.testing.assert_allclose(start.evaluate(np.arange(40)), texts.E[:40], atol=1e-5)
        weights = {name: p.detach().numpy() for name, p in start.parameters.items()}
        np.testing.assert_allclose(embedder.with_adapter(start.adapter(weights)).embed(CHUNKS), texts.E, atol=1e-5)

    def test_loaded_adapter_equals_the_trained_one(self, embedder, texts):
        """Oracle: the vectors during training equal those of the adapter loaded from its files."""
        encoder = lora._Encoder(embedder, texts, LoraSettings(rank=3, alpha=5), 7)
        rng = np.random.default_rng(0)
        weights = {n: rng.normal(0, 0.1, p.shape).astype(np.float32) for n, p in encoder.parameters.items()}
        adapter = encoder.adapter(weights)
        found = embedder.with_adapter(adapter).embed(CHUNKS)
        np.testing.assert_allclose(encoder.evaluate(np.arange(len(CHUNKS))), found, atol=1e-4)
        assert np.abs(found - texts.E).max() > 0.02

    def test_interrupted_training_resumes_exactly(self, embedder, texts, trained, tmp_path):
        file, taken = tmp_path / "checkpoint", []

        def interrupt(steps):
            taken.append(steps)
            if len(taken) == 15:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fine_tune(embedder, texts, SHORT, checkpoint=file, progress=interrupt)
        again = []
        adapter, result = fine_tune(embedder, texts, SHORT, checkpoint=file, progress=again.append)
        assert again == [10, *[1] * 20]
        np.testing.assert_allclose(result.losses, trained[1].losses, atol=1e-4)
        found, whole = (embedder.with_adapter(a).embed(CHUNKS) for a in (adapter, trained[0]))
        np.testing.assert_allclose(found, whole, atol=1e-4)

    def test_mode_compatible_does_not_encode_questions(self, embedder, texts, monkeypatch):
        asked = []
        monkeypatch.setattr(lora._Encoder, "questions", lambda self, rows: asked.append(rows) or self.chunks(rows))
        fine_tune(embedder, texts, replace(SHORT, mode="compatible", steps=2, keep_weight=1))
        assert not asked
        fine_tune(embedder, texts, replace(SHORT, steps=2, keep_weight=1))
        assert len(asked) == 2

    def test_keep_weight_reduces_the_change_of_similarities(self, embedder, texts, trained):
        def changed(adapter):
            T, TQ = (embedder.with_adapter(adapter).embed(t) for t in (CHUNKS, texts.questions))
            return np.square(TQ @ T.T - texts.Q @ texts.E.T).mean()

        kept, _ = fine_tune(embedder, texts, replace(SHORT, keep_weight=1000))
        assert changed(kept) < changed(trained[0]) / 2

    def test_checkpointing_changes_memory_only(self, embedder, texts):
        short = replace(SHORT, steps=4, eval_interval=4)
        kept, again = (fine_tune(embedder, texts, short, LoraSettings(checkpointing=c))[1] for c in (False, True))
        np.testing.assert_allclose(kept.losses, again.losses, atol=1e-4)

    def test_files_are_readable_by_peft_and_contain_no_local_path(self, model, trained, tmp_path):
        import peft
        import sentence_transformers

        adapter, _ = trained
        assert tuple(adapter) == ADAPTER_FILES
        about = json.loads(adapter[ADAPTER_FILES[0]])
        assert about["peft_type"] == "LORA"
        assert about["base_model_name_or_path"] is None
        assert str(model.parent).encode() not in adapter[ADAPTER_FILES[0]] + adapter[ADAPTER_FILES[1]]
        for name, content in adapter.items():
            (tmp_path / name).write_bytes(content)
        library = sentence_transformers.SentenceTransformer(str(model), device="cpu", local_files_only=True)
        with lora._quiet():
            peft.PeftModel.from_pretrained(library[0].auto_model, str(tmp_path))
        library_vectors = library.encode(CHUNKS[:9], normalize_embeddings=True, show_progress_bar=False)
        np.testing.assert_allclose(library_vectors, backend(model).with_adapter(adapter).embed(CHUNKS[:9]), atol=1e-4)

    def test_needs_no_network(self, embedder, texts, monkeypatch):
        def refuse(*_):
            raise AssertionError("the network was used")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        adapter, _ = fine_tune(embedder, texts, replace(SHORT, steps=1))
        embedder.with_adapter(adapter).embed(["t1w1"])

    def test_damaged_or_incompatible_adapters_are_rejected(self, embedder, trained, tmp_path):
        adapter, _ = trained
        other = tiny_encoder.bert(tmp_path, tiny_encoder.SPECIAL + ["a"], layers=1)
        for wrong in (
            {**adapter, ADAPTER_FILES[1]: adapter[ADAPTER_FILES[1]][:500]},
            {**adapter, ADAPTER_FILES[0]: b"{}"},
            {ADAPTER_FILES[0]: adapter[ADAPTER_FILES[0]]},
        ):
            with pytest.raises(DataError, match="damaged or belongs to another model"):
                embedder.with_adapter(wrong)
        with pytest.raises(DataError, match="damaged or belongs to another model"):
            backend(other).with_adapter(adapter)

    def test_invalid_settings_are_rejected(self, embedder, texts):
        for wrong in ({"rank": 0}, {"alpha": 0}):
            with pytest.raises(ConfigError, match="at least 1"):
                LoraSettings(**wrong)
        with pytest.raises(ConfigError, match="device 'cuda:99' is not available; 'cpu' always is"):
            fine_tune(embedder, texts, SHORT, LoraSettings(device="cuda:99"))

    def test_missing_peft_raises_an_error_with_the_extra(self, embedder, texts, monkeypatch):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(MissingExtra, match="pip install 'casemate\\[lora\\]'"):
            fine_tune(embedder, texts, SHORT)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_computes_in_half_precision_on_a_gpu(self, embedder, texts):
        encoder = lora._Encoder(embedder, texts, LoraSettings(), 7)
        assert encoder.device.type == "cuda"
        np.testing.assert_allclose(encoder.evaluate(np.arange(40)), texts.E[:40], atol=0.02)


class TestDefense:
    @pytest.mark.parametrize("mode", ["lora", "lora_compatible"])
    def test_ranking_equals_the_definition_and_scores_do_not_change(self, tmp_path, embedder, reindexing, mode):
        setting = Setting(tmp_path, embedder, reindexing, mode)
        setting.defense.candidates = len(DOCUMENTS)
        changed = 0
        for text in (QUESTION, "t0w1 t5w2", "t4w9 t4w2 t1w1"):
            found = setting.found(text)
            assert ids(found) == setting.expected(text)
            own = embedder.embed([h.document.content for h in found.hits]) @ embedder.embed([text])[0]
            np.testing.assert_allclose([h.score for h in found.hits], own, atol=1e-5)  # Mirabel depends on these scores
            changed += ids(found) != ids(setting.index.search(embedder.embed([text])[0], 5))
        assert changed

    def test_exact_mode_finds_the_best_of_the_collection(self, tmp_path, embedder, reindexing):
        setting = Setting(tmp_path, embedder, reindexing, candidates=2, exact=True)
        assert ids(setting.found(QUESTION)) == setting.expected(QUESTION)

    def test_new_chunks_are_encoded_without_training(self, tmp_path, embedder, reindexing):
        setting = Setting(tmp_path, embedder, reindexing)
        setting.defense.candidates = 200
        setting.found(QUESTION)
        new = topical(3, seed=9, first=1002)
        setting.index.add(new, embedder.embed([d.content for d in new]))
        assert ids(setting.found(new[0].text)) == setting.expected(new[0].text, [*DOCUMENTS, *new])
        assert setting.found(new[0].text).hits[0].document.id == "d1002"
        again = Reindex("lora", tmp_path / "r", embedder=embedder, index=setting.index, candidates=200)
        setting.guard = Guard(Rag(embedder, setting.index, Parrot()), [again])  # now included in the scan
        assert setting.found(new[0].text).hits[0].document.id == "d1002"

    def test_cached_embedders_are_unwrapped(self, embedder):
        assert require_tunable(CachedEmbedder(CachedEmbedder(embedder))) is embedder
        Reindex("lora", embedder=CachedEmbedder(embedder))

    def test_encoder_is_loaded_once(self, tmp_path, embedder, reindexing, monkeypatch):
        setting, loads, load = Setting(tmp_path, embedder, reindexing), [], type(embedder).with_adapter
        monkeypatch.setattr(
            type(embedder), "with_adapter", lambda self, adapter: loads.append(1) or load(self, adapter)
        )
        for text in (QUESTION, "t0w1", "t1w1"):
            setting.found(text)
        assert loads == [1]


class TestReindexRegistry:
    def test_encoder_is_stored_beside_its_version(self, tmp_path, reindexing):
        registry = ReindexRegistry(tmp_path, "default")
        written = registry.write(reindexing)
        folder = registry.folder / "001.lora"
        assert sorted(p.name for p in folder.iterdir()) == sorted(ADAPTER_FILES)
        assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
        size = sum(p.stat().st_size for p in folder.iterdir())
        assert written.megabytes["adapter"] == pytest.approx(size / 1e6)
        latest = ReindexRegistry(tmp_path, "default").current()
        assert adapter_digest(latest.adapter) == adapter_digest(reindexing.adapter)
        assert np.array_equal(latest.tuned, reindexing.tuned)

    def test_changed_encoder_files_are_rejected(self, tmp_path, reindexing):
        for name in ADAPTER_FILES:
            registry = ReindexRegistry(tmp_path / name, "default")
            registry.write(reindexing)
            path = registry.folder / "001.lora" / name
            path.write_bytes(path.read_bytes()[:-1] + b"}")
            if name == ADAPTER_FILES[0]:
                path.write_bytes(path.read_bytes() + b" ")
            with pytest.raises(DataError, match="were changed after training"):
                registry.current()
            path.unlink()
            with pytest.raises(DataError, match="damaged"):
                registry.current()

    def test_rollback_restores_the_earlier_encoder(self, tmp_path, embedder, reindexing):
        setting = Setting(tmp_path, embedder, reindexing)
        first = ids(setting.found(QUESTION))
        weak = setting.registry.write(replace(reindexing, strength=0.0))
        assert ids(setting.found(QUESTION)) == ids(setting.index.search(embedder.embed([QUESTION])[0], 5))
        assert weak.version == 2
        setting.registry.rollback()
        assert ids(setting.found(QUESTION)) == first

    def test_rejected_versions_keep_only_their_report(self, tmp_path, reindexing):
        registry = ReindexRegistry(tmp_path, "default")
        registry.write(replace(reindexing, accepted=False, reason="too dear"))
        assert not (registry.folder / "001.lora").exists()
        assert registry.read(1).report["megabytes"]["adapter"] > 0

    def test_partial_files_of_a_killed_process_are_replaced(self, tmp_path, reindexing):
        registry = ReindexRegistry(tmp_path, "default")
        (registry.folder / "001.lora").mkdir(parents=True)
        (registry.folder / "001.lora" / "rest").write_bytes(b"x")
        registry.write(reindexing)
        assert sorted(p.name for p in (registry.folder / "001.lora").iterdir()) == sorted(ADAPTER_FILES)
        assert registry.current().version == 1


class TestFit:
    def test_report_contains_the_metrics(self, reindexing):
        report = reindexing.report
        assert report["silhouette"]["after"] > report["silhouette"]["before"]
        assert report["training"]["mode"] == "lora"
        assert set(report["megabytes"]) == {"adapter", "vectors"}
        assert json.dumps(report)

    def test_recall_bound_applies_to_encoders_too(self, tmp_path, embedder, monkeypatch):
        monkeypatch.setattr("casemate.reindexing.fitting._recall_loss", lambda before, after: (0.2, 0.3))
        index, _ = indexed(tmp_path, DOCUMENTS, embedder)
        refused = fit(index, embedder, ReindexSettings(mode="lora", questions=60, training=replace(SHORT, steps=2)))
        assert not refused.accepted
        assert "recall@5 may fall by 0.300" in refused.reason
        index.close()

    def test_vectors_follow_the_order_of_the_keys(self, tmp_path, embedder, reindexing):
        """The result does not depend on the order of the index, and equal texts share a vector."""
        index, _ = indexed(tmp_path, [*reversed(DOCUMENTS), replace(DOCUMENTS[3], id="twin", source="twin")], embedder)
        assert reindex_due(reindexing, index) == ""
        found = fit(index, embedder, ReindexSettings(mode="lora", questions=60, training=replace(SHORT, steps=1)))
        T, known = found.tuned_vectors(reindexing.keys)
        assert known.all()
        encoder = embedder.with_adapter(found.adapter)
        by_key = dict(zip(reindexing.keys.tolist(), T, strict=True))
        for d in DOCUMENTS[::17]:
            np.testing.assert_allclose(by_key[chunk_key(d)], encoder.embed([d.content])[0], atol=1e-4)
        index.close()
