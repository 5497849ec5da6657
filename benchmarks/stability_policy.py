"""S copies of the calculator policy, with weights of their own, as one batched computation.

The toy is so small that one run spends its time on overhead. Here the linear layers of S runs are one batched product,
and what the study needs of the gradient (the norm of every episode's score, the gradient of every group) comes from the
inputs and output gradients of one backward. The test sets it against `calculator.Policy`, one run at a time.

Independent of rewards, weights of episodes and rules.
Shapes: _S runs, _P parameters of one run, _N rows (episodes) of a run, _A groups of rows, _T tokens, _D width, _V
vocabulary. Weights are one float32 tensor [S, P] in the order of `Policy().named_parameters()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.calculator import MAX_TOKENS, NUM_HEADS, NUM_LAYERS, WIDTH, Policy

SHAPES: dict[str, torch.Size] = {name: p.shape for name, p in Policy().named_parameters()}
SIZES = [shape.numel() for shape in SHAPES.values()]
NUM_PARAMETERS = sum(SIZES)


def stacked(weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """State dicts of policies as one tensor. [S, P]"""
    return torch.stack([torch.cat([one[name].flatten() for name in SHAPES]) for one in weights])


def named(weight_SP: Tensor) -> dict[str, Tensor]:
    """Views [S, *shape] by parameter name."""
    pieces = weight_SP.split(SIZES, dim=1)  # type: ignore[no-untyped-call]
    return {name: p.view(-1, *shape) for (name, shape), p in zip(SHAPES.items(), pieces, strict=True)}


@dataclass(frozen=True, slots=True)
class _Tap:
    """A layer's input (None for the embedding) and output, to take the gradient of the layer's parameters from."""

    name: str
    input: Tensor | None
    output: Tensor


class Cache:
    """Keys and values of every row so far. Rows lead, so that the first N of them are one piece of memory."""

    def __init__(self, num_runs: int, num_rows: int) -> None:
        shape = (2 * NUM_LAYERS, num_rows, num_runs, NUM_HEADS, MAX_TOKENS, WIDTH // NUM_HEADS)
        self.kept = torch.zeros(shape)

    def copy(self, runs: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Row `source` becomes row `target`, within each run."""
        self.kept[:, targets, runs] = self.kept[:, sources, runs]


