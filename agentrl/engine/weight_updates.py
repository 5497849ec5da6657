"""Weight updates of one vLLM server: the swap, its proof by checksum and logprob parity, and recovery after a restart.

No token is generated under unknown weights. Independent of requests and their tokens (vllm_engine.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.config.engine import KvOnUpdate
from agentrl.engine.base import Parity, WeightUpdate, is_delta, parity
from agentrl.engine.generation_stream import INITIAL_LABEL
from agentrl.engine.parity import ParityBounds
from agentrl.engine.vllm_control import VLLMControl
from agentrl.errors import EngineError, EngineGone, PreviousWeightsKept, WeightsWanted, WeightSyncError
from agentrl.types import WeightsRef

log = logging.getLogger(__name__)

POLL_RETURN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How the weights of a server are updated and proven. Example: `UpdateSettings(kv_on_update="stale")`."""

    first_version: int = 0
    """Version of the weights that the server was started with: above 0 for weights that a run exported."""
    update_timeout_s: float = 300.0
    """Deadline of one weight update."""
    return_timeout_s: float = 0.0
    """How long a server that is gone may take to return with the current weights before that is an error. The tokens so
    far are kept and continued. 0: do not wait."""
    kv_on_update: KvOnUpdate = "recompute"
    """Whether requests that run across an update keep their KV entries (stale) or have them recomputed. Prefix-cache
    entries never serve requests that start under another version: each version has its own salt."""
    by_folder: bool = False
    """Load weights with `reload_weights` from the folder instead of through vLLM's weight transfer."""
    sleeps: bool = False
    """Whether the server must be able to release its memory (`WeightUpdater.sleep`)."""
    parity_bound: float = 1e-3
    """Largest allowed mean |engine - learner| logprob on the probe text; agentrl.engine.parity derives the others."""
    parity_every: int = 1
    """Probe the first update and every n-th after it."""


