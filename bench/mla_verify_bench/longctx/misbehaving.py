"""A server that streams at a known rate and misbehaves on request, for the benchmark's own gates.

A real HTTP server on 127.0.0.1 that speaks SGLang's ``/generate`` and ``/server_info`` and OpenAI's
completions. What it does with a request is decided by the prompt's length, so one run meets every
behaviour, cell by cell.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BEHAVIOURS = (
    "good", "multi_token_events", "incremental", "reasoning_only", "no_usage", "cached", "loop", "late_loop",
    "empty", "nan_text", "nan_figure", "early_stop", "disconnect", "http_error", "error_in_stream", "garbage",
    "miscount", "usage_sum", "silence", "stall", "flood",
)  # fmt: skip


@dataclass
class Script:
    """How the server behaves: ``by_depth`` names a behaviour by the prompt's tokens; others are ``good``."""

    by_depth: Mapping[int, str] = field(default_factory=dict)
    tokens_per_second: float = 2000.0
    ttft_s: float = 0.005
    accept_length: int = 1  # above 1 the server says that it speculates, and sends so many tokens per event
    slow_requests: int = 0  # the first so many requests take SLOW times as long
    pool_tokens: int = 1 << 20
    dies_at: int = 0  # a prompt of so many tokens makes the server go away in mid-stream
    refuses_extras: bool = False  # 400 for request fields that are not OpenAI's
    says_sglang: bool = True

    SLOW = 8.0