class Scored:
    """Logits of rows of every run, with what the backward needs when `grads`."""

    def __init__(self, weight_SP: Tensor, ids_SNT: Tensor, *, grads: bool) -> None:
        self._ids_SNT, self._taps, self._grads = ids_SNT, list[_Tap](), grads
        self._weights = named(weight_SP)
        num_runs, num_rows, length = ids_SNT.shape
        with torch.set_grad_enabled(grads):
            hidden_SMD = _embedded(self._weights, ids_SNT, 0).requires_grad_(grads)
            self._taps.append(_Tap("embedding", None, hidden_SMD))
            for layer in range(NUM_LAYERS):
                hidden_SMD = self._block(hidden_SMD, f"blocks.{layer}.", num_rows, length)
            logits_SMV = self._linear(self._norm(hidden_SMD, "norm"), "head")
            log_p_SNTV = logits_SMV.view(num_runs, num_rows, length, -1)[:, :, :-1].log_softmax(-1)
            self.logprob_SNT = log_p_SNTV.gather(3, ids_SNT[:, :, 1:, None])[..., 0]
            """Log-probability of token t + 1. float32 [S, N, T - 1]"""

    def backward(self, weight_SNT: Tensor) -> RowGradients:
        """Of the sum of each row's weighted log-probabilities. weight [S, N, T - 1]"""
        loss = (self.logprob_SNT * weight_SNT).sum()
        gradients = torch.autograd.grad(loss, [tap.output for tap in self._taps])
        return RowGradients(self._ids_SNT, list(zip(self._taps, gradients, strict=True)))

    def _block(self, hidden_SMD: Tensor, prefix: str, num_rows: int, length: int) -> Tensor:
        num_runs = len(hidden_SMD)
        qkv = self._linear(self._norm(hidden_SMD, prefix + "norm1"), prefix + "qkv")
        qkv = qkv.view(num_runs * num_rows, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        mixed_SMD = mixed.transpose(1, 2).reshape(num_runs, num_rows * length, WIDTH)
        hidden_SMD = hidden_SMD + self._linear(mixed_SMD, prefix + "out")
        up = self._linear(self._norm(hidden_SMD, prefix + "norm2"), prefix + "up")
        return hidden_SMD + self._linear(functional.gelu(up), prefix + "down")

    def _linear(self, x_SMD: Tensor, name: str) -> Tensor:
        return self._tapped(name, x_SMD, _linear(self._weights, x_SMD, name))

    def _norm(self, x_SMD: Tensor, name: str) -> Tensor:
        normed_SMD = functional.layer_norm(x_SMD, (WIDTH,))
        return self._tapped(name, normed_SMD, _scaled(self._weights, normed_SMD, name))

    def _tapped(self, name: str, x_SMD: Tensor, y_SMD: Tensor) -> Tensor:
        if self._grads:
            self._taps.append(_Tap(name, x_SMD.detach(), y_SMD))
        return y_SMD


class RowGradients:
    """The gradient of each row's own sum, kept as inputs and output gradients of the layers."""

    def __init__(self, ids_SNT: Tensor, taps: Sequence[tuple[_Tap, Tensor]]) -> None:
        self._taps, self._ids_SNT = taps, ids_SNT

    def norms(self) -> tuple[Tensor, Tensor]:
        """Each row's gradient norm, and the part of it that the scales of the normalisations have. float64 [S, N]"""
        num_runs, num_rows, _ = self._ids_SNT.shape
        square_R = torch.zeros(num_runs * num_rows, dtype=torch.float64)
        scales_R = torch.zeros_like(square_R)
        for tap, gradient in self._taps:
            g_RTD = self._rows(gradient)
            if tap.input is None:
                square_R += self._token_gradients(g_RTD, num_runs * num_rows).square().sum((1, 2))
                square_R += g_RTD.square().sum((1, 2))
            elif "norm" in tap.name:
                scale_R = (g_RTD * self._rows(tap.input)).sum(1).square().sum(1)
                scales_R += scale_R
                square_R += scale_R + g_RTD.sum(1).square().sum(1)
            else:  # |sum_t g_t x_t^T|^2 + |sum_t g_t|^2 by inner products of tokens
                x_RTD = self._rows(tap.input)
                square_R += ((x_RTD @ x_RTD.mT + 1) * (g_RTD @ g_RTD.mT)).sum((1, 2))
        return tuple(total.sqrt().view(num_runs, num_rows) for total in (square_R, scales_R))  # type: ignore[return-value]

    def of_groups(self, coefficient_SNA: Tensor) -> Tensor:
        """Sum of coefficient times gradient over the rows of each group; rows are [A, N / A]. float32 [S, A, P]"""
        num_runs, num_groups, _ = coefficient_SNA.shape
        num_parts = num_runs * num_groups
        pieces: dict[str, Tensor] = {}
        for tap, gradient in self._taps:
            g_RTD = self._rows(gradient) * coefficient_SNA.flatten()[:, None, None]
            g_KMD = g_RTD.reshape(num_parts, -1, g_RTD.shape[-1])
            if tap.input is None:
                pieces["token.weight"] = self._token_gradients(g_KMD, num_parts)
                position = g_KMD.new_zeros(num_parts, MAX_TOKENS, WIDTH)
                position[:, : g_RTD.shape[1]] = g_RTD.view(num_parts, -1, *g_RTD.shape[1:]).sum(1)
                pieces["position.weight"] = position
                continue
            x_KMD = tap.input.reshape(num_parts, -1, tap.input.shape[-1])
            is_scale = "norm" in tap.name
            pieces[tap.name + ".weight"] = (g_KMD * x_KMD).sum(1) if is_scale else g_KMD.mT @ x_KMD
            pieces[tap.name + ".bias"] = g_KMD.sum(1)
        return torch.cat([pieces[name].flatten(1) for name in SHAPES], dim=1).view(num_runs, num_groups, -1)

    def _rows(self, value_SMD: Tensor) -> Tensor:
        num_runs, num_rows, length = self._ids_SNT.shape
        return value_SMD.reshape(num_runs * num_rows, length, -1)

    def _token_gradients(self, g_KMD: Tensor, num_parts: int) -> Tensor:
        one_hot = functional.one_hot(self._ids_SNT.reshape(num_parts, -1), SHAPES["token.weight"][0])
        return one_hot.to(g_KMD.dtype).mT @ g_KMD


def decode(weight_SP: Tensor, ids_SNT: Tensor, start: int, cache: Cache) -> Tensor:
    """Log-probabilities after tokens `start`... of the first N rows; the cache holds what came before. [S, N, V]"""
    weights = named(weight_SP)
    num_runs, num_rows, length = ids_SNT.shape
    end, width = start + length, WIDTH // NUM_HEADS
    with torch.no_grad():
        hidden_SMD = _embedded(weights, ids_SNT, start)
        for layer in range(NUM_LAYERS):
            prefix = f"blocks.{layer}."
            normed = _scaled(weights, functional.layer_norm(hidden_SMD, (WIDTH,)), prefix + "norm1")
            qkv = _linear(weights, normed, prefix + "qkv").view(num_runs, num_rows, length, 3, NUM_HEADS, width)
            qkv = qkv.permute(3, 1, 0, 4, 2, 5)
            cache.kept[2 * layer : 2 * layer + 2, :num_rows, :, :, start:end] = qkv[1:]
            q, k, v = (part.flatten(0, 1) for part in (qkv[0], *cache.kept[2 * layer : 2 * layer + 2, :num_rows]))
            mixed = functional.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], is_causal=length > 1)
            mixed = mixed.reshape(num_rows, num_runs, NUM_HEADS, length, width)
            mixed_SMD = mixed.permute(1, 0, 3, 2, 4)
            hidden_SMD = hidden_SMD + _linear(weights, mixed_SMD.reshape(num_runs, -1, WIDTH), prefix + "out")
            normed = _scaled(weights, functional.layer_norm(hidden_SMD, (WIDTH,)), prefix + "norm2")
            up = functional.gelu(_linear(weights, normed, prefix + "up"))
            hidden_SMD = hidden_SMD + _linear(weights, up, prefix + "down")
        last_SND = hidden_SMD.view(num_runs, num_rows, length, WIDTH)[:, :, -1]
        normed = _scaled(weights, functional.layer_norm(last_SND, (WIDTH,)), "norm")
        return _linear(weights, normed, "head").log_softmax(-1)


