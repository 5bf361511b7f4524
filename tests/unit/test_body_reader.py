"""Memory for request bodies: uploads without a key give way to a form that arrives at once."""

import asyncio

import pytest

from casemate.gateway.body_reader import ANONYMOUS, BODIES_PER_OWNER, MAX_UPLOADS, BodyReader
from casemate.gateway.errors import ApiError

SIZE = 1000
CHUNKED = {"transfer-encoding": "chunked"}


async def stalled(reader, owner):
    """An upload that stops one byte before its end."""
    sent = iter([{"type": "http.request", "body": b"x" * (SIZE - 1), "more_body": True}])

    async def receive():
        if (message := next(sent, None)) is not None:
            return message
        await asyncio.Event().wait()

    async with reader.read(receive, CHUNKED, owner):
        pass


async def form(reader, owner):
    """A small body that arrives at once."""

    async def receive():
        return {"type": "http.request", "body": b"key=a key of an admin", "more_body": False}

    async with reader.read(receive, CHUNKED, owner) as repeated:
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


def test_a_request_without_a_body_passes_beside_as_many_stalled_uploads_as_a_key_may_have():
    async def run():
        reader = BodyReader(SIZE * MAX_UPLOADS, 60.0)
        uploads = [asyncio.create_task(stalled(reader, "some-key")) for _ in range(MAX_UPLOADS)]
        await asyncio.sleep(0.01)
        try:
            with pytest.raises(ApiError):
                await form(reader, "some-key")
            async with reader.read(nothing, {"content-length": "0"}, "some-key") as repeated:
                return await repeated()
        finally:
            for task in uploads:
                task.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)

    async def nothing():
        return {"type": "http.request", "body": b"", "more_body": False}

    assert asyncio.run(run())["body"] == b""


def test_a_body_that_was_not_announced_is_refused():
    async def run():
        async def hidden():
            return {"type": "http.request", "body": b"x", "more_body": False}

        async with BodyReader(SIZE, 60.0).read(hidden, {}, "some-key") as repeated:
            await repeated()

    with pytest.raises(ApiError):
        asyncio.run(run())
