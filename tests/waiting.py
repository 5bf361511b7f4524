"""Waiting for what another thread or process does."""

import time


def wait_for(what, seconds=60):
    """Waits until a function returns a true value, and returns it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
    return found
