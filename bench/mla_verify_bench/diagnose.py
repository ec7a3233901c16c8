"""``mla-verify diagnose``: where the time of a decode step goes, by depth, and what to change.

A step takes step(L) = a + b L. The K/V bytes of a token over b is the bandwidth that verify attention really gets. Time
per token is step(L) / accept length. What is lost at the deepest point, against a server that has nothing wrong, is
apportioned; with a' and b' what a and b should be, and A' what the accept length should be:

    step/A - step'/A'  =  (b - b') L / A        attention
                        + (a - a') / A          launch: the host, eager mode, small kernels
                        + step' (1/A - 1/A')    drafter or text
                        + the fit's own error   unexplained

so the parts sum to the whole. Prefill and cache lie outside the step and are held against the time of a request.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MAX_POINTS = 10_000
# Memory bandwidth in GB/s, memory in GiB. Published figures of the cards.
GPUS = {
    "rtx pro 6000": (1792, 96), "rtx 5090": (1792, 32), "h200": (4800, 141), "h100": (3350, 80), "a100": (2039, 80),
    "b200": (8000, 180), "l40s": (864, 48), "rtx 4090": (1008, 24), "dgx spark": (273, 128),
}  # fmt: skip
# SGLang 0.5.17's own verify kernel, H = 8 and 16, N = 16: results/nvidia-h200/20261201T072238Z-phase1.json
BUILT_IN_GB_S = 6.0
GOOD_SHARE = 0.5  # of the card's bandwidth: what phase 1 asks of the kernel, twice the floor
STEP_OVERHEAD_S = 0.010  # of a step in CUDA graphs, beside reading weights: host, sampling, small kernels
GOOD_ACCEPT = 3.0  # tokens a verify step that a working drafter brings on easy text
WORKING_ACCEPT = 2.0  # below this on predictable text, the drafter is at fault
PREFILL_SHARE, PREFILL_DROP = 0.3, 4.0  # of a request's time; how far prefill tok/s falls from its best
NOTEWORTHY = 0.05  # a smaller share is not named


@dataclass(frozen=True)
class Point:
    """One valid measurement. Seconds and tokens; NaN or 0 where it is not known."""

    depth: float  # tokens of context, the middle of the output
    decode_tok_s: float  # of one request
    accept_length: float = 1.0  # tokens a step commits
    ttft_s: float = math.nan
    prompt_tokens: float = 0
    new_tokens: int = 256
    predictable: bool | None = None  # None: not told
    concurrency: int = 1

    @property
    def step_s(self) -> float:
        return self.accept_length / self.decode_tok_s


@dataclass(frozen=True)
class Server:
    """What is known of the server and its card."""

    kv_bytes: float  # of a token, one rank, all layers
    bandwidth_gb_s: float = 0  # of the card; 0: not known
    memory_gib: float = 0
    weights_gib: float = 0  # read by a step, one rank
    draft_tokens: int = 0  # nodes of a verify step; 0: no speculation, or not told
    heads: int = 0  # query heads of one rank
    attention_backend: str = ""
    pool_tokens: int = 0
    flags: tuple[str, ...] = ()  # of the cells that are not valid


@dataclass(frozen=True)
class Cause:
    name: str  # attention, drafter, text, launch, prefill, cache, unexplained
    share: float  # of what is lost at the deepest point; prefill and cache: of a request's time
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """``causes`` of the decode step sum to 1; ``outside`` are prefill and cache."""

    verdict: str
    causes: list[Cause]
    outside: list[Cause]
    fit: dict[str, float] = field(default_factory=dict)  # a_ms, b_ms_per_1k, b_low, b_high
    bandwidth_gb_s: dict[str, float] = field(default_factory=dict)  # attention, low, high, card, built_in
    deepest: dict[str, float] = field(default_factory=dict)  # depth, tok_s, tok_s_lost, predicted_tok_s
    measure_next: str = ""


def fit(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """a in s, b in s a token, and an interval of b. Theil-Sen: a bad cell does not tilt the line.

    Two depths give the line and no interval (NaN).
    """
    by_depth: dict[float, list[float]] = {}
    for p in points:
        by_depth.setdefault(p.depth, []).append(p.step_s)
    depths = sorted(by_depth)
    steps = [statistics.median(by_depth[d]) for d in depths]
    if len(depths) == 2:
        b = (steps[1] - steps[0]) / (depths[1] - depths[0])
        low = high = math.nan
    else:
        from scipy.stats import theilslopes

        b, _, low, high = (float(x) for x in theilslopes(steps, depths, 0.9))
    a = statistics.median(s - b * d for s, d in zip(steps, depths, strict=True))
    if a < 0:  # a step cannot begin below nothing: through the deepest point
        a, b = 0.0, steps[-1] / depths[-1]
    return a, max(b, 0.0), low, high


def diagnose(points: Sequence[Point], server: Server) -> Diagnosis:
    """The fit, the bandwidth and the ranked causes. Raises ValueError without a usable point."""
    points = [p for p in points if p.decode_tok_s > 0 and p.depth > 0 and p.accept_length > 0]
    if not points:
        raise ValueError("no valid measurement; give --point DEPTH:TOK_S or a cells.jsonl with valid cells")
    if not server.kv_bytes > 0:
        raise ValueError("the K/V bytes of a token are not known; give --layers (MLA) or --model-config")
    alone = [p for p in points if p.concurrency == min(q.concurrency for q in points)]
    depths = sorted({p.depth for p in alone})
    if len(depths) == 1:
        # No slope from one depth. But no step reads more than the card holds, so the rest grew with the context.
        step = statistics.median(p.step_s for p in alone)
        a = min(_fixed(server), step)
        b, low, high = (step - a) / depths[0], math.nan, step / depths[0]
    else:
        a, b, low, high = fit(alone)
    # Of the points as deep as any, the slowest: what a user complains of.
    deepest = min((p for p in alone if p.depth > 0.95 * depths[-1]), key=lambda p: p.decode_tok_s)
    causes, lost, predicted = _apportion(alone, deepest, server, a, b)
    outside = [c for c in (_prefill(alone, deepest), _cache(points, deepest, server)) if c]
    implied = server.kv_bytes / b / 1e9 if b else math.inf
    return Diagnosis(
        verdict=_verdict(causes, outside, deepest, implied, server, len(depths)),
        causes=causes,
        outside=outside,
        fit={"a_ms": a * 1e3, "b_ms_per_1k": b * 1e6, "b_low": low * 1e6, "b_high": high * 1e6},
        bandwidth_gb_s={
            "attention": implied,
            "low": server.kv_bytes / high / 1e9 if high > 0 else math.nan,
            "high": server.kv_bytes / low / 1e9 if low > 0 else math.nan,
            "card": server.bandwidth_gb_s or math.nan,
            "built_in": BUILT_IN_GB_S,
        },
        deepest={
            "depth": deepest.depth,
            "tok_s": deepest.decode_tok_s,
            "lost_ms_per_token": lost * 1e3,
            "predicted_tok_s": predicted,
        },
        measure_next=_measure_next(alone, depths, server),
    )


def _fixed(server: Server) -> float:
    """Seconds that a step may take beside attention: weights once, or all that the card holds, and an overhead."""
    if not server.bandwidth_gb_s:
        return 0.05
    read = server.weights_gib or server.memory_gib
    return read * 2**30 / (GOOD_SHARE * server.bandwidth_gb_s * 1e9) + STEP_OVERHEAD_S


def _apportion(
    points: Sequence[Point], deepest: Point, server: Server, a: float, b: float
) -> tuple[list[Cause], float, float]:
    """Causes by share, seconds lost a token at the deepest point, and tok/s with nothing lost (a prediction)."""
    length, accept, fixed = deepest.depth, deepest.accept_length, _fixed(server)
    good_b = min(b, server.kv_bytes / (GOOD_SHARE * (server.bandwidth_gb_s or 1000) * 1e9))
    good_a = min(a, fixed)
    easy = [p.accept_length for p in points if p.predictable]
    speculates = server.draft_tokens > 1 or any(p.accept_length > 1.02 for p in points)
    good_accept = max(accept, *easy, min(GOOD_ACCEPT, server.draft_tokens or GOOD_ACCEPT)) if speculates else accept
    good_step = good_a + good_b * length
    lost = deepest.step_s / accept - good_step / good_accept
    parts = {
        "attention": (b - good_b) * length / accept,
        "launch": (a - good_a) / accept,
        "accept": good_step * (1 / accept - 1 / good_accept),
        "unexplained": (deepest.step_s - a - b * length) / accept,
    }
    total = sum(abs(x) for x in parts.values())
    # Where next to nothing is lost, shares of it would be noise made large.
    if total < NOTEWORTHY * deepest.step_s / accept:
        return [], max(lost, 0.0), good_accept / good_step
    shares = {name: abs(x) / total for name, x in parts.items()}
    implied = server.kv_bytes / b / 1e9 if b else math.inf
    of_card = f", {100 * implied / server.bandwidth_gb_s:.2g} % of the card's" if server.bandwidth_gb_s else ""
    backend = f" (backend {server.attention_backend})" if server.attention_backend else ""
    found = [
        Cause(
            "attention",
            shares["attention"],
            f"step time grows {b * 1e6:.3g} ms per 1,000 tokens: K/V read at {implied:.3g} GB/s{of_card}{backend}"
            + (f"; SGLang's own verify kernel reads {BUILT_IN_GB_S:g} GB/s at 185,000" if implied < 60 else "")
            + (f"; each of {server.heads} heads reads it again" if server.heads and implied < 60 else ""),
            "a verify kernel that splits the prefix: --attention-backend mla_verify"
            if not server.attention_backend.startswith("mla_verify")
            else "mla-verify doctor: see which implementation was chosen, and why",
        ),
        Cause(
            "launch",
            shares["launch"],
            f"a step takes {a * 1e3:.3g} ms before any context; reading weights explains {fixed * 1e3:.3g} ms at most",
            "leave --disable-cuda-graph out, raise --cuda-graph-max-bs-decode over the batch, keep overlap on",
        ),
        _accept_cause(shares["accept"], points, deepest, good_accept, easy),
        Cause(
            "unexplained",
            shares["unexplained"],
            f"the deepest point lies {abs(parts['unexplained']) * accept * 1e3:.3g} ms off the line through all",
            "measure again with --repeats 3; look for retraction and clocks",
        ),
    ]
    found.sort(key=lambda c: -c.share)
    return [c for c in found if c.share > 0], max(lost, 0.0), good_accept / good_step


def _accept_cause(share: float, points: Sequence[Point], deepest: Point, good: float, easy: Sequence[float]) -> Cause:
    said = f"{deepest.accept_length:.3g} tokens a step, {good:.3g} expected"
    if easy and statistics.median(easy) >= WORKING_ACCEPT:
        return Cause(
            "text",
            share,
            f"{said}: on predictable text the same drafter brings {statistics.median(easy):.3g}",
            "no kernel mends this: judge the server on text like yours; fewer --speculative-num-draft-tokens cost less",
        )
    where = "on predictable text too" if easy else "on this text; predictable text was not measured"
    return Cause(
        "drafter",
        share,
        f"{said} {where}",
        "check --speculative-draft-model-path against the target (version, chat template, dtype), or another algorithm",
    )


def _prefill(points: Sequence[Point], deepest: Point) -> Cause | None:
    """Time to the first token out of proportion: prefill slows down with depth."""
    rates = [p.prompt_tokens / p.ttft_s for p in points if p.ttft_s > 0 and p.prompt_tokens]
    if not rates or not deepest.ttft_s > 0:
        return None
    decode = deepest.new_tokens / deepest.decode_tok_s
    share = deepest.ttft_s / (deepest.ttft_s + decode)
    rate, best = deepest.prompt_tokens / deepest.ttft_s, max(rates)
    if share < PREFILL_SHARE or best < PREFILL_DROP * rate:
        return None
    return Cause(
        "prefill",
        share,
        f"the first token takes {deepest.ttft_s:.3g} s of a request's {deepest.ttft_s + decode:.3g} s: "
        f"{rate:.3g} prompt tokens a second here, {best:.3g} at the best depth",
        "raise --chunked-prefill-size, name another --prefill-attention-backend, keep the radix cache on",
    )


def _cache(points: Sequence[Point], deepest: Point, server: Server) -> Cause | None:
    """A pool that does not hold what is asked of it, or cells that the prefix cache answered."""
    need = max(p.concurrency * (p.depth + p.new_tokens) for p in points)
    if server.pool_tokens and server.pool_tokens < need:
        return Cause(
            "cache",
            1 - server.pool_tokens / need,
            f"the K/V pool holds {server.pool_tokens:,} tokens, the requests want {need:,.0f}: they wait",
            "mla-verify plan: a larger --mem-fraction-static, --kv-cache-dtype fp8_e4m3, or fewer requests",
        )
    if bad := [name for name in ("over_pool", "cached") if name in server.flags]:
        what = {
            "over_pool": "prompt and output did not fit the pool",
            "cached": "the prefix cache answered part of them",
        }
        return Cause(
            "cache",
            server.flags.count(bad[0]) / (len(server.flags) + len(points)),
            f"{server.flags.count(bad[0])} cells are not valid: {what[bad[0]]}",
            "mla-verify plan for the pool; unique prefixes (bench longctx sends them) for the cache",
        )
    return None


def _verdict(
    causes: Sequence[Cause], outside: Sequence[Cause], deepest: Point, implied: float, server: Server, depths: int
) -> str:
    at = f"at {deepest.depth:,.0f} tokens, {deepest.decode_tok_s:.3g} tok/s"
    named = [c for c in causes if c.share >= NOTEWORTHY and c.name != "unexplained"]
    first = max([*named, *outside], key=lambda c: c.share, default=None)
    if first is None:
        return f"{at}: nothing stands out; the step is as fast as its bytes allow, within a factor of two"
    words = {
        "attention": f"verify attention: it reads K/V at {implied:.3g} GB/s",
        "launch": "fixed cost of a step: launches and the host, not the context",
        "drafter": f"the drafter: {deepest.accept_length:.3g} tokens a verify step",
        "text": f"the text: {deepest.accept_length:.3g} tokens a verify step, more on predictable text",
        "prefill": "prefill: the first token takes most of a request's time",
        "cache": "the K/V pool: it does not hold what is asked",
    }
    hedge = " (one depth: by exclusion, a second depth would prove it)" if depths == 1 and first in named else ""
    others = [f"{c.name} {100 * c.share:.0f} %" for c in [*named, *outside] if c is not first]
    beside = f"; beside it {', '.join(others)}" if others else ""
    return f"{at}: {words[first.name]}, {100 * first.share:.0f} % of what is lost{hedge}{beside}"


def _measure_next(points: Sequence[Point], depths: Sequence[float], server: Server) -> str:
    """One command, or "" where the points suffice."""
    ask: list[str] = []
    if len(depths) < 3 or depths[-1] < 4 * depths[0]:
        deep = max(4096, int(depths[-1]))
        wanted = sorted({1024, max(2048, deep // 8), max(4096, deep // 2), deep})
        ask.append("--depths " + ",".join(map(str, wanted)))
    speculates = server.draft_tokens > 1 or any(p.accept_length > 1.02 for p in points)
    if speculates and not any(p.predictable for p in points):
        ask.append("--text both")
    return f"mla-verify bench longctx --base-url URL {' '.join(ask)}" if ask else ""


# What comes in


def points_of(found: Sequence[Any]) -> tuple[list[Point], Server]:
    """Cells of one label of ``bench longctx``, valid ones, and what they say of the server."""
    points = [
        Point(
            depth=(c.figures.prompt_tokens or c.key.depth) + (c.figures.completion_tokens or 0) / 2,
            decode_tok_s=c.figures.decode_tok_s,
            accept_length=c.figures.accept_length or 1.0,
            ttft_s=c.figures.ttft_s or math.nan,
            prompt_tokens=c.figures.prompt_tokens or 0,
            new_tokens=c.figures.completion_tokens or c.run.max_new_tokens,
            predictable=c.key.text == "predictable",
            concurrency=c.key.concurrency,
        )
        for c in found
        if c.valid and c.figures.decode_tok_s
    ]
    run = found[-1].run
    return points, Server(
        kv_bytes=run.kv_bytes_per_token,
        draft_tokens=run.server.speculative_num_draft_tokens if run.server.speculative_algorithm else 0,
        attention_backend=run.server.attention_backend,
        pool_tokens=run.server.pool_tokens,
        flags=tuple(flag.name for c in found for flag in c.flags),
        **_card(str(((run.hardware or {}).get("gpu") or {}).get("name", ""))),
    )


def _card(name: str) -> dict[str, float]:
    found = next((figures for key, figures in GPUS.items() if key in name.lower()), None)
    return {"bandwidth_gb_s": found[0], "memory_gib": found[1]} if found else {}


def point(text: str) -> Point:
    """DEPTH:TOK_S[:ACCEPT_LENGTH[:TTFT_S]] of the command line, with k for 1,000."""
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= 4:
            raise ValueError
        depth = float(re.sub("[kK]$", "", parts[0])) * (1000 if parts[0][-1:] in "kK" else 1)
        values = [depth, *map(float, parts[1:])]
        if not all(math.isfinite(v) and v > 0 for v in values):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no point; expected DEPTH:TOK_S[:ACCEPT_LENGTH[:TTFT_S]], for example 185k:0.7:1"
        ) from None
    ttft = values[3] if len(values) > 3 else math.nan
    return Point(depth, values[1], values[2] if len(values) > 2 else 1.0, ttft, depth)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "mla-verify diagnose --point 1k:38 --point 185k:0.7 --layers 61 --gpu 'RTX PRO 6000'   from a few numbers; "
        "mla-verify diagnose longctx-results/RUN   from a benchmark"
    )
    parser.add_argument("result", nargs="?", type=Path, help="cells.jsonl of bench longctx, or its folder")
    parser.add_argument("--label", default="", help="which server of the result (default: each)")
    parser.add_argument("--base-url", metavar="URL", help="measure this running server first, a few minutes")
    parser.add_argument(
        "--point",
        action="append",
        type=point,
        default=[],
        metavar="DEPTH:TOK_S[:ACCEPT[:TTFT_S]]",
        help="a measurement; may be repeated",
    )
    parser.add_argument("--layers", type=int, default=0, help="of an MLA model, for the K/V bytes of a token")
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="config.json of the model, in place of --layers"
    )
    parser.add_argument("--kv-cache-dtype", default="bfloat16", choices=["bfloat16", "float16", "fp8_e4m3"])
    parser.add_argument("--tp-size", type=int, default=1, help="tensor parallelism; MLA's K/V is on every rank whole")
    parser.add_argument("--heads", type=int, default=0, help="query heads of one rank")
    parser.add_argument("--speculative-num-draft-tokens", type=int, default=0, metavar="N", help="0: no speculation")
    parser.add_argument("--attention-backend", default="", help="what the server runs")
    parser.add_argument("--gpu", default="", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--bandwidth", type=float, default=0, metavar="GB/s", help="of the card, in place of --gpu")
    parser.add_argument("--weights-gib", type=float, default=0, help="weights that a step reads, one rank")
    parser.add_argument("--pool-tokens", type=int, default=0, help="tokens that the K/V pool holds")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one diagnosis for each server. 0 where one was made."""
    sources: list[tuple[str, list[Point], Server]] = []
    if args.base_url:
        args.result = _measure(args.base_url)
    if args.result:
        from .longctx import cells

        path = args.result / "cells.jsonl" if args.result.is_dir() else args.result
        found = cells.load(path)
        labels = [args.label] if args.label else list(dict.fromkeys(c.key.label for c in found))
        for label in labels:
            own = [c for c in found if c.key.label == label]
            if not own:
                known = ", ".join(dict.fromkeys(c.key.label for c in found))
                raise ValueError(f"--label is {label!r}; {path} has {known or 'no cells'}")
            sources.append((label, *points_of(own)))
    elif args.point:
        if len(args.point) > MAX_POINTS:
            raise ValueError(f"--point was given {len(args.point)} times; at most {MAX_POINTS}")
        sources.append(("", args.point, Server(kv_bytes=0)))
    else:
        raise ValueError("nothing to diagnose; give a result of bench longctx, --base-url, or --point DEPTH:TOK_S")
    told = [(label, diagnose(points, _with_flags(server, args))) for label, points, server in sources]
    if args.json:
        json.dump([{"label": label, **_plain(asdict(d))} for label, d in told], sys.stdout, indent=1)
        print()
    else:
        for label, diagnosis in told:
            _show(label, diagnosis)
    return 0


