"""The records that a sandbox client and the service exchange, and the errors of the client.

Independent of processes and HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

ExecStatus = Literal["ok", "error", "timeout", "oom", "output_limit", "crashed", "sandbox_error", "overloaded"]

BackendName = Literal["auto", "namespaces", "docker", "landlock", "unsafe"]
BACKENDS: Mapping[BackendName, str] = {
    "auto": "the strongest that works here: namespaces, docker, landlock, or unsafe where that is permitted",
    "namespaces": "namespaces, system call filter, read-only root, control group: Linux, root or user namespaces",
    "docker": "a container without network for each session: needs a Docker engine and the image agentrl-sandbox",
    "landlock": "Landlock and a strict system call filter: Linux 6.2 as root, 6.12 as a plain user",
    "unsafe": "resource limits only, for code that you trust; must be permitted with allow_unsafe",
}
"""What isolates sessions: name -> what it is and needs. `auto` comes first, then the strongest."""

INFRA_STATUSES: frozenset[str] = frozenset({"sandbox_error", "overloaded"})
"""Failures of the service, never of the program: the client retries them, then raises."""

MAX_CODE_CHARS = 16 * 1024**2
MAX_FILE_BYTES = 8 * 1024**2
MAX_SESSION_BODY_BYTES = 65_536
"""Of the body that opens a session."""
MAX_TIMEOUT_S = 600.0
DEFAULT_TIMEOUT_S = 5.0
DEFAULT_MAX_QUEUE_S = 300.0
DEFAULT_MAX_OUTPUT_BYTES = 65_536


def _text(value: Any) -> str:
    """Accept any Python string, lone surrogates included: the interpreter refuses those, not the protocol."""
    if not isinstance(value, str):
        raise ValueError("must be a string")
    if len(value) > MAX_CODE_CHARS:
        raise ValueError(f"must have at most {MAX_CODE_CHARS} characters")
    return value


Text = Annotated[str, PlainValidator(_text)]
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


class ProtocolModel(BaseModel):
    """A frozen record; unknown keys are refused.

    Example: `class Limits(ProtocolModel)`; `Limits.model_validate_json(body)` refuses a key that it does not know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(ProtocolModel):
    """What one session may use. The service clamps each limit to its own maximum and replies with the result.

    >>> Limits(num_processes=8).memory_bytes // 1024**2
    512
    """

    memory_bytes: Annotated[int, Field(ge=32 * 1024**2, le=2**46)] = 512 * 1024**2
    """Sum over all processes and files of the session, without the preloaded libraries."""
    num_processes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Processes and threads."""


class SessionRequest(ProtocolModel):
    """Body of POST /v1/sessions.

    >>> SessionRequest(seed=7).model_dump(exclude_none=True)
    {'profile': 'python', 'seed': 7}
    """

    profile: Literal["python"] = "python"
    limits: Limits | None = None
    ttl_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """The session is closed after this time without a call."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seeds `random`, `numpy.random` and sympy's generator, again after every loss of state."""
    idempotency_key: Identifier | None = None


class SessionReply(ProtocolModel):
    """Answer to POST /v1/sessions.

    Example: `SessionReply.model_validate_json(body).session_id`.
    """

    session_id: str
    backend: str
    limits: Limits


class ExecRequest(ProtocolModel):
    """Body of POST /v1/sessions/{id}/exec.

    >>> ExecRequest(exec_id="e1", code="6 * 7").timeout_s
    5.0
    """

    exec_id: Identifier
    code: Text
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = DEFAULT_TIMEOUT_S
    max_queue_s: Annotated[float, Field(gt=0, le=3600)] = DEFAULT_MAX_QUEUE_S
    """A call that has not begun after this time is answered `overloaded` and never run."""
    stdin: Text | None = None
    max_output_bytes: Annotated[int, Field(ge=0, le=16 * 1024**2)] = DEFAULT_MAX_OUTPUT_BYTES
    """Cap on each of stdout, stderr, result and traceback; the middle is cut out."""


class ExecResult(ProtocolModel):
    """What one execution did. The supervisor observes `status`; the program writes the texts.

    >>> ExecResult(status="ok", stdout="6 * 7 =\\n", result="42").to_text()
    '6 * 7 =\\n42'
    """

    model_config = ConfigDict(extra="ignore", frozen=True)  # a client may be older than its service

    status: ExecStatus
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    """repr of the last expression; None when the code ends in a statement or in the value None."""
    traceback: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    """Set when the program asked to exit, or when its interpreter ended (negative: by that signal)."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    queue_s: float = 0.0
    """Time spent waiting for a free slot and an interpreter; not part of `wall_s`."""
    peak_rss_bytes: int = 0
    state_lost: bool = False
    """Whether this call ran in a fresh interpreter although an earlier call of the session had left state."""

    def to_text(self, *, traceback_lines: int = 20) -> str:
        """The text for the model: output, then the last expression, the end of the traceback, or a one-line reason."""
        parts = []
        if self.state_lost:
            parts.append("[the interpreter was restarted: earlier variables are gone]")
        parts += [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.status == "ok":
            parts.append(self.result or "")
        elif self.status == "error":
            lines = (self.traceback or f"[exit code {self.exit_code}]").rstrip("\n").split("\n")
            parts.append("\n".join(lines[-traceback_lines:]))
        else:
            parts.append(self._note())
        return "\n".join(part for part in parts if part) or "(no output)"

    def _note(self) -> str:
        return {
            "timeout": f"[timed out after {self.wall_s:.1f} s]",
            "oom": "[killed: out of memory]",
            "output_limit": "[stopped: too much output]",
            "crashed": f"[the interpreter ended, exit code {self.exit_code}]",
            "overloaded": "[the sandbox is overloaded]",
        }.get(self.status, "[the sandbox failed]")


class Health(ProtocolModel):
    """Answer to GET /healthz.

    Example: `(await client.health()).isolation` says which isolation is active.
    """

    status: Literal["ok", "degraded", "unsafe"]
    backend: str
    isolation: str
    """Which isolation is active, in words."""
    degraded: list[str]
    """What is weaker than it should be, and why."""
    slots: int
    sessions: int
    running: int
    warm: int


class SandboxUnavailable(RuntimeError):
    """The service failed, is gone, or has no room, after the retries. Never the program's fault."""


class SandboxGone(SandboxUnavailable):
    """Nothing listens at the service's address: it died, and may be restarted."""


class SessionLost(SandboxUnavailable):
    """The service no longer knows this session: it restarted, or the session expired."""
