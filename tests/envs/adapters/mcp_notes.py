"""A small MCP server for the tests: notes that live as long as the process. `stdio`, or `http PORT`."""

import base64
import os
import signal
import sys
import time
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import AudioContent, EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents
from pydantic import Field

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add_note(text: str, times: Annotated[int, Field(ge=1, le=3, description="how often")] = 1) -> str:
    """Write a note down."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool(structured_output=False)
def show(kind: str) -> Any:
    """Show something that is no text."""
    data = base64.b64encode(b"12345").decode()
    return {
        "image": ImageContent(type="image", data=data, mime_type="image/png"),
        "audio": AudioContent(type="audio", data=data, mime_type="audio/wav"),
        "link": ResourceLink(type="resource_link", name="readme", uri="file:///readme.md"),
        "resource": [
            TextContent(type="text", text="Here:"),
            EmbeddedResource(
                type="resource", resource=TextResourceContents(uri="file:///a.txt", mime_type="text/plain", text="aaa")
            ),
        ],
    }[kind]


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def die() -> str:
    """End the server."""
    sys.stderr.write("dying as told\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
def pid() -> str:
    """Tell the process, and a variable of its environment."""
    return f"{os.getpid()} {os.environ.get('NOTES_KEY')}"


if __name__ == "__main__":
    if os.environ.get("NOTES_EXTRA"):
        server.tool(name="extra")(lambda: "extra")
    if sys.argv[1] == "stdio":
        server.run("stdio")
        if os.environ.get("NOTES_STAYS"):  # after the end of its input, as a careless server would
            time.sleep(60)
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
