"""An executor on a Ray cluster of one or several machines.

A task whose worker or node dies is run again elsewhere, so tasks may run more than once and must have no side effects.
Results are returned in order and are not stored in the cluster.

Secrets: a task carries the names of environment variables, not their values (``types.Secret``). So a worker needs these
variables in its own environment.

Functions, items, shared values and results are authenticated with a secret of the campaign, which Ray does not carry: a
cluster of this process inherits it, and the nodes of another cluster have it in their environment. Ray itself
unpickles only the ``SealedMessage`` around them. Ray's own messages are not covered: they are protected by its token.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import secrets
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from casemate.errors import BackendError, ConfigError, needs
from casemate.runtime.executor import Executor, Shared, Stopped
from casemate.runtime.sealed_messages import SECRET_LENGTH, MessageSeal, Reference, SealedMessage

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")

TASKS_PER_WORKER = 3  # running and queued tasks per worker: queued ones hide the transfer time
MAX_DEATHS = 5  # a task fails after killing this many workers
POLL_S, WORKER_COUNT_S = 0.2, 2.0
CONNECT_S = 10.0  # timeout of the first connection
SECRET_VARIABLE = "CASEMATE_CLUSTER_SECRET"
"""Environment variable with the secret of the campaign, equal on all nodes of a cluster."""
FUNCTION, ITEM, RESULT, SHARED = "function of call {}", "item {} of call {}", "result {} of call {}", "shared value {}"
"""Purposes of messages. A call of ``map`` has a random id, so no message can be used in another one."""
FORMS = "'local', 'auto', 'host:port' or 'ray://host:port'"


class _Task(NamedTuple):
    number: int
    item: Any
    deaths: int = 0


class _TaskQueue:
    """Running tasks, and results that wait for earlier ones."""

    def __init__(self, ray: Any, run: Any, seal: MessageSeal, function: Callable[[Any], Any]) -> None:
        self._ray, self._run, self._seal, self._call = ray, run, seal, secrets.token_hex(8)
        self._function = ray.put(seal.seal(function, FUNCTION.format(self._call)))
        self._waiting: dict[Any, _Task] = {}
        self._done: dict[int, Any] = {}
        self._next = 0

    @property
    def size(self) -> int:
        """Number of started tasks whose results were not returned yet."""
        return len(self._waiting) + len(self._done)

    def start(self, task: _Task) -> None:
        item = self._seal.seal(task.item, ITEM.format(task.number, self._call))
        self._waiting[self._run.remote(self._function, item, task.number, self._call)] = task

    def wait(self) -> bool:
        """Waits up to ``POLL_S`` for a task to end. Returns whether one did. Resubmits tasks whose worker died."""
        ready, _ = self._ray.wait(list(self._waiting), timeout=POLL_S)
        for ref in ready:
            task = self._waiting.pop(ref)
            try:
                done: _Done = self._seal.open(self._ray.get(ref), RESULT.format(task.number, self._call))
            except self._ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from error
            except self._ray.exceptions.RayError as error:  # the worker or node died, or the result was lost with it
                self.start(_retried(task, error))
                continue
            if done.error is not None:
                raise done.error from WorkerTraceback(done.traceback)
            self._done[task.number] = done.result
        return bool(ready)

    def results(self) -> Iterator[Any]:
        while self._next in self._done:
            yield self._done.pop(self._next)
            self._next += 1

    def cancel(self) -> None:
        for ref in self._waiting:
            if self._ray.is_initialized():
                self._ray.cancel(ref, force=True)


def _retried(task: _Task, error: Exception) -> _Task:
    """The task with one more death counted, unless it has killed too many workers."""
    if task.deaths + 1 >= MAX_DEATHS:
        raise BackendError(
            f"{MAX_DEATHS} workers died on the same task, the last with {type(error).__name__}; check that there is "
            "memory for one task per core. Finished results are kept; run again to resume",
            backend="ray",
            retryable=False,
        ) from error
    return task._replace(deaths=task.deaths + 1)


@dataclass(frozen=True, slots=True)
class _SharedValue(Reference):
    """A value in the cluster's object store."""

    def get(self) -> Any:
        """See ``Shared``. Each worker process fetches it once."""
        return _fetch(self)


class WorkerTraceback(Exception):
    """Where a task failed on its worker: the cause of the exception that is raised here."""


