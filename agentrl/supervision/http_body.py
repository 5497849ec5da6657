"""Bodies of requests, never more of one than was allowed. Knows no route and no token."""

from __future__ import annotations

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect


class BodyTooLarge(ValueError):
    """More was sent, or announced, than is taken."""


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge at once where its length is announced, else with the byte that is too many;
    HTTPException where the sender went away.

    A body sent in chunks announces nothing: the length's header alone would let it grow until the memory is full.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLarge(f"bodies are limited to {limit_bytes} bytes")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise BodyTooLarge(f"bodies are limited to {limit_bytes} bytes")
    except ClientDisconnect as error:
        raise HTTPException(400, "the body broke off") from error  # nobody reads it; a traceback would be read
    return bytes(body)
