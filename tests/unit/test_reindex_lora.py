import asyncio
import json
import socket
import stat
import sys
from dataclasses import replace

import numpy as np
import pytest

from casemate.defenses.reindex import Reindex
from casemate.errors import ConfigError, DataError, MissingExtra
from casemate.guard import Guard
from casemate.lab.box import CachedEmbedder
from casemate.lab.reindex import Settings, fit
from casemate.rag import Rag
from casemate.reindexing import lora
from casemate.reindexing.lora import LoraSettings, Texts, TrainSettings, tune
from casemate.reindexing.shelf import Shelf, due
from casemate.reindexing.space import key
from casemate.reindexing.topics import silhouette
from casemate.reindexing.tuned import FILES, digest, tunable
from casemate.types import Query
from tests import tiny_encoder
from tests.fakes import Parrot
from tests.topical import TOPICS, VOCABULARY, indexed, topical

REASON = "needs casemate[lora]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("sentence_transformers", reason=REASON)
pytest.importorskip("peft", reason=REASON)

SHORT = TrainSettings(classes=6, each=3, negatives=3, questions=6, rate=5e-3, steps=30, look=10, keep=0, identity=0)
DOCUMENTS = topical(102)
CHUNKS = [d.content for d in DOCUMENTS]
LABELS = np.array([int(d.id[1:]) % TOPICS for d in DOCUMENTS])
QUESTION = "t2w3 t2w5 t3w1 t3w4"