class MisbehavingServer:
    """``with MisbehavingServer(script) as server: … server.url``; ``server.prompts`` lists what was asked.

    ``server.rates``: decode tok/s of each reply by the server's own clock, which a busy machine slows below the
    script's.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.prompts: list[Any] = []
        self.rates: list[float] = []
        self.lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> MisbehavingServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop listening; what is in flight breaks off."""
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of: MisbehavingServer

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        script = self.server_of.script
        if self.path == "/server_info" and script.says_sglang:
            speculates = script.accept_length > 1
            self._json(
                {
                    "version": "0.0.test",
                    "max_total_num_tokens": script.pool_tokens,
                    "context_length": 1 << 20,
                    "attention_backend": "fake",
                    "speculative_algorithm": "NGRAM" if speculates else None,
                    "speculative_num_draft_tokens": 8 if speculates else None,
                    "skip_tokenizer_init": True,
                }
            )
        elif self.path == "/v1/models":
            self._json({"data": [{"id": "fake-model"}]})
        elif self.path == "/health":
            self._json({})
        else:
            self._json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        owner, script = self.server_of, self.server_of.script
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            api, prompt, count = "generate", body["input_ids"], body["sampling_params"]["max_new_tokens"]
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            api = self.path.rsplit("/", 1)[0].removeprefix("/v1/") if "chat" in self.path else "completions"
            prompt = body["messages"][0]["content"] if api == "chat" else body["prompt"]
            count = body["max_tokens"]
        else:
            return self._json({"error": "not found"}, 404)
        if script.refuses_extras and "ignore_eos" in body:
            return self._json({"error": {"message": "Unrecognized request argument: ignore_eos"}}, 400)
        with owner.lock:
            owner.prompts.append(prompt)
            number = len(owner.prompts)
        depth = len(prompt.split(" ")) if isinstance(prompt, str) else len(prompt)
        # Text comes near to a depth only: the nearest behaviour within a tenth is meant.
        near = min(script.by_depth, key=lambda d: abs(d - depth), default=0)
        behaviour = script.by_depth[near] if near and abs(near - depth) <= near * 0.1 else "good"
        try:
            if behaviour == "http_error":
                return self._json({"error": {"message": "out of \x1b[31mmemory"}}, 503)
            self._stream(api, behaviour, depth, count, script.SLOW if number <= script.slow_requests else 1.0)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has seen enough

    def _stream(self, api: str, behaviour: str, depth: int, count: int, slow: float) -> None:
        script = self.server_of.script
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        begin = time.perf_counter() + script.ttft_s * slow
        end = count // 2 if behaviour in ("early_stop", "disconnect") else count
        step = 4 if behaviour == "multi_token_events" else script.accept_length
        ids = list(range(100, 100 + count))
        if behaviour == "loop":
            ids = [7, 8] * count
        elif behaviour == "late_loop":
            ids[count // 2 :] = [7, 8] * count
        words = ["nan" if behaviour == "nan_text" else f"w{i}" for i in ids]
        done, first_sent, sent = 0, 0.0, 0.0
        while done < end:
            before, done = done, 1 if done == 0 else min(end, done + step)
            late = 0.5 if behaviour == "stall" and done > count // 2 else 0.0
            due = begin + slow * (done - 1) / script.tokens_per_second + late
            time.sleep(max(0.0, due - time.perf_counter()))
            if behaviour == "silence" and done > 3:
                time.sleep(30.0)
            if behaviour == "error_in_stream" and done > 3:
                self._send({"error": {"message": "CUDA error: an illegal memory access"}})
                return
            if behaviour == "garbage" and done > 3:
                self._write(b"data: {half an ev\n\n")
                return
            if behaviour == "flood" and done > 3:
                self._write(b"data: " + b"x" * (17 << 20))
                return
            if script.dies_at == depth and done > 3:
                threading.Thread(target=self.server_of.die, daemon=True).start()
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            for event in self._events(api, behaviour, depth, ids, words, before, done, count, end):
                self._send(event)
            sent = time.perf_counter()
            first_sent = sent if done == 1 else first_sent
        if sent > first_sent:
            self.server_of.rates.append((end - 1) / (sent - first_sent))
        if behaviour == "disconnect":
            return
        if api != "generate" and behaviour != "no_usage":
            self._send({"choices": [], "usage": self._usage(behaviour, depth, end)})
        self._write(b"data: [DONE]\n\n")

    def _events(
        self,
        api: str,
        behaviour: str,
        depth: int,
        ids: list,
        words: list,
        before: int,
        done: int,
        asked: int,
        end: int,
    ) -> Iterator[dict[str, Any]]:
        finish = ("length" if end == asked else "stop") if done == end else None
        if behaviour == "disconnect":
            finish = None
        first = before if behaviour == "incremental" else 0
        if behaviour == "empty":
            words = []
        if api == "generate":
            meta: dict[str, Any] = {
                "prompt_tokens": depth,
                "completion_tokens": done + (5 if behaviour == "miscount" else 0),
                "cached_tokens": depth // 2 if behaviour == "cached" else 0,
                "finish_reason": {"type": finish} if finish else None,
            }
            if behaviour == "no_usage":
                meta = {"finish_reason": meta["finish_reason"]}
            if behaviour == "nan_figure":
                meta["spec_accept_length"] = float("nan")
            if finish and self.server_of.script.accept_length > 1:
                meta["spec_verify_ct"] = -(-(done - 1) // self.server_of.script.accept_length)
            event = {"text": " ".join(words[first:done]), "meta_info": meta}
            event["output_ids"] = ids[first:done]
            yield event
            return
        piece = "".join(w + " " for w in words[before:done])
        delta = {"reasoning_content": piece} if behaviour == "reasoning_only" else {"content": piece}
        yield {"choices": [{"delta": delta} if api == "chat" else {"text": piece}] if piece else []}
        if finish:
            yield {"choices": [{"delta": {}, "text": "", "finish_reason": finish}]}

    def _usage(self, behaviour: str, depth: int, count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": depth,
            "completion_tokens": count // 2 if behaviour == "miscount" else count,
            "prompt_tokens_details": {"cached_tokens": depth // 2 if behaviour == "cached" else 0},
        }
        usage["total_tokens"] = depth + usage["completion_tokens"] + (3 if behaviour == "usage_sum" else 0)
        if behaviour == "nan_figure":
            usage["cost"] = float("nan")
        return usage

    def _send(self, event: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()
