"""Measures the grid of one server: depth x concurrency x text x repeat, one line per finished cell."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import re
import secrets
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from . import cells, client
from .cells import Cell, Facts, Key, Run
from .client import Reply, Target
from .prompts import HEAD, Prompts, for_tokenizer
from .telemetry import Sampler

WARMUP_TOKENS = 16
WARMUP_TRIES = 3
CACHED_TRIES = 3
MAX_CONFIG = 4 << 20
COUNTERS = re.compile(
    rb"^(?:sglang:spec_verify_calls_total|vllm:spec_decode_num_drafts_total)(?:\{[^}\n]*\})? (\S+)", re.M
)


class ServerGone(Exception):
    """The server stopped answering; what was measured before is kept."""


@dataclass(frozen=True)
class Grid:
    """What to measure. ``label`` names the line in tables and plots."""

    depths: Sequence[int]
    concurrency: Sequence[int]
    texts: Sequence[str]
    max_new_tokens: int
    repeats: int = 1

    def keys(self, label: str) -> Iterator[Key]:
        """Cells in the order in which they are measured: shallow first."""
        for text in self.texts:
            for concurrency in self.concurrency:
                for depth in sorted(self.depths):
                    for repeat in range(self.repeats):
                        yield Key(label=label, depth=depth, concurrency=concurrency, text=text, repeat=repeat)


@dataclass
class Job:
    """One server and how to measure it."""

    base_url: str
    label: str  # "" = the server's attention backend
    grid: Grid
    output: Path  # cells.jsonl
    seed: int = 0
    api: str = "auto"
    model: str = ""
    api_key: str = ""
    vocab_size: int = 0
    model_config: Path | None = None
    warm_up: bool = True
    embedded: bool = False
    silence_s: float = 1800.0  # longest wait for the next byte
    cell_s: float = 7200.0  # longest time of one request
    command: Sequence[str] = ()
    server_command: Sequence[str] = ()
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Watch:
    """What a progress display is told. The defaults tell nobody."""

    begin: Callable[[str, int, int], None] = lambda label, total, skipped: None
    cell: Callable[[str], None] = lambda words: None
    done: Callable[[Cell], None] = lambda cell: None


def loopback(url: str) -> bool:
    """True where the server is on this machine, so its GPU and its model folder are ours to look at."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json (or the folder that holds it), bounded; {} where none can be read."""
    path = path / "config.json" if path.is_dir() else path
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG + 1)
        config = json.loads(content) if len(content) <= MAX_CONFIG else {}
    except (OSError, ValueError, RecursionError):
        return {}
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    return config if isinstance(config, dict) else {}