class WeightUpdater:
    """Updates the weights of one server, and restores them after a restart.

    Args:
        weights_change: called when an update begins, before the first call to the server.
        num_starts: number of starts of the server so far, where that is known: a server that died and returned between
            two requests holds the wrong weights without any other sign of it.
        end_server: ends the server's process, which is then restarted. None where it was not started here.

    Example:
        await updater.connect("policy")
        update = await updater.update(ref)  # proven; raises WeightSyncError otherwise
        await updater.trusted()  # before each request
    """

    def __init__(
        self,
        control: VLLMControl,
        settings: UpdateSettings,
        *,
        weights_change: Callable[[], None],
        num_starts: Callable[[], int],
        end_server: Callable[[], None] | None = None,
    ) -> None:
        self._control = control
        self._settings = settings
        self._weights_change = weights_change
        self._num_starts = num_starts
        self._end_server = end_server
        self._seen_starts = num_starts()
        self._model = ""
        self._changing = asyncio.Lock()  # one update, or one recovery, at a time
        self._open = asyncio.Event()  # cleared while weights change: no request starts and no answer is returned
        self._open.set()
        self._distrust: WeightSyncError | None = None
        self._ref: WeightsRef | None = None  # the weights it holds; None: those it was started with
        self._num_updates = 0
        self._is_asleep = False
        self._is_torn = False  # an update broke off and left it with a part of the new weights
        self.version = 0
        self.num_restarts = 0
        self.num_refused = 0
        """Updates that failed: what was sampled since the last of them began may be of weights without a proof."""
        self.wants_weights = False
        """Whether only the learner can give the server the current weights: it was restarted, or an update broke
        off."""

    async def connect(self, model: str) -> None:
        """Ask the server which weights it holds. Raises EngineError when they cannot be known."""
        self._model = model
        if await self._control.is_paused():
            raise EngineError(
                f"engine at {self._url} is paused: a weight update was interrupted, or it was left asleep, and its "
                "weights are unknown; restart it"
            )
        if self._settings.sleeps and not await self._control.can_sleep():
            raise EngineError(
                f"engine at {self._url} cannot release its memory: start it on a GPU with --enable-sleep-mode, or with "
                "`agentrl engine`; or set engine.sleep_while_training=false"
            )
        if await self._control.label() == INITIAL_LABEL:
            # A server without a label holds exactly the weights it was started with.
            await self._control.set_label(str(self._settings.first_version))
        self.version = await self._control.version()

    @property
    def _url(self) -> str:
        return self._control.url

    @property
    def salt(self) -> str:
        """Separates the prefix-cache entries of one version from requests under another."""
        return f"v{self.version}"

    @property
    def status(self) -> Literal["open", "changing", "unknown"]:
        """Whether it takes requests now, with proven weights; if not, whether an update or a return is under way."""
        return "changing" if not self._open.is_set() else "unknown" if self._distrust else "open"

    async def trusted(self) -> None:
        """Wait while weights change. Raises WeightSyncError when the engine's weights are unknown."""
        # Ends with `update` or `come_back`, which have deadlines. Another update may begin before this waiter runs.
        while not self._open.is_set():
            await self._open.wait()
        if self._distrust is not None:
            raise self._distrust
        if self._num_starts() != self._seen_starts:
            await self.come_back(EngineGone(f"engine at {self._url} was restarted"))
            await self.trusted()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log p(token[t+1] | token[:t+1]) under the weights it holds now. [T] -> [T-1]. Raises EngineError."""
        return await self._control.score(token_ids, model=self._model, cache_salt=self.salt)

    async def pause(self) -> None:
        """See VLLMEngine.pause. A server that dies meanwhile goes on generating once it is back."""
        await self._stopped(lambda: self._control.pause(clear_cache=False))

    async def sleep(self) -> None:
        """See VLLMEngine.sleep. A server that dies meanwhile is awaited and put to sleep after its restart."""
        await self._stopped(self._released)

    async def _stopped(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Stop the server until the next update; after a failure it is open as before."""
        async with self._changing:
            self._open.clear()
            try:
                await stop()
            except BaseException:
                self._open.set()
                raise

    async def _released(self) -> None:
        self._is_asleep = True  # also after a failure, which leaves it unknown: the next update finds out
        timeout_s = self._settings.update_timeout_s
        try:
            await self._control.sleep(timeout_s=timeout_s)
        except EngineError as error:
            if not isinstance(error, EngineGone) and not await self._control.is_gone():
                raise
            await self._wait_until_back(error)
            await self._control.sleep(timeout_s=timeout_s)

    async def running(self) -> None:
        """Return once the server runs, whatever weights it holds. Raises EngineError when it does not return."""
        await self._wait_until_back(EngineGone(f"engine at {self._url} is gone"))

    async def join(self, init_info: dict[str, Any]) -> None:
        """Let it join the learner's group.

        Raises EngineError past the deadline of an update, WeightsWanted where it died: a group can be made anew.
        """
        try:
            await self._control.init_transfer(init_info, timeout_s=self._settings.update_timeout_s)
        except EngineError as error:
            has_group = "rank_offset" in init_info
            if has_group and (isinstance(error, EngineGone) or await self._control.is_gone()):
                raise WeightsWanted(str(error)) from error
            raise

    async def update(self, ref: WeightsRef) -> WeightUpdate:
        """See VLLMEngine.update_weights."""
        async with self._changing:
            what = f"weights of version {ref.policy_version} for the engine at {self._url}"
            self._distrust = WeightSyncError(f"{what}: the update was interrupted; restart the engine")
            self._open.clear()
            self._weights_change()
            try:
                update = await self._taken_or_restored(ref, what)
            except WeightsWanted:
                self._distrust, self.wants_weights = None, True
                raise
            except WeightSyncError as error:
                self.num_refused += 1
                self._distrust = self._distrust and error
                self._open.set()
                raise
            except BaseException:
                self._open.set()
                raise
            self._ref, self._distrust, self.wants_weights, self._is_torn = ref, None, False, False
            self._open.set()
            return update

    async def come_back(self, error: EngineError) -> None:
        """Return once the engine serves the current weights again. Raises `error` if it was never gone."""
        async with self._changing:
            if not isinstance(error, EngineGone) and not await self._control.is_gone():
                raise error
            self._open.clear()  # no request starts on a server that may hold other weights
            try:
                await self._wait_until_back(error)
                self._seen_starts = self._num_starts()
                # Otherwise only the connection broke, or another call has already restored the weights.
                if self._distrust is None and await self._control.label() == INITIAL_LABEL:
                    await self._renew(error)
            except WeightSyncError as sync_error:
                self._distrust = sync_error
                raise
            except WeightsWanted as wanted:
                log.warning("%s", wanted)
            finally:
                if not self.wants_weights:
                    self._open.set()

    async def _taken_or_restored(self, ref: WeightsRef, what: str) -> WeightUpdate:
        """The update; repeated after a restart in its middle; after a failure, the previous weights.

        Raises WeightsWanted after a restart where the weights are not in a folder.
        """
        try:
            starts = self._num_starts()
            try:
                return await self._take(ref)
            except EngineError as error:
                # A server whose engine process died may not answer a call until its deadline, before it ends itself.
                is_gone = isinstance(error, EngineGone) or starts != self._num_starts() or await self._control.is_gone()
                if isinstance(error, WeightSyncError) or not is_gone:
                    raise
                await self._wait_until_back(error)
                self.num_restarts += await self._control.label() == INITIAL_LABEL
                if ref.path is None:
                    raise WeightsWanted(f"{what}: it was restarted") from error
                return await self._take(ref)
        except WeightSyncError as error:
            raise WeightSyncError(f"{what}: {error}") from error
        except EngineError as error:
            raise await self._restored(error, what) from error

    async def _take(self, ref: WeightsRef) -> WeightUpdate:
        """Load, label, resume, prove. Raises WeightSyncError from the proof, another EngineError before it."""
        starts = self._num_starts()
        try:
            async with asyncio.timeout(self._settings.update_timeout_s):
                gap_s = await self._swap(ref)
                proof = await self._prove(ref)
        except TimeoutError as error:
            raise EngineError(
                f"the update was not done within {self._settings.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from error
        self._seen_starts = starts
        return WeightUpdate(gap_s=gap_s, num_bytes=ref.num_bytes, parity=proof)

    async def _swap(self, ref: WeightsRef) -> float:
        started = time.monotonic()
        version, timeout_s = ref.policy_version, self._settings.update_timeout_s
        is_awake = not self._is_asleep or await self._control.wake_up("weights", timeout_s=timeout_s)
        if is_awake:
            await self._control.pause(clear_cache=self._settings.kv_on_update == "recompute")
        if self._settings.by_folder and ref.path is not None:
            await self._control.reload(ref.path, version=version, timeout_s=timeout_s)
        else:
            await self._control.load(ref.update_info, version=version, timeout_s=timeout_s)
        if (reported := await self._control.version()) != version:
            raise EngineError(f"engine at {self._url} reports version {reported} after the update")
        if is_delta(ref) and set(await self._control.checksums()) != {ref.checksum}:
            self.wants_weights = True  # it stays paused
            raise WeightsWanted(f"engine at {self._url}: what changed since {ref.path} does not give version {version}")
        self.version = version
        if not is_awake and not await self._control.wake_up("kv_cache", timeout_s=timeout_s):
            raise EngineError(f"engine at {self._url} is still asleep after the update")
        self._is_asleep = False
        await self._control.resume()
        return time.monotonic() - started

    async def _prove(self, ref: WeightsRef) -> Parity | None:
        """Compare the checksum of what the server took, and its logprobs of the probe text. Raises WeightSyncError."""
        if ref.checksum and (wrong := {s for s in await self._control.checksums() if s != ref.checksum}):
            raise WeightSyncError(
                f"it took other weights than the learner sent: checksum {sorted(map(str, wrong))}, not {ref.checksum}"
            )
        self._num_updates += 1
        if (self._num_updates - 1) % self._settings.parity_every:
            return None
        found = parity(await self.score(ref.probe.token_ids), ref.probe.logprobs)
        bounds = ParityBounds(self._settings.parity_bound)
        if bounds.refuses(found):
            raise WeightSyncError(
                "it does not hold the learner's weights: its logprobs of the probe text differ by "
                f"{found.mean_abs:.2g} on average (KL {found.kl:.2g}), allowed is {bounds.mean:g} "
                f"(KL {bounds.kl:.2g}; engine.parity_bound)"
            )
        if bounds.warns(found):
            log.warning(
                "engine at %s: one logprob of the probe text differs by %.2g nats from the learner's, usual is at most "
                "%.2g; %.2g on average is within engine.parity_bound=%g, so the weights of version %d are accepted",
                *(self._url, found.max_abs, bounds.largest, found.mean_abs, bounds.mean, ref.policy_version),
            )
        return found

    async def _restored(self, error: EngineError, what: str) -> WeightSyncError:
        """The error to raise. If the engine is proven to hold the previous weights, it is trusted again.

        Raises WeightsWanted where it has a part of the new weights. It is not resumed before it has all of them.
        """
        if (ref := self._ref) is None:
            return WeightSyncError(f"{what}: {error}")
        try:
            async with asyncio.timeout(self._settings.update_timeout_s):
                is_torn = ref.path is None and not await self._still_holds(ref)
                if not is_torn:
                    await (self._control.resume() if ref.path is None else self._swap(ref))
                    self._num_updates = 0  # probe now
                    await self._prove(ref)
        except (EngineError, TimeoutError) as second:
            why = f"{what}: {error}; the previous weights could not be restored either: {second}"
            if (ref.path is not None and not self._is_asleep) or await self._control.is_gone():
                return WeightSyncError(why)
            return await self._ended(why)  # a broadcast may hang in it, or it does not wake
        if is_torn:
            return await self._torn(f"{what}: {error}")
        self._distrust = None
        return PreviousWeightsKept(f"{what}: {error}. It continues with version {self.version}")

    async def _still_holds(self, ref: WeightsRef) -> bool:
        """Whether no layer has changed since the update with `ref`: every worker still reports its checksum."""
        return not self._is_asleep and set(await self._control.checksums()) == {ref.checksum}

    async def _torn(self, why: str) -> WeightSyncError:
        """After the first update that broke off the server waits for a complete one; after the second it is ended."""
        if self._is_torn:
            return await self._ended(f"{why}; the update before it broke off too")
        self._is_torn = True
        raise WeightsWanted(f"{why}; it has a part of them and waits for all")

    async def _ended(self, why: str) -> WeightSyncError:
        """End the server, whose weights are unknown. Raises WeightsWanted when it is back, if that is waited for."""
        self._is_torn = False
        if self._end_server is None:
            return WeightSyncError(f"{why}. It is not resumed: restart the engine at {self._url}")
        log.warning("%s. The engine at %s is ended and started again", why, self._url)
        self._end_server()
        try:
            await self._wait_until_back(EngineGone(f"{why}. It was ended"))
        except EngineGone as gone:
            return WeightSyncError(str(gone))
        self.num_restarts += 1
        raise WeightsWanted(why)

    async def _wait_until_back(self, error: EngineError) -> None:
        """Raises `error` when nothing answers within `return_timeout_s`."""
        if not await self._control.is_gone():
            return
        log.warning("%s; waiting %g s for it to return", error, self._settings.return_timeout_s)
        try:
            async with asyncio.timeout(self._settings.return_timeout_s):
                while True:
                    try:
                        return await self._control.health()
                    except EngineError:
                        await asyncio.sleep(POLL_RETURN_S)
        except TimeoutError:
            raise error from None

    async def _renew(self, error: EngineError) -> None:
        """Give a restarted engine the current weights before it takes requests."""
        self.num_restarts += 1
        if self._ref is None and self.version == self._settings.first_version:
            await self._control.set_label(str(self.version))
        elif self._ref is None:
            raise EngineError(f"{error}; it returned without version {self.version}, which this run did not make")
        elif self._ref.path is None:
            log.warning("the engine at %s was restarted and waits for the learner's weights", self._url)
            self.wants_weights = True
        else:
            self._num_updates = 0  # probe
            await self._take(self._ref)
            log.warning("the engine at %s was restarted and holds version %d again", self._url, self.version)
