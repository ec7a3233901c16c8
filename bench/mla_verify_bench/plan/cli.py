"""``mla-verify plan``: the feasible ``--mem-fraction-static``, the pool it gives, the launch command, all terms."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ALGORITHMS = ("none", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "mla-verify plan --model kimi-k2 --gpu rtx-pro-6000 --tp-size 8 --weights-gib 69.5 --context-length 200000 "
        "--max-running-requests 8; or --log FILE of a server that has started, and no guess is needed"
    )
    what = parser.add_argument_group("model and card")
    what.add_argument(
        "--model", "--model-path", required=True, help="a preset, a config.json, or the folder that holds one"
    )
    what.add_argument("--gpu", default="", help="a preset such as rtx-pro-6000 or h200 (default: this machine's)")
    what.add_argument("--gpu-memory-mib", type=float, default=0, help="of the card, in place of --gpu")
    what.add_argument("--free-before-gib", type=float, default=0, help="free before weights load, as the log says")
    what.add_argument("--weights-gib", type=float, default=0, help="weights of one rank, as the log says")
    what.add_argument("--log", type=Path, metavar="FILE", help="start-up log of SGLang: free memory, weights, fraction")
    what.add_argument("--sglang-version", default="0.5.23", choices=["0.5.17", "0.5.23"], help="whose rules")
    flags = parser.add_argument_group("flags of the server, by SGLang's names")
    flags.add_argument("--tp-size", type=int, default=1)
    flags.add_argument("--dp-size", type=int, default=1, help="DP attention: a rank keeps more heads, K/V stays whole")
    flags.add_argument("--context-length", type=int, default=0, help="default: the model's own")
    flags.add_argument("--max-running-requests", type=int, default=0)
    flags.add_argument("--chunked-prefill-size", type=int, default=0, help="default: 8192")
    flags.add_argument("--page-size", type=int, default=1)
    flags.add_argument("--kv-cache-dtype", default="auto", help="auto, bfloat16, fp8_e4m3")
    flags.add_argument("--attention-backend", default="mla_verify")
    flags.add_argument("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs", type=int, default=0)
    flags.add_argument("--disable-prefill-cuda-graph", action="store_true")
    flags.add_argument("--speculative-algorithm", default="none", choices=ALGORITHMS)
    flags.add_argument("--speculative-num-draft-tokens", type=int, default=0)
    flags.add_argument("--speculative-draft-model-path", default="", help="preset, config.json or folder")
    flags.add_argument("--draft-weights-gib", type=float, default=0)
    out = parser.add_argument_group("result")
    out.add_argument("--target-tokens", type=int, default=0, help="what the pool must hold (default: one context)")
    out.add_argument("--margin-gib", type=float, default=1.0, help="for what is not known (default: 1)")
    out.add_argument("--what-if", action="store_true", help="also by requests, K/V dtype, chunk and draft")
    out.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw one card's memory")
    out.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """0 where there is a plan, 1 where nothing fits (and what would)."""
    from .memory import plan

    setup, started = _setup(args)
    made = plan(setup, args.target_tokens)
    others = _what_if(setup, args.target_tokens) if args.what_if else []
    if args.picture:
        from .picture import draw

        draw(made, args.picture)
    if args.json:
        json.dump(_plain(made, others, started), sys.stdout, indent=1)
        print()
    else:
        _show(made, others, started)
    return 0 if made.feasible else 1


def _setup(args: argparse.Namespace) -> tuple[Any, Any]:
    """The setup, and what the log said or None."""
    from . import log
    from .memory import Setup, cell, static_gib
    from .model import nextn_draft, presets, read_draft, read_model

    model = read_model(args.model)
    started = log.read(args.log) if args.log else None
    total_mib, taken, sm_count, capability = args.gpu_memory_mib, 1.5, 0, ""
    if args.gpu:
        known = presets()["gpus"]
        if args.gpu not in known:
            raise ValueError(f"--gpu is {args.gpu!r}; expected one of {', '.join(known)}, or give --gpu-memory-mib")
        card = known[args.gpu]
        total_mib = total_mib or card["total_mib"]
        taken, sm_count, capability = card.get("taken_gib", taken), card["sm_count"], card["capability"]
    elif not total_mib:
        from ..machine import gpu

        found, why_not = gpu()
        if not found:
            raise ValueError(f"--gpu is not given and there is none here ({why_not}); name a preset, e.g. --gpu h200")
        total_mib, sm_count = found["memory_bytes"] / 2**20, found["sm_count"]
        capability = found["capability"]
    said = started or log.StartUp()
    free = args.free_before_gib or said.free_before_gib or total_mib / 1024 - taken
    weights = args.weights_gib or said.weights_gib
    if not weights:
        raise ValueError(
            "--weights-gib is not given; take it from a start-up log (Load weight end … mem usage) or --log"
        )
    draft = None
    if args.speculative_draft_model_path:
        draft = read_draft(args.speculative_draft_model_path, model)
    elif args.speculative_algorithm in ("EAGLE", "NEXTN"):
        draft = nextn_draft(model)
    setup = Setup(
        model=model,
        total_gib=total_mib / 1024,
        free_before_gib=free,
        weights_gib=weights,
        tp_size=args.tp_size,
        dp_size=args.dp_size,
        sm_count=sm_count,
        kv_cache_dtype=args.kv_cache_dtype,
        context=args.context_length or said.context_length or 0,
        max_running_requests=args.max_running_requests,
        chunked_prefill_size=args.chunked_prefill_size or said.chunked_prefill_size or 8192,
        page_size=args.page_size,
        cuda_graph_max_bs=args.cuda_graph_max_bs_decode,
        prefill_graph=False if args.disable_prefill_cuda_graph else None,
        capability=capability,
        algorithm=args.speculative_algorithm,
        draft_tokens=args.speculative_num_draft_tokens,
        draft=draft,
        draft_weights_gib=args.draft_weights_gib or said.draft_weights_gib or 0.0,
        attention_backend=args.attention_backend,
        release=args.sglang_version,
        margin_gib=args.margin_gib,
    )
    if started and not (args.free_before_gib or args.weights_gib or args.draft_weights_gib):
        reserve = static_gib(setup) - setup.weights_gib - setup.draft_weights_gib  # the release's own, not weights
        settled = started.settled(cell(setup) if _same_pool(setup, started) else 0, reserve)
        if settled:
            before, left = settled
            setup = replace(setup, free_before_gib=before, weights_gib=max(0.0, before - left), draft_weights_gib=0.0)
    return setup, started


def _same_pool(setup: Any, started: Any) -> bool:
    """Whether the log's pool is one of this setup's cells: same dtype and layers, and no draft, whose pool is apart."""
    from .memory import cell

    bounds = started.cell_bytes
    return bounds is not None and setup.draft is None and bounds[0] <= cell(setup) <= bounds[1]


def _what_if(setup: Any, target: int) -> list[tuple[str, Any]]:
    """The same plan with one flag changed."""
    from .memory import plan

    changes: list[tuple[str, Any]] = [
        (f"--max-running-requests {n}", replace(setup, max_running_requests=n)) for n in (1, 8, 48)
    ]
    changes += [(f"--kv-cache-dtype {kind}", replace(setup, kv_cache_dtype=kind)) for kind in ("bfloat16", "fp8_e4m3")]
    changes += [(f"--chunked-prefill-size {n}", replace(setup, chunked_prefill_size=n)) for n in (2048, 8192, 16384)]
    changes.append(
        ("no speculation", replace(setup, algorithm="none", draft=None, draft_weights_gib=0.0, draft_tokens=0))
    )
    return [(name, plan(changed, target, suggest=False)) for name, changed in changes]


def _plain(made: Any, others: list[tuple[str, Any]], started: Any) -> dict[str, Any]:
    from .memory import command, pool_gib, static_gib

    def brief(p: Any) -> dict[str, Any]:
        return {
            "feasible": p.feasible,
            "mem_fraction_static": p.fraction,
            "lowest": p.low,
            "highest": p.high,
            "pool_tokens": p.tokens,
            "missing_gib": p.missing_gib,
        }

    fraction = made.fraction if made.fraction is not None else made.high
    return {
        **brief(made),
        "target_tokens": made.target_tokens,
        "kv_bytes_per_token": made.cell_bytes,
        "change": made.change,
        "command": command(made),
        "static_gib": static_gib(made.setup),
        "pool_gib": pool_gib(made.setup, fraction),
        "terms": [vars(term) for term in made.terms],
        "what_if": {name: brief(p) for name, p in others},
        "log": {k: v for k, v in vars(started).items() if v is not None} if started else None,
    }


def _show(made: Any, others: list[tuple[str, Any]], started: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from .memory import command, pool_gib, static_gib

    console, setup = Console(), made.setup

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if made.feasible:
        say(
            f"--mem-fraction-static {made.fraction:g} (feasible: {max(made.low, 0):.3f} to {made.high:.3f}): "
            f"the pool holds {made.tokens:,} tokens, {made.target_tokens:,} are asked for"
        )
    else:
        say(
            f"no --mem-fraction-static serves {made.target_tokens:,} tokens: {made.missing_gib:.2f} GiB are missing "
            f"(the pool would need {made.low:.3f}, the rest leaves {made.high:.3f})"
        )
        say(f"smallest change that makes it fit: {made.change}")
    table = Table("on one card", "GiB", "why")
    fraction = made.fraction if made.fraction is not None else made.high
    table.add_row("taken before load", f"{setup.total_gib - setup.free_before_gib:.2f}", "CUDA, NCCL, the driver")
    table.add_row("weights", f"{static_gib(setup):.2f}", "target, draft, and the release's own reserve")
    table.add_row(
        "K/V pool",
        f"{max(0.0, pool_gib(setup, fraction)):.2f}",
        f"{made.cell_bytes:,} B a token, whole on every rank of TP",
    )
    for term in made.terms:
        table.add_row(term.name, f"{term.gib:.2f}", term.why + ("" if term.exact else " (estimate)"))
    console.print(table)
    if others:
        grid = Table("what if", "fraction", "pool tokens", "missing, GiB")
        for name, p in others:
            grid.add_row(name, f"{p.fraction:g}" if p.feasible else "none", f"{p.tokens:,}", f"{p.missing_gib:.2f}")
        console.print(grid)
    if started:
        if started.cell_bytes and not started.cell_bytes[0] <= made.cell_bytes <= started.cell_bytes[1]:
            low, high = started.cell_bytes
            say(
                f"the log's pool has {low:,.0f} to {high:,.0f} B a token, not {made.cell_bytes:,}: "
                "another dtype, draft or model?"
            )
        for line in started.unknown:
            say(f"not understood, and not guessed at: {line}")
    if made.feasible:
        say(shlex.join(command(made)))
