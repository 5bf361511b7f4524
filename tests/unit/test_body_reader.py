"""Memory for request bodies: stalled uploads without a key do not block a complete form."""

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
    """A small body that arrives in one message."""

    async def receive():
        return {"type": "http.request", "body": b"key=a key of an admin", "more_body": False}

    async with reader.read(receive, CHUNKED, owner) as replay:
        return (await replay())["body"]


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
def test_stalled_uploads_without_a_key_do_not_block_a_form(count):
    assert asyncio.run(after_uploads(ANONYMOUS, count)).startswith(b"key=")


def test_a_key_with_too_many_bytes_in_progress_is_refused():
    with pytest.raises(ApiError):
        asyncio.run(after_uploads("some-key", BODIES_PER_OWNER + 1))


def test_request_without_a_body_is_accepted_at_the_upload_limit_of_its_key():
    async def run():
        reader = BodyReader(SIZE * MAX_UPLOADS, 60.0)
        uploads = [asyncio.create_task(stalled(reader, "some-key")) for _ in range(MAX_UPLOADS)]
        await asyncio.sleep(0.01)
        try:
            with pytest.raises(ApiError):
                await form(reader, "some-key")
            async with reader.read(nothing, {"content-length": "0"}, "some-key") as replay:
                return await replay()
        finally:
            for task in uploads:
                task.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)

    async def nothing():
        return {"type": "http.request", "body": b"", "more_body": False}

    assert asyncio.run(run())["body"] == b""


def test_body_without_length_or_transfer_encoding_header_is_refused():
    async def run():
        async def receive_unannounced():
            return {"type": "http.request", "body": b"x", "more_body": False}

        async with BodyReader(SIZE, 60.0).read(receive_unannounced, {}, "some-key") as replay:
            await replay()

    with pytest.raises(ApiError):
        asyncio.run(run())
