"""What budgeted defragmentation adds to a decode step of a real server, on one GPU; the gate budgeted-step.

usage: bench_server.py gates [--rounds N]   the gate of phase.yaml that names this file
       bench_server.py table [--rounds N]   the same, for a person
       with --cpu                           a tiny model on SGLang's CPU engine: shows that it runs, nothing about speed

Servers of one random-weight model differ in MLA_VERIFY_DEFRAG alone: off, a budget, and a budget with the stock
allocation, under which all that is decoded together lies scattered and every budget is used up. All are up at the
same time. A round sends the same unseen prompts to each, one server after the other, the order rotating; a sample is
the milliseconds of a step, from a request's first token to its last, mean over its requests. The pool holds a few
rounds, so the prefix cache evicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import httpx
from mla_verify_bench import tiny_model
from mla_verify_bench.frag import fetch
from mla_verify_bench.longctx.client import Target, ask
from mla_verify_bench.longctx.server import Launch, Server, write_random_model
from mla_verify_bench.records import ratio_of_medians

SEED, WARMUPS = 5, 1


@dataclass(frozen=True)
class Setup:
    """Sizes of a run. ``budget`` bytes may move after every ``every`` steps."""

    layers: int
    heads: int
    pool: int
    requests: int
    prompt: int
    new_tokens: int
    budget: int
    every: int


GPU = Setup(layers=61, heads=16, pool=60_000, requests=16, prompt=512, new_tokens=512, budget=256 << 20, every=256)
CPU = Setup(layers=2, heads=4, pool=300, requests=3, prompt=30, new_tokens=24, budget=200_000, every=8)


def modes(setup: Setup) -> dict[str, dict[str, str]]:
    """Variables of each server, by its name."""
    budget = f"budget:{setup.budget}:{setup.every}"
    return {
        "off": {"MLA_VERIFY_DEFRAG": "off"},
        "budget": {"MLA_VERIFY_DEFRAG": budget, "MLA_VERIFY_DEFRAG_POLICY": "best-fit"},
        "budget, stock allocation": {"MLA_VERIFY_DEFRAG": budget, "MLA_VERIFY_DEFRAG_POLICY": "stock"},
    }


def launch(setup: Setup, cpu: bool, folder: Path) -> Launch:
    context = setup.prompt + setup.new_tokens + 64
    if cpu:
        model = tiny_model.write(folder / "model", tiny_model.TinyModel(context=context))
    else:
        model = write_random_model(folder / "model", layers=setup.layers, heads=setup.heads, context=context)
    return Launch(
        python=sys.executable, model_path=str(model), attention_backend="mla_verify", cpu=cpu, context_length=context,
        pool_tokens=setup.pool, max_running_requests=setup.requests, speculative_algorithm="", dummy_weights=not cpu,
        seed=SEED,
    )  # fmt: skip


def step_ms(url: str, prompts: list[list[int]], new_tokens: int) -> float:
    """Send the prompts at once; milliseconds of a step, mean over the requests."""

    async def send() -> list:
        async with httpx.AsyncClient(trust_env=False, timeout=None, limits=httpx.Limits(max_connections=None)) as http:
            return await asyncio.gather(*(ask(http, Target(url, "generate"), p, new_tokens) for p in prompts))

    took = []
    for reply in asyncio.run(send()):
        if reply.error or reply.completion_tokens != new_tokens:
            sys.exit(f"a request got {reply.completion_tokens} of {new_tokens} tokens: {reply.error} {reply.detail}")
        took.append(1e3 * (reply.last_s - reply.first_s) / (new_tokens - reply.first_tokens))
    return statistics.fmean(took)


def measure(setup: Setup, rounds: int, cpu: bool) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Samples of each server, and the tokens that each has moved meanwhile."""
    taken: dict[str, list[float]] = {}
    moved: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        what, urls = launch(setup, cpu, Path(scratch)), {}
        for name, environ in modes(setup).items():
            with mock.patch.dict(os.environ, environ | ({"MLA_VERIFY_IMPL": "reference"} if cpu else {})):
                urls[name] = running.enter_context(Server(what, Path(scratch, f"{name}.log"))).base_url
        names = list(urls)
        taken = {name: [] for name in names}

        def tokens_moved(name: str) -> int:
            return 0 if name == "off" else sum(rank.counters.moved_tokens for rank in fetch(urls[name]))

        for i in range(WARMUPS + rounds):
            if i == WARMUPS:
                moved = {name: -tokens_moved(name) for name in names}
            prompts = tiny_model.prompts(setup.requests, shortest=setup.prompt, longest=setup.prompt, seed=SEED + i)
            for k in range(len(names)):
                name = names[(i + k) % len(names)]
                sample = step_ms(urls[name], prompts, setup.new_tokens)
                if i >= WARMUPS:
                    taken[name].append(sample)
        for name in names:
            moved[name] += tokens_moved(name)
    return taken, moved


def report(taken: dict[str, list[float]], moved: dict[str, int], setup: Setup) -> dict:
    """The gate, in the form that the gate runner reads: the worse of the two budgets."""
    ratios = {
        name: ratio_of_medians(taken["off"], samples, peer=f"off / {name}", seed=SEED)
        for name, samples in taken.items()
        if name != "off"
    }
    added = {name: 100 * (ratio.high - 1) for name, ratio in ratios.items()}
    worst = max(added, key=added.get)
    gate = {
        "metrics": {"added_percent_high": added[worst], "moved_tokens": moved["budget, stock allocation"]},
        "ratios": {name: ratio.model_dump() for name, ratio in ratios.items()},
        "samples": {name: {"values": s, "warmups": WARMUPS, "unit": "ms"} for name, s in taken.items()},
        "reason": f"worst: {worst}",
    }
    if not moved["budget, stock allocation"]:
        gate |= {"passed": None, "reason": "no token was moved, so the steps say nothing about moving"}
    return {"gates": {"budgeted-step": gate}, "seeds": {"prompts": SEED}, "notes": [f"servers of {setup}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--rounds", type=int, default=9, help="samples of each server; 3 or more")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on SGLang's CPU engine")
    args = parser.parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds is {args.rounds}; expected 3 or more, or an interval of the median says nothing")
    if not args.cpu:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("bench_server.py needs a CUDA GPU; --cpu tries it out without one")
    setup = CPU if args.cpu else GPU
    taken, moved = measure(setup, args.rounds, args.cpu)
    told = report(taken, moved, setup)
    for name, samples in taken.items():
        print(
            f"{name}: {statistics.median(samples):.3f} ms a step, {moved[name]:,} tokens moved",
            file=sys.stderr if args.what == "gates" else sys.stdout,
        )
    for name, ratio in told["gates"]["budgeted-step"]["ratios"].items():
        low, high = (100 * (ratio[bound] - 1) for bound in ("low", "high"))
        print(f"{name} adds {low:.2f} % to {high:.2f} %", file=sys.stderr if args.what == "gates" else sys.stdout)
    if out := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(out, "w", encoding="utf-8") as f:
            json.dump(told, f)


if __name__ == "__main__":
    main()