class AdamW:
    """torch.optim.AdamW without weight decay, for every run with its own learning rate."""

    def __init__(self, weight_SP: Tensor) -> None:
        self._mean_SP, self._square_SP = torch.zeros_like(weight_SP), torch.zeros_like(weight_SP)
        self._num_steps_S = torch.zeros(len(weight_SP))

    def step(self, weight_SP: Tensor, gradient_SP: Tensor, lr_S: Tensor, is_taken_S: Tensor) -> None:
        """Change the weights in place; runs whose step is not taken stay as they are, moments included."""
        is_taken_S1 = is_taken_S[:, None]
        self._num_steps_S += is_taken_S
        mean_SP = self._mean_SP.lerp(gradient_SP, 1 - 0.9)
        square_SP = self._square_SP.lerp(gradient_SP.square(), 1 - 0.999)
        self._mean_SP = torch.where(is_taken_S1, mean_SP, self._mean_SP)
        self._square_SP = torch.where(is_taken_S1, square_SP, self._square_SP)
        num_steps_S1 = self._num_steps_S[:, None].clamp(min=1)
        denominator_SP = self._square_SP.sqrt() / (1 - 0.999**num_steps_S1).sqrt() + 1e-8
        step_S1 = torch.where(is_taken_S1, lr_S[:, None] / (1 - 0.9**num_steps_S1), 0.0)
        weight_SP -= step_S1.float() * self._mean_SP / denominator_SP


def _embedded(weights: Mapping[str, Tensor], ids_SNT: Tensor, start: int) -> Tensor:
    num_runs, num_rows, length = ids_SNT.shape
    table = weights["token.weight"]
    shifted = ids_SNT + torch.arange(num_runs)[:, None, None] * table.shape[1]
    hidden = table.reshape(-1, WIDTH)[shifted] + weights["position.weight"][:, None, start : start + length]
    return hidden.view(num_runs, num_rows * length, WIDTH)


def _linear(weights: Mapping[str, Tensor], x_SMD: Tensor, name: str) -> Tensor:
    return torch.baddbmm(weights[name + ".bias"][:, None], x_SMD, weights[name + ".weight"].mT)


def _scaled(weights: Mapping[str, Tensor], x_SMD: Tensor, name: str) -> Tensor:
    return torch.addcmul(weights[name + ".bias"][:, None], x_SMD, weights[name + ".weight"][:, None])
