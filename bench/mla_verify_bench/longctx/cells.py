"""A cell of the benchmark: what was asked, what was measured, and whether the figures may be believed.

``judge`` is pure: replies in, figures and flags out. A flagged cell is shown and kept, never called valid.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .client import Reply

SCHEMA = 1
MAX_LINE = 1 << 20  # a cell is a few kilobytes; a longer line is not ours

FLAGS = {
    "http_error": "the server answered with an error",
    "disconnect": "the stream broke off",
    "timeout": "the server went silent",
    "malformed": "the reply is not the protocol's",
    "no_usage": "the server told no token counts",
    "count_mismatch": "token counts contradict each other",
    "nan": "a figure or the text is NaN",
    "no_text": "no text came",
    "cached": "part of the prompt came from the prefix cache: TTFT and prefill are too good",
    "loop": "the text is a loop of few tokens: acceptance and tok/s are too good",
    "stopped_early": "fewer tokens than asked for",
    "depth_off": "the prompt is not as deep as asked for",
    "over_pool": "prompt and output don't fit the server's K/V pool",
    "cold": "nothing warmed the server up: compilation may be in the figures",
    "stall": "a single pause makes up much of the decode time",
    "no_steady_window": "one request's decode ran beside another's prefill for most of its time",
}
"""Why a cell is not valid -> what that means."""

RETRY = frozenset({"http_error", "disconnect", "timeout", "malformed", "cold", "stall"})
"""A resumed run measures cells with these flags again: another attempt may go better."""

WARM_SHARE, WARM_S = 1.5, 0.2  # a round slower than the next by this factor and more than this was cold
DEPTH_TOLERANCE = 0.05
STALL_SHARE, STALL_GAPS, STALL_RATIO = 1 / 3, 16, 8.0
STALL_S = 0.2  # a shorter pause is the scheduler of a busy machine
STEADY_SHARE = 0.25  # of the decoded tokens have to lie where all requests decode
TEXT_CACHE_SHARE = 0.01  # a chat template or BOS is shared by every prompt sent as text


class Flag(BaseModel):
    """One reason not to believe a cell."""

    model_config = ConfigDict(extra="forbid")
    name: str
    detail: str


class Facts(BaseModel):
    """What a server says about itself. Nothing here is trusted beyond showing it and sizing the requests."""

    model_config = ConfigDict(extra="ignore")
    api: str = ""
    name: str = ""  # sglang, or "" where the server doesn't say
    version: str = ""
    model: str = ""
    model_path: str = ""
    device: str = ""
    attention_backend: str = ""
    speculative_algorithm: str = ""
    speculative_num_draft_tokens: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    page_size: int = 0
    tp_size: int = 1
    pool_tokens: int = 0  # 0 = not told
    max_request_tokens: int = 0  # prompt and output of one request; 0 = not told
    has_tokenizer: bool = True


class Run(BaseModel):
    """What all cells of one start of the benchmark share."""

    model_config = ConfigDict(extra="forbid")
    id: str
    started: str  # UTC, ISO 8601
    command: list[str]
    seed: int
    nonce: str  # in every prompt's first tokens, so that no two runs share a prefix
    max_new_tokens: int
    base_url: str
    embedded: bool  # the server was started by the benchmark
    server: Facts
    server_command: list[str] = []
    kv_bytes_per_token: int = 0  # of one rank, all layers; 0 = not known
    hardware: dict[str, Any] = {}
    versions: dict[str, str] = {}


class Key(BaseModel):
    """Which cell of the grid."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    label: str
    depth: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    text: str
    repeat: int = Field(default=0, ge=0)


class Telemetry(BaseModel):
    """Means over a cell, from NVML, of this machine's GPU 0."""

    model_config = ConfigDict(extra="forbid")
    samples: int
    sm_busy_percent: float
    memory_busy_percent: float
    power_w: float
    sm_clock_mhz: float
    temperature_c: float
    memory_used_gib: float


