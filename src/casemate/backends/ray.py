"""The workers of a Ray cluster: of this machine, or of as many as there are.

A task whose worker or node dies is done again elsewhere, so it may run more than once and must change nothing. Results
come back in order. Nothing is kept in the cluster: what is finished is with whoever asked, and stays when it ends.

Secrets: a task carries the names of environment variables, not their values (``types.Secret``), so a worker needs these
variables in its own environment.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from casemate.errors import BackendError, ConfigError, needs
from casemate.spread import Shared, Spread, Stopped

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")

AHEAD = 3
"""Tasks of each worker that are under way or wait for it: what a task takes to travel does not hold it up."""
DEATHS = 5
"""Workers over which one task may die."""
POLL_S, CENSUS_S = 0.2, 2.0
CONNECT_S = 10.0
"""How long an address may take to answer."""
FORMS = "'local', 'auto', 'host:port' or 'ray://host:port'"


class _Task(NamedTuple):
    """A piece of work."""

    number: int
    item: Any
    deaths: int = 0


class _Flight:
    """Tasks under way, and results whose turn has not come."""

    def __init__(self, ray: Any, do: Any, function: Callable[[Any], Any]) -> None:
        self._ray, self._do, self._function = ray, do, ray.put(function)
        self._waiting: dict[Any, _Task] = {}
        self._done: dict[int, Any] = {}
        self._turn = 0

    @property
    def size(self) -> int:
        """How many tasks were started whose results were not taken yet."""
        return len(self._waiting) + len(self._done)

    def start(self, task: _Task) -> None:
        """Hands a task to the cluster."""
        self._waiting[self._do.remote(self._function, task.item)] = task

    def land(self) -> bool:
        """Waits a moment for tasks to end; whether one did. One whose worker died is started again."""
        ready, _ = self._ray.wait(list(self._waiting), timeout=POLL_S)
        for ref in ready:
            task = self._waiting.pop(ref)
            try:
                self._done[task.number] = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from error
            except self._ray.exceptions.RayError as error:  # worker or node died, or the result was lost with it
                self.start(_again(task, error))
        return bool(ready)

    def next(self) -> Iterator[Any]:
        """The results whose turn has come."""
        while self._turn in self._done:
            yield self._done.pop(self._turn)
            self._turn += 1

    def give_up(self) -> None:
        """Ends what nobody waits for any more."""
        for ref in self._waiting:
            if self._ray.is_initialized():
                self._ray.cancel(ref, force=True)


def _again(task: _Task, error: Exception) -> _Task:
    """The task, to be tried once more.

    Raises:
        BackendError: If too many workers died over it.
    """
    if task.deaths + 1 >= DEATHS:
        raise BackendError(
            f"{DEATHS} workers died over the same piece of work, the last with {type(error).__name__}: is there too "
            "little memory for one task of each core? What was finished is kept; run again to go on",
            backend="ray",
            retryable=False,
        ) from error
    return task._replace(deaths=task.deaths + 1)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A value in the cluster's memory."""

    ref: Any

    def get(self) -> Any:
        """See ``Shared``. Each worker fetches it once."""
        return _fetched(self.ref)


