"""Asks the hub for a small file of a model: silently, and once, where the hub does not answer.

huggingface_hub repeats a request for half a minute and logs each attempt. Independent of what the file says.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ANSWER_S = 5.0


@cache
def answers() -> bool:
    """Whether the hub answers at all, asked once per process, with a deadline; False in its offline mode."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=ANSWER_S)
    except (httpx.HTTPError, OSError):
        return False
    return True


def file_of(name: str, file: str) -> Path | None:
    """A file of the hub's model `name`, from the cache or downloaded; None where neither can be had.

    Example: `file_of("Qwen/Qwen3-1.7B", "config.json")`.
    """
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        return Path(hf_hub_download(name, file, local_files_only=not answers()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError):
        return None
