"""One question to a server that runs the target: what is sent, and what may be trusted of what comes back.

`completions` sends the prompt in tokens, rendered here, so that neither the server's template nor its tokenizer is asked;
`chat` sends the messages, for servers that offer nothing else. With `extras` the request also asks, in the words that vLLM
and SGLang share, for the token ids of the answer (`return_token_ids`) and for sampling from the raw distribution, without the
top-k or the repetition penalty of the model's own generation config. Ids that come back are the answer; text alone is
tokenized here, and such answers are counted, because the target may have written it in other tokens.

A reply that cannot be the target's stops the run (`DataError`): ids outside the vocabulary, or a prompt that the server
rendered to other tokens. One that has no answer in it fails for good (`Refused`) or may be asked again (`Unavailable`).

Known limits: whether the server's weights are the target's cannot be seen from here; a chat server that takes reasoning or
tool calls out of the text and gives no ids is refused, since the text that was written is not known.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Self

import httpx

from dflash.command_config import PrepareConfig
from dflash.config import ConfigError
from dflash.data.answers import Answer
from dflash.data.generate import Question
from dflash.data.meta import DataError, PrepareFailed
from dflash.data.retrying import retry_after_seconds
from dflash.data.shelf import Prompt

_AGAIN = frozenset({408, 409, 425, 429})  # and everything from 500
_USAGE = frozenset({301, 302, 307, 308, 401, 403, 404, 405})  # no question will fare better
_STOPPED = frozenset({"stop", "tool_calls", "function_call"})
_AGAIN_FINISHES = frozenset({None, "abort", "error"})
_EXCERPT = 200  # characters of a reply that messages repeat


class Unavailable(Exception):
    """No answer this time: asked again later."""

    def __init__(self, reason: str, detail: str = "", *, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.wait_seconds = reason, detail or reason, wait_seconds


class Refused(Exception):
    """No answer to this question, whenever it is asked."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the client must know of the target. Filled by `prepare`."""

    tokenizer: Any
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Server:
    """An OpenAI-compatible server; an asynchronous context manager."""

    def __init__(self, config: PrepareConfig, served: Served) -> None:
        assert config.server is not None
        self.root = config.server.rstrip("/")
        self.model = config.server_model or ""
        self._config = config
        self._served = served
        limits = httpx.Limits(max_connections=config.server_concurrency + 1, max_keepalive_connections=config.server_concurrency)
        # One request's time is limited as a whole, below: a limit on each read would let a trickle go on for ever.
        self._client = httpx.AsyncClient(headers=_headers(config), limits=limits, timeout=None)  # noqa: S113

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def choose_model(self) -> None:
        """Take the model that is asked for, or the only one. Raises ConfigError when that is not to be had there."""
        try:
            response = await self._within(self._client.get(f"{self.root}/models"))
        except Unavailable as error:
            raise PrepareFailed(f"{self.root} does not answer ({error.detail}): start the server") from error
        names: list[str] = []
        try:
            names = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            if response.status_code in _USAGE - {404, 405}:
                raise ConfigError(self._usage(response)) from None
        if self.model and names and self.model not in names:
            raise ConfigError(f"{self.root} has no model {self.model!r}, found {', '.join(names)}: name one with --server-model")
        if not self.model and len(names) != 1:
            raise ConfigError(f"{self.root} names {len(names)} models ({', '.join(names)}): name one with --server-model")
        self.model = self.model or names[0]

    async def answers_at_all(self) -> bool:
        """Whether anything answers there now."""
        try:
            await self._within(self._client.get(f"{self.root}/models"), seconds=min(10.0, self._config.server_timeout_seconds))
        except Unavailable:
            return False
        return True

    async def ask(self, question: Question, prompt: Prompt) -> Answer:
        """The answer to one question, asked once. Raises Unavailable, Refused, or for all questions DataError, ConfigError."""
        path, body = self.request(question, prompt)
        response = await self._within(self._client.post(f"{self.root}{path}", json=body))
        if response.status_code in _AGAIN or response.status_code >= 500:
            wait = retry_after_seconds(response.headers.get("retry-after"), now_unix_seconds=time.time())
            raise Unavailable(f"HTTP {response.status_code}", _excerpt(response), wait_seconds=wait)
        if response.status_code in _USAGE:
            raise ConfigError(self._usage(response))
        if response.status_code != 200:
            raise Refused(f"HTTP {response.status_code}", _excerpt(response))
        try:
            choice, echoed = _choice_of(response.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise Unavailable("malformed reply", f"{type(error).__name__}: {error}: {_excerpt(response)}") from error
        return self._answer(question, choice, echoed)

    def request(self, question: Question, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of the request for one question."""
        config = self._config
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": 1.0,
            "stream": False,
        }
        if config.temperature > 0:
            body["seed"] = _seed(config.seed, question.sample_id)
        if config.server_extras:
            body |= {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
            body |= {"stop_token_ids": list(self._served.end_token_ids), "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        if config.server_api == "completions":
            return "/completions", {**body, "prompt": list(question.ids)}
        body["messages"] = list(prompt.messages)
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if config.server_extras:
            body["chat_template_kwargs"] = {"enable_thinking": config.enable_thinking}
        return "/chat/completions", body

    def _answer(self, question: Question, choice: dict[str, Any], echoed: Any) -> Answer:
        finish = choice.get("finish_reason")
        if finish in _AGAIN_FINISHES:
            raise Unavailable(f"finish reason {finish}")
        if finish not in _STOPPED and finish != "length":
            raise Refused(f"finish reason {finish}")
        if echoed is not None and [int(token) for token in echoed] != [int(token) for token in question.ids]:
            raise DataError(self._rendered_otherwise(question, echoed))
        ids, exact = choice.get("token_ids"), True
        if ids is None:
            ids, exact = self._tokenized(choice), False
        ids = self._to_first_end(ids, stopped=finish in _STOPPED, by=choice.get("stop_reason", choice.get("matched_stop")))
        if not ids:
            raise Refused("empty answer")
        wrong = next((token for token in ids if not 0 <= token < self._served.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{self.root} answers with token id {wrong}, the target {self._config.target.path!r} has a vocabulary of "
                f"{self._served.vocab_size}: let the server run that target, or name the other one with --target.path"
            )
        return Answer.of(ids, self._served.end_token_ids, exact=exact)

    def _tokenized(self, choice: dict[str, Any]) -> list[int]:
        message = choice.get("message") or {}
        taken_out = next((key for key in ("reasoning_content", "reasoning", "tool_calls") if message.get(key)), None)
        if taken_out is not None:
            raise Refused(f"the server took {taken_out} out of the text and gives no token ids")
        text = message.get("content") if message else choice.get("text")
        return list(self._served.tokenizer(text or "", add_special_tokens=False, verbose=False)["input_ids"])

    def _to_first_end(self, ids: Any, *, stopped: bool, by: Any) -> list[int]:
        """Up to the first end token. Servers that were stopped by one may leave it out: it is put back."""
        found = [int(token) for token in ids]
        ends = self._served.end_token_ids
        first = next((i for i, token in enumerate(found) if token in ends), None)
        if first is not None:
            return found[: first + 1]
        own = getattr(self._served.tokenizer, "eos_token_id", None)
        end = by if by in ends else own if own in ends else ends[0]
        return [*found, end] if stopped and found else found

    async def _within(self, request: Any, *, seconds: float | None = None) -> httpx.Response:
        limit = seconds or self._config.server_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                response: httpx.Response = await request
        except TimeoutError:
            raise Unavailable("no reply in time", f"no reply in {limit:g} s") from None
        except httpx.InvalidURL as error:
            raise ConfigError(f"server is {self.root!r}: {error}") from error
        except httpx.HTTPError as error:
            raise Unavailable(type(error).__name__, f"{type(error).__name__}: {error}") from error
        return response

    def _usage(self, response: httpx.Response) -> str:
        fix = {
            401: "name the environment variable that holds the key with --server-key-variable",
            403: "name the environment variable that holds a key with that right with --server-key-variable",
            404: "is --server the root of the API, as in http://HOST:8000/v1, and --server-model right?",
        }.get(response.status_code, "check --server and --server-api")
        return f"{response.request.url} says HTTP {response.status_code} ({_excerpt(response)}): {fix}"

    def _rendered_otherwise(self, question: Question, echoed: Any) -> str:
        pairs = zip(echoed, question.ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(echoed), len(question.ids)))
        decode = self._served.tokenizer.decode
        return (
            f"{self.root} asked the target in {len(echoed)} tokens, prompt {question.sample_id!r} has {len(question.ids)} here, "
            f"and they differ from token {same} on ({decode(echoed[same : same + 8])!r} there, "
            f"{decode(list(question.ids)[same : same + 8])!r} here): the server has another chat template, thinking mode or "
            "tokenizer; use --server-api completions, or serve with the target's own"
        )


def _choice_of(reply: Any) -> tuple[dict[str, Any], Any]:
    """The one choice of a reply, and the tokens of the prompt if they came back. Raises what `ask` takes for malformed."""
    choice = reply["choices"][0]
    ids = choice.get("token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise TypeError("token_ids are no list of integers")
    message = choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    if ids is None and text is None and not message:
        raise KeyError("neither token_ids, text nor message")
    if text is not None and not isinstance(text, str):
        raise TypeError("text is no text")
    echoed = choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
    return choice, echoed if isinstance(echoed, list) else None


def _headers(config: PrepareConfig) -> dict[str, str]:
    if config.server_key_variable is None:
        return {}
    key = os.environ.get(config.server_key_variable)
    if not key:
        raise ConfigError(f"the environment variable {config.server_key_variable} is empty or not set: put the API key there")
    return {"Authorization": f"Bearer {key}"}


def _seed(seed: int, sample_id: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{sample_id}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1  # servers take 31 bits


def _excerpt(response: httpx.Response) -> str:
    text = " ".join(response.text.split())
    return json.dumps(text[:_EXCERPT] + ("..." if len(text) > _EXCERPT else ""), ensure_ascii=False)
