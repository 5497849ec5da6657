"""The RayJob that starts a run on Kubernetes by the KubeRay operator, with the config that it mounts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from agentrl.cli.cluster.resources import Asked, Nodes, described
from agentrl.config import Config
from agentrl.errors import ConfigError

RAY_VERSION = "2.60.0"
CONFIG_FOLDER = "/etc/agentrl"
HEAD_CPUS = 2
RETRIES = 3
KEPT_S = 600
SANDBOX_BASE_BYTES = 2**30
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What all pods have. Example: `Pods(image="registry/agentrl:1", claim="agentrl")`."""

    image: str
    """Has agentrl, and ray[default]."""
    claim: str
    """A PersistentVolumeClaim that many pods can write."""
    mount: str = "/shared"
    memory: str | None = None
    """Of a pod with parts, e.g. 64Gi; None: no limit."""


def manifest(config: Config, *, asked: Sequence[Asked], nodes: Nodes, pods: Pods) -> str:
    """The ConfigMap and the RayJob, as YAML. They hold no secret: the operator makes the token of the cluster.

    Raises ConfigError where the run would write outside of the shared folder.
    """
    import yaml

    _check_shared(config, pods.mount)
    name = re.sub(r"[^a-z0-9-]+", "-", config.name.lower()).strip("-")[:40] or "agentrl"
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-config"},
        "data": {"config.yaml": text},
    }
    parts = "".join(f"#   {line}\n" for line in described(asked).splitlines())
    head = (
        f"# A run on {nodes.count} pods, by Ray. Written by `agentrl cluster render kuberay`. Parts ask for\n{parts}"
        f"# Start it with: kubectl create -f FILE. After a failure it continues in a new cluster, {RETRIES} times.\n"
    )
    job = _job(config, name, nodes, pods)
    return head + yaml.dump_all([config_map, job], Dumper=_dumper(), sort_keys=False, width=120)


def _dumper() -> Any:
    """Writes texts of several lines as they are, and nothing as a reference to another place."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Of one manifest."""

        def ignore_aliases(self, data: Any) -> bool:
            """See yaml.SafeDumper."""
            return True

    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" * ("\n" in text))
    )
    return Dumper


def _check_shared(config: Config, mount: str) -> None:
    """Raises ConfigError for folders that pods would not share."""
    folders = {"out_dir": config.out_dir}
    if config.model.warmstart is not None or config.model.path.startswith(("/", ".")):
        folders["model.path"] = config.model.path
    for key, folder in folders.items():
        if not PurePosixPath(folder).is_relative_to(mount):
            raise ConfigError(
                f"{key}={folder} is not in the shared folder {mount} of the pods (--mount): set "
                f"{key}={PurePosixPath(mount) / PurePosixPath(folder).name}"
            )


def _job(config: Config, name: str, nodes: Nodes, pods: Pods) -> dict[str, Any]:
    link = PurePosixPath(config.out_dir) / f"{config.name}-latest"
    command = ["python3", "-m", "agentrl", "train", f"{CONFIG_FOLDER}/config.yaml", "--latest", str(link)]
    groups = [_parts(nodes, pods)]
    groups += [_sandbox(config, pods)] if config.sandbox.url is None else []
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": shlex.join(command),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_S,
            "backoffLimit": RETRIES,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    # No part is placed there: it has the orchestrator.
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod("ray-head", pods, {"cpu": HEAD_CPUS}, config_map=f"{name}-config"),
                },
                "workerGroupSpecs": groups,
            },
        },
    }


def _parts(nodes: Nodes, pods: Pods) -> dict[str, Any]:
    """The pods of engines, learner and rollout workers."""
    limits: dict[str, Any] = {"cpu": nodes.cpus}
    limits |= {"memory": pods.memory} if pods.memory else {}
    limits |= {GPU: nodes.gpus} if nodes.gpus else {}
    start = {"num-cpus": str(nodes.cpus), "num-gpus": str(nodes.gpus)}
    return _group("parts", nodes.count, start, _pod("ray-worker", pods, limits))


def _sandbox(config: Config, pods: Pods) -> dict[str, Any]:
    """The pod for model-written code: it has neither the shared folder nor an account."""
    settings = config.sandbox
    limits = {"cpu": settings.slots, "memory": settings.slots * settings.memory_bytes + SANDBOX_BASE_BYTES}
    container = {"name": "ray-worker", "image": pods.image, "resources": {"limits": limits, "requests": {"cpu": 1}}}
    template = {"spec": {"automountServiceAccountToken": False, "containers": [container]}}
    start = {"num-cpus": "1", "num-gpus": "0", "resources": '"{\\"sandbox\\": 1}"'}
    return _group("sandbox", 1, start, template)


def _group(name: str, count: int, start: dict[str, str], template: dict[str, Any]) -> dict[str, Any]:
    sizes = {"replicas": count, "minReplicas": count, "maxReplicas": count}
    return {"groupName": name, **sizes, "rayStartParams": start, "template": template}


def _pod(name: str, pods: Pods, limits: dict[str, Any], config_map: str | None = None) -> dict[str, Any]:
    """A pod template with the shared folder, and with memory for /dev/shm."""
    mounts = [{"name": "shared", "mountPath": pods.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if config_map is not None:
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
        volumes.append({"name": "config", "configMap": {"name": config_map}})
    container = {"name": name, "image": pods.image, "resources": {"limits": limits, "requests": limits}}
    return {"spec": {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}}