@dataclass(eq=False)
class RayCluster(Spread):
    """Tasks are done by the workers of a Ray cluster, one core each.

    Attributes:
        address: ``local`` starts a cluster on this machine that ends with this process; ``auto`` finds one that runs
            on this machine; ``host:port`` is the head of one that this machine is part of; ``ray://host:port`` is one
            elsewhere.
        cores: Of this machine, for ``local``; 0: all.
        patience_s: How long tasks wait when the cluster has no worker left, in seconds.
    """

    address: str
    cores: int = 0
    patience_s: float = 300.0
    _ray: Any = field(default=None, init=False, repr=False)
    _counted: tuple[float, int] = field(default=(0.0, 0), init=False, repr=False)

    def __post_init__(self) -> None:
        with needs("casemate[ray]"):
            self._ray = importlib.import_module("ray")
        if self._ray.is_initialized():
            raise ConfigError("this process is connected to a Ray cluster already; disconnect first: ray.shutdown()")
        self._connect()
        try:
            self._require_same_everywhere()
        except BaseException:
            self.close()
            raise
        self._do = self._ray.remote(num_cpus=1, max_retries=0)(_done)

    @property
    def workers(self) -> int:
        """See ``Spread.workers``."""
        at, count = self._counted
        if time.monotonic() - at > CENSUS_S or not at:
            count = int(self._ray.cluster_resources().get("CPU", 0))
            self._counted = time.monotonic(), count
        return count

    @property
    def here(self) -> bool:
        """See ``Spread.here``."""
        return self.address == "local"

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        """See ``Spread.map``."""
        flight = _Flight(self._ray, self._do, function)
        numbered, heard = enumerate(items), time.monotonic()
        try:
            while not stopped():
                room = max(AHEAD * self.workers, 1) - flight.size
                for _, (number, item) in zip(range(room), numbered, strict=False):
                    flight.start(_Task(number, item))
                if not flight.size:
                    return
                heard = self._alive(heard, flight.land())
                yield from flight.next()
        finally:
            flight.give_up()

    def share(self, value: Value) -> Shared[Value]:
        """See ``Spread.share``. It is in the memory of the cluster until nobody holds it any more."""
        return _Sent(self._ray.put(value))

    def close(self) -> None:
        """See ``Spread.close``. A cluster that was started here ends."""
        self._ray.shutdown()

    def _alive(self, heard: float, moved: bool) -> float:
        """When the cluster was last seen to have workers; waits for new ones, but not for ever."""
        now = time.monotonic()
        if moved or self.workers:
            return now
        if now - heard > self.patience_s:
            raise BackendError(
                f"the Ray cluster at {self.address} has had no worker for {self.patience_s:g} seconds; start some "
                "nodes. What was finished is kept; run again to go on",
                backend="ray",
                retryable=True,
            )
        return heard

    def _connect(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # a cluster that is started here tells nobody of itself
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "casemate"}
        if self.address == "local":
            options |= {"include_dashboard": False, "num_cpus": self.cores or os.cpu_count()}
        elif self.address != "auto":
            _require_listening(self.address)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Ray warns of, it also raises, or it is of its own future
                self._ray.init(address=self.address, **options)
        except (Exception, SystemExit) as error:  # Ray raises nothing narrower, and one of its clients exits
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> ConfigError | BackendError:
        said = " ".join(str(error).split())
        if "ersion mismatch" in said:
            return ConfigError(f"the Ray cluster at {self.address} runs other versions: {said}; use the same on both")
        hint = {
            "auto": "'ray start --head' starts one, and --on local does without",
            "local": "is the machine too busy, or short of memory? Without --on, one process does the work",
        }.get(self.address, "is it up, and if it asks for a token, is RAY_AUTH_MODE=token set here, too?")
        what = f"no Ray cluster at {self.address!r} ({said[:300]}); {hint}"
        return BackendError(what, backend="ray", retryable=True)

    def _require_same_everywhere(self) -> None:
        """Refuses a cluster whose nodes would compute something else.

        Raises:
            ConfigError: If a node has no casemate, or another version of it or of Python.
        """
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        probe = self._ray.remote(num_cpus=0, max_retries=2)(_probe())
        nodes = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        asked = [probe.options(scheduling_strategy=strategy(n["NodeID"], soft=False)).remote() for n in nodes]
        for node, ref in zip(nodes, asked, strict=True):
            try:
                found = self._ray.get(ref, timeout=60)
            except self._ray.exceptions.RayError as error:
                if isinstance(error, self._ray.exceptions.RayTaskError):
                    raise ConfigError(f"the Ray node {node['NodeManagerAddress']} cannot work: {error}") from error
                continue  # it died meanwhile, or is slow: what it is given to do is done again elsewhere
            if found != build():
                raise ConfigError(
                    f"the Ray node {node['NodeManagerAddress']} has {told(found)}, and this machine {told(build())}; "
                    "install the same on all nodes (pip install 'casemate[ray]'), with the extras in use"
                )


def _done(function: Callable[[Item], Result], item: Item) -> Result:
    """One task, on a worker."""
    return function(item)


@lru_cache(maxsize=2)
def _fetched(ref: Any) -> Any:
    """A shared value, kept by the worker's process."""
    return importlib.import_module("ray").get(ref)


@cache
def build() -> tuple[str, str, str]:
    """What must be the same on all machines: Python, the version of casemate, and its very code."""
    code = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return ".".join(map(str, sys.version_info[:2])), version("casemate"), code.hexdigest()[:12]


def told(found: Sequence[str]) -> str:
    """A build in words."""
    python, casemate, code = found
    return f"casemate {casemate} (code {code}) on Python {python}" if casemate else f"no casemate (Python {python})"


def _probe() -> Callable[[], tuple[str, str, str]]:
    """Asks a worker for its build. It travels as code, so that a worker without casemate can answer, too."""

    def probe() -> tuple[str, str, str]:
        try:
            found: tuple[str, str, str] = importlib.import_module("casemate.backends.ray").build()
        except ImportError:
            return ".".join(platform.python_version_tuple()[:2]), "", ""
        return found

    return probe


def _require_listening(address: str) -> None:
    """Refuses an address that is none, or where nobody listens: Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--on {address!r} is no cluster; write {FORMS}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise BackendError(
            f"no Ray cluster at {address!r} ({error}); is it up, and is this the port for "
            f"{'clients (10001)' if address.startswith('ray://') else 'nodes (6379)'}?",
            backend="ray",
            retryable=True,
        ) from error