def backend(folder):
    from casemate.backends.sentence_transformers import SentenceTransformers

    return SentenceTransformers(str(folder))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads of a model this small wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A BERT with random weights whose words are those of the topics."""
    bert = tiny_encoder.bert(tmp_path_factory.mktemp("bert"), [*tiny_encoder.SPECIAL, *np.ravel(VOCABULARY).tolist()])
    return tiny_encoder.sentence_model(bert, tmp_path_factory.mktemp("models") / "tiny", 32)


@pytest.fixture(scope="module")
def embedder(model):
    return backend(model)


@pytest.fixture(scope="module")
def texts(embedder):
    asked = [" ".join(text.split()[1:6]) for text in CHUNKS[:30]]
    return Texts(CHUNKS, embedder.embed(CHUNKS), LABELS, asked, embedder.embed(asked))


@pytest.fixture(scope="module")
def trained(embedder, texts):
    return tune(embedder, texts, SHORT)


@pytest.fixture(scope="module")
def learnt(embedder, tmp_path_factory):
    """A re-indexing of the tiny collection, whatever it costs."""
    index, _ = indexed(tmp_path_factory.mktemp("index"), DOCUMENTS, embedder)
    found = fit(index, embedder, Settings(mode="lora", questions=60, training=SHORT, recall_loss=0.5))
    index.close()
    return replace(found, strength=0.75, accepted=True)


class Setting:
    """A system that ranks by a fine-tuned encoder."""

    def __init__(self, folder, embedder, learnt, mode="lora", **options):
        self.index, self.embedder = indexed(folder, DOCUMENTS, embedder)
        self.shelf = Shelf(folder / "r", "default")
        self.learnt = self.shelf.write(replace(learnt, mode=mode))
        self.defense = Reindex(mode, folder / "r", embedder=embedder, index=self.index, **options)
        self.guard = Guard(Rag(embedder, self.index, Parrot()), [self.defense])

    def found(self, text):
        return asyncio.run(self.guard.retrieve(Query(text)))[0]

    def expected(self, text, documents=DOCUMENTS):
        """Ids of the five best by the definition."""
        encoder, t = self.embedder.tuned(self.learnt.adapter), self.learnt.strength

        def places(texts):
            E, T = (e.embed(texts).astype(float) for e in (self.embedder, encoder))
            return [((1 - t) * e + t * u) / np.linalg.norm((1 - t) * e + t * u) for e, u in zip(E, T, strict=True)]

        (q,) = places([text]) if self.defense.mode == "lora" else self.embedder.embed([text])
        near = {d.id: float(q @ z) for d, z in zip(documents, places([d.content for d in documents]), strict=True)}
        return sorted(near, key=lambda name: -near[name])[:5]


def ids(retrieval):
    return [h.document.id for h in retrieval.hits]


class TestTuning:
    def test_draws_topics_apart_and_leaves_the_embedder_as_it_was(self, model, embedder, texts, trained):
        adapter, result = trained
        T = embedder.tuned(adapter).embed(CHUNKS)
        assert silhouette(T, LABELS) > silhouette(texts.E, LABELS) + 0.1
        (_, before), *_ = result.separations
        assert max(dict(result.separations).values()) == dict(result.separations)[result.step] > before
        assert np.array_equal(embedder.embed(CHUNKS), texts.E)
        assert embedder.fingerprint == backend(model).fingerprint != embedder.tuned(adapter).fingerprint

    def test_starts_as_the_embedder_itself(self, embedder, texts):
        start = lora._Encoder(embedder, texts, LoraSettings(), 7)
        np.testing.assert_allclose(start.held(np.arange(40)), texts.E[:40], atol=1e-5)
        weights = {name: p.detach().numpy() for name, p in start.parameters.items()}
        np.testing.assert_allclose(embedder.tuned(start.adapter(weights)).embed(CHUNKS), texts.E, atol=1e-5)

    def test_what_was_learnt_is_what_is_loaded(self, embedder, texts):
        """The vectors in training and those of the adapter, read from its files, are the same."""
        encoder = lora._Encoder(embedder, texts, LoraSettings(rank=3, alpha=5), 7)
        rng = np.random.default_rng(0)
        weights = {n: rng.normal(0, 0.1, p.shape).astype(np.float32) for n, p in encoder.parameters.items()}
        adapter = encoder.adapter(weights)
        found = embedder.tuned(adapter).embed(CHUNKS)
        np.testing.assert_allclose(encoder.held(np.arange(len(CHUNKS))), found, atol=1e-4)
        assert np.abs(found - texts.E).max() > 0.02

    def test_an_interrupted_training_goes_on_as_if_it_had_not_been(self, embedder, texts, trained, tmp_path):
        file, taken = tmp_path / "checkpoint", []

        def interrupt(steps):
            taken.append(steps)
            if len(taken) == 15:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tune(embedder, texts, SHORT, checkpoint=file, progress=interrupt)
        again = []
        adapter, result = tune(embedder, texts, SHORT, checkpoint=file, progress=again.append)
        assert again == [10, *[1] * 20]
        np.testing.assert_allclose(result.losses, trained[1].losses, atol=1e-4)
        found, whole = (embedder.tuned(a).embed(CHUNKS) for a in (adapter, trained[0]))
        np.testing.assert_allclose(found, whole, atol=1e-4)

    def test_in_mode_compatible_no_question_goes_through_the_new_encoder(self, embedder, texts, monkeypatch):
        asked = []
        monkeypatch.setattr(lora._Encoder, "questions", lambda self, rows: asked.append(rows) or self.chunks(rows))
        tune(embedder, texts, replace(SHORT, mode="compatible", steps=2, keep=1))
        assert not asked
        tune(embedder, texts, replace(SHORT, steps=2, keep=1))
        assert len(asked) == 2

    def test_to_keep_similarities_is_to_change_them_less(self, embedder, texts, trained):
        def changed(adapter):
            T, TQ = (embedder.tuned(adapter).embed(t) for t in (CHUNKS, texts.questions))
            return np.square(TQ @ T.T - texts.Q @ texts.E.T).mean()

        kept, _ = tune(embedder, texts, replace(SHORT, keep=1000))
        assert changed(kept) < changed(trained[0]) / 2

    def test_to_compute_activations_again_changes_nothing_but_memory(self, embedder, texts):
        short = replace(SHORT, steps=4, look=4)
        kept, again = (tune(embedder, texts, short, LoraSettings(checkpointing=c))[1] for c in (False, True))
        np.testing.assert_allclose(kept.losses, again.losses, atol=1e-4)

    def test_the_files_are_pefts_and_tell_nothing_of_this_machine(self, model, trained, tmp_path):
        import peft
        import sentence_transformers

        adapter, _ = trained
        assert tuple(adapter) == FILES
        about = json.loads(adapter[FILES[0]])
        assert about["peft_type"] == "LORA"
        assert about["base_model_name_or_path"] is None
        assert str(model.parent).encode() not in adapter[FILES[0]] + adapter[FILES[1]]
        for name, content in adapter.items():
            (tmp_path / name).write_bytes(content)
        library = sentence_transformers.SentenceTransformer(str(model), device="cpu", local_files_only=True)
        with lora._quiet():
            peft.PeftModel.from_pretrained(library[0].auto_model, str(tmp_path))
        theirs = library.encode(CHUNKS[:9], normalize_embeddings=True, show_progress_bar=False)
        np.testing.assert_allclose(theirs, backend(model).tuned(adapter).embed(CHUNKS[:9]), atol=1e-4)

    def test_needs_no_network(self, embedder, texts, monkeypatch):
        def refuse(*_):
            raise AssertionError("the network was used")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        adapter, _ = tune(embedder, texts, replace(SHORT, steps=1))
        embedder.tuned(adapter).embed(["t1w1"])

    def test_an_adapter_that_is_damaged_or_of_another_model_is_refused(self, embedder, trained, tmp_path):
        adapter, _ = trained
        other = tiny_encoder.bert(tmp_path, tiny_encoder.SPECIAL + ["a"], layers=1)
        for wrong in (
            {**adapter, FILES[1]: adapter[FILES[1]][:500]},
            {**adapter, FILES[0]: b"{}"},
            {FILES[0]: adapter[FILES[0]]},
        ):
            with pytest.raises(DataError, match="damaged or of another model"):
                embedder.tuned(wrong)
        with pytest.raises(DataError, match="damaged or of another model"):
            backend(other).tuned(adapter)

    def test_what_makes_no_sense_is_refused(self, embedder, texts):
        for wrong in ({"rank": 0}, {"alpha": 0}):
            with pytest.raises(ConfigError, match="at least 1"):
                LoraSettings(**wrong)
        with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used here"):
            tune(embedder, texts, SHORT, LoraSettings(device="cuda:99"))

    def test_without_peft_the_message_is_how_to_install_it(self, embedder, texts, monkeypatch):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(MissingExtra, match="pip install 'casemate\\[lora\\]'"):
            tune(embedder, texts, SHORT)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu_it_computes_in_half_precision(self, embedder, texts):
        encoder = lora._Encoder(embedder, texts, LoraSettings(), 7)
        assert encoder.device.type == "cuda"
        np.testing.assert_allclose(encoder.held(np.arange(40)), texts.E[:40], atol=0.02)


class TestDefense:
    @pytest.mark.parametrize("mode", ["lora", "lora_compatible"])
    def test_ranks_by_the_definition_and_leaves_scores_alone(self, tmp_path, embedder, learnt, mode):
        setting = Setting(tmp_path, embedder, learnt, mode)
        setting.defense.candidates = len(DOCUMENTS)
        changed = 0
        for text in (QUESTION, "t0w1 t5w2", "t4w9 t4w2 t1w1"):
            found = setting.found(text)
            assert ids(found) == setting.expected(text)
            own = embedder.embed([h.document.content for h in found.hits]) @ embedder.embed([text])[0]
            np.testing.assert_allclose([h.score for h in found.hits], own, atol=1e-5)  # what Mirabel judges by
            changed += ids(found) != ids(setting.index.search(embedder.embed([text])[0], 5))
        assert changed

    def test_exact_finds_the_best_of_the_whole_collection(self, tmp_path, embedder, learnt):
        setting = Setting(tmp_path, embedder, learnt, candidates=2, exact=True)
        assert ids(setting.found(QUESTION)) == setting.expected(QUESTION)

    def test_new_chunks_are_embedded_by_the_encoder_without_training(self, tmp_path, embedder, learnt):
        setting = Setting(tmp_path, embedder, learnt)
        setting.defense.candidates = 200
        setting.found(QUESTION)
        new = topical(3, seed=9, first=1002)
        setting.index.add(new, embedder.embed([d.content for d in new]))
        assert ids(setting.found(new[0].text)) == setting.expected(new[0].text, [*DOCUMENTS, *new])
        assert setting.found(new[0].text).hits[0].document.id == "d1002"
        again = Reindex("lora", tmp_path / "r", embedder=embedder, index=setting.index, candidates=200)
        setting.guard = Guard(Rag(embedder, setting.index, Parrot()), [again])  # read with the collection
        assert setting.found(new[0].text).hits[0].document.id == "d1002"

    def test_the_laboratory_s_cache_in_front_of_an_embedder_is_seen_through(self, embedder):
        assert tunable(CachedEmbedder(CachedEmbedder(embedder))) is embedder
        Reindex("lora", embedder=CachedEmbedder(embedder))

    def test_the_encoder_is_loaded_once(self, tmp_path, embedder, learnt, monkeypatch):
        setting, loads, tuned = Setting(tmp_path, embedder, learnt), [], type(embedder).tuned
        monkeypatch.setattr(type(embedder), "tuned", lambda self, adapter: loads.append(1) or tuned(self, adapter))
        for text in (QUESTION, "t0w1", "t1w1"):
            setting.found(text)
        assert loads == [1]


class TestShelf:
    def test_keeps_the_encoder_beside_its_version(self, tmp_path, learnt):
        shelf = Shelf(tmp_path, "default")
        written = shelf.write(learnt)
        folder = shelf.place / "001.lora"
        assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
        assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
        size = sum(p.stat().st_size for p in folder.iterdir())
        assert written.megabytes["adapter"] == pytest.approx(size / 1e6)
        held = Shelf(tmp_path, "default").current()
        assert digest(held.adapter) == digest(learnt.adapter)
        assert np.array_equal(held.tuned, learnt.tuned)

    def test_only_the_files_that_were_written_are_loaded(self, tmp_path, learnt):
        for name in FILES:
            shelf = Shelf(tmp_path / name, "default")
            shelf.write(learnt)
            path = shelf.place / "001.lora" / name
            path.write_bytes(path.read_bytes()[:-1] + b"}")
            if name == FILES[0]:
                path.write_bytes(path.read_bytes() + b" ")
            with pytest.raises(DataError, match="were changed"):
                shelf.current()
            path.unlink()
            with pytest.raises(DataError, match="damaged"):
                shelf.current()

    def test_goes_back_to_an_earlier_encoder_and_to_none(self, tmp_path, embedder, learnt):
        setting = Setting(tmp_path, embedder, learnt)
        first = ids(setting.found(QUESTION))
        weak = setting.shelf.write(replace(learnt, strength=0.0))
        assert ids(setting.found(QUESTION)) == ids(setting.index.search(embedder.embed([QUESTION])[0], 5))
        assert weak.version == 2
        setting.shelf.rollback()
        assert ids(setting.found(QUESTION)) == first

    def test_of_what_was_refused_the_figures_are_kept(self, tmp_path, learnt):
        shelf = Shelf(tmp_path, "default")
        shelf.write(replace(learnt, accepted=False, why="too dear"))
        assert not (shelf.place / "001.lora").exists()
        assert shelf.read(1).report["megabytes"]["adapter"] > 0

    def test_what_a_killed_program_left_is_replaced(self, tmp_path, learnt):
        shelf = Shelf(tmp_path, "default")
        (shelf.place / "001.lora").mkdir(parents=True)
        (shelf.place / "001.lora" / "rest").write_bytes(b"x")
        shelf.write(learnt)
        assert sorted(p.name for p in (shelf.place / "001.lora").iterdir()) == sorted(FILES)
        assert shelf.current().version == 1


class TestFit:
    def test_the_report_tells_what_it_came_to(self, learnt):
        report = learnt.report
        assert report["silhouette"]["after"] > report["silhouette"]["before"]
        assert report["training"]["mode"] == "lora"
        assert set(report["megabytes"]) == {"adapter", "vectors"}
        assert json.dumps(report)

    def test_the_gate_on_what_is_found_holds_for_encoders_too(self, tmp_path, embedder, monkeypatch):
        monkeypatch.setattr("casemate.lab.reindex._loss", lambda before, after: (0.2, 0.3))
        index, _ = indexed(tmp_path, DOCUMENTS, embedder)
        refused = fit(index, embedder, Settings(mode="lora", questions=60, training=replace(SHORT, steps=2)))
        assert not refused.accepted
        assert "recall@5 may fall by 0.300" in refused.why
        index.close()

    def test_equal_texts_and_replaced_ones_keep_their_vectors(self, tmp_path, embedder, learnt):
        """The vectors lie in the order of the keys, whatever the order of the index."""
        index, _ = indexed(tmp_path, [*reversed(DOCUMENTS), replace(DOCUMENTS[3], id="twin", source="twin")], embedder)
        assert due(learnt, index) == ""
        found = fit(index, embedder, Settings(mode="lora", questions=60, training=replace(SHORT, steps=1)))
        T, known = found.kept(learnt.keys)
        assert known.all()
        encoder = embedder.tuned(found.adapter)
        by_key = dict(zip(learnt.keys.tolist(), T, strict=True))
        for d in DOCUMENTS[::17]:
            np.testing.assert_allclose(by_key[key(d)], encoder.embed([d.content])[0], atol=1e-4)
        index.close()