def _with_flags(server: Server, args: argparse.Namespace) -> Server:
    """What the command line says goes over what the result says."""
    from .longctx.run import Facts, kv_bytes_per_token, read_config

    changes: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if args.model_config:
        config = read_config(args.model_config)
        if not config:
            raise ValueError(f"--model-config {args.model_config} can't be read as a model's config.json")
    elif args.layers:
        config = {"num_hidden_layers": args.layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if config:
        changes["kv_bytes"] = kv_bytes_per_token(
            config, Facts(kv_cache_dtype=args.kv_cache_dtype, tp_size=args.tp_size)
        )
    if args.gpu:
        card = _card(args.gpu)
        if not card:
            raise ValueError(f"--gpu is {args.gpu!r}; expected one of {', '.join(GPUS)}, or give --bandwidth GB/s")
        changes |= card
    for flag, name in (
        ("bandwidth", "bandwidth_gb_s"), ("weights_gib", "weights_gib"), ("heads", "heads"),
        ("speculative_num_draft_tokens", "draft_tokens"), ("attention_backend", "attention_backend"),
        ("pool_tokens", "pool_tokens"),
    ):  # fmt: skip
        value = getattr(args, flag)
        if not isinstance(value, str) and not 0 <= value < 1e12:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}; expected 0 or more")
        if value:
            changes[name] = value
    return replace(server, **changes)


