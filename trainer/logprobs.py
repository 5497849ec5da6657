"""Log-probability and entropy of each action token under the model. Knows nothing of rewards or weights.

The head is applied to action positions only and in chunks, so [tokens, vocabulary] in float32 is never held whole.
Shapes: _S tokens read, _N action tokens, _C tokens of a chunk, _V vocabulary, _D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.errors import ConfigError
from trainer.packing import ActionTensors

CHUNK_TOKENS = 1024


def action_logprobs(model: Any, tensors: ActionTensors, *, chunk_tokens: int = CHUNK_TOKENS) -> tuple[Tensor, Tensor]:
    """(logprob_N with its graph, entropy_N without), both float32 in nats. Empty when there are no action tokens."""
    if len(tensors.target_N) == 0:
        empty = torch.zeros(0, device=tensors.target_N.device)
        return empty, empty
    hidden_SD = _hidden(model, tensors.input_ids_S)
    hidden_ND = hidden_SD[tensors.predictor_N]
    head = model.get_output_embeddings()
    chunks = list(zip(torch.split(hidden_ND, chunk_tokens), torch.split(tensors.target_N, chunk_tokens), strict=True))
    if len(chunks) == 1:
        return _score(head, *chunks[0])
    scored = [checkpoint(_score, head, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def check_head(model: Any) -> None:
    """Prove that hidden states times the output embedding are this architecture's logits.

    Raises ConfigError for a model that does more in between (soft-capping, scaling): its log-probabilities would be
    silently wrong.
    """
    ids_S = torch.arange(min(16, model.config.vocab_size), device=model.device)
    with torch.no_grad():
        direct_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
        ours_SV = model.get_output_embeddings()(_hidden(model, ids_S))
    if not torch.allclose(direct_SV.float(), ours_SV.float(), rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output embedding; this learner cannot score it"
        )


def _hidden(model: Any, input_ids_S: Tensor) -> Tensor:
    # A cache object would make the mask ignore sequence borders in packed input, and costs memory: never keep one.
    output = model.base_model(input_ids=input_ids_S[None], use_cache=False)
    hidden_SD: Tensor = output.last_hidden_state[0]
    return hidden_SD


def _score(head: Any, hidden_CD: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
    log_p_CV = head(hidden_CD).float().log_softmax(dim=-1)
    with torch.no_grad():
        entropy_C = torch.special.entr(log_p_CV.exp()).sum(dim=-1)
    return log_p_CV.gather(1, target_C[:, None])[:, 0], entropy_C