def kv_bytes_per_token(config: dict[str, Any], facts: Facts) -> int:
    """K/V bytes that one rank reads per token of context, all layers; 0 where the config doesn't tell.

    MLA: latent + rope, on every rank whole. Otherwise K and V of the rank's share of the heads. A model with
    an indexer reads only the tokens it picks, so nothing is implied.
    """
    sizes = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
    kinds = (facts.kv_cache_dtype, facts.dtype, config.get("torch_dtype"), config.get("dtype"))
    width = next((sizes[kind] for kind in kinds if kind in sizes), 0)

    def number(*names: str) -> int:
        value = next((config[n] for n in names if isinstance(config.get(n), int)), 0)
        return value if 0 < value < 1 << 20 else 0

    layers = number("num_hidden_layers")
    if number("index_topk"):
        return 0
    if latent := number("kv_lora_rank"):
        return layers * (latent + number("qk_rope_head_dim")) * width
    heads = number("num_key_value_heads", "num_attention_heads")
    size = number("head_dim") or number("hidden_size") // max(1, number("num_attention_heads"))
    return layers * 2 * max(1, heads // max(1, facts.tp_size)) * size * width if heads else 0


async def probe(http: httpx.AsyncClient, target: Target, api: str) -> Facts:
    """What the server says about itself; ``api`` "auto" picks SGLang's own where it is spoken."""
    info = await client.json_page(http, target, "/server_info") or await client.json_page(
        http, target, "/get_server_info"
    )
    models = await client.json_page(http, target, "/v1/models")
    if info is None and models is None and await client.page(http, target, "/health") is None and api == "auto":
        raise ServerGone(f"nothing that answers at {target.base_url}; start the server, or correct --base-url")
    told = _facts_of(info or {})
    entry = next((e for e in (models or {}).get("data") or [] if isinstance(e, dict)), {})
    told.model = target.model or client.printable(str(entry.get("id", "")), 200)
    if isinstance(entry.get("max_model_len"), int) and not told.max_request_tokens:
        told.max_request_tokens = entry["max_model_len"]
    told.api = api if api != "auto" else "generate" if told.name == "sglang" else "completions"
    return told


def _facts_of(info: dict[str, Any]) -> Facts:
    def word(name: str) -> str:
        value = info.get(name)
        return client.printable(value, 200) if isinstance(value, str) else ""

    def number(name: str) -> int:
        value = info.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else 0

    return Facts(
        name="sglang" if "max_total_num_tokens" in info or "speculative_algorithm" in info else "",
        version=word("version"),
        model_path=word("model_path"),
        device=word("device"),
        attention_backend=word("decode_attention_backend") or word("attention_backend"),
        speculative_algorithm=word("speculative_algorithm"),
        speculative_num_draft_tokens=number("speculative_num_draft_tokens"),
        dtype=word("dtype"),
        kv_cache_dtype=word("kv_cache_dtype"),
        page_size=number("page_size"),
        tp_size=number("tp_size") or 1,
        pool_tokens=number("max_total_num_tokens"),
        max_request_tokens=number("context_length") or number("max_req_input_len"),
        has_tokenizer=info.get("skip_tokenizer_init") is not True,
    )


class Measurement:
    """The grid of one server. ``await measure()`` returns how many cells it measured."""

    def __init__(self, job: Job, done: Sequence[Cell] = (), watch: Watch | None = None) -> None:
        self.job, self.watch = job, watch or Watch()
        self._done = {cell.key for cell in done if not cells.RETRY & {flag.name for flag in cell.flags}}
        headers = {"authorization": f"Bearer {job.api_key}"} if job.api_key else {}
        self.target = Target(job.base_url.rstrip("/"), "generate", model=job.model, headers=headers)
        self._cold = "" if job.warm_up else "the warm-up was left out"

    async def measure(self) -> int:
        job = self.job
        timeout = httpx.Timeout(job.silence_s, connect=15.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # No proxy from the environment between the benchmark and a server on this machine.
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=not loopback(job.base_url)) as self.http:
            self.facts = facts = await probe(self.http, self.target, job.api)
            self.target.api, self.target.model = facts.api, facts.model
            label = job.label or facts.attention_backend or facts.model or "server"
            wanted = list(job.grid.keys(label))
            left = [key for key in wanted if key not in self._done]
            self.watch.begin(label, len(wanted), len(wanted) - len(left))
            if not left:
                return 0
            config = self._config()
            self.prompts = await self._prompts(config, max(job.grid.depths))
            self.run = self._run(config)
            if job.warm_up:
                await self._warm_up(left)
            for key in left:
                await self._cell(key)
            return len(left)

    def _config(self) -> dict[str, Any]:
        path = self.job.model_config
        if path is not None:
            if not (config := read_config(path)):
                raise ValueError(f"--model-config is {str(path)!r}, which holds no readable config.json")
            return config
        if self.facts.model_path and loopback(self.job.base_url):
            return read_config(Path(self.facts.model_path))
        return {}

    async def _prompts(self, config: dict[str, Any], longest: int) -> Prompts:
        seed, nonce = self.job.seed, secrets.token_hex(4)
        if self.facts.api != "generate":
            return Prompts(seed=seed, nonce=nonce)
        special: list[int] = []
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(name)
            special += value if isinstance(value, list) else [value]
        size = config.get("vocab_size")
        size = size if isinstance(size, int) and 64 <= size < 1 << 24 else 0

        async def tokenize(text: str) -> list[int] | None:
            if not self.facts.has_tokenizer or "natural" not in self.job.grid.texts and (self.job.vocab_size or size):
                return None
            body = {"model": self.facts.model or "default", "prompt": text, "add_special_tokens": False}
            told = await client.json_page(self.http, self.target, "/tokenize", body)
            ids = (told or {}).get("tokens")
            return ids if isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < 1 << 24 for i in ids) else None

        vocab = self.job.vocab_size or size
        return await for_tokenizer(tokenize, seed=seed, nonce=nonce, vocab_size=vocab, special=special, longest=longest)

    def _run(self, config: dict[str, Any]) -> Run:
        job = self.job
        return Run(
            id=f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{self.prompts.nonce}",
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=list(job.command),
            seed=job.seed,
            nonce=self.prompts.nonce,
            max_new_tokens=job.grid.max_new_tokens,
            base_url=job.base_url,
            embedded=job.embedded,
            server=self.facts,
            server_command=list(job.server_command),
            kv_bytes_per_token=kv_bytes_per_token(config, self.facts),
            hardware=job.hardware,
            versions=job.versions,
        )

    async def _ask(
        self, key: Key, tokens: int, tell: Callable[[str], None]
    ) -> tuple[list[Reply], list[list[int] | str]]:
        prompts = [self.prompts.make(key.text, key.depth) for _ in range(key.concurrency)]
        tell(f"prefilling {key.depth:,} tokens")
        started = 0

        def on_tokens(reply: Reply) -> None:
            nonlocal started
            started += len(reply.marks) == 1
            if started == key.concurrency:
                told = (
                    f"{reply.completion_tokens:,} of {tokens:,}"
                    if reply.completion_tokens
                    else f"{len(reply.marks):,} chunks"
                )
                tell(f"decoding, {told}")

        asks = [client.ask(self.http, self.target, p, tokens, on_tokens, self.job.cell_s) for p in prompts]
        replies = await asyncio.gather(*asks)
        if replies[0].status in (400, 422) and self.target.extras and self.target.api != "generate":
            # A strict OpenAI server refuses fields that are not OpenAI's; without them text may end early.
            self.target.extras = False
            return await self._ask(key, tokens, tell)
        for prompt, reply in zip(prompts, replies, strict=True):
            self.prompts.learn(key.text, prompt, reply.prompt_tokens)
        return list(replies), prompts

    async def _warm_up(self, left: Sequence[Key]) -> None:
        """Ask until two rounds take about the same time; nothing of it is kept.

        Compilation, allocation and clocks settle here. Each kind of text and each concurrency gets its round.
        """
        shallow = min(key.depth for key in left)
        tokens = min(self.job.grid.max_new_tokens, WARMUP_TOKENS)
        kinds = dict.fromkeys((key.text, key.concurrency) for key in left)
        times: list[float] = []
        for number, (text, concurrency) in enumerate(kinds):
            key = Key(label="", depth=shallow, concurrency=concurrency, text=text)
            for attempt in range(WARMUP_TRIES if number == 0 else 1):
                begin = time.perf_counter()
                words = f"warming up ({text} x{concurrency}, round {attempt + 1})"
                replies, _ = await self._ask(key, tokens, lambda w, words=words: self.watch.cell(f"{words}: {w}"))
                times.append(time.perf_counter() - begin)
                if any(r.error for r in replies):
                    await self._gone(replies)
                    break  # the cells will say what is wrong
                if attempt and times[-2] < cells.WARM_SHARE * times[-1] + cells.WARM_S:
                    break
                if attempt == WARMUP_TRIES - 1:
                    self._cold = f"warm-up rounds took {', '.join(f'{t:.2f}' for t in times)} s: still getting faster"

    async def _cell(self, key: Key) -> None:
        what = f"{key.label} {key.depth:,} tokens x{key.concurrency} {key.text}"
        over = self._over_pool(key)
        begin = time.perf_counter()
        if over:
            flags = [cells.Flag(name="over_pool", detail=over)]
            self._keep(Cell(key=key, figures=cells.Figures(), flags=flags, seconds=0.0, run=self.run))
            return
        attempt = 0
        while True:
            attempt += 1
            counted = await self._steps_counted()
            with Sampler() if loopback(self.job.base_url) else _nothing() as sampler:
                replies, _ = await self._ask(
                    key, self.job.grid.max_new_tokens, lambda w: self.watch.cell(f"{what}: {w}")
                )
            after = await self._steps_counted()
            cached = max((r.cached_tokens or 0) for r in replies)
            # A token in common with something that the server has seen is chance in a small vocabulary:
            # another head cures it.
            if self.prompts.as_text or not 0 < cached <= HEAD // 4 or attempt == CACHED_TRIES:
                break
        if all(reply.status == -1 for reply in replies):
            await self._gone(replies)  # a cell that was never asked for is no cell
        facts = self.facts
        speculates = True if facts.speculative_algorithm else False if facts.name == "sglang" else None
        figures, flags = cells.judge(
            replies,
            key,
            max_new_tokens=self.job.grid.max_new_tokens,
            as_text=self.prompts.as_text,
            speculates=speculates,
            counted_steps=round(after - counted) if counted is not None and after is not None else None,
            kv_bytes_per_token=self.run.kv_bytes_per_token,
            cold=self._cold,
        )
        self._cold = ""
        sample = replies[0].text or replies[0].reasoning or " ".join(map(str, replies[0].output_ids[:24]))
        self._keep(
            Cell(
                key=key,
                figures=figures,
                flags=flags,
                seconds=round(time.perf_counter() - begin, 3),
                attempts=attempt,
                text_source=self.prompts.source(key.text),
                telemetry=sampler.telemetry,
                sample=client.printable(sample, 120),
                requests=[reply.summary() for reply in replies],
                run=self.run,
            )
        )
        if any(reply.error for reply in replies):
            await self._gone(replies)

    def _keep(self, cell: Cell) -> None:
        cells.append(self.job.output, cell)
        self.watch.done(cell)

    def _over_pool(self, key: Key) -> str:
        """Why the server can't hold the cell, or "". Such a cell is not asked for: it would be cut short."""
        facts, new = self.facts, self.job.grid.max_new_tokens
        # A speculating server reserves two windows of draft tokens per request.
        one = key.depth + new + 2 * facts.speculative_num_draft_tokens
        if facts.max_request_tokens and key.depth + new > facts.max_request_tokens:
            most = facts.max_request_tokens
            return f"{key.depth} + {new} tokens; a request may have {most} (--context-length)"
        if facts.pool_tokens and one * key.concurrency > facts.pool_tokens:
            pool = facts.pool_tokens
            return f"{key.concurrency} x {one} tokens; the pool holds {pool} (--mem-fraction-static)"
        return ""

    async def _steps_counted(self) -> float | None:
        """Verify steps since the server started, where /metrics tells; needed by APIs without meta_info."""
        if self.facts.api == "generate" or (self.facts.name == "sglang" and not self.facts.speculative_algorithm):
            return None
        page = await client.page(self.http, self.target, "/metrics")
        found = [float(v) for v in COUNTERS.findall(page or b"") if re.fullmatch(rb"[\d.eE+]+", v)]
        return math.fsum(found) if found else None

    async def _gone(self, replies: Sequence[Reply]) -> None:
        """Raise if the server no longer takes connections."""
        if not any(r.error in ("disconnect", "timeout") for r in replies):
            return
        for pause in (0.5, 1.0, 2.0):  # a dying server listens for a moment longer
            await asyncio.sleep(pause)
            if await _connects(self.job.base_url):
                return
        detail = next(r.detail for r in replies if r.error)
        raise ServerGone(f"{self.job.base_url} no longer answers ({detail}); restart it and run again with --resume")


async def _connects(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), 10)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


class _nothing:
    telemetry = None

    def __enter__(self) -> _nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def best(found: Sequence[Cell]) -> dict[tuple[str, str, int, int], Cell]:
    """(label, text, concurrency, depth) -> the cell to show: of valid repeats that with the median rate."""
    groups: dict[tuple[str, str, int, int], list[Cell]] = {}
    for cell in found:
        key = cell.key
        groups.setdefault((key.label, key.text, key.concurrency, key.depth), []).append(cell)
    shown = {}
    for name, group in groups.items():
        good = [c for c in group if c.valid] or group
        rates = [c.figures.decode_tok_s or 0.0 for c in good]
        shown[name] = good[rates.index(statistics.median_low(rates))]
    return shown
