"""Step time of NGRAM verify and of plain decode by context depth, in the real engine, ours and the built-in backend.

usage: bench_engine.py gates     the gates of phase.yaml that name this file
       bench_engine.py table     the same run, for a person

Batch 1, CUDA graphs on, four engines: (NGRAM, no speculation) x (ours, SGLang's ``triton``). They start side by side
and are timed one after another. A sample is the time between two arrivals of a streamed answer, which is a step
(``session.step_times``). The context is real K/V in the pool, written by an abridged prefill (attention left out, see
tests/sglang_cpu/session.py); all steps that are timed are whole. Each request ends in tokens of its own, so that its
prefix is found in the radix cache and its text has not been seen.

With no GPU it runs small on SGLang's CPU engine, which tests this file and says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mla_verify_bench import tiny_model
from mla_verify_bench.records import Ratio, ratio_of_medians
from mla_verify_bench.tiny_model import TinyModel
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu"))

from session import Session, device_options, step_times  # noqa: E402

GPU = torch.cuda.is_available()
SEED = 5
OWN = 8  # tokens at the end of a prompt that no other has
PEER = "built-in triton"
Samples = dict[tuple[str, str, int], list[float]]  # (mode, backend, depth) -> ms of a step


@dataclass(frozen=True)
class Size:
    """All that differs between a GPU and a rehearsal without one."""

    ngram_model: TinyModel
    decode_layers: int  # plain decode: so many that the card is the limit and not the host
    depths: tuple[int, ...]  # shallowest first
    nodes: int
    tokens: int  # of an answer
    steps: int  # samples wanted of each cell
    slow_steps: int  # where a step takes longer than SLOW_MS


SLOW_MS = 200.0
SIZE = (
    Size(
        TinyModel(
            context=196_608, vocab=8192, hidden=2048, width=256, layers=8, heads=16, dtype="bfloat16", sharpness=4.0,
            preference=(1.0, 1.0), forks=1 / 16,
        ),
        decode_layers=61, depths=(1024, 16_384, 65_536, 185_000), nodes=16, tokens=64, steps=60, slow_steps=5,
    )
    if GPU
    else Size(
        TinyModel(context=512, layers=2, preference=(1.0, 1.0), forks=1 / 16, sharpness=4.0),
        decode_layers=3, depths=(64, 96, 128, 192), nodes=8, tokens=12, steps=8, slow_steps=3,
    )
)  # fmt: skip
MODES = ("ngram", "decode")
BACKENDS = ("mla_verify", "triton")


def options(folder: Path, mode: str, backend: str) -> dict:
    model = SIZE.ngram_model if mode == "ngram" else replace(SIZE.ngram_model, layers=SIZE.decode_layers)
    path = folder / f"model-{mode}"
    if not path.exists():
        if mode == "decode" and GPU:  # its text is of no account, and its weights would take long to draw
            tiny_model.write_config(path, model)
        else:
            tiny_model.write(path, model)
    told = device_options(GPU, model.dtype) | {
        "model_path": str(path),
        "attention_backend": backend,
        "max_running_requests": 2,
        "max_total_tokens": model.context,
        "chunked_prefill_size": 16_384,
        "mem_fraction_static": 0.8,  # the pool is capped; this only has to leave room for it beside the others
        "decode_log_interval": 1000,
    }
    if mode == "ngram":
        told |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": SIZE.nodes}
    if GPU:
        told |= {"cuda_graph_max_bs_decode": 2}
        if mode == "decode":
            told |= {"load_format": "dummy"}
    return told


def measure(session: Session, mode: str, backend: str, done) -> None:
    """All depths, deepest first: the deepest prompt's prefix serves the others. ``done(depth, samples)`` after each."""
    rng = random.Random(SEED)
    words = range(len(tiny_model.SPECIAL), SIZE.ngram_model.vocab)
    text = rng.choices(words, k=SIZE.depths[-1])

    def ask(depth: int, tokens: int) -> list[float]:
        prompt = text[: depth - OWN] + rng.choices(words, k=OWN)
        job = {"name": f"{depth}-{rng.random()}", "prompts": [prompt], "tokens": tokens, "stream": True}
        return [ms for ms, _ in step_times(session.ask(job | {"logprobs": False})["marks"][0])]

    for depth in reversed(SIZE.depths):
        warm = ask(depth, 4)
        slow = bool(warm) and statistics.median(warm) > SLOW_MS
        wanted, taken = SIZE.slow_steps if slow else SIZE.steps, []
        for _ in range(SIZE.steps):
            # plain decode and an unseen text give about a token a step
            taken += ask(depth, wanted + 3 if slow else SIZE.tokens)
            if len(taken) >= wanted:
                break
        done(depth, taken)


