"""A model behind any OpenAI-compatible endpoint: messages in, a message out. For evaluation: it returns no token ids.

Uses OpenAI's client library; independent of episodes and rewards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn, Self

from agentrl.chat.openai_schema import message_body, read_arguments
from agentrl.errors import ConfigError, EngineError, EngineGone, MissingDependencyError
from agentrl.tokens.tool_calls import OPEN, parse_hermes
from agentrl.types import FinishReason, Message, ToolCall

MAX_RETRIES = 5
PROBE_TIMEOUT_S = 10.0


class PromptTooLong(Exception):
    """The endpoint refused messages that do not fit its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the model. The token counts are the endpoint's; 0 if it reports none.

    reply = await model.say(messages, tools, max_tokens=100, temperature=1.0, top_p=1.0)
    reply.message.tool_calls, reply.finish_reason
    """

    message: Message
    parse_errors: tuple[str, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    generate_s: float = 0.0  # time to the answer, the client library's retries included


class ChatModel:
    """Client of one endpoint.

        async with ChatModel(url, model="gpt-5", api_key=key, api_key_name="OPENAI_API_KEY", request_timeout_s=60) as m:
            reply = await m.say([user("hello")], (), max_tokens=100, temperature=1.0, top_p=1.0)

    Args:
        url: base URL in the form that OpenAI's clients expect; it usually ends in /v1.
        model: the name under which the endpoint serves it.
        api_key: sent as a bearer token; None if the endpoint needs none.
        api_key_name: the environment variable that holds the key, for error messages.
        request_timeout_s: deadline of one attempt.
        max_retries: attempts after the first, on a lost connection, a rate limit or a server error.

    Raises MissingDependencyError without the openai package.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None,
        api_key_name: str,
        request_timeout_s: float,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            need = "a model behind an OpenAI-compatible endpoint needs the openai package"
            raise MissingDependencyError.of_extra(need, "chat") from error
        self._openai = openai
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=api_key or "none", timeout=request_timeout_s, max_retries=max_retries
        )
        self._what = f"model {model!r} at {url}"
        self._model = model
        self._api_key_name = api_key_name
        self._num_tries = max_retries + 1
        self._names: dict[str, str] = {}
        self._omitted: set[str] = set()

    async def __aenter__(self) -> Self:
        """Raises EngineGone where nothing listens, before hundreds of episodes each find out and try again."""
        openai = self._openai
        try:
            await self._client.with_options(max_retries=0, timeout=PROBE_TIMEOUT_S).models.list()
        except openai.APITimeoutError:
            pass  # something listens
        except openai.APIConnectionError as error:
            await self._client.close()
            raise EngineGone(
                f"{self._what} does not answer: {error.__cause__ or error}; does the server run?"
            ) from None
        except openai.OpenAIError:
            pass  # any answer will do: not every endpoint lists its models
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def say(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The next message. Raises PromptTooLong, ConfigError for what the user can fix, else EngineError."""
        wanted: dict[str, Any] = {
            "model": self._model,
            "messages": [_outgoing(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            **({"tools": list(tools)} if tools else {}),
            **({"stop": list(stop)} if stop else {}),
        }
        create: Any = self._client.chat.completions.create
        started = time.monotonic()
        while True:
            fields = {self._names.get(name, name): value for name, value in wanted.items() if name not in self._omitted}
            try:
                reply = self._read(await create(**fields), has_tools=bool(tools))
                return replace(reply, generate_s=time.monotonic() - started)
            except self._openai.OpenAIError as error:
                if not self._adapted(error, fields):
                    self._refused(error)

    def _adapted(self, error: Any, fields: dict[str, Any]) -> bool:
        """Adapt to models with another name for the limit, or without sampling settings; whether to try again."""
        param = getattr(error, "param", None)
        if param not in fields or getattr(error, "code", None) not in ("unsupported_parameter", "unsupported_value"):
            return False
        if param == "max_tokens":
            self._names[param] = "max_completion_tokens"
        elif param in ("temperature", "top_p") and fields[param] == 1:  # 1 is the default of the models that refuse it
            self._omitted.add(param)
        else:
            return False
        return True

    def _refused(self, error: Any) -> NoReturn:
        openai = self._openai
        text = " ".join(str(error).split())[:500]
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            raise ConfigError(f"{self._what} refuses the key; set {self._api_key_name} ({text})") from error
        if isinstance(error, openai.NotFoundError):
            raise ConfigError(
                f"{self._what} was not found; does the URL end as its service documents, usually in /v1, and is this "
                f"the served name? ({text})"
            ) from error
        if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
            if error.code == "context_length_exceeded" or "maximum context length" in text:
                raise PromptTooLong(text) from error
            hint = (
                "; start vLLM with --enable-auto-tool-choice --tool-call-parser hermes" if "tool-call" in text else ""
            )
            raise ConfigError(f"{self._what} refuses the request: {text}{hint}") from error
        if isinstance(error, openai.APITimeoutError):
            raise EngineError(f"{self._what} did not answer in time, {self._num_tries} times") from error
        raise EngineError(f"{self._what} failed, {self._num_tries} times: {type(error).__name__}: {text}") from error

    def _read(self, answer: Any, *, has_tools: bool) -> Reply:
        if not answer.choices:
            raise EngineError(f"{self._what} answered without a choice")
        choice = answer.choices[0]
        message, errors = _incoming(choice.message, has_tools=has_tools)
        return Reply(
            message=message,
            parse_errors=errors,
            finish_reason=FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP,
            num_prompt_tokens=answer.usage.prompt_tokens if answer.usage else 0,
            num_completion_tokens=answer.usage.completion_tokens if answer.usage else 0,
        )


def _outgoing(message: Message) -> dict[str, Any]:
    """The message in OpenAI's format. An answer to a call that did not parse has no id: it is sent as a user's."""
    if message.role == "tool" and not message.tool_call_id:
        return {"role": "user", "content": message.content}
    return message_body(message)


def _incoming(message: Any, *, has_tools: bool) -> tuple[Message, tuple[str, ...]]:
    """The message with its calls, and the errors of calls that did not parse, which stay in the text."""
    content: str = message.content or ""
    calls: list[ToolCall] = []
    errors: list[str] = []
    if has_tools and OPEN in content:  # the server left malformed calls, or all calls, in the text
        parsed = parse_hermes(content)
        content, calls, errors = parsed.content, list(parsed.tool_calls), list(parsed.errors)
    for call in message.tool_calls or ():
        if call.type != "function":
            errors.append(f"a call of type {call.type!r} is not known")
            continue
        try:
            arguments = read_arguments(call.function.arguments)
        except ValueError as error:
            errors.append(f"the arguments of {call.function.name!r} are {error}")
            content += f"\n{call.function.name}({call.function.arguments})"
        else:
            calls.append(ToolCall(id=call.id, name=call.function.name, arguments=arguments))
    return Message(role="assistant", content=content, tool_calls=tuple(calls)), tuple(errors)
