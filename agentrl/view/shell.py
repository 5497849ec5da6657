"""The HTML around the page's script: with the script beside it, or in it. Independent of what the page shows."""

from __future__ import annotations

import base64
import gzip
import html
import secrets
from collections.abc import Mapping
from importlib import resources

FILES = ("app.js", "app.css", "LICENSES.txt")
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="agentrl-source" content="{source}">
<title>{title}</title>
{style}
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript; `agentrl view RUN --json runs` prints the same as text.</noscript>
"""
_BESIDE = '<link rel="stylesheet" href="app.css">'


def file(name: str) -> bytes:
    """One of FILES, as it was built. Raises KeyError for any other name."""
    if name not in FILES:
        raise KeyError(name)
    return resources.files("agentrl.view").joinpath("page", name).read_bytes()


def policy(*, script: str, style: str, connect: str) -> str:
    """The Content-Security-Policy: nothing from elsewhere, no script or style in what is shown.

    >>> policy(script="'self'", style="'self'", connect="'none'").split("; ")[0]
    "default-src 'none'"
    """
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def page_beside_files(*, source: str, title: str = "agentrl") -> str:
    """index.html of a server (source "server") or a folder (source "files"), with app.js and app.css beside it."""
    csp = policy(script="'self'", style="'self'", connect="'self'" if source == "server" else "'none'")
    head = _HEAD.format(policy=csp, source=source, title=html.escape(title), style=_BESIDE)
    return f'{head}<script src="app.js"></script>\n</body>\n</html>\n'


def page_in_one_file(documents: Mapping[str, bytes], *, title: str) -> str:
    """A page that holds its script, style and documents (JSON by name)."""
    nonce = secrets.token_urlsafe(16)
    csp = policy(script=f"'nonce-{nonce}'", style=f"'nonce-{nonce}'", connect="'none'")
    style = f'<style nonce="{nonce}">{file("app.css").decode()}</style>'
    head = _HEAD.format(policy=csp, source="page", title=html.escape(title), style=style)
    data = "\n".join(
        f'<script type="text/plain" data-doc="{html.escape(name)}">{packed(content)}</script>'
        for name, content in documents.items()
    )
    script = file("app.js").decode().replace("</script", "<\\/script")
    return f'{head}{data}\n<script nonce="{nonce}">{script}</script>\n</body>\n</html>\n'


def packed(content: bytes) -> str:
    """Gzipped, in base64, as the page unpacks it."""
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()
