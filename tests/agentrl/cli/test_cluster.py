"""`agentrl cluster render`: the nodes that it computes, and what it writes. tests/e2e/test_slurm.py runs a script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.cluster.resources import Asked, Nodes, NodeSize, asked_of, nodes_for
from agentrl.cli.main import app
from agentrl.config import load, parse
from agentrl.errors import ConfigError

BIG = [
    *("engine.device=cuda", "learner.hostfile=null", "engine.url=null", "sandbox.url=null"),
    *("engine.replicas=4", "engine.host=127.0.0.1", "ray.ranks_per_node=8", "rollout.workers=6"),
]
SHARED = ["out_dir=/shared/runs", "model.path=/shared/models/tiny", "--image", "registry/agentrl:1"]


def rendered(*words: str) -> str:
    done = CliRunner().invoke(app, ["cluster", "render", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def big_run() -> list[Asked]:
    return asked_of(load("configs/cluster/aime.yaml", [*BIG, "place=ray"]))


def test_what_the_parts_ask_for_is_what_the_run_asks_for() -> None:
    assert [str(one) for one in big_run()] == [
        "2 x {CPU: 8, GPU: 8}, each on a node of its own",
        "4 x {CPU: 1, GPU: 4}",
        "1 x {CPU: 1}",
        "6 x {CPU: 1}",
    ]


@pytest.mark.parametrize(
    ("size", "count", "nodes"),
    [
        (NodeSize(), None, Nodes(count=4, cpus=16, gpus=8)),
        (NodeSize(cpus=8), None, Nodes(count=4, cpus=8, gpus=8)),
        (NodeSize(cpus=64, gpus=16), None, Nodes(count=2, cpus=64, gpus=16)),
        (NodeSize(gpus=8), 7, Nodes(count=7, cpus=16, gpus=8)),
    ],
)
def test_nodes_of_one_size_have_room_for_all_parts(size: NodeSize, count: int | None, nodes: Nodes) -> None:
    assert nodes_for(big_run(), size, count=count) == nodes


@pytest.mark.parametrize(
    ("size", "count", "said"),
    [
        (NodeSize(gpus=4), None, r"(?s)no room for one learner.*learner: 2 x \{CPU: 8, GPU: 8\}.*a node: \{GPU: 4\}"),
        (NodeSize(), 3, r"(?s)--nodes 3: the parts need 4.*engine: 4 x"),
    ],
)
def test_too_little_is_refused_with_what_is_asked_for(size: NodeSize, count: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nodes_for(big_run(), size, count=count)


def test_a_resource_that_rendered_nodes_do_not_have_is_refused() -> None:
    keys: dict[str, Any] = {"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "place": "ray"}
    config = parse({**keys, "ray": {"bundles": {"engine": {"fast": 1, "CPU": 1}}}}, source="test")
    with pytest.raises(ConfigError, match=r"ray\.bundles\.engine asks for fast: the nodes .* Leave fast out"):
        asked_of(config)


def test_the_batch_script_is_correct_bash_and_holds_the_numbers_but_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TOKEN", "hush-hush")
    script = tmp_path / "job.sh"
    rendered("slurm", "configs/cluster/aime.yaml", *BIG, "name=my run; $(touch x)", "--out", str(script))
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    for line in ("--nodes=4", "--cpus-per-task=16", "--gpus-per-node=8", "--job-name=my-run-touch-x-", "--exclusive"):
        assert f"#SBATCH {line}" in lines
    assert any(line.endswith("--num-cpus=16 --num-gpus=8 \\") for line in lines)
    assert "export RAY_AUTH_MODE=token" in script.read_text() and "hush" not in script.read_text()
    (command,) = (line for line in lines if line.startswith("    -- "))
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command[7:]}"], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines()[:4] == ["python3", "-m", "agentrl", "train"]
    assert "name=my run; $(touch x)" in words.stdout.splitlines() and "place=ray" in words.stdout.splitlines()


def test_the_ray_job_has_what_its_definition_requires() -> None:
    config_map, job = yaml.safe_load_all(
        rendered("kuberay", "configs/quickstart.yaml", *SHARED, "rollout.workers=2", "--memory", "8Gi")
    )
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    parts, sandbox = cluster["workerGroupSpecs"]
    for group in (parts, sandbox):
        assert {"groupName", "minReplicas", "maxReplicas", "template"} <= set(group)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for template in (cluster["headGroupSpec"]["template"], parts["template"], sandbox["template"]):
        (container,) = template["spec"]["containers"]
        assert container["image"] == "registry/agentrl:1" and container["name"]
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    assert parts["replicas"] == 1 and parts["rayStartParams"] == {"num-cpus": "5", "num-gpus": "0"}
    assert parts["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": 5, "memory": "8Gi"}
    assert sandbox["rayStartParams"]["resources"] == '"{\\"sandbox\\": 1}"'
    assert "volumes" not in sandbox["template"]["spec"], "model-written code does not see the shared folder"
    again = parse(yaml.safe_load(config_map["data"]["config.yaml"]), source="test")
    assert again.place == "ray" and again.rollout.workers == 2


def test_a_sandbox_that_runs_elsewhere_has_no_pod() -> None:
    _, job = yaml.safe_load_all(rendered("kuberay", "configs/quickstart.yaml", *SHARED, "sandbox.url=http://box:8321"))
    assert len(job["spec"]["rayClusterSpec"]["workerGroupSpecs"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kuberay", *SHARED[:2]], "--image REGISTRY/NAME:TAG"),
        (["kuberay", *SHARED[1:]], "out_dir=runs is not in the shared folder /shared .*set out_dir=/shared/runs"),
        (["kuberay", SHARED[0], *SHARED[2:]], "set model.path=/shared/modmath-tiny"),
        (["slurm", "ray.address=a:6379"], "ray.address=a:6379: .* Leave it out"),
        (["slurm", "engine.gpus=[0]"], "engine.gpus with place=ray"),
        (["slurm", "--out", "configs/quickstart.yaml"], "exists: remove it"),
        (["slurm", "--out", "no/folder/job.sh"], "cannot write no/folder/job.sh"),
    ],
)
def test_careless_inputs_are_explained(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["cluster", "render", words[0], "configs/quickstart.yaml", *words[1:]])
    assert done.exit_code == 2
    assert re.search(said, re.sub(r"\s+", " ", done.output.replace("│", " "))), done.output
