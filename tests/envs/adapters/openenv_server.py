"""Small OpenEnv environments behind one port, for the interpreter that has the `openenv` package.

Usage: openenv_server.py PORT
"""

import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Guess(Environment):
    """Guess a number: the seed's last digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, hint="", **kwargs):
        self.number, self.steps = (seed or 0) % 10, 0
        return Heard(text=f"Guess a digit. {hint}".strip())

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.message == "crash":
            raise RuntimeError("the game is broken")
        is_right = action.message.strip() == str(self.number)
        return Heard(text="Right!" if is_right else "No.", reward=1.0 if is_right else -0.25, done=is_right)

    @property
    def state(self):
        return State(step_count=self.steps)


class Move(Action):
    """Walk on the grid."""

    dx: int = Field(ge=-1, le=1, description="to the right")
    dy: int = Field(0, ge=-1, le=1, description="up")


class Place(Observation):
    x: int
    y: int


class Grid(Environment):
    """Walk to (2, 0)."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.x = self.y = 0
        return Place(x=0, y=0)

    def step(self, action, timeout_s=None, **kwargs):
        self.x, self.y = self.x + action.dx, self.y + action.dy
        return Place(x=self.x, y=self.y, reward=0.5, done=(self.x, self.y) == (2, 0))

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    """Tools behind MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def fail(reason: str) -> str:
            """Fail."""
            raise ValueError(reason)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return CallToolObservation(tool_name="none", result=None)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = FastAPI()
    app.mount("/small", create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=2))
    app.mount("/guess", create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=32))
    app.mount("/grid", create_fastapi_app(Grid, Move, Place, max_concurrent_envs=32))
    app.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=32))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
