"""Memory for request bodies: uploads without a key give way to a form that arrives at once."""

import asyncio

import pytest

from casemate.gateway.body_reader import ANONYMOUS, BODIES_PER_OWNER, BodyReader
from casemate.gateway.errors import ApiError

SIZE = 1000


async def stalled(reader, owner):
    """An upload that stops one byte before its end."""
    sent = iter([{"type": "http.request", "body": b"x" * (SIZE - 1), "more_body": True}])

    async def receive():
        if (message := next(sent, None)) is not None:
            return message
        await asyncio.Event().wait()

    async with reader.read(receive, {}, owner):
        pass


async def form(reader, owner):
    """A small body that arrives at once."""

    async def receive():
        return {"type": "http.request", "body": b"key=a key of an admin", "more_body": False}

    async with reader.read(receive, {}, owner) as repeated:
        return (await repeated())["body"]


async def after_uploads(owner, count):
    reader = BodyReader(SIZE, 60.0)
    uploads = [asyncio.create_task(stalled(reader, owner)) for _ in range(count)]
    await asyncio.sleep(0.01)
    try:
        return await form(reader, owner)
    finally:
        for task in uploads:
            task.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)


@pytest.mark.parametrize("count", [BODIES_PER_OWNER, BODIES_PER_OWNER + 1, 3 * BODIES_PER_OWNER])
def test_slow_uploads_without_a_key_block_no_form(count):
    assert asyncio.run(after_uploads(ANONYMOUS, count)).startswith(b"key=")


def test_a_key_with_too_many_bytes_in_progress_is_refused():
    with pytest.raises(ApiError):
        asyncio.run(after_uploads("some-key", BODIES_PER_OWNER + 1))
