"""Bodies of requests: bounded in size, depth and number of parts before anything is built from them.

A body is first split into the fields of its record, and the fields are left as bytes. Only a field that the record
has, and that is not too large for it, is then decoded. Independent of routes, tenants and sessions.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

MAX_FIELD_BYTES = 65_536
"""Of a field that is neither a text nor a table of texts. Decoding more could take seconds and gigabytes."""
MAX_TABLE_ENTRIES = 256
"""Entries of a field that is a table of texts: the files of one call."""
MAX_REST_BYTES = 4096

Model = TypeVar("Model", bound=BaseModel)


class BodyRefused(Exception):
    """The body is too large, or is no such record.

    Example: a handler answers with its `status_code`, which is 400, 413 or 422.
    """

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


async def read_record(request: Request, model: type[Model], *, limit_bytes: int) -> Model:
    """The body of a request whose content-length is known to be set. Raises BodyRefused.

    Example: `body = await read_record(request, SessionRequest, limit_bytes=65_536)`.
    """
    if int(request.headers.get("content-length", "0")) > limit_bytes:
        raise BodyRefused(413, f"the body of this call has at most {limit_bytes} bytes")
    try:
        return decode(await request.body(), model)
    except ClientDisconnect:
        raise BodyRefused(400, "the body broke off") from None  # answered, so that the log shows no traceback


def decode(body: bytes, model: type[Model]) -> Model:
    """The record that `body` holds as JSON. Raises BodyRefused.

    Example: `decode(b'{"seed": 7}', SessionRequest).seed` is 7.
    """
    try:
        try:
            values = {name: _value(f"body.{name}", raw) for name, raw in _split(body, model).items()}
        except msgspec.DecodeError:
            values = _with_surrogates(body, model)
        return model.model_validate(values)
    except ValidationError as error:
        # the input is not echoed, because it may hold what JSON cannot represent
        problems = [f"{'.'.join(map(str, ('body', *one['loc'])))}: {one['msg']}" for one in error.errors()]
        raise BodyRefused(422, "; ".join(problems)) from None
    except RecursionError:
        raise BodyRefused(422, "body: nested too deeply") from None
    except ValueError as error:  # msgspec's and json's errors, and text that is not UTF-8
        raise BodyRefused(422, f"body: {error}") from None


def _split(body: bytes, model: type[BaseModel]) -> dict[str, memoryview]:
    """The fields of `model` that are in the body, each as the bytes that stand there. Raises msgspec's errors."""
    split = msgspec.json.decode(body, type=_split_type(model))
    raws = {name: getattr(split, name) for name in model.model_fields}
    return {name: memoryview(raw) for name, raw in raws.items() if raw is not msgspec.UNSET}


@cache
def _split_type(model: type[BaseModel]) -> type[msgspec.Struct]:
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in model.model_fields]
    is_strict = model.model_config.get("extra") == "forbid"
    return msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=is_strict)


def _with_surrogates(body: bytes, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of a body that msgspec refuses: it knows no lone surrogates, which code may hold.

    The same checks are made on a copy of equal length without escapes. What they leave is safe to decode as a whole.
    """
    if b"\\u" not in body:
        msgspec.json.decode(body, type=_split_type(model))  # raises what was wrong
    raws = _split(body.replace(b"\\\\", b"xx").replace(b"\\u", b"xx"), model)
    for name, raw in raws.items():
        _check_size(f"body.{name}", raw)
    # the rest: names, unknown fields, and fields that come twice
    if len(body) - sum(map(len, raws.values())) > MAX_REST_BYTES:
        raise BodyRefused(422, f"body: at most {MAX_REST_BYTES} bytes beside the known fields")
    values = json.loads(str(body, "utf-8"))
    return {name: values[name] for name in raws}


def _value(where: str, raw: memoryview) -> Any:
    """The value of one field. A text may be as long as the body; the model limits it."""
    _check_size(where, raw)
    if _is_text(raw) or len(raw) <= MAX_FIELD_BYTES:
        return json.loads(str(raw, "utf-8"))
    return msgspec.json.decode(raw, type=dict[str, str | None])


def _check_size(where: str, raw: memoryview) -> None:
    if _is_text(raw) or len(raw) <= MAX_FIELD_BYTES:
        return
    if bytes(raw[:1]) != b"{":
        raise BodyRefused(422, f"{where}: at most {MAX_FIELD_BYTES} bytes")
    # counted before it is decoded: each entry of a table of texts has four quotes, or two and null
    if bytes(raw).count(b'"') > 4 * MAX_TABLE_ENTRIES:
        raise BodyRefused(422, f"{where}: at most {MAX_TABLE_ENTRIES} entries")
    msgspec.json.decode(raw, type=dict[str, str | None])


def _is_text(raw: memoryview) -> bool:
    return bytes(raw[:1]) == b'"'
