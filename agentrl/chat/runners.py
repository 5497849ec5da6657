"""The four ways to play an episode, for a GroupPlayer: by who leads the conversation, and by how the model speaks.

|               | the environment leads  | its own agent leads           |
|---------------|------------------------|-------------------------------|
| by token ids  | `token_runner`         | AgentRunner x TokenSession    |
| by messages   | EndpointSpeaker        | AgentRunner x ForwardSession  |
"""

from __future__ import annotations

from agentrl.chat.agent_runner import AgentRunner
from agentrl.chat.chat_model import ChatModel
from agentrl.chat.endpoint_speaker import EndpointSpeaker
from agentrl.chat.forward_session import ForwardSession
from agentrl.chat.proxy import ChatProxy
from agentrl.chat.token_session import TokenSession
from agentrl.engine.base import Engine
from agentrl.env import Env
from agentrl.env.agent_env import AgentEnv
from agentrl.rollouts.env_runner import EnvRunner
from agentrl.rollouts.episode import EpisodeRunner
from agentrl.rollouts.generation import TokenGenerator
from agentrl.rollouts.settings import Attempt, RolloutSettings
from agentrl.rollouts.token_speaker import token_runner
from agentrl.tokens.tokenizer import TurnTokenizer


class TokenRunners:
    """Episodes by token ids, through an Engine: what can be trained on.

    player = GroupPlayer(make_env, settings_of(config), TokenRunners(tokenizer))
    """

    def __init__(self, tokenizer: TurnTokenizer) -> None:
        self._tokenizer = tokenizer
        self._proxy = ChatProxy()  # serves only while an agent plays

    def for_env(self, env: Env, attempt: Attempt, model: Engine, settings: RolloutSettings) -> EpisodeRunner:
        """See MakeRunner."""
        return token_runner(env, attempt, model, settings, self._tokenizer)

    def for_agent(self, env: AgentEnv, attempt: Attempt, model: Engine, settings: RolloutSettings) -> EpisodeRunner:
        """See MakeRunner. The turns that the agent asks for are bounded, sampled and recorded by its session."""
        tokenizer = self._tokenizer.with_tool_format("hermes")  # the format of a chat endpoint's tools
        session = TokenSession(
            TokenGenerator(model, tokenizer, session_id=attempt.session_id, seed=settings.request_seed(attempt)),
            tokenizer=tokenizer,
            config=settings.config,
            sampling=settings.sampling(tokenizer),
            max_calls=settings.turn_budget(env),
        )
        return AgentRunner(env, attempt.task, session, self._proxy)


class EndpointRunners:
    """Episodes by messages, through any chat endpoint: for evaluation.

    player = GroupPlayer(make_env, settings_of(config), EndpointRunners())
    """

    def __init__(self) -> None:
        self._proxy = ChatProxy()

    def for_env(self, env: Env, attempt: Attempt, model: ChatModel, settings: RolloutSettings) -> EpisodeRunner:
        """See MakeRunner."""
        return EnvRunner(
            env,
            attempt.task,
            EndpointSpeaker(model, tools=env.tool_schemas(), config=settings.config),
            max_turns=settings.turn_budget(env),
            reset_timeout_s=settings.config.episode_timeout_s,
        )

    def for_agent(self, env: AgentEnv, attempt: Attempt, model: ChatModel, settings: RolloutSettings) -> EpisodeRunner:
        """See MakeRunner."""
        session = ForwardSession(model, config=settings.config, max_calls=settings.turn_budget(env))
        return AgentRunner(env, attempt.task, session, self._proxy)
