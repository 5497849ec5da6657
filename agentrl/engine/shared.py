"""The engines of a run and its spare ones, as rollout workers are told of them: one list, looked at by index.

Independent of what is played with them.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.engine.base import EngineState, SharedEngines


class WithSpare:
    """See SharedEngines: first those that train, then those that only evaluate, marked as such.

    Example:
        engines = WithSpare(engine, spare)
        [state.url for state in engines.states() if state.is_spare]
    """

    def __init__(self, engines: SharedEngines, spare: SharedEngines) -> None:
        self._engines = engines
        self._spare = spare

    def states(self) -> tuple[EngineState, ...]:
        """See SharedEngines."""
        return (*self._engines.states(), *(replace(state, is_spare=True) for state in self._spare.states()))

    async def check(self, index: int) -> None:
        """See SharedEngines."""
        num_engines = len(self._engines.states())
        if index < num_engines:
            await self._engines.check(index)
        else:
            await self._spare.check(index - num_engines)
