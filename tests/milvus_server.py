"""A real Milvus server that always ends with the test process. Several servers can run concurrently."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

QUICK = {
    "PROXY_TIMETICKINTERVAL": 50,  # delay of a read after a write, in ms; the default is 200
    "QUERYCOORD_CHECKINTERVAL": 100,
    "QUERYCOORD_SEGMENTCHECKINTERVAL": 100,
    "QUERYCOORD_CHANNELCHECKINTERVAL": 100,
    "QUERYCOORD_DISTPULLINTERVAL": 50,
    "QUERYCOORD_UPDATENEXTTARGETINTERVAL": 1,
}
"""With these settings a collection loads in less than three seconds."""
START_S = 240


@contextmanager
def milvus_server() -> Iterator[Any]:
    """A standalone server from the package ``milvus``, with ``listen_port`` and ``server_proc``."""
    with ExitStack() as stack:
        server = None
        for last in (False, False, True):  # another process may take a free port before the server listens
            server = server or _started(stack, last)
        yield server


def _started(stack: ExitStack, last: bool) -> Any:
    """A server that stops with the stack. None: this attempt failed, and another one is allowed."""
    folder = Path(tempfile.mkdtemp(prefix="casemate-milvus-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    server = _create(folder)
    stack.callback(server.stop)
    with _environment(_settings(folder)):
        server.start()
    stack.enter_context(_kill_with_this_process(server.server_proc.pid))
    try:
        _wait(server)
    except RuntimeError:
        if last:
            raise
        return None
    return server


@contextmanager
def _kill_with_this_process(server: int) -> Iterator[None]:
    """Kills the server even if this process is killed."""
    watch = f"while kill -0 {os.getpid()}; do sleep 1; done; kill -9 {server}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = subprocess.Popen(["sh", "-c", watch], start_new_session=True, **quiet)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def _create(folder: Path) -> Any:
    """A server on free ports that is not started yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from milvus import MilvusServer, MilvusServerConfig
    config = MilvusServerConfig(data_dir=str(folder))
    names = [name for name in config.configurable_items if name.endswith("_port")]
    *ports, web = _free(len(names) + 1)
    config.configs.update(zip(names, ports, strict=True))
    server = MilvusServer(config, wait_for_started=False)
    server.webservice_port = web
    return server


def _free(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def _settings(folder: Path) -> dict[str, str]:
    """Settings including those of the embedded etcd, which otherwise uses ports 2379 and 2380."""
    client, peer = _free(2)
    config = folder / "etcd.yaml"
    config.write_text(
        f"name: default\ndata-dir: {folder}/etcd\n"
        f"listen-client-urls: http://127.0.0.1:{client}\nadvertise-client-urls: http://127.0.0.1:{client}\n"
        f"listen-peer-urls: http://127.0.0.1:{peer}\ninitial-advertise-peer-urls: http://127.0.0.1:{peer}\n"
        f"initial-cluster: default=http://127.0.0.1:{peer}\n"
    )
    places = {"ETCD_CONFIG_PATH": str(config), "ETCD_ENDPOINTS": f"127.0.0.1:{client}"}
    return {name: str(value) for name, value in QUICK.items()} | places


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(server: Any) -> None:
    """Waits until the server is healthy. If it stopped, raises an error with the end of its log."""
    begin, url = time.monotonic(), f"http://127.0.0.1:{server.webservice_port}/healthz"
    while time.monotonic() - begin < START_S and server.server_proc.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=9) as answer:
            if b"OK" in answer.read():
                return
        time.sleep(0.2)
    log = Path(server.config.base_data_dir) / "logs/milvus-stdout.log"
    raise RuntimeError(f"Milvus did not start: {log.read_text(errors='replace')[-2000:]}")