class Figures(BaseModel):
    """None = not measurable here. Seconds, tokens, milliseconds, 1e9 bytes."""

    model_config = ConfigDict(extra="forbid")
    prompt_tokens: int | None = None  # mean of a request
    completion_tokens: int | None = None  # mean of a request
    cached_tokens: int | None = None  # sum
    ttft_s: float | None = None  # median of the requests
    prefill_tok_s: float | None = None  # all requests together
    decode_tok_s: float | None = None  # one request
    total_tok_s: float | None = None  # all requests together
    accept_length: float | None = None  # tokens committed per verify step; 1 without speculation
    verify_steps: float | None = None  # mean of a request
    ms_per_step: float | None = None
    kv_read_gb_s: float | None = None  # K/V bytes of one rank at this depth over the time of a step
    distinct_share: float | None = None  # of the output's tokens


class Cell(BaseModel):
    """One line of ``cells.jsonl``."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int = SCHEMA
    key: Key
    figures: Figures
    flags: list[Flag]
    seconds: float
    attempts: int = 1
    text_source: str = ""
    telemetry: Telemetry | None = None
    sample: str = ""  # how the first reply's text begins
    requests: list[dict[str, Any]] = []
    run: Run

    @property
    def valid(self) -> bool:
        return not self.flags

    @property
    def reasons(self) -> str:
        return "; ".join(f"{f.name}: {f.detail}" for f in self.flags)


def judge(
    replies: Sequence[Reply],
    key: Key,
    *,
    max_new_tokens: int,
    as_text: bool,
    speculates: bool | None,
    counted_steps: int | None = None,
    kv_bytes_per_token: int = 0,
    cold: str = "",
) -> tuple[Figures, list[Flag]]:
    """Figures and flags of one cell.

    ``as_text``: prompts were sent as text; their length is only near to the depth, and a template is shared.
    ``speculates``: None = the server doesn't say. ``counted_steps``: verify steps by the server's counters,
    differenced. ``cold``: why the server can't be taken as warmed up, or "".
    """
    flags: dict[str, str] = {}
    for reply in replies:
        _judge_reply(reply, key, max_new_tokens, as_text, flags)
    if cold:
        flags.setdefault("cold", cold)
    figures = _figures(replies, flags, speculates, counted_steps, kv_bytes_per_token)
    for name, value in figures:
        if isinstance(value, float) and not math.isfinite(value):
            setattr(figures, name, None)
            flags.setdefault("nan", f"{name} is {value}")
    return figures, [Flag(name=name, detail=detail[:400]) for name, detail in flags.items()]


def _judge_reply(reply: Reply, key: Key, asked: int, as_text: bool, flags: dict[str, str]) -> None:
    def flag(name: str, detail: str) -> None:
        flags.setdefault(name, detail)

    if reply.error:
        flag(reply.error, reply.detail)
    if reply.saw_nan:
        flag("nan", "the reply holds a NaN or an infinity where a number belongs")
    if reply.error in ("http_error", "timeout", "disconnect", "malformed") and reply.last_s is None:
        return
    if reply.prompt_tokens is None or reply.completion_tokens is None:
        if not reply.error:
            flag("no_usage", "the reply ended without usage; token counts are never taken from chunks")
    else:
        for problem in reply.count_problems:
            flag("count_mismatch", problem)
        n = reply.completion_tokens
        if n > asked:
            flag("count_mismatch", f"usage says {n} tokens of {asked} asked for")
        elif n < asked and not reply.error:
            flag("stopped_early", f"{n} of {asked} tokens, finish reason {reply.finish_reason or 'not told'!r}")
        if reply.output_ids and len(reply.output_ids) != n:
            flag("count_mismatch", f"usage says {n} tokens, the reply holds {len(reply.output_ids)}")
        if reply.content_events > n:
            flag(
                "count_mismatch",
                f"usage says {n} tokens, but {reply.content_events} events each brought text",
            )
        text = len(reply.text) + len(reply.reasoning)
        if n >= 16 and text and text < n / 4 and not reply.output_ids:
            flag("count_mismatch", f"usage says {n} tokens for {text} characters")
        if not as_text and reply.sent_tokens and reply.prompt_tokens != reply.sent_tokens:
            flag(
                "count_mismatch",
                f"{reply.sent_tokens} prompt tokens were sent, usage says {reply.prompt_tokens}",
            )
        if abs(reply.prompt_tokens - key.depth) > DEPTH_TOLERANCE * key.depth + 8:
            flag("depth_off", f"{reply.prompt_tokens} prompt tokens for a depth of {key.depth}")
        cached = reply.cached_tokens or 0
        if cached > (TEXT_CACHE_SHARE * reply.prompt_tokens if as_text else 0):
            flag("cached", f"{cached} of {reply.prompt_tokens} prompt tokens came from the cache")
    if not reply.error:
        pieces, words = _pieces(reply), (reply.reasoning + " " + reply.text).split()
        if not pieces or (reply.text_told and not words):
            flag("no_text", "the reply holds neither text nor reasoning")
        elif words and all(word.strip(".,;:!-").lower() in ("nan", "inf") for word in words):
            flag("nan", f"the text is {' '.join(words[:4])!r}")
        elif why := _loop(pieces):
            flag("loop", why)
    gaps = [b - a for (a, _), (b, _) in zip(reply.marks, reply.marks[1:], strict=False) if b > a]
    if len(gaps) >= STALL_GAPS and not reply.error:
        longest, middle = max(gaps), statistics.median(gaps)
        if longest > max(STALL_S, STALL_SHARE * sum(gaps), STALL_RATIO * middle):
            flag("stall", f"one pause of {longest:.3g} s among steps of {1000 * middle:.3g} ms")


def _pieces(reply: Reply) -> list[Any]:
    """Tokens where the server gives them, else words."""
    return reply.output_ids or (reply.reasoning + " " + reply.text).split()


def _loop(pieces: Sequence[Any]) -> str:
    """Why this output is a loop, or "". Judged on the second half too: many texts loop only after a while."""
    for part, name in ((pieces, "output"), (pieces[len(pieces) // 2 :], "second half")):
        n, distinct = len(part), len(set(part))
        if n >= 8 and distinct < min(8, n / 4 + 1):
            return f"{distinct} distinct of {n} in the {name}"
    return ""


def _figures(
    replies: Sequence[Reply],
    flags: dict[str, str],
    speculates: bool | None,
    counted_steps: int | None,
    kv_bytes_per_token: int,
) -> Figures:
    done = [r for r in replies if r.completion_tokens and r.first_s is not None and not r.error]
    figures = Figures()
    told = [r for r in replies if r.prompt_tokens is not None]
    if told:
        figures.prompt_tokens = round(statistics.fmean(r.prompt_tokens for r in told))
    if any(r.cached_tokens is not None for r in replies):
        figures.cached_tokens = sum(r.cached_tokens or 0 for r in replies)
    started = [r for r in replies if r.first_s is not None]
    if started:
        figures.ttft_s = statistics.median(r.first_s - r.start_s for r in started)
        if all(r.prompt_tokens is not None for r in started):
            span = max(r.first_s for r in started) - min(r.start_s for r in started)
            figures.prefill_tok_s = _rate(sum(r.prompt_tokens for r in started), span)
    if not done or len(done) < len(replies):
        return figures  # a cell with a lost request has no rate

    figures.completion_tokens = round(statistics.fmean(r.completion_tokens for r in done))
    pieces = [_pieces(r) for r in done]
    if all(pieces):
        figures.distinct_share = statistics.fmean(len(set(p)) / len(p) for p in pieces)

    decoded = [r.completion_tokens - r.first_tokens for r in done]
    times = [r.last_s - r.first_s for r in done]
    rates = [_rate(n, t) for n, t in zip(decoded, times, strict=True)]
    if any(rate is None for rate in rates):
        return figures
    figures.decode_tok_s = statistics.median(rates)
    figures.total_tok_s = _rate(sum(decoded), max(r.last_s for r in done) - min(r.first_s for r in done))

    steps = [r.verify_steps for r in done]
    if not all(steps):
        if counted_steps:
            steps = [counted_steps * n / sum(decoded) for n in decoded]
        elif speculates is False:
            steps = decoded
    if all(steps):
        figures.verify_steps = statistics.fmean(steps)
        figures.accept_length = sum(decoded) / sum(steps)
        figures.ms_per_step = 1000 * statistics.median(t / s for t, s in zip(times, steps, strict=True))

    if len(done) > 1:
        _steady(done, decoded, times, figures, flags)
    if figures.ms_per_step and kv_bytes_per_token and figures.prompt_tokens:
        context = figures.prompt_tokens + figures.completion_tokens / 2
        figures.kv_read_gb_s = kv_bytes_per_token * context * len(done) / figures.ms_per_step / 1e6
    return figures


def _steady(
    done: Sequence[Reply],
    decoded: Sequence[int],
    times: Sequence[float],
    figures: Figures,
    flags: dict[str, str],
) -> None:
    """Rates of several requests, from the time in which all of them decode and none prefills."""
    begin, end = max(r.first_s for r in done), min(r.last_s for r in done)
    inside = [_tokens_between(r, begin, end) for r in done]
    if end > begin and None not in inside and sum(inside) >= STEADY_SHARE * sum(decoded):
        total = sum(inside) / (end - begin)
        figures.total_tok_s, figures.decode_tok_s = total, total / len(done)
        if figures.accept_length and all(inside):
            figures.ms_per_step = 1000 * (end - begin) * len(done) * figures.accept_length / sum(inside)
        return
    beside = sum(max(0.0, min(begin, r.last_s) - r.first_s) for r in done)
    if beside > 0.2 * sum(times):
        flags.setdefault(
            "no_steady_window",
            f"{100 * beside / sum(times):.0f} % of decode time ran beside a prefill; raise --max-new-tokens",
        )


def _tokens_between(reply: Reply, begin: float, end: float) -> int | None:
    def at(moment: float) -> int | None:
        count: int | None = 0
        for t, tokens in reply.marks:
            if t > moment:
                break
            count = tokens
        return count

    first, last = at(begin), at(end)
    return None if first is None or last is None else last - first


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


# reading and writing


def append(path: Path, cell: Cell) -> None:
    """Add one line in one write: an interrupt loses the cell being measured, never a finished one."""
    line = cell.model_dump_json().encode() + b"\n"
    with open(path, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path, *, repair: bool = False) -> list[Cell]:
    """The cells of a file, the last of each key. A torn last line (a crash while writing) is left out.

    ``repair`` also cuts it off, so that the next ``append`` starts on a line of its own.
    """
    found: dict[Key, Cell] = {}
    complete = 0
    with open(path, "rb") as file:
        for number in range(1, 1_000_001):
            line = file.readline(MAX_LINE + 1)
            if not line:
                break
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE:
                    raise ValueError(f"{path} line {number} is longer than {MAX_LINE} bytes; it is not a file of cells")
                break
            complete = file.tell()
            try:
                version = json.loads(line).get("schema_version")
                if version != SCHEMA:
                    raise ValueError(f"schema_version is {version!r}; this version of mla-verify reads {SCHEMA}")
                cell = Cell.model_validate_json(line)
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path} line {number} is not a cell: {str(error)[:300]}") from None
            found.pop(cell.key, None)
            found[cell.key] = cell
    if repair and complete < path.stat().st_size:
        os.truncate(path, complete)
    return list(found.values())
