"""A real HTTP server that answers as vLLM and SGLang do, with the tiny target, and fails as it is told to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from helpers_data import byte_tokenizer

from dflash.data.chat import render_prompt
from dflash.data.generate import Question, Sampling, answer

_WRITTEN: dict[tuple[int, tuple[int, ...], int], list[int]] = {}

Fault = Callable[[str, int], str | None]  # (prompt in tokens, how often it was asked before) -> what goes wrong


class TargetServer(ThreadingHTTPServer):
    """Serves `model`; what it was asked and what it answered can be looked at."""

    daemon_threads = True

    def __init__(
        self, model: Any, *, gives_ids: bool = True, fault: Fault = lambda _prompt, _times: None, **changes: Any
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.tokenizer = byte_tokenizer()
        self.gives_ids = gives_ids
        self.fault = fault
        self.change: Callable[[dict[str, Any]], None] = changes.get("change", lambda _reply: None)
        self.models = changes.get("models", ["tiny"])
        self.bodies: list[dict[str, Any]] = []
        self.headers_seen: list[Any] = []
        self.arrivals: list[float] = []  # seconds of the monotonic clock
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.at_one_time = 0
        self.most_at_one_time = 0
        self.dead = False
        self.ended = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Root of the API."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def die(self) -> None:
        """Answer nothing any more, on old connections either."""
        self.dead = True
        self.socket.close()

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are no news."""

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        """The prompt of a request in tokens, as this server's template renders it."""
        return list(body["prompt"]) if "prompt" in body else render_prompt(self.tokenizer, body["messages"])

    def _written(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """The target's greedy answer; computed once for all servers."""
        key = (id(self.model), prompt, max_tokens)
        if key not in _WRITTEN:
            sampling = Sampling(max_new_tokens=max_tokens, end_token_ids={self.tokenizer.eos_token_id})
            _WRITTEN[key] = answer(self.model, [Question(sample_id="", ids=prompt)], sampling)[0]
        return _WRITTEN[key]

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the target answers."""
        prompt, end = self.prompt_ids(body), self.tokenizer.eos_token_id
        with self.lock:
            ids = self._written(tuple(prompt), body["max_tokens"])
        stopped = ids[-1] == end
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        text = self.tokenizer.decode(ids[:-1] if stopped else ids)
        choice |= {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        reply = {"id": "1", "object": "x", "choices": [choice], "usage": {"completion_tokens": len(ids)}}
        self.change(reply)
        return reply


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TargetServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.dead:
            self._hang_up()
        else:
            self._send(200, json.dumps({"object": "list", "data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = json.dumps(server.prompt_ids(body))
        with server.lock:
            server.bodies.append(body)
            server.headers_seen.append(self.headers)
            server.arrivals.append(time.monotonic())
            times = server.asked[key]
            server.asked[key] += 1
            server.at_one_time += 1
            server.most_at_one_time = max(server.most_at_one_time, server.at_one_time)
        try:
            self._respond(body, key, "dead" if server.dead else server.fault(key, times))
        finally:
            with server.lock:
                server.at_one_time -= 1

    def _respond(self, body: dict[str, Any], key: str, fault: str | None) -> None:
        if fault in ("dead", "cut"):
            if fault == "cut":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + b'{"choices": [')
            self._hang_up()
            return
        if fault == "slow":
            self.server.ended.wait()  # longer than any client waits
            return
        if fault is not None and fault.isdecimal():
            self._send(int(fault), json.dumps({"error": {"message": "planted"}}))
            return
        if fault == "later":
            self._send(429, "{}", {"Retry-After": "1"})
            return
        text = fault.removeprefix("say ") if fault and fault.startswith("say ") else json.dumps(self.server.reply(body))
        self._send(200, text)
        with self.server.lock:
            self.server.answered[key] += fault is None

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(model: Any, **settings: Any) -> Iterator[TargetServer]:
    """A server in a thread of its own, until the end of the block."""
    with TargetServer(model, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="server")
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
