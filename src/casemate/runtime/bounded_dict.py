"""A dictionary of the latest items."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Setting an item makes it the latest. Beyond ``most`` items, the oldest is dropped.

    >>> seen = BoundedDict(2)
    >>> seen["a"], seen["b"], seen["a"], seen["c"] = 1, 2, 3, 4
    >>> dict(seen)
    {'a': 3, 'c': 4}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
