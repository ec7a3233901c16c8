"""``mla-verify doctor``: what this machine has, which implementation would serve it, and a short self-test."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from . import machine

SGLANG_RANGE = ("0.5.17", "0.5.23")
"""Oldest and newest SGLang that the plugin is tested with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if the self-test is wrong, else 0."""
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 0 if found["self_test"]["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything doctor says, as plain values."""
    found = machine.describe()
    found["classes"] = machine.classes(found["gpu"]["capability"] if found["gpu"] else None)
    found["sglang"] = _sglang(found["versions"]["sglang"])
    try:
        import mla_verify

        found["implementations"] = mla_verify.implementations()
        device = "cuda" if found["gpu"] else "cpu"
        found["chosen"] = mla_verify.choose(device)
        found["chosen_because"] = _because(found["chosen"], found["implementations"])
        found["self_test"] = self_test(device, found["chosen"])
    except Exception as error:  # doctor describes a broken installation rather than falling over it
        found.setdefault("implementations", {})
        found.setdefault("chosen", "")
        found.setdefault("chosen_because", "")
        found["self_test"] = {"ok": False, "sentence": f"{type(error).__name__}: {error}"}
    return found


def _sglang(version: str) -> dict[str, Any]:
    low, high = SGLANG_RANGE
    if not version:
        sentence = f"not installed; the plugin is tested with {low} to {high}"
        return {"version": "", "in_range": False, "sentence": sentence}
    ok = _numbers(low) <= _numbers(version) <= _numbers(high)
    return {
        "version": version,
        "in_range": ok,
        "sentence": f"{version}, {'in' if ok else 'outside'} the tested range {low} to {high}",
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def _because(chosen: str, implementations: dict[str, str]) -> str:
    if os.environ.get("MLA_VERIFY_IMPL", "auto") not in ("auto", ""):
        return "MLA_VERIFY_IMPL asks for it"
    others = [f"{name}: {why}" for name, why in implementations.items() if why]
    return "; ".join(others) or "it is the fastest that runs here"


def self_test(device: str, impl: str) -> dict[str, Any]:
    """``verify`` on a small ragged batch against a dense float64 softmax written out here; on a GPU also its speed."""
    import mla_verify
    import torch
    from mla_verify import Slots, Tree

    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    prefixes, nodes, heads = [130, 7, 0], [5, 3, 1], 4
    lens = [prefix + n for prefix, n in zip(prefixes, nodes, strict=True)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kv = torch.randn(sum(lens) + 9, 576, generator=generator).to(dtype)
    q = torch.randn(sum(nodes), heads, 576, generator=generator).to(dtype)
    order = torch.randperm(kv.shape[0], generator=generator).tolist()
    lists = [order[sum(lens[:b]) : sum(lens[: b + 1])] for b in range(3)]
    parents = [[-1, 0, 0, 1, 1], [-1, 0, 1], [-1]]
    scale = 192**-0.5
    out, lse = mla_verify.verify(
        q.to(device), kv.to(device), Slots.from_lists(lists, device), Tree.from_parents(parents, device=device),
        sm_scale=scale, impl=impl, checked=True,
    )  # fmt: skip
    worst, row = 0.0, 0
    for slots, parent in zip(lists, parents, strict=True):
        keys = kv[slots].double()
        for node in range(len(parent)):
            seen, at = set(), node
            while at >= 0:
                seen.add(at)
                at = parent[at]
            prefix = len(slots) - len(parent)
            visible = keys[[*range(prefix), *(prefix + n for n in sorted(seen))]]
            scores = q[row].double() @ visible.T * scale
            wanted = scores.softmax(-1) @ visible[:, :512]
            worst = max(worst, (out[row].cpu().double() - wanted).abs().max().item())
            worst = max(worst, (lse[row].cpu().double() - scores.logsumexp(-1)).abs().max().item())
            row += 1
    allowed = 0.02 if dtype == torch.bfloat16 else 1e-4
    ok = worst <= allowed
    result: dict[str, Any] = {"ok": ok, "impl": impl, "worst_error": worst, "allowed_error": allowed}
    speed = ""
    if ok and device == "cuda":
        result.update(_speed(impl))
        shape = f"16 nodes × 16 heads over {result['tokens']:,} tokens"
        speed = f"; {shape} in {result['ms']:.3f} ms, {result['gb_per_s']:.0f} GB/s of K/V"
    result["seconds"] = round(time.perf_counter() - started, 2)
    verdict = "right" if ok else "WRONG"
    result["sentence"] = f"{impl} is {verdict}: worst error {worst:.1e}, allowed {allowed:.0e}{speed}"
    return result


def _speed(impl: str, tokens: int = 65_536, nodes: int = 16, heads: int = 16) -> dict[str, float]:
    """Median time of one call with as cold an L2 as a pool of several copies gives, and the K/V bandwidth in it."""
    import mla_verify
    import torch
    from mla_verify import Slots, Tree

    copies = 4  # 4 × 75 MB: beyond the L2 of every card so far
    kv = torch.randn(copies * tokens, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(nodes, heads, 576, device="cuda", dtype=torch.bfloat16)
    tree = Tree.chain(nodes, device="cuda")
    order = torch.randperm(copies * tokens, device="cuda", dtype=torch.int32)
    pools = [
        Slots.from_indptr(part.contiguous(), torch.tensor([0, tokens], device="cuda"), tokens)
        for part in order.split(tokens)
    ]
    times = []
    for i in range(24):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        mla_verify.verify(q, kv, pools[i % copies], tree, sm_scale=192**-0.5, impl=impl)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ms = sorted(times[8:])[8]
    return {"tokens": tokens, "ms": ms, "gb_per_s": tokens * 576 * 2 / ms / 1e6}


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    gpu, versions = found["gpu"], found["versions"]
    rows: list[tuple[str, str]] = []
    if gpu:
        shared, memory = gpu["shared_memory_per_block_bytes"], gpu["memory_bytes"] / 2**30
        rows += [
            ("GPU", f"{gpu['name']}, capability {gpu['capability']}, {gpu['sm_count']} SMs, {memory:.0f} GiB"),
            ("shared memory", f"{shared:,} B per block" if shared else "per block: this torch does not say"),
            ("driver", f"{gpu.get('driver') or 'unknown'}, CUDA {gpu['cuda']}"),
        ]
    else:
        rows.append(("GPU", f"none: {found['no_gpu_because']}"))
    cpu = found["cpu"]
    rows += [
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 2**30:.0f} GiB"),
        ("gates", f"of classes {', '.join(found['classes'])}"),
        ("torch", versions["torch"] or "not installed"),
        ("Triton", versions["triton"] or "not installed"),
        ("SGLang", found["sglang"]["sentence"]),
    ]
    for name, why in found["implementations"].items():
        rows.append((name, why or "runs here"))
    rows += [
        ("chosen", f"{found['chosen'] or 'none'} ({found['chosen_because']})"),
        ("self-test", found["self_test"]["sentence"]),
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(text))
    Console().print(table, highlight=False)
