"""One streamed request against SGLang's ``/generate`` or an OpenAI-compatible server.

Times are taken when bytes arrive; token counts only from what the server states (``usage``, ``meta_info``),
never from the number of events. What a server sends is untrusted: sizes are bounded, numbers are checked.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_EVENT = 16 << 20  # bytes of one event: SGLang repeats the whole text in each
MAX_STREAM = 1 << 30  # bytes of one reply
MAX_BODY = 8 << 20  # bytes of a page such as /server_info
APIS = ("generate", "completions", "chat")
PATHS = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass
class Reply:
    """What one request brought. Seconds are of ``time.perf_counter``."""

    start_s: float
    sent_tokens: int = 0  # prompt tokens sent as ids; 0 where text was sent
    first_s: float | None = None  # when the first token arrived
    last_s: float | None = None  # when the last token arrived
    first_tokens: int = 1  # tokens that the first arrival brought: 1, unless the server says more
    marks: list[tuple[float, int | None]] = field(default_factory=list)  # arrival, tokens so far if told
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    verify_steps: int | None = None
    text: str = ""
    text_told: bool = False  # the server has a text field, so that an empty text is a finding
    reasoning: str = ""
    output_ids: list[int] = field(default_factory=list)
    content_events: int = 0  # events of an OpenAI stream that brought text: each is at least one token
    finish_reason: str = ""
    count_problems: list[str] = field(default_factory=list)
    saw_nan: bool = False
    error: str = ""  # "", or the name of a flag
    detail: str = ""
    status: int = 0  # of HTTP; -1 = no connection was made

    def summary(self) -> dict[str, Any]:
        """For the cell's line: no text, no marks."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self.start_s, 6)

        return {
            "first_s": since(self.first_s),
            "last_s": since(self.last_s),
            "events": len(self.marks),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "verify_steps": self.verify_steps,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


class _Malformed(Exception):
    pass


@dataclass
class Target:
    """A server and how to speak to it."""

    base_url: str
    api: str  # of APIS
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    extras: bool = True  # send fields beyond OpenAI's own: ignore_eos, continuous usage

    def body(self, prompt: list[int] | str, max_new_tokens: int) -> dict[str, Any]:
        """The request's JSON: greedy, streamed, exactly ``max_new_tokens`` long if the server can."""
        if self.api == "generate":
            key = "text" if isinstance(prompt, str) else "input_ids"
            sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
            return {key: prompt, "sampling_params": sampling, "stream": True}
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.extras:
            body["ignore_eos"] = True
            body["stream_options"]["continuous_usage_stats"] = True
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body


async def ask(
    http: httpx.AsyncClient,
    target: Target,
    prompt: list[int] | str,
    max_new_tokens: int,
    on_tokens: Callable[[Reply], None] | None = None,
    limit_s: float = math.inf,
) -> Reply:
    """Send one prompt and read its stream, for ``limit_s`` at most.

    Never raises for what a server does: ``Reply.error`` names it.
    """
    body = json.dumps(target.body(prompt, max_new_tokens)).encode()
    headers = {"content-type": "application/json", "accept": "text/event-stream", **target.headers}
    reply = Reply(start_s=time.perf_counter(), sent_tokens=0 if isinstance(prompt, str) else len(prompt))
    finished = False
    try:
        async with http.stream("POST", target.base_url + PATHS[target.api], content=body, headers=headers) as response:
            reply.status = response.status_code
            if response.status_code != 200:
                reply.error = "http_error"
                reply.detail = f"HTTP {response.status_code}: {printable(await _head(response))}"
                return reply
            async for moment, data in _events(response):
                if moment - reply.start_s > limit_s:
                    reply.error, reply.detail = "timeout", _where(reply, f"not finished in {limit_s:.0f} s")
                    return reply
                if data == b"[DONE]":
                    finished = True
                    continue
                before = len(reply.marks)
                _take(reply, target.api, _parse(data, reply), moment)
                if on_tokens and len(reply.marks) > before:
                    on_tokens(reply)
        if not finished and not reply.finish_reason and not reply.error:
            reply.error, reply.detail = "disconnect", _where(reply, "the stream ended with no finish reason")
    except _Malformed as problem:
        reply.error, reply.detail = "malformed", str(problem)
    except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
        reply.error, reply.detail, reply.status = (
            "disconnect",
            f"no connection: {printable(str(problem))}",
            -1,
        )
    except httpx.TimeoutException as problem:
        reply.error, reply.detail = "timeout", _where(reply, type(problem).__name__)
    except (httpx.HTTPError, httpx.StreamError, OSError) as problem:
        reply.error, reply.detail = (
            "disconnect",
            _where(reply, f"{type(problem).__name__}: {printable(str(problem))}"),
        )
    return reply


def _where(reply: Reply, what: str) -> str:
    return f"{what}, after {len(reply.marks)} arrivals of tokens"


async def _head(response: httpx.Response, limit: int = 2000) -> str:
    got = b""
    async for piece in response.aiter_bytes():
        got += piece
        if len(got) >= limit:
            break
    return got[:limit].decode(errors="replace")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """``data:`` lines with the time at which their last byte arrived."""
    pending = bytearray()
    total = 0
    async for piece in response.aiter_bytes():
        moment = time.perf_counter()
        total += len(piece)
        if total > MAX_STREAM:
            raise _Malformed(f"the reply is longer than {MAX_STREAM} bytes")
        start = len(pending)
        pending += piece
        while (newline := pending.find(b"\n", start)) >= 0:
            line = bytes(pending[:newline]).rstrip(b"\r")
            del pending[: newline + 1]
            start = 0
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()
            elif line[:1] == b"{":
                said = printable(line[:200].decode(errors="replace"))
                raise _Malformed(f"a bare JSON line in a stream of events: {said}")
        if len(pending) > MAX_EVENT:
            raise _Malformed(f"an event is longer than {MAX_EVENT} bytes")


def _parse(data: bytes, reply: Reply) -> dict[str, Any]:
    def constant(_: str) -> None:
        reply.saw_nan = True

    try:
        event = json.loads(data, parse_constant=constant)
    except (ValueError, RecursionError):
        raise _Malformed(f"an event is not JSON: {printable(data[:200].decode(errors='replace'))!r}") from None
    if not isinstance(event, dict):
        raise _Malformed(f"an event is {type(event).__name__}, not an object")
    return event


def _take(reply: Reply, api: str, event: dict[str, Any], moment: float) -> None:
    if error := event.get("error"):
        message = error.get("message", error) if isinstance(error, dict) else error
        reply.error, reply.detail = "http_error", f"an error inside the stream: {printable(str(message))}"
        return
    had = len(reply.text) + len(reply.reasoning) + len(reply.output_ids)
    told = reply.completion_tokens
    if api == "generate":
        _take_generate(reply, event)
    else:
        _take_openai(reply, event)
    has = len(reply.text) + len(reply.reasoning) + len(reply.output_ids)
    now = reply.completion_tokens
    if told is not None and now is not None and now < told:
        reply.count_problems.append(f"the count of tokens fell from {told} to {now}")
    # A closing event that only repeats the count brings no token.
    if has > had or (reply.marks and reply.marks[-1][1] is not None and (now or 0) > (told or 0)):
        if reply.first_s is None:
            reply.first_s = moment
            reply.first_tokens = now or 1
        reply.last_s = moment
        reply.marks.append((moment, now))


def _take_generate(reply: Reply, event: dict[str, Any]) -> None:
    meta = event.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    count = _count(meta, "completion_tokens", reply)
    ids, text = event.get("output_ids"), event.get("text")
    # SGLang repeats the whole output in each event, or sends what is new (--incremental-streaming-output).
    appended = False
    if isinstance(ids, list):
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _Malformed("output_ids holds something that is no integer")
        have = len(reply.output_ids)
        appended = have > 0 and count is not None and len(ids) != count and have + len(ids) == count
        reply.output_ids = reply.output_ids + ids if appended else ids
    if isinstance(text, str):
        reply.text_told = True
        reply.text = text if not appended and text.startswith(reply.text) else reply.text + text
    if count is not None:
        reply.completion_tokens = count
    for name, key in (("prompt_tokens",) * 2, ("cached_tokens",) * 2, ("verify_steps", "spec_verify_ct")):
        if (value := _count(meta, key, reply)) is not None:
            setattr(reply, name, value)
    if reason := meta.get("finish_reason"):
        kind = reason.get("type") if isinstance(reason, dict) else reason
        reply.finish_reason = printable(str(kind), 60)
        if kind == "abort":
            detail = reason.get("message") if isinstance(reason, dict) else ""
            reply.error, reply.detail = (
                "http_error",
                f"the server aborted the request: {printable(str(detail))}",
            )


def _take_openai(reply: Reply, event: dict[str, Any]) -> None:
    choices = event.get("choices")
    for choice in choices[:1] if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            raise _Malformed("choices holds something that is no object")
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else {}
        text = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if isinstance(text, str) and isinstance(reasoning, str) and (text or reasoning):
            reply.text += text
            reply.reasoning += reasoning
            reply.content_events += 1
        if reason := choice.get("finish_reason"):
            reply.finish_reason = printable(str(reason), 60)
    usage = event.get("usage")
    if isinstance(usage, dict):
        prompt, completion = _count(usage, "prompt_tokens", reply), _count(usage, "completion_tokens", reply)
        total = _count(usage, "total_tokens", reply)
        if None not in (prompt, completion, total) and total != prompt + completion:
            reply.count_problems.append(f"usage says {prompt} + {completion} = {total} tokens")
        reply.prompt_tokens = prompt if prompt is not None else reply.prompt_tokens
        reply.completion_tokens = completion if completion is not None else reply.completion_tokens
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and (cached := _count(details, "cached_tokens", reply)) is not None:
            reply.cached_tokens = cached


def _count(source: dict[str, Any], key: str, reply: Reply) -> int | None:
    value = source.get(key)
    if isinstance(value, float) and not math.isfinite(value):
        reply.saw_nan = True
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        return None
    return int(value) if 0 <= value < 1 << 40 else None


async def page(http: httpx.AsyncClient, target: Target, path: str, body: dict[str, Any] | None = None) -> bytes | None:
    """GET (or POST) a small page; None where the server has none or it is longer than ``MAX_BODY``."""
    try:
        method = "GET" if body is None else "POST"
        async with http.stream(method, target.base_url + path, json=body, headers=target.headers, timeout=30) as got:
            if got.status_code != 200:
                return None
            content = b""
            async for piece in got.aiter_bytes():
                content += piece
                if len(content) > MAX_BODY:
                    return None
            return content
    except (httpx.HTTPError, httpx.InvalidURL, OSError):
        return None


async def json_page(
    http: httpx.AsyncClient, target: Target, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """``page`` as a JSON object, or None."""
    content = await page(http, target, path, body)
    try:
        value = json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def printable(text: str, limit: int = 300) -> str:
    """A server's words on one line, with no control characters, at most ``limit`` long."""
    return "".join(c if c.isprintable() else " " for c in text[: 4 * limit]).strip()[:limit]
