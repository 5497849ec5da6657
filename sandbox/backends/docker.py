"""The `docker` backend: a hardened container for each session, controlled over its attached stdio.

It is the strongest isolation where the engine runs containers under gVisor (`runsc`), and works for plain users on
machines without namespaces. A container takes far longer to make than a fork, so the pool keeps some warm. Independent
of executions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

from sandbox.backends import isolate
from sandbox.backends.base import BackendError, BackendSettings, Child
from sandbox.backends.contained import OVERHEAD_BYTES, ContainedChild, remove
from sandbox.backends.uids import NUM_UIDS, UidRange

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

log = logging.getLogger(__name__)

PING_DEADLINE_S = 3
API_DEADLINE_S = 60
HELLO_DEADLINE_S = 60.0
LEFTOVER_AGE_S = 600.0
GVISOR_THREADS = 256
_LABEL = "agentrl.sandbox"
_ENTRYPOINT = ["python", "-s", "-P", "-m", "sandbox.backends.container_init"]


class DockerBackend:
    """See base.Backend."""

    name = "docker"

    def __init__(self, settings: BackendSettings) -> None:
        self.isolation = ""
        self.degraded: list[str] = []
        self._settings = settings
        self._instance = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._uids: UidRange | None = None  # while it runs
        self._client: docker.DockerClient | None = None
        self._runtime = "runc"
        self._environment: dict[str, str | None] = {}

    async def start(self) -> None:
        """See base.Backend."""
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        try:
            import docker
            from docker.errors import DockerException, ImageNotFound
            from requests.exceptions import RequestException
        except ModuleNotFoundError as error:
            raise BackendError("the docker SDK is not installed: pip install docker") from error
        where = os.environ.get("DOCKER_HOST", "the default socket")
        try:
            client = docker.from_env(timeout=PING_DEADLINE_S)
            if client.api.base_url.startswith(("https:", "http+docker://ssh")):
                raise BackendError(f"sessions need a plain connection to the engine, not TLS or ssh as at {where}")
            info = client.info()
            client.api.timeout = API_DEADLINE_S
            image = client.images.get(self._settings.image)
            _remove_leftovers(client)
        except ImageNotFound as error:
            build = f"docker build -t {self._settings.image} -f sandbox/Dockerfile ."
            raise BackendError(f"the engine has no image {self._settings.image}: {build}") from error
        except (DockerException, RequestException) as error:
            hint = "this user may not use it" if "Permission denied" in str(error) else "set DOCKER_HOST"
            raise BackendError(f"no Docker engine answers at {where} ({hint}): {error}") from error
        inherited = {entry.partition("=")[0] for entry in image.attrs["Config"]["Env"] or []}
        # None removes a variable of the image; Python itself needs two
        self._environment = {**dict.fromkeys(inherited - {"PATH", "PYTHONPATH"}), **isolate.ENVIRONMENT}
        self._uids = UidRange.claim()
        self._client = client
        self._describe(info)

    def _describe(self, info: dict[str, Any]) -> None:
        gvisor = info.get("Runtimes", {}).get("runsc")
        if gvisor is not None and "kvm" in " ".join(gvisor.get("runtimeArgs") or []):
            self.degraded.append("runsc is registered with the kvm platform, which can hang: runc is used")
            gvisor = None
        self._runtime = "runc" if gvisor is None else "runsc"
        kernel = "the host's kernel" if gvisor is None else "gVisor's kernel"
        self.isolation = (
            f"a container for each session ({self._runtime}, {kernel}): no network, read-only root, sized tmpfs, "
            "no capabilities, no new privileges, a uid of its own, memory, cpu and process limits; seccomp allow-list"
        )
        options = " ".join(info.get("SecurityOptions") or [])
        if "name=seccomp" not in options and self._runtime == "runc":
            self.degraded.append("the engine has no seccomp profile: only the session's own filter stands")
        for key, what in (("MemoryLimit", "memory"), ("PidsLimit", "process"), ("CpuCfsQuota", "cpu")):
            if not info.get(key):
                self.degraded.append(f"the engine enforces no {what} limits")

    async def spawn(self) -> Child:
        """See base.Backend."""
        making = asyncio.create_task(asyncio.to_thread(self._run, next(self._numbers)))
        try:
            container, connection = await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(BackendError):
                container, connection = await making  # it cannot be cancelled halfway
                connection.close()
                await asyncio.to_thread(remove, container)
            raise
        child = ContainedChild(container, *await asyncio.open_connection(sock=connection))
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                await child.hello()
        except BaseException as error:
            await asyncio.shield(child.close())
            if isinstance(error, TimeoutError):
                raise BackendError(f"a container sent nothing for {HELLO_DEADLINE_S:.0f} s") from error
            raise
        return child

    def _run(self, number: int) -> tuple[Container, socket.socket]:
        """Start a container. Returns it with the connection to its stdio. Raises BackendError."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        assert self._client is not None
        container = None
        try:
            container = self._client.containers.create(self._settings.image, **self._options(number))
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            attached = container.attach_socket(params=streams)
            # a duplicate, because the SDK closes its descriptor with the response
            connection = socket.socket(fileno=os.dup(attached.fileno()))
            attached.close()
            container.start()
        except (DockerException, RequestException, OSError) as error:
            if container is not None:
                remove(container)
            raise BackendError(f"a container could not be started: {error}") from error
        connection.setblocking(False)
        return container, connection

    def _options(self, number: int) -> dict[str, Any]:
        from docker.types import LogConfig

        assert self._uids is not None
        limits, disk_bytes = self._settings.limits, self._settings.disk_bytes
        # no uid twice at a time: the kernel counts the processes of a uid over all containers
        uid = self._uids.first + number % NUM_UIDS
        is_gvisor = self._runtime == "runsc"
        memory_bytes = limits.memory_bytes + OVERHEAD_BYTES
        config = {"preload": self._settings.preload, "limits": {**limits.model_dump(), "disk_bytes": disk_bytes}}
        tmpfs = f"size={disk_bytes},nr_inodes=10000,mode=1777,nosuid,nodev,noexec"
        return {
            "name": f"agentrl-sandbox-{self._instance}-{number}",
            "entrypoint": _ENTRYPOINT,
            "command": [json.dumps(config)],
            "user": f"{uid}:{uid}",
            "environment": self._environment,
            "healthcheck": {"test": ["NONE"]},  # the image's own check is for the service
            "hostname": "sandbox",
            "labels": {_LABEL: self._instance},
            "runtime": self._runtime,
            "network_mode": "none",
            "ipc_mode": "private",
            "cgroupns": "private",
            "read_only": True,
            "tmpfs": dict.fromkeys([isolate.WORK_FOLDER, "/tmp", "/dev/shm"], tmpfs),
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": memory_bytes,
            "memswap_limit": memory_bytes,
            "nano_cpus": 10**9,
            # one more for pid 1; gVisor also counts its own threads, and some for each of the session's
            "pids_limit": GVISOR_THREADS + 2 * limits.num_processes if is_gvisor else limits.num_processes + 1,
            "log_config": LogConfig(type="none"),  # a program could fill the disk with its output
            "stdin_open": True,  # once: pid 1 reads end-of-file when the service is gone
            "auto_remove": True,
        }

    async def stop(self) -> None:
        """See base.Backend."""
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.to_thread(self._remove_all, client)
        if self._uids is not None:
            self._uids.close()
            self._uids = None

    def _remove_all(self, client: docker.DockerClient) -> None:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            label = f"{_LABEL}={self._instance}"
            for container in client.containers.list(all=True, filters={"label": label}, sparse=True):
                remove(container)
        except (DockerException, RequestException) as error:
            log.warning("containers may be left: %s", error)
        client.close()


def _remove_leftovers(client: docker.DockerClient) -> None:
    """Remove containers of services that were killed between creating and starting one. Others end by themselves."""
    for container in client.containers.list(all=True, filters={"label": _LABEL, "status": "created"}, sparse=True):
        if time.time() - container.attrs["Created"] > LEFTOVER_AGE_S:
            remove(container)
