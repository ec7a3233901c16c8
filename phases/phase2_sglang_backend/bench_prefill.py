"""Prefill by path: SGLang's own backends beside this decode backend, and this one, in the real engine.

usage: bench_prefill.py gates [--paths P,P]     the gate of phase.yaml that names this file
       bench_prefill.py table [--paths P,P]     the same run, for a person

gpu-prefill   time to the first token of a prompt that nothing is cached of, one request at a time, chunked prefill,
              radix cache on. ratio_low: the advised path over the fastest of the others, at the worst length, the lower
              end of the interval

An engine for each path. They start side by side and are timed one after another. A path whose engine does not start or
dies is noted with its reason and costs its own figures alone. The weights are dummies, of the sizes that
bench_engine.py times.

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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_engine import GPU, SIZE, Session, device_options
from mla_verify_bench import tiny_model
from mla_verify_bench.records import ratio_of_medians
from rich.console import Console
from rich.table import Table

GATE = "gpu-prefill"
OURS = "mla_verify"
SEED = 7
CARD = torch.cuda.get_device_capability()[0] if GPU else 0
# By compute capability: fa3 is for Hopper alone. Where a card is not listed, the default.
ADVISED = {9: "fa3"}.get(CARD, "flashinfer" if GPU else "triton")
PATHS = (OURS, "triton", *(["flashinfer"] if GPU else []), *(["fa3"] if CARD == 9 else []))
MODEL = SIZE.ngram_model


@dataclass(frozen=True)
class Load:
    """All that differs between a GPU and a rehearsal without one."""

    lengths: tuple[int, ...]
    chunk: int
    samples: int
    least: int  # samples, however long they take
    seconds: float  # after which a cell takes no further one


LOAD = Load((4_096, 32_768), 8_192, 12, 2, 5.0) if GPU else Load((48, 192), 64, 3, 2, 5.0)
Samples = dict[tuple[str, int], list[float]]  # (path, tokens) -> ms to the first token


def options(folder: Path, path: str) -> dict:
    model = folder / "model"
    if not model.exists():  # on a GPU its text is of no account, and its weights would take long to draw
        (tiny_model.write_config if GPU else tiny_model.write)(model, MODEL)
    told = device_options(GPU, MODEL.dtype) | {
        "model_path": str(model),
        # Not --prefill-attention-backend: SGLang 0.5.17 goes by this flag when it decides whether the chunks after
        # the first may leave the absorbed form.
        "attention_backend": path,
        "max_running_requests": 2,
        "max_total_tokens": MODEL.context,
        "chunked_prefill_size": LOAD.chunk,
        "mem_fraction_static": 0.8,  # the pool is capped; this only has to leave room for it beside the others
    }
    if path != OURS:
        told |= {"decode_attention_backend": OURS}
    return told | ({"cuda_graph_max_bs_decode": 2, "load_format": "dummy"} if GPU else {})


def measure(session: Session, done) -> None:
    """All lengths, ``done(length, samples)`` after each. A request before them, of each length, is not counted."""
    rng = random.Random(SEED)
    words = range(len(tiny_model.SPECIAL), MODEL.vocab)
    # No two begin alike, so that the radix cache has nothing of any.
    first = iter(rng.sample(words, len(LOAD.lengths) * (1 + LOAD.samples)))

    def ask(length: int) -> float:
        prompt = [next(first), *rng.choices(words, k=length - 1)]
        job = {"name": f"{length}-{rng.random()}", "prompts": [prompt], "tokens": 1, "stream": True, "logprobs": False}
        reply = session.ask(job, timeout=300)
        assert reply["cached"] == [0], f"{reply['cached']} tokens of a new prompt were cached"
        return 1e3 * reply["marks"][0][0][0]

    for length in LOAD.lengths:
        ask(length)
        taken, began = [], time.monotonic()
        while len(taken) < LOAD.samples and (len(taken) < LOAD.least or time.monotonic() - began < LOAD.seconds):
            taken.append(ask(length))
        done(length, taken)


def report(taken: Samples, reasons: dict[str, str], paths: Sequence[str]) -> dict:
    """The gate and the samples of what has been measured so far."""
    ratios, fastest = {}, {}
    for length in LOAD.lengths:
        medians = {p: statistics.median(taken[p, length]) for p in paths if (p, length) in taken and p != ADVISED}
        if medians and (ADVISED, length) in taken:
            fastest[length] = other = min(medians, key=lambda p: medians[p])
            peer = f"{other} at {length}"
            ratios[length] = ratio_of_medians(taken[ADVISED, length], taken[other, length], peer=peer, seed=SEED)
    metrics = {f"tokens/s {p} {n}": n / statistics.median(values) * 1e3 for (p, n), values in taken.items()}
    if ADVISED in reasons:  # one that is not installed is a peer that is missing
        passed = None if "ImportError" in reasons[ADVISED] else False
        gate = {"passed": passed, "reason": f"the advised path, {ADVISED}: {reasons[ADVISED]}"}
    elif len(ratios) < len(LOAD.lengths):
        gate = {"passed": None, "reason": f"{ADVISED}, the advised path, and another were not measured at all lengths"}
    else:
        worst = min(ratios, key=lambda n: ratios[n].low)
        plain = {r.peer: r.model_dump() for r in ratios.values()}
        said = f"prefill by {ADVISED}; worst at {worst} tokens, against {fastest[worst]}"
        gate = {"metrics": {"ratio_low": ratios[worst].low} | metrics, "ratios": plain, "reason": said}
    samples = {f"{p} {n}": {"values": values, "warmups": 1, "unit": "ms"} for (p, n), values in taken.items()}
    notes = [
        f"{MODEL.layers} layers, {MODEL.heads} heads, hidden {MODEL.hidden}, {MODEL.dtype}, dummy weights; chunks of "
        f"{LOAD.chunk:,} tokens",
        *(f"{path} could not be measured: {why}" for path, why in reasons.items()),
    ]
    return {"gates": {GATE: gate}, "metrics": metrics, "samples": samples, "seeds": {"text": SEED}, "notes": notes}


def show(taken: Samples, reasons: dict[str, str], paths: Sequence[str], console: Console) -> None:
    lengths = [f"{n:,} tokens" for n in LOAD.lengths]
    table = Table("path", *lengths, title=f"prefill, tokens/s, medians; advised: {ADVISED}")
    for path in paths:
        cells = [(n, taken.get((path, n))) for n in LOAD.lengths]
        table.add_row(path, *(f"{n / statistics.median(c) * 1e3:,.0f}" if c else "" for n, c in cells))
    console.print(table)
    for path, why in reasons.items():
        console.print(f"{path}: {why}", markup=False)


def run(folder: Path, paths: Sequence[str], save) -> tuple[Samples, dict[str, str]]:
    taken: Samples = {}
    reasons: dict[str, str] = {}
    sessions: dict[str, Session] = {}

    def start(path: str) -> Session:
        if path not in sessions:
            sessions[path] = Session(folder / path, options(folder, path), gpu=GPU)
        return sessions[path]

    def attempt(path: str, what) -> None:
        """Whatever ends one path's engine is that path's reason."""
        if path in reasons:
            return
        try:
            what(start(path))
        except (RuntimeError, AssertionError, OSError) as error:
            reasons[path] = str(error)
            print(f"{path}: {error}", file=sys.stderr)
            start(path).stop()
            save(taken, reasons)

    try:
        for path in paths if GPU else ():
            start(path)
        for path in paths if GPU else ():  # nobody may still be starting while another is timed
            attempt(path, lambda session: session.wait(300))
        for path in paths:

            def done(length: int, samples: list[float], path: str = path) -> None:
                taken[path, length] = samples
                save(taken, reasons)
                middle = statistics.median(samples)
                speed = f"{middle:.1f} ms, {length / middle * 1e3:,.0f} tokens/s, {len(samples)} samples"
                print(f"{path}, {length:,} tokens: {speed}", file=sys.stderr)

            attempt(path, lambda session, done=done: measure(session, done))
            if path in sessions:
                sessions[path].stop()
    finally:
        for session in sessions.values():
            session.stop()
    return taken, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--paths", default=",".join(PATHS), help="names of --attention-backend (default: %(default)s)")
    args = parser.parse_args()
    paths, out = args.paths.split(","), os.environ.get("MLA_VERIFY_GATE_OUT")

    def save(taken: Samples, reasons: dict[str, str]) -> None:
        if out:
            Path(out).write_text(json.dumps(report(taken, reasons, paths)), encoding="utf-8")

    save({}, {})
    with tempfile.TemporaryDirectory(prefix="mla-verify-prefill-") as folder:
        taken, reasons = run(Path(folder), paths, save)
    save(taken, reasons)
    show(taken, reasons, paths, Console() if args.what == "table" else Console(stderr=True))


if __name__ == "__main__":
    main()
