"""Casemate's guard around a store that a framework searches: wired once, asked by every wrapper of that store."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casemate import app as wiring
from casemate import calibration, registry
from casemate import config as configuration
from casemate.attaching.places import MEMORY
from casemate.config import Config, Part
from casemate.defenses.mirabel import Mirabel
from casemate.errors import CapabilityError, DataError
from casemate.guard import Guard
from casemate.integrations.adapters import Foreign, Foreigner, document_of, unit
from casemate.integrations.asking import ASKED, Asked, Asker, Row
from casemate.integrations.attachment import Attachment
from casemate.integrations.loops import Loops
from casemate.lab.calibrate import calibrate
from casemate.monitor.alerts.at_once import Alarming
from casemate.protocols import Defense, Embedder, EventStore, Generator, Index, Progress
from casemate.rag import Rag, require_answerable
from casemate.types import DEFAULT_TENANT, Document, Hit, Outcome, Prompt, Query, Retrieval, Vector

log = logging.getLogger("casemate.integrations")
UNTOLD = {
    "the answer": "the framework owns the model: what it writes is not looked at",
    "ways round": "what reads or writes the store without this wrapper is not guarded; sync() after foreign writes",
    "scores": "they are the store's own, for the application: do not show them to whoever asks",
}


@dataclass(frozen=True, slots=True)
class Protects:
    """What a wrapper protects where it stands, and what it cannot.

    Attributes:
        acts: Defenses that act on what is retrieved.
        acts_not: What is not protected here, and why.
        mode: ``enforce``, ``observe`` or ``off``.
    """

    acts: tuple[str, ...]
    acts_not: Mapping[str, str]
    mode: str

    def __str__(self) -> str:
        acts = ", ".join(self.acts) if self.mode != "off" and self.acts else "nothing"
        lacks = "; ".join(f"{what}: {why}" for what, why in self.acts_not.items())
        return f"{self.mode}: {acts} on what is retrieved. Not protected: {lacks}"


class Protection:
    """A guard, and the store that it stands in front of.

    Args:
        store: The framework's store.
        embedder: The framework's embedder.
        config: A ``casemate.yaml``, the same as a mapping, or None for the defaults. Of it ``guard``, ``calibrate``,
            ``store`` and ``privacy`` count; the system under protection is the framework's.
        path: Folder for the moments, the calibration and the record of verdicts. None: they live as long as this does.
        fit: True learns at once how close harmless questions come, where the guard does not know it yet; or harmless
            questions that people asked, to learn from; False leaves it to ``calibrate``.

    Raises:
        ConfigError: If the configuration is wrong, or the store cannot be read through.
        DataError: If its vectors are of no use.
    """

    def __init__(
        self,
        store: Foreign,
        embedder: Foreigner,
        config: Config | Mapping[str, Any] | Path | str | None = None,
        path: Path | str | None = None,
        fit: bool | Sequence[str] = True,
    ) -> None:
        self.store, self.embedder = store, embedder
        self.config = _read(config)
        with ExitStack() as opened:
            held = path if path is not None else opened.enter_context(tempfile.TemporaryDirectory(prefix="casemate-"))
            self.folder = Path(held).absolute()
            beside = self.folder / "attached.db" if path is not None else Path(MEMORY)
            self.index = opened.enter_context(closing(Attachment(store, beside)))
            self.events = self._events(opened, kept=path is not None)
            rag = _Rag(embedder, self.index, _Nobody())
            defenses = self._defenses(self.config.guard.defenses)
            self.guard = self._guard(rag, defenses)
            self.by_vector = self._guard(rag, [_Remembered(defenses), *map(_vectorial, defenses)])
            self.loops = Loops()
            opened.callback(self.loops.close)
            self.close = weakref.finalize(self, opened.pop_all().close)
        self.protects = self._told()
        log.info("%s: %s", store.name, self.protects)
        if path is None:
            log.info("%s: what the guard learns and whom it withholds what from is forgotten at the end", store.name)
        if fit is not False and self.due:
            self.calibrate(() if fit is True else fit)

    def _events(self, opened: ExitStack, kept: bool) -> EventStore | None:
        """The record of verdicts: where it was configured, or beside the moments, if they are kept."""
        part = self.config.store
        if "store" not in self.config.model_fields_set:
            if not kept:
                return None
            part = Part.model_validate({"use": "sql_events", "path": str(self.folder / "events.db")})
        return Alarming(opened.enter_context(closing(wiring.build("store", part, self.config.folder))))

    def _defenses(self, parts: Sequence[Part]) -> list[Defense]:
        given: dict[Any, Any] = {Embedder: self.embedder, Index: self.index}
        if self.events is not None:
            given[EventStore] = self.events
        return [wiring.build("defense", self._placed(part), self.config.folder, given) for part in parts]

    def _placed(self, part: Part) -> Part:
        """With its files in our folder, where the configuration does not say otherwise."""
        files = {
            f.name: str(self.folder / f.default.name)
            for f in dataclasses.fields(registry.load("defense", part.use))
            if isinstance(f.default, Path)
        }
        return Part.model_validate({"use": part.use, **files, **part.options})

    def _guard(self, rag: Rag, defenses: Sequence[Defense]) -> Guard:
        section = self.config.guard
        return Guard(
            rag,
            () if section.mode == "off" else defenses,
            enforce=section.mode == "enforce",
            on_error=section.on_error,
            store=self.events,
            log_text=self.config.privacy.log_text,
        )

    def _told(self) -> Protects:
        acts, acts_not = [], dict(UNTOLD)
        for defense, part in zip(self.guard.defenses, self.config.guard.defenses, strict=False):
            kind = type(defense)
            if kind.on_retrieve is not Defense.on_retrieve:
                acts.append(part.use)
            elsewhere = [
                what
                for what, method in (("generator", "on_generate"), ("answer", "on_answer"), ("index", "on_index"))
                if getattr(kind, method) is not getattr(Defense, method)
            ]
            if elsewhere:
                acts_not[part.use] = f"what it does to the {' and the '.join(elsewhere)} does not happen here"
        return Protects(tuple(acts), acts_not, self.config.guard.mode)

    @property
    def due(self) -> str:
        """Why the guard must be calibrated before it lets anything through; empty if it need not."""
        try:
            for defense in self.guard.defenses:
                if isinstance(defense, Mirabel):
                    defense.ready(DEFAULT_TENANT, self.index.moments().n)
        except DataError as error:
            return str(error)
        return ""

    def calibrate(self, questions: Sequence[str] = (), progress: Progress = lambda count: None) -> None:
        """Learns how close harmless questions come to documents, from some that people asked, else from made ones.

        Args:
            questions: That people asked.
            progress: Called with the number of questions just embedded.
        """
        fitted = [d for d in self.guard.defenses if isinstance(d, Mirabel) and d.mode == "calibrated"]
        if not fitted:
            raise CapabilityError("nothing to calibrate: guard.defenses has no mirabel in mode calibrated")
        began = time.monotonic()
        log.info("%s: learning how close harmless questions come", self.store.name)
        settings = wiring.calibration_settings(self.config, DEFAULT_TENANT)
        attacks = wiring.published_attacks()
        found = self.loops.run(lambda: calibrate(self.guard.rag, attacks, questions, settings, progress))
        calibration.write(fitted[0].calibration, DEFAULT_TENANT, found)
        log.info("%s: learnt from %s in %.0f s", self.store.name, found.source, time.monotonic() - began)

    def sync(self) -> None:
        """Reads the store through, so that the guard knows what others wrote."""
        self.index.attach(anew=True)

    def retrieve(self, asked: Asked) -> list[Row]:
        """What the guard lets through, best first, as the framework found it."""
        return self.loops.run(lambda: self._retrieved(asked))

    async def aretrieve(self, asked: Asked) -> list[Row]:
        """The same where a loop is running: the search runs in a thread."""
        asked.inline = False
        return await self._retrieved(asked)

    async def _retrieved(self, asked: Asked) -> list[Row]:
        asked.vector = unit(asked.native)
        query = Query(asked.text, asked.asker.name, k=asked.k)
        if asked.given is not None:
            return await self._judged(asked, query, asked.given)
        gone = set[str]() if asked.whole is None else await self._too_close(asked, query, asked.whole)
        rows, _ = await self._let_through(asked, query)
        if not gone:
            return rows
        of = self.sources(row.id for row in rows)
        return [row for row in rows if of.get(row.id, "") not in gone]

    async def _too_close(self, asked: Asked, query: Query, whole: Mapping[str, Any]) -> set[str]:
        """Sources that the question is too close to among all documents.

        Among the few that pass a filter a document has no neighbours to stand out from: a filter must not hide that.
        """
        filtered, asked.options = asked.options, whole
        _, hidden = await self._let_through(asked, query)
        asked.options = filtered
        return set(self.sources(hidden).values())

    async def _judged(self, asked: Asked, query: Query, given: Sequence[Row]) -> list[Row]:
        """What is left of somebody else's finds, and then others, as many as were given."""
        kept, _ = await self._let_through(asked, query)
        left = {row.id for row in kept}
        gone = set(self.sources(row.id for row in given if row.id not in left).values())
        asked.given, asked.options = None, {}
        others, _ = await self._let_through(asked, query)  # always: time must not tell whether any is needed
        mine, of = left.union(row.id for row in given), self.sources(row.id for row in others)
        return [*kept, *(row for row in others if row.id not in mine and of.get(row.id, "") not in gone)][: asked.k]

    async def _let_through(self, asked: Asked, query: Query) -> tuple[list[Row], list[str]]:
        """What the guard lets through, and ids of what it withholds."""
        guard = self.guard if asked.text.strip() else self.by_vector
        token = ASKED.set(asked)
        try:
            found, verdicts = await guard.retrieve(query)
        finally:
            ASKED.reset(token)
        hidden = [identity for v in verdicts if guard.enforce for identity in v.hidden]
        return [_as_left(asked.found[h.document.id], h.document) for h in found.hits], hidden

    def withheld(self, asker: Asker) -> Collection[str]:
        """Sources that a client is not to see by any way."""
        return self.loops.run(lambda: self.awithheld(asker))

    async def awithheld(self, asker: Asker) -> Collection[str]:
        """The same where a loop is running."""
        barred: set[str] = set()
        for defense in self.guard.defenses if self.guard.enforce else ():
            await asyncio.to_thread(defense.follow)
            barred.update(defense.barred(Query("", asker.name)))
        return barred

    def sources(self, ids: Iterable[str]) -> dict[str, str]:
        """The record that each document was cut from, as the guard groups them; unknown ones are lacking."""
        piece = self.store.find(list(dict.fromkeys(ids)))
        return {d.id: d.source for d in self.index.named(piece.documents)}

    def given(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Of somebody else's finds those that are in the store, in his order; the others are dropped."""
        wanted = {row.id: row for row in rows}
        there = {d.id for d in self.store.find(list(wanted)).documents}
        if len(there) < len(wanted):
            log.warning("%s: %d documents are not in it, and were dropped", self.store.name, len(wanted) - len(there))
        return tuple(row for row in wanted.values() if row.id in there)

    @contextmanager
    def writing(self, ids: Sequence[str] | None) -> Iterator[None]:
        """Around a change by the framework's own methods: the guard knows of it when the block ends.

        Args:
            ids: What is put in, replaced or removed; None: nobody can say, so the store is read through afterwards.
        """
        if ids is None:
            yield
            self.sync()
        else:
            with self.index.changing(ids):
                yield
        if why := self.due:
            log.warning("%s: nothing is let through until calibrate() is called: %s", self.store.name, why)


class _Rag(Rag):
    """The framework's own retrieval as the guard knows one. Its model is not ours to call."""

    embedder: Foreigner
    index: Attachment

    async def embed(self, documents: Sequence[Document], progress: Progress | None = None) -> Vector:
        return await asyncio.to_thread(self.embedder.documents, [d.content for d in documents], progress)

    async def encode(self, query: Query, behind: Callable[[], None] = lambda: None) -> Vector:
        asked = ASKED.get()
        if asked is None or asked.vector is None:
            return await super().encode(query, behind)
        require_answerable(query if query.text.strip() else replace(query, text="?"))
        if asked.inline:
            behind()
        else:
            await asyncio.to_thread(behind)
        return asked.vector

    async def search(self, vector: Vector, k: int, tenant: str) -> Retrieval:
        asked = ASKED.get()
        if asked is None:
            return await super().search(vector, k, tenant)
        look = self._look if asked.given is None else self._given
        if asked.inline:
            return look(asked, vector, k, tenant)
        return await asyncio.to_thread(look, asked, vector, k, tenant)

    def _look(self, asked: Asked, vector: Vector, k: int, tenant: str) -> Retrieval:
        return self.index.search(vector, k, tenant)

    def _given(self, asked: Asked, vector: Vector, k: int, tenant: str) -> Retrieval:
        """What somebody else retrieved, and below it what the store holds that is less similar than all of that.

        What stands between is left out of the comparison, which makes a document look closer, never less close.
        """
        assert asked.given is not None
        found = self.index.search(vector, k + len(asked.given), tenant)
        cosine = self.index.cosines([row.id for row in asked.given], vector)
        documents = self.index.named([document_of(row) for row in asked.given])
        known = sorted((Hit(d, cosine[d.id]) for d in documents), key=lambda hit: -hit.score)
        asked.found.update((row.id, row) for row in asked.given)
        lowest = known[-1].score if known else 2.0
        ids = {h.document.id for h in known}
        below = [h for h in found.hits if h.score < lowest and h.document.id not in ids]
        return replace(found, hits=(*known, *below)[:k])


class _Nobody(Generator):
    """Stands where a model would: the framework has its own."""

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        raise CapabilityError("this guard retrieves only; the framework writes the answer")
        yield ""


@dataclass(eq=False)
class _Remembered(Defense):
    """Keeps back what other defenses withhold from a client already. It decides nothing itself."""

    others: Sequence[Defense]

    def follow(self) -> None:
        for defense in self.others:
            defense.follow()

    def barred(self, query: Query) -> Collection[str]:
        return set[str]().union(*(d.barred(query) for d in self.others))

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        barred = self.barred(query)
        return Outcome(replace(retrieval, hits=tuple(h for h in retrieval.hits if h.document.source not in barred)))


def _vectorial(defense: Defense) -> Defense:
    """The defense for questions of which only the vector is known.

    A calibrated Mirabel counts words, too. Without them it would take an attack for harmless, so the published rule
    stands in, which needs none and is stricter.
    """
    if not isinstance(defense, Mirabel) or defense.mode != "calibrated":
        return defense
    return replace(defense, mode="exact", significance=None)


def _as_left(row: Row, document: Document) -> Row:
    """A row as the defenses left it: one may have changed the text."""
    return row if document.text == row.text else row._replace(text=document.text)


def _read(config: Config | Mapping[str, Any] | Path | str | None) -> Config:
    if isinstance(config, str | Path):
        return configuration.read(Path(config))
    if config is None or isinstance(config, Config):
        return config or Config()
    return configuration.parse(config)
