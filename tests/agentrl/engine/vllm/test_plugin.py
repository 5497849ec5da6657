"""The folder backend and the worker's calls inside the real server: vLLM's own five calls, and how they fail."""

import shutil
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.engine.checksum import checksum_of
from tests.conftest import VLLMServer
from tests.device import parity_bound

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))


@pytest.fixture
async def http(vllm_server: VLLMServer, tiny_model_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    # A connection kept idle would race with the server, which closes such after 5 s.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=vllm_server.url, timeout=60, limits=limits) as http:
        await http.post("/pause", params={"mode": "keep", "clear_cache": True})
        yield http
        await http.post("/start_weight_update")  # refused where a test left one open
        for path, body in (
            ("/update_weights", {"update_info": {"path": str(tiny_model_dir)}}),
            ("/finish_weight_update", {"weight_version": "0"}),
            ("/resume", {}),
        ):
            (await http.post(path, json=body)).raise_for_status()


async def test_the_calls_are_those_of_the_nccl_backend(http: httpx.AsyncClient, tiny_model_dir: Path) -> None:
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": str(tiny_model_dir)}}),
        ("/finish_weight_update", {"weight_version": "41"}),
        ("/shutdown_weight_transfer_engine", {}),
    ):
        assert (await http.post(path, json=body)).status_code == 200, path
    assert (await http.get("/weight_info")).json() == {"weight_version": "41"}


@pytest.mark.parametrize(
    ("update_info", "reason"),
    [({"path": "/nowhere"}, "no model"), ({}, "path"), ({"path": "/nowhere", "names": []}, "names")],
)
async def test_a_bad_update_fails_with_its_reason(
    http: httpx.AsyncClient, update_info: dict[str, object], reason: str
) -> None:
    await http.post("/start_weight_update")
    reply = await http.post("/update_weights", json={"update_info": update_info})
    assert reply.status_code == 500
    assert reason in reply.text


def rewritten(source: Path, folder: Path, *, drop: str = "", cut: str = "", add: str = "") -> Path:
    tensors = load_file(source / "model.safetensors")
    changed = {
        name: (tensor[:-1] if cut and cut in name else tensor).contiguous()
        for name, tensor in tensors.items()
        if not (drop and drop in name)
    }
    if add:
        changed[add] = next(iter(tensors.values())).clone()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"drop": "layers.1.self_attn.q_norm"}, "q_norm"),
        ({"drop": "layers.0"}, "layers.0"),
        ({"drop": "layers.0.mlp.up_proj"}, "up_proj"),
        ({"cut": "embed_tokens"}, "another shape"),
        ({"add": "model.layers.0.unheard_of.weight"}, "unheard_of"),
    ],
)
async def test_weights_that_are_not_the_models_are_refused(
    http: httpx.AsyncClient, tiny_model_dir: Path, tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    folder = rewritten(tiny_model_dir, tmp_path / "weights", **change)
    await http.post("/start_weight_update")
    reply = await http.post("/update_weights", json={"update_info": {"path": str(folder)}})
    assert reply.status_code == 500
    assert reason in reply.text


async def rpc(http: httpx.AsyncClient, method: str, **arguments: str) -> list[object]:
    reply = await http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
    reply.raise_for_status()
    return list(reply.json()["results"])


def changed(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A folder with every weight changed by half."""
    tensors = {name: tensor * 1.5 for name, tensor in load_file(source / "model.safetensors").items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


async def test_the_checksum_is_that_of_the_last_finished_update(
    http: httpx.AsyncClient, tiny_model_dir: Path, tmp_path: Path
) -> None:
    first = checksum_of(load_file(tiny_model_dir / "model.safetensors").items())
    second = checksum_of(changed(tiny_model_dir, tmp_path / "new").items())
    seen = []
    for folder in (tiny_model_dir, tmp_path / "new"):
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"path": str(folder)}}),
            ("/finish_weight_update", {"weight_version": "1"}),
        ):
            (await http.post(path, json=body)).raise_for_status()
            seen.append(await rpc(http, "weights_checksum"))
    assert seen[2:] == [[first], [first], [first], [second]]


async def test_renewing_tied_layers_completes_a_reload(
    http: httpx.AsyncClient, tiny_model_dir: Path, tmp_path: Path
) -> None:
    changed(tiny_model_dir, tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32").eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        logits_TV = model(input_ids=torch.tensor([TEXT])).logits[0]
    expected = logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(TEXT)[1:, None])[:, 0]
    await rpc(http, "reload_weights", weights_path=str(tmp_path / "new"))
    await rpc(http, "renew_tied_layers")
    await http.post("/resume")
    body = {
        "model": "policy",
        "token_ids": TEXT,
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
    }
    entries = (await http.post("/inference/v1/generate", json=body)).json()["prompt_logprobs"]
    scored = [entry[str(token)]["logprob"] for token, entry in zip(TEXT[1:], entries[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(scored), expected, rtol=0, atol=parity_bound())


async def test_finishing_without_an_update_is_refused(http: httpx.AsyncClient) -> None:
    await http.post("/start_weight_update")
    reply = await http.post("/finish_weight_update", json={"weight_version": "9"})
    assert reply.status_code == 500 and "no folder" in reply.text
    assert (await http.get("/weight_info")).json() != {"weight_version": "9"}


def test_the_entry_point_is_installed() -> None:
    found = {entry.name: entry.value for entry in metadata.entry_points(group="vllm.general_plugins")}
    assert found["agentrl"] == "agentrl.engine.vllm.plugin:register"


def test_registering_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from agentrl.engine.vllm.plugin import register

    register()
    register()
    assert WeightTransferEngineFactory._registry["safetensors"]().__name__ == "SafetensorsEngine"
    assert "nccl" in WeightTransferEngineFactory._registry
