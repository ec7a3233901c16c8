"""A server's start-up log: what it says of memory. Untrusted text: bounded, numbers checked, the rest ignored.

The lines are those of SGLang 0.5.17 and 0.5.23. With tensor parallelism every rank prints them; the least roomy counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,6})?)"
PATTERNS = {
    "free_before_gib": rf"Load weight begin\. avail mem={_NUMBER} GB",
    "free_after_gib": rf"Load weight end\..*?avail mem={_NUMBER} GB",
    "weights_gib": rf"Load weight end\..*?mem usage={_NUMBER} GB",
    "kv_gib": rf"(?<!\w )KV Cache is allocated\..*?KV size: {_NUMBER} GB",
    "kv_tokens": rf"(?<!\w )KV Cache is allocated\..*?#tokens: {_NUMBER}",
    "free_after_pool_gib": rf"Memory pool end\. avail mem={_NUMBER} GB",
    "pool_tokens": rf"max_total_num_tokens={_NUMBER},",
    "chunked_prefill_size": rf"max_total_num_tokens=.*?chunked_prefill_size={_NUMBER},",
    "max_running_requests": rf"max_total_num_tokens=.*?max_running_requests={_NUMBER},",
    "context_length": rf"max_total_num_tokens=.*?context_len={_NUMBER},",
    "free_at_end_gib": rf"max_total_num_tokens=.*?available_[cg]pu_mem={_NUMBER} GB",
    "mem_fraction_static": rf"\bmem_fraction_static(?:=|': ){_NUMBER}",
    "max_total_tokens": rf"server_args=.*?\bmax_total_tokens(?:=|': ){_NUMBER}",
    "tp_size": rf"\btp_size(?:=|': ){_NUMBER}",
}
LEAST = {"free_before_gib", "free_after_gib", "free_after_pool_gib", "free_at_end_gib", "pool_tokens", "kv_tokens"}
WHOLE = {
    "kv_tokens",
    "pool_tokens",
    "chunked_prefill_size",
    "max_running_requests",
    "context_length",
    "max_total_tokens",
    "tp_size",
}
# Printed at every start-up, of no use to a plan.
_KNOWN = re.compile(r"(Init torch distributed ends\.|Memory baseline taken\.|Capture .* end\.|Capture .* begin\.)")
# Lines about memory that are not among the above: said, not guessed.
_ABOUT_MEMORY = re.compile(r"(avail mem=|mem usage=|is allocated\.|max_total_num_tokens)", re.IGNORECASE)


@dataclass
class StartUp:
    """Numbers of a log; None where it does not say. GiB are what SGLang prints as GB."""

    free_before_gib: float | None = None
    free_after_gib: float | None = None
    weights_gib: float | None = None
    draft_weights_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None
    free_after_pool_gib: float | None = None
    pool_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    free_at_end_gib: float | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None  # --max-total-tokens: the pool is capped, so it tells nothing of memory
    tp_size: int | None = None
    unknown: list[str] = field(default_factory=list)  # lines about memory that are not understood

    @property
    def cell_bytes(self) -> tuple[float, float] | None:
        """K/V bytes of a token, least and most, from the pool's size as printed to two decimals."""
        if not self.kv_gib or not self.kv_tokens:
            return None
        # The buffers have a page more than the tokens, of 64 at most.
        least, most = (self.kv_gib - 0.005) * 2**30, (self.kv_gib + 0.005) * 2**30
        return least / (self.kv_tokens + 64), most / self.kv_tokens

    @property
    def fraction(self) -> float | None:
        """``--mem-fraction-static`` that the server used: as it says, else from what the pool took."""
        if self.mem_fraction_static is not None:
            return self.mem_fraction_static
        if None in (self.free_before_gib, self.free_after_gib, self.kv_gib):
            return None
        return 1 - (self.free_after_gib - self.kv_gib) / self.free_before_gib

    def settled(self, cell: int = 0, reserve_gib: float = 0.0) -> tuple[float, float] | None:
        """Free memory before the weights and before the pool, GiB, closer than the log's two decimals.

        A pool that is known and was not capped gives the second to a few MiB (``cell``: bytes of a token;
        ``reserve_gib``: kept from it). Else before, after and their printed difference are three roundings of two
        numbers: the centre of what all three allow. None where the log does not have them.
        """
        if self.free_before_gib is None or self.free_after_gib is None:
            return None
        before, after = self.free_before_gib, self.free_after_gib
        if cell and self.kv_tokens and self.mem_fraction_static and self.max_total_tokens is None:
            pool = self.kv_tokens * cell / 2**30
            return before, pool + reserve_gib + before * (1 - self.mem_fraction_static)
        if self.weights_gib is None or self.draft_weights_gib is not None:
            return before, after
        steps = [d / 4000 - 0.005 for d in range(41)]
        weights = self.weights_gib
        fits = [(a, b) for a in steps for b in steps if abs(before + a - after - b - weights) <= 0.005 + 1e-9]
        if not fits:  # another rank's figure is in it
            return before, after
        return before + sum(a for a, _ in fits) / len(fits), after + sum(b for _, b in fits) / len(fits)

    def missing(self) -> list[str]:
        """Names of what a plan needs and the log does not say."""
        return [name for name in ("free_before_gib", "weights_gib") if getattr(self, name) is None]


def read(path: Path) -> StartUp:
    """The numbers of a log file. ValueError where it can't be read or says nothing of memory."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_LOG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--log {path} can't be read: {error.strerror}; give a server's start-up log") from None
    if len(raw) > MAX_LOG_BYTES:
        raise ValueError(f"--log {path} is over {MAX_LOG_BYTES >> 20} MiB; cut it after the start-up")
    return parse(raw.decode("utf-8", "replace"), str(path))


def parse(text: str, name: str = "the log") -> StartUp:
    """The same for text."""
    found: dict[str, list[float]] = {}
    unknown: list[str] = []
    loads = 0
    for line in text.splitlines():
        line = line[:4000]
        hit = False
        for key, pattern in PATTERNS.items():
            match = re.search(pattern, line)
            if match and 0 <= float(match[1]) < 1e9:
                hit = True
                found.setdefault(key, []).append(float(match[1]))
        loads += "Load weight end." in line
        if not hit and not _KNOWN.search(line) and _ABOUT_MEMORY.search(line):
            unknown.append(" ".join(line.split())[:160])
    if not found:
        raise ValueError(f"{name} has none of SGLang's start-up lines (Load weight begin, Memory pool end, …)")
    start = StartUp(unknown=unknown[:20])
    for f in fields(StartUp):
        if f.name in found:
            values = found[f.name]
            value = min(values) if f.name in LEAST else values[0]
            setattr(start, f.name, int(value) if f.name in WHOLE else value)
    # A draft model is loaded after the target: its weights are the second figure of a rank.
    ranks = max(1, start.tp_size or 1)
    weights = found.get("weights_gib", [])
    if loads >= 2 * ranks and weights:
        start.draft_weights_gib = weights[ranks] if ranks < len(weights) else weights[-1]
    if start.free_before_gib is not None and "free_before_gib" in found:
        start.free_before_gib = min(found["free_before_gib"][:ranks])
    if any(isinstance(v, float) and not math.isfinite(v) for v in vars(start).values()):
        raise ValueError(f"{name} holds a number that is not finite")
    return start
