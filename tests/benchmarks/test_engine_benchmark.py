"""The engine benchmark's own arithmetic; the bare generator sends the same requests as our client."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from agentrl.types import Sampling
from benchmarks.engine.throughput import median_interval
from tests.conftest import VLLMServer
from trainer.gpu_report import load

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n0\r\n\r\nxy"
REFUSAL = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"


@asynccontextmanager
async def answering(pieces: Sequence[bytes]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def halves(answer: bytes, at: int) -> list[bytes]:
    return [answer[:at], answer[at:]]


@pytest.mark.parametrize("answer", [STREAM, WHOLE])
async def test_the_end_of_an_answer_is_seen_wherever_it_is_cut(answer: bytes) -> None:
    for at in range(1, len(answer)):
        async with answering(halves(answer, at)) as url, asyncio.timeout(5):
            connection = await load.Connection.open(url)
            await connection.ask(b"one")
            await connection.ask(b"another")
            connection.close()


@pytest.mark.parametrize("answer", [STREAM, WHOLE])
async def test_an_answer_without_its_end_is_waited_for(answer: bytes) -> None:
    async with answering([answer[:-1]]) as url:
        connection = await load.Connection.open(url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connection.ask(b"one")
        connection.close()


async def test_a_refusal_is_no_answer() -> None:
    async with answering([REFUSAL]) as url:
        connection = await load.Connection.open(url)
        with pytest.raises(RuntimeError, match="404"):
            await connection.ask(b"one")
        connection.close()


def test_each_turn_continues_the_one_before() -> None:
    (script,) = load.scripts(1, num_turns=3, first_tokens=10, observation_tokens=4, max_tokens=6, vocab_size=50)
    assert [len(prompt) for prompt in script.prompts] == [10, 20, 30]
    assert script.prompts[2][:20] == script.prompts[1] and script.prompts[1][:10] == script.prompts[0]


def test_a_request_for_a_whole_answer_differs_in_that_alone() -> None:
    body = b'{"stream":true,"token_ids":[1]}'
    request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\nX: y\r\n\r\n" % len(body) + body
    head, changed = load.not_streamed(request).split(b"\r\n\r\n")
    assert json.loads(changed) == {"stream": False, "token_ids": [1]}
    assert head == b"POST / HTTP/1.1\r\nContent-Length: %d\r\nX: y" % len(changed)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(max_tokens=1), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(max_tokens=1, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(max_tokens=1, top_p=0.7), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(max_tokens=1, top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(max_tokens=1, temperature=0.5, top_k=2), [0.8, 0.2, 0, 0]),
    ],
)
def test_the_shaped_distribution_is_the_one_worked_by_hand(sampling: Sampling, kept: list[float]) -> None:
    torch = pytest.importorskip("torch")
    from trainer.gpu_report.random_models import shaped

    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert shaped(logits, sampling).softmax(dim=-1)[0].tolist() == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize(("tied", "name"), [(True, "Qwen2"), (False, "Llama"), (True, "Qwen3")])
def test_random_models_have_logits_spread_as_said(tied: bool, name: str) -> None:
    pytest.importorskip("torch")
    from trainer.gpu_report import random_models as models

    model = models.make(name, models.BY_SIZE["1 MB"], tied=tied)
    spread = models.logits(model, range(100, 164)).std(dim=-1).mean()
    assert math.isclose(spread, models.LOGIT_STD, rel_tol=0.2)


def test_float32_logits_leave_the_whole_ess_ratio_of_the_same_hidden_states_and_bfloat16_ones_do_not() -> None:
    pytest.importorskip("torch")
    from benchmarks.engine import rho
    from trainer.gpu_report import random_models as models

    model = rho.with_entropy(models.make("Llama", models.BY_SIZE["1 MB"], tied=False, dtype="bfloat16"), 0.55)
    texts = [[(7 * i + number) % 768 for i in range(1025)] for number in range(1)]
    tokens, logprobs = [], []
    for text in texts:
        log_pi_TV = models.logits(model, text)[:-1].log_softmax(dim=-1)
        tokens.append(log_pi_TV.argmax(dim=-1))
        logprobs.append(log_pi_TV.amax(dim=-1).double())
    drawn = dict.fromkeys(rho.HEADS, rho.Drawn(token_T=tokens, logprob_T=logprobs, listed=1.0))
    *_, rounded, exact = rho._rows(model, texts, drawn, 0.55)
    assert float(rounded[3]) > 1e-3 > 1e-5 > float(exact[3])
    assert float(rounded[-1]) < 0.9 and float(exact[-1]) == 1.0


def test_a_random_models_positions_stay_exact_in_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    from trainer.gpu_report import random_models as models

    model = models.make("Qwen3", models.BY_SIZE["1 MB"], tied=True, dtype="bfloat16")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.engine
async def test_the_bare_generator_sends_what_our_client_sends(vllm_server: VLLMServer) -> None:
    sessions = load.scripts(3, num_turns=2, first_tokens=20, observation_tokens=4, max_tokens=4, vocab_size=300)
    requests = await asyncio.to_thread(load.record, vllm_server.url, vllm_server.model, sessions)
    for script in sessions:
        for name, prompt in zip(script.request_ids(), script.prompts, strict=True):
            body = json.loads(requests[name].split(b"\r\n\r\n", 1)[1])
            assert body["token_ids"] == list(prompt) and body["sampling_params"]["max_tokens"] == 4
    made = await asyncio.to_thread(load.through_sockets, vllm_server.url, requests, sessions)
    assert made.num_tokens == 24 and len(made.latencies_s) == 6


def test_the_interval_of_a_median_is_that_of_the_order_statistics() -> None:
    # n = 100: ranks 50 -+ 9.8, so the 41st to the 61st smallest
    assert median_interval([float(value) for value in reversed(range(100))]) == (40.0, 49.5, 60.0)


@pytest.mark.parametrize("entropy", [0.55, 2.8])
def test_a_random_model_is_given_the_entropy_of_the_row(entropy: float) -> None:
    pytest.importorskip("torch")
    from benchmarks.engine.rho import with_entropy
    from trainer.gpu_report import random_models as models

    model = with_entropy(models.make("Llama", models.BY_SIZE["1 MB"], tied=False), entropy)
    log_pi_TV = models.logits(model, [7 * i % 768 for i in range(64)]).log_softmax(dim=-1)
    assert math.isclose(-(log_pi_TV.exp() * log_pi_TV).sum(dim=-1).mean(), entropy, rel_tol=0.01)


def test_sums_are_over_whole_stretches_of_a_text() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.engine.rho import _sums

    # A text of 8 tokens has 7 positions: its last stretch of 4 lacks one. Stretches that lack more are left out.
    assert _sums([torch.arange(7.0), torch.ones(6)], 4) == [6.0, 15.0, 4.0]