def _measure(url: str) -> Path:
    """A short grid on a running server; returns the folder of its cells."""
    import time

    from .cli import main

    folder = Path("longctx-results") / time.strftime("%Y%m%d-%H%M%S-diagnose")
    words = ["--base-url", url, "--text", "both", "--max-new-tokens", "64", "--output-dir", str(folder)]
    if main(["bench", "longctx", *words]) == 130:
        raise KeyboardInterrupt
    if not (folder / "cells.jsonl").exists():
        raise ValueError(f"nothing could be measured at {url}; see above")
    return folder


def _plain(value: Any) -> Any:
    """NaN and infinity become null, which JSON has."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(label: str, d: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{label}: {d.verdict}" if label else d.verdict, markup=False, highlight=False)
    table = Table("cause", "share", "evidence", "what to change")
    for cause in [*d.causes, *d.outside]:
        table.add_row(cause.name, f"{100 * cause.share:.0f} %", cause.evidence, cause.remedy)
    if table.row_count:
        console.print(table)
    of, b = d.bandwidth_gb_s, d.fit
    line = (
        f"step(L) = {b['a_ms']:.3g} ms + {b['b_ms_per_1k']:.3g} ms per 1,000 tokens; K/V at {of['attention']:.3g} GB/s"
    )
    if math.isfinite(of["low"]):
        line += (
            f" ({of['low']:.3g} to {of['high']:.3g})" if math.isfinite(of["high"]) else f" (at least {of['low']:.3g})"
        )
    if math.isfinite(of["card"]):
        line += f", card {of['card']:g}"
    console.print(line, markup=False, highlight=False)
    if d.causes:
        deep = d.deepest
        console.print(
            f"prediction: {deep['predicted_tok_s']:.3g} tok/s at {deep['depth']:,.0f} tokens with attention at half of "
            "the card's bandwidth and the rest as it should be; a prediction, not a measurement",
            markup=False, highlight=False,
        )  # fmt: skip
    if d.measure_next:
        console.print(f"to be surer: {d.measure_next}", markup=False, highlight=False)