@dataclass(frozen=True, slots=True)
class _Done:
    """Result of a task, or its exception and where that was raised."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""


@dataclass(eq=False)
class RayCluster(Executor):
    """Runs tasks on the workers of a Ray cluster, one core each.

    Attributes:
        address: ``local`` starts a cluster on this machine that ends with this process; ``auto`` finds one running on
            this machine; ``host:port`` is the head of one that this machine belongs to; ``ray://host:port`` is a remote
            one.
        cores: Cores of this machine to use with ``local``. 0: all.
        patience_s: Timeout in seconds while the cluster has no worker.
    """

    address: str
    cores: int = 0
    patience_s: float = 300.0
    _ray: Any = field(default=None, init=False, repr=False)
    _seal: MessageSeal = field(init=False, repr=False)
    _counted: tuple[float, int] = field(default=(0.0, 0), init=False, repr=False)

    def __post_init__(self) -> None:
        with needs("casemate[ray]"):
            self._ray = importlib.import_module("ray")
        if self._ray.is_initialized():
            raise ConfigError("this process is connected to a Ray cluster already; disconnect first: ray.shutdown()")
        own = MessageSeal(secrets.token_hex(SECRET_LENGTH).encode()) if self.local else None
        with _environment(own.secret.decode()) if own else nullcontext():  # its processes inherit it
            self._connect()
        try:
            self._seal = own or _seal_from_environment()
            self._require_same_build()
        except BaseException:
            self.close()
            raise
        self._run = self._ray.remote(num_cpus=1, max_retries=0)(_run_task)

    @property
    def workers(self) -> int:
        at, count = self._counted
        if time.monotonic() - at > WORKER_COUNT_S or not at:
            count = int(self._ray.cluster_resources().get("CPU", 0))
            self._counted = time.monotonic(), count
        return count

    @property
    def local(self) -> bool:
        return self.address == "local"

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], stopped: Stopped = lambda: False
    ) -> Iterator[Result]:
        queue = _TaskQueue(self._ray, self._run, self._seal, function)
        numbered, alive = enumerate(items), time.monotonic()
        try:
            while not stopped():
                room = max(TASKS_PER_WORKER * self.workers, 1) - queue.size
                for _, (number, item) in zip(range(room), numbered, strict=False):
                    queue.start(_Task(number, item))
                if not queue.size:
                    return
                alive = self._check_workers(alive, queue.wait())
                yield from queue.results()
        finally:
            queue.cancel()

    def share(self, value: Value) -> Shared[Value]:
        """See ``Executor.share``. The value stays in the cluster until all references are gone."""
        name = secrets.token_hex(16)
        return _SharedValue(name, self._ray.put(self._seal.seal(value, SHARED.format(name))))

    def close(self) -> None:
        """See ``Executor.close``. Stops a cluster that this process started."""
        self._ray.shutdown()

    def _check_workers(self, alive: float, progressed: bool) -> float:
        """When the cluster last had workers; an error if that is longer ago than ``patience_s``."""
        now = time.monotonic()
        if progressed or self.workers:
            return now
        if now - alive > self.patience_s:
            raise BackendError(
                f"the Ray cluster at {self.address} has had no worker for {self.patience_s:g} seconds; start "
                "nodes. Finished results are kept; run again to resume",
                backend="ray",
                retryable=True,
            )
        return alive

    def _connect(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no usage statistics
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "casemate"}
        if self.address == "local":
            options |= {"include_dashboard": False, "num_cpus": self.cores or os.cpu_count()}
        elif self.address != "auto":
            _require_listening(self.address)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray also raises what matters; the rest is about its future versions
                self._ray.init(address=self.address, **options)
        except (Exception, SystemExit) as error:  # Ray raises nothing narrower, and one of its clients exits
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> ConfigError | BackendError:
        message = " ".join(str(error).split())
        if "ersion mismatch" in message:
            return ConfigError(f"the Ray cluster at {self.address} has other versions: {message}; use the same on both")
        hint = {
            "auto": "start one with 'ray start --head', or use --cluster local",
            "local": "check load and memory of this machine, or omit --cluster to use one process",
        }.get(self.address, "check that it runs; if it requires a token, set RAY_AUTH_MODE=token here too")
        problem = f"no Ray cluster at {self.address!r} ({message[:300]}); {hint}"
        return BackendError(problem, backend="ray", retryable=True)

    def _require_same_build(self) -> None:
        """Requires the same build of Casemate and Python on all nodes, so results do not depend on the node."""
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        probe = self._ray.remote(num_cpus=0, max_retries=2)(_probe())
        nodes = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        challenge = secrets.token_hex(16)
        probes = [probe.options(scheduling_strategy=strategy(n["NodeID"], soft=False)).remote(challenge) for n in nodes]
        for node, ref in zip(nodes, probes, strict=True):
            try:
                *node_build, proof = self._ray.get(ref, timeout=60)
            except self._ray.exceptions.RayError as error:
                if isinstance(error, self._ray.exceptions.RayTaskError):
                    raise ConfigError(f"the Ray node {node['NodeManagerAddress']} cannot run tasks: {error}") from error
                continue  # it died or is slow: its tasks are run elsewhere
            if tuple(node_build) != build():
                raise ConfigError(
                    f"the Ray node {node['NodeManagerAddress']} has {describe_build(node_build)}, "
                    f"this machine {describe_build(build())}; "
                    "install the same on all nodes (pip install 'casemate[ray]'), with the extras in use"
                )
            if not secrets.compare_digest(proof, self._seal.proof(challenge)):
                raise ConfigError(
                    f"the Ray node {node['NodeManagerAddress']} has another {SECRET_VARIABLE}, or none; "
                    "set the same one before 'ray start' on every node, and here"
                )


def _run_task(function: SealedMessage, item: SealedMessage, number: int, call: str) -> SealedMessage:
    seal = _seal_from_environment()
    purpose = RESULT.format(number, call)
    try:
        run, value = seal.open(function, FUNCTION.format(call)), seal.open(item, ITEM.format(number, call))
        return seal.seal(_Done(run(value)), purpose)
    except Exception as error:
        text = traceback.format_exc()
        try:
            message = seal.seal(_Done(error=error, traceback=text), purpose)
            seal.open(message, purpose)  # some exceptions can be pickled, but not unpickled
        except Exception:
            message = seal.seal(_Done(error=RuntimeError(f"{type(error).__name__}: {error}"), traceback=text), purpose)
        return message


@lru_cache(maxsize=2)
def _fetch(shared: _SharedValue) -> Any:
    """A shared value, cached in the worker process."""
    message = importlib.import_module("ray").get(shared.handle)
    return _seal_from_environment().open(message, SHARED.format(shared.name))


def _seal_from_environment() -> MessageSeal:
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SECRET_LENGTH:
        raise ConfigError(
            f"set {SECRET_VARIABLE} to the same random text of {SECRET_LENGTH} or more characters here and, before "
            "'ray start', on every node; it authenticates what they exchange"
        )
    return MessageSeal(secret.encode())


@contextmanager
def _environment(secret: str) -> Iterator[None]:
    """Sets the secret of the environment, for the processes that are started meanwhile."""
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = secret
    try:
        yield
    finally:
        del os.environ[SECRET_VARIABLE]
        os.environ |= {SECRET_VARIABLE: before} if before is not None else {}


@cache
def build() -> tuple[str, str, str]:
    """What must be equal on all machines: Python version, Casemate version, and a hash of its code."""
    code = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return ".".join(map(str, sys.version_info[:2])), version("casemate"), code.hexdigest()[:12]


def describe_build(node_build: Sequence[str]) -> str:
    """A build as text, for errors."""
    python, casemate, code = node_build
    return f"casemate {casemate} (code {code}) on Python {python}" if casemate else f"no casemate (Python {python})"


def _probe() -> Callable[[str], tuple[str, str, str, str]]:
    """A function that returns a worker's build and proof. Pickled by value, so a worker without Casemate can run it."""

    def probe(challenge: str) -> tuple[str, str, str, str]:
        try:
            module = importlib.import_module("casemate.backends.clusters.ray")
        except ImportError:
            return ".".join(platform.python_version_tuple()[:2]), "", "", ""
        return (*module.build(), module.prove(challenge))

    return probe


def prove(challenge: str) -> str:
    """The proof of this process that it has the secret; empty without one."""
    try:
        return _seal_from_environment().proof(challenge)
    except ConfigError:
        return ""


def _require_listening(address: str) -> None:
    """Refuses invalid or unreachable addresses early: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--cluster is {address!r}; allowed: {FORMS}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise BackendError(
            f"no Ray cluster at {address!r} ({error}); check that it runs, and that this is its port for "
            f"{'clients (10001)' if address.startswith('ray://') else 'nodes (6379)'}",
            backend="ray",
            retryable=True,
        ) from error
