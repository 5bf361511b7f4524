"""Limits BLAS, the one of NumPy, to one thread while the process answers queries."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController


class _BlasLimit:
    """Reentrant limit: one thread while any context is open, the original number after the last one closes."""

    def __init__(self) -> None:
        self._controller = ThreadpoolController().select(user_api="blas")
        self._lock = threading.Lock()
        self._users = 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._limit = self._controller.limit(limits=1)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limit.restore_original_limits()


@cache
def single_blas_thread() -> _BlasLimit:
    """Context in which BLAS uses one thread in the whole process.

    Queries arrive concurrently. BLAS threads spin for milliseconds after each product, on the cores that the embedder
    needs: a query took four times as long. Changing the number for each search is as slow.
    """
    return _BlasLimit()
