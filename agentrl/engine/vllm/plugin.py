"""vLLM's plugin entry point: registers our weight-transfer backends; each is loaded only where it is configured.

    safetensors    reads a folder that learner and engine share          agentrl.engine.vllm.safetensors
    gloo           broadcast between processes, for CPUs                  agentrl.engine.vllm.gloo
    agentrl_nccl   vLLM's own NCCL backend, checked and summed            agentrl.engine.vllm.device
    agentrl_ipc    vLLM's own CUDA IPC backend, checked and summed        agentrl.engine.vllm.device

All implement vLLM's own calls (init, start, update, finish, shutdown). Independent of versions, HTTP and training.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from agentrl.supervision.parent import end_with_parent

# The last two have a prefix: vLLM refuses to register a name twice.
ENGINES = {
    "safetensors": ("agentrl.engine.vllm.safetensors", "SafetensorsEngine"),
    "gloo": ("agentrl.engine.vllm.gloo", "GlooEngine"),
    "agentrl_nccl": ("agentrl.engine.vllm.device", "NCCLEngine"),
    "agentrl_ipc": ("agentrl.engine.vllm.device", "IPCEngine"),
}


def register() -> None:
    """Register the backends; may be called again. vLLM calls it in each of its processes.

    The processes of a server that agentrl started end with their parent, so that none keeps a GPU's memory.
    """
    end_with_parent()
    for name, (module, class_name) in ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, class_name)