def report(taken: Samples) -> dict:
    """Gates, ratios and samples of what has been measured so far."""
    gates: dict[str, dict] = {}
    last = SIZE.depths[-1]

    def ratio(ours: tuple[str, str, int], theirs: tuple[str, str, int], peer: str) -> Ratio:
        return ratio_of_medians(taken[ours], taken[theirs], peer=peer, seed=SEED)

    def gate(name: str, cells: list[tuple], make) -> None:
        if lost := [c for c in cells if not taken.get(c)]:
            mode, backend, depth = lost[0]
            gates[name] = {"passed": None, "reason": f"{mode} on {backend} at {depth} was not measured"}
        else:
            gates[name] = make()

    def grows() -> dict:
        r = ratio(("ngram", "mla_verify", SIZE.depths[0]), ("ngram", "mla_verify", SIZE.depths[2]), "ours at 64k")
        return {"metrics": {"ratio_high": r.high}, "ratios": {"64k over 1k": r.model_dump()}}

    def deep() -> dict:
        r = ratio(("ngram", "mla_verify", last), ("ngram", "triton", last), PEER)
        return {"metrics": {"ratio_low": r.low}, "ratios": {PEER: r.model_dump()}}

    def decode() -> dict:
        ratios = {d: ratio(("decode", "mla_verify", d), ("decode", "triton", d), f"{PEER} at {d}") for d in SIZE.depths}
        worst = min(ratios, key=lambda d: ratios[d].low)
        plain = {f"{PEER} at {d}": r.model_dump() for d, r in ratios.items()}
        return {"metrics": {"ratio_low": ratios[worst].low}, "ratios": plain, "reason": f"worst at {worst}"}

    ours = [("ngram", "mla_verify", d) for d in SIZE.depths]
    gate("gpu-step-64k", [ours[0], ours[2]], grows)
    gate("gpu-step-185k", [ours[-1], ("ngram", "triton", last)], deep)
    gate("gpu-decode-never-slower", [("decode", b, d) for b in BACKENDS for d in SIZE.depths], decode)
    samples = {
        f"{mode} {backend} {depth}": {"values": values, "warmups": 1, "unit": "ms"}
        for (mode, backend, depth), values in taken.items()
        if values
    }
    notes = [
        f"{SIZE.ngram_model.heads} heads, hidden {SIZE.ngram_model.hidden}, {SIZE.ngram_model.dtype}; "
        f"{SIZE.ngram_model.layers} layers with NGRAM ({SIZE.nodes} nodes), {SIZE.decode_layers} without speculation",
        "the context's K/V come from a prefill without attention; only whole steps are timed",
    ]
    return {"gates": gates, "samples": samples, "seeds": {"text": SEED}, "notes": notes}


def show(taken: Samples, console: Console) -> None:
    table = Table("step", "depth", "ours, ms", "built-in, ms", "ratio", title="medians, batch 1")
    for mode in MODES:
        for depth in SIZE.depths:
            sides = [taken.get((mode, backend, depth)) for backend in BACKENDS]
            if all(sides):
                mine, theirs = map(statistics.median, sides)
                table.add_row(mode, f"{depth:,}", f"{mine:.2f}", f"{theirs:.2f}", f"{theirs / mine:.2f} ×")
    console.print(table)


def run(folder: Path, save) -> Samples:
    taken: Samples = {}
    cells = [(mode, backend) for mode in MODES for backend in BACKENDS]
    sessions: dict[tuple[str, str], Session] = {}

    def start(cell: tuple[str, str]) -> None:
        made = options(folder, *cell)
        sessions[cell] = Session(folder / "-".join(cell), made, gpu=GPU, abridged_prefill=True)

    try:
        for cell in cells if GPU else ():
            start(cell)
        for session in sessions.values():  # nobody may still be starting while another is timed
            session.wait()
        for cell in cells:
            if cell not in sessions:
                start(cell)

            def done(depth: int, samples: list[float], cell: tuple[str, str] = cell) -> None:
                taken[(*cell, depth)] = samples
                save(taken)
                middle = f"{statistics.median(samples):.2f} ms" if samples else "no step"
                print(f"{cell[0]} on {cell[1]} at {depth:,}: {middle}, {len(samples)} samples", file=sys.stderr)

            measure(sessions[cell], *cell, done)
            sessions[cell].stop()
    finally:
        for session in sessions.values():
            session.stop()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    args = parser.parse_args()
    out = os.environ.get("MLA_VERIFY_GATE_OUT")

    def save(taken: Samples) -> None:
        if out:
            Path(out).write_text(json.dumps(report(taken)), encoding="utf-8")

    save({})
    with tempfile.TemporaryDirectory(prefix="mla-verify-engine-") as folder:
        taken = run(Path(folder), save)
    show(taken, Console() if args.what == "table" else Console(stderr=True))


if __name__ == "__main__":
    main()
