"""Decode at 200,000 tokens of context: one rank of Kimi-K2 at TP 8 in real SGLang, built-in backend against ours.

usage: headline.py gates [--plot FILE.svg]     the gates of phase.yaml that name this file
       headline.py table [--plot FILE.svg]     the same run, for a person

61 layers, 8 heads, hidden 7,168, random weights, float16; a dense MLP whose 0.3 GB a layer are about what a verify
step of 16 nodes reads of int4 experts. NGRAM speculation, CUDA graphs, batch 1. Ours is the server that ``mla-verify
plan`` asked for; it first serves one request of 199,000 tokens, whose K/V in the radix cache are then the context of
all depths. Two texts: ``natural`` goes on in words that no n-gram has seen; ``predictable`` ends in a walk round a
short cycle and goes on in it, which n-grams guess entirely.

A sample is the time between two arrivals of a streamed answer, which is a verify step (``session.step_times``);
tokens/s is the cell's accept length over it. The tests of test_server.py and this command report one and the same run,
which is made by whichever process of a gate run comes first. With no GPU it runs small on SGLang's CPU engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mla_verify_bench import tiny_model
from mla_verify_bench.records import Ratio, ratio_of_medians
from mla_verify_bench.tiny_model import TinyModel
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sglang_cpu"))

from session import Session, device_options, first_differences, step_times  # noqa: E402

GPU = torch.cuda.is_available()
SEED = 3
TEXTS = ("predictable", "natural")
OURS, PEER = "mla_verify", "triton"
OWN = 8  # tokens at the end of a natural prompt that no other has
Run = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """All that differs between a GPU and a rehearsal without one."""

    model: TinyModel
    context: int
    longest: int  # tokens of the longest request's prompt
    depths: tuple[int, ...]
    nodes: int
    walk: int  # tokens at the end of a predictable prompt
    tokens: dict[str, int]  # of a timed answer, by text
    checked_tokens: dict[str, int]  # of an answer whose tokens are compared
    short: int  # further short requests whose tokens are compared
    short_longest: int
    rounds: int  # timed answers of a cell
    margin_gib: int  # of the card, left to the other engine


SIZE = (
    Size(
        TinyModel(
            context=200_000, vocab=16_384, hidden=7168, width=256, layers=61, heads=8, dtype="float16", sharpness=4.0,
            preference=(1.0, 1.0), forks=1 / 16, predictable=64,
        ),
        context=200_000, longest=199_000, depths=(1024, 16_384, 65_536, 131_072, 185_000), nodes=16, walk=256,
        tokens={"predictable": 82, "natural": 8}, checked_tokens={"predictable": 17, "natural": 4}, short=24,
        short_longest=2_000, rounds=5, margin_gib=45,
    )
    if GPU
    else Size(
        TinyModel(context=256, layers=2, sharpness=4.0, preference=(1.0, 1.0), forks=1 / 8, predictable=16),
        context=256, longest=200, depths=(48, 96, 160), nodes=8, walk=32,
        tokens={"predictable": 20, "natural": 6}, checked_tokens={"predictable": 9, "natural": 4}, short=4,
        short_longest=60, rounds=2, margin_gib=1,
    )
)  # fmt: skip
SLOW_MS = 300.0  # of a step; such cells are timed once


# ---- the plan and the engines ----


def planned(model: Path) -> dict[str, Any]:
    """What ``mla-verify plan`` says of this machine and model, before anything has been started."""
    target = SIZE.model
    files = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    # What SGLang counts among the weights beside the files: kv_b_proj once more, absorbed, and the rope table.
    copies = 2 * target.layers * target.heads * 256 * tiny_model.LATENT_DIM + 4 * target.context * tiny_model.ROPE_DIM
    weights = (files + copies) / 2**30
    words = [
        "plan", "--json", "--model", str(model), "--weights-gib", str(weights), "--sglang-version", "0.5.17",
        "--context-length", str(SIZE.context), "--max-running-requests", "4", "--chunked-prefill-size", "8192",
        "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(SIZE.nodes),
        "--margin-gib", str(SIZE.margin_gib),
    ]  # fmt: skip
    words += ["--free-before-gib", str(_free_gib())] if GPU else ["--gpu-memory-mib", "8192"]
    done = subprocess.run([sys.executable, "-m", "mla_verify_bench.cli", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mla-verify plan ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return json.loads(done.stdout)


def _free_gib() -> float:
    """Free on the card once a process has its CUDA context, as SGLang finds it before it loads weights."""
    ask = "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.mem_get_info()[0] / 2**30)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return float(done.stdout)


def flags(command: list[str]) -> dict[str, Any]:
    """The planned command line as the engine's arguments."""
    words = command[command.index("sglang.launch_server") + 1 :]
    told = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        number = value.replace(".", "", 1).isdigit()
        told[name[2:].replace("-", "_")] = (float(value) if "." in value else int(value)) if number else value
    return told


def our_options(plan: dict[str, Any]) -> dict[str, Any]:
    told = device_options(GPU, SIZE.model.dtype) | flags(plan["command"])
    told["decode_log_interval"] = 1000
    if not GPU:  # the CPU engine's pool would be all of this machine's memory
        told |= {"max_total_tokens": 2 * SIZE.context}
    return told


def peer_options(plan: dict[str, Any]) -> dict[str, Any]:
    """The built-in backend beside it: the same server but for the pool, and for prefill in one chunk.

    It prefills fast only where nothing came before the chunk, so this favours it.
    """
    told = our_options(plan) | {
        "attention_backend": PEER,
        "chunked_prefill_size": SIZE.context,
        "max_prefill_tokens": SIZE.context,
        "max_total_tokens": SIZE.context + 8 * SIZE.nodes,
    }
    return told | {"mem_fraction_static": 0.6} | ({} if GPU else {"triton_attention_num_kv_splits": 1})


# ---- one engine's part of the run ----


class Texts:
    """Prompts by text and depth; the same for both engines, each request of a cell another one."""

    def __init__(self) -> None:
        rng = random.Random(f"headline {SEED}")
        self.words = range(len(tiny_model.SPECIAL), SIZE.model.vocab - SIZE.model.predictable)
        self.long = rng.choices(self.words, k=SIZE.longest)
        self.cycle = tiny_model.predictable_cycle(SIZE.model)

    def walk(self, length: int, start: int) -> list[int]:
        return [self.cycle[(start + i) % len(self.cycle)] for i in range(length)]

    def prompt(self, text: str, depth: int, number: int) -> list[int]:
        rng = random.Random(f"headline {SEED} {text} {depth} {number}")
        if text == "natural":
            return self.long[: depth - OWN] + rng.choices(self.words, k=OWN)
        length = min(SIZE.walk, depth // 2)
        return self.long[: depth - length] + self.walk(length, rng.randrange(len(self.cycle)))

    def short(self) -> list[list[int]]:
        rng = random.Random(f"headline {SEED} short")
        return [rng.choices(self.words, k=rng.randrange(20, SIZE.short_longest)) for _ in range(SIZE.short)]


def serve(session: Session, texts: Texts, save) -> None:
    """All cells of one engine, deepest first, so that one prefill serves all. ``save(part, value)`` after each."""
    greedy = {"logprobs": True}
    short = session.ask({"name": "short", "prompts": texts.short(), "tokens": 12, "at_once": 4} | greedy)
    save("short", {key: short[key] for key in ("tokens", "top2")})
    # N-grams learn the short cycle where a step costs little.
    learn = texts.walk(min(SIZE.walk, SIZE.short_longest // 2), 0)
    session.ask({"name": "learn", "prompts": [learn], "tokens": 2 * len(texts.cycle), "logprobs": False})
    for depth in reversed(SIZE.depths):
        for text in TEXTS:
            one = {"name": f"{text}-{depth}", "prompts": [texts.prompt(text, depth, 0)], "stream": True}
            checked = session.ask(one | greedy | {"tokens": SIZE.checked_tokens[text]})
            steps: list[float] = []
            accepted: list[float] = []
            for number in range(1, 1 + SIZE.rounds):
                again = {"name": f"{text}-{depth}-{number}", "prompts": [texts.prompt(text, depth, number)]}
                reply = session.ask(one | again | {"tokens": SIZE.tokens[text], "logprobs": False})
                taken = step_times(reply["marks"][0])
                steps += [ms for ms, _ in taken]
                accepted += [tokens for _, tokens in taken[:-1] or taken]  # the answer's length cuts the last one short
                if steps and statistics.median(steps) > SLOW_MS:
                    break
            save(f"{text} {depth}", {
                "tokens": checked["tokens"], "top2": checked["top2"], "cached": checked["cached"][0],
                "ms_per_step": steps, "accept_length": statistics.fmean(accepted) if accepted else None,
            })  # fmt: skip


def run(folder: Path, console: Console, told: Callable[[Run], None]) -> Run:
    """The whole run; ``run.json`` in ``folder`` grows with it, and ``told`` gets it each time."""
    taken: Run = {"finished": False, "failed": "", "cells": {OURS: {}, PEER: {}}}
    place = folder / "run.json"

    def save(engine: str, part: str, value: Any) -> None:
        (taken["cells"][engine] if engine else taken)[part] = value
        fresh = place.with_suffix(".tmp")
        fresh.write_text(json.dumps(taken))
        fresh.replace(place)
        told(taken)
        if engine and value.get("ms_per_step"):
            console.print(f"{part} on {engine}: {statistics.median(value['ms_per_step']):.1f} ms a step", markup=False)

    sessions: list[Session] = []
    model = _roomy(folder)
    try:
        _write_model(model)
        plan = planned(model)
        save("", "plan", plan)
        console.print(f"plan: {' '.join(plan['command'])}, {plan['pool_tokens']:,} tokens", markup=False)
        texts = Texts()
        ours = Session(folder / "ours", our_options(plan), gpu=GPU)
        sessions.append(ours)
        save("", "server", ours.wait())  # alone on the card, as the plan has it
        if GPU:
            sessions.append(Session(folder / "peer", peer_options(plan), gpu=GPU))  # starts during the long prefill
        longest = {"name": "longest", "prompts": [texts.long], "tokens": 16, "logprobs": False}
        served = ours.ask(longest)
        save("", "longest", {"tokens": len(texts.long) + len(served["tokens"][0]), "seconds": served["seconds"]})
        for session in sessions:
            session.wait()  # nobody may still be starting while another is timed
        serve(ours, texts, lambda part, value: save(OURS, part, value))
        ours.stop()
        if not GPU:
            sessions.append(Session(folder / "peer", peer_options(plan), gpu=GPU))
        serve(sessions[-1], texts, lambda part, value: save(PEER, part, value))
        save("", "finished", True)
    except Exception as error:  # noqa: BLE001 - kept: the gates that need what is missing say it
        save("", "failed", f"{type(error).__name__}: {error}"[-3000:])
    finally:
        for session in sessions:
            session.stop()
        shutil.rmtree(model if model.parent == folder else model.parent, ignore_errors=True)
    return taken


def _write_model(path: Path) -> None:
    """In a process of its own: a CUDA context here would take from the card that the plan is for."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import headline; from mla_verify_bench import tiny_model; "
        "tiny_model.write(sys.argv[2], headline.SIZE.model, 'cuda' if headline.GPU else 'cpu')"
    )
    words = [sys.executable, "-c", program, str(Path(__file__).resolve().parent), str(path)]
    subprocess.run(words, check=True, stdout=sys.stderr)


def _roomy(folder: Path) -> Path:
    """Where 22 GB of weights are written and read twice: memory, where there is some."""
    memory = Path("/dev/shm")
    if GPU and memory.is_dir() and shutil.disk_usage(memory).free > 40e9:
        return Path(tempfile.mkdtemp(prefix="mla-verify-headline-", dir=memory)) / "model"
    return folder / "model"


def this_run(told: Callable[[Run], None] = lambda taken: None) -> Run:
    """The run of this gate run: made by the first of its processes that asks, read by the others.

    They are children of one process; its id and the time it started name the folder, with the files that count.
    $MLA_VERIFY_HEADLINE_RUN names another folder, to keep a run beyond the process.
    """
    kept = os.environ.get("MLA_VERIFY_HEADLINE_RUN")
    folder = Path(kept) if kept else Path(tempfile.gettempdir()) / f"mla-verify-headline-{_name()}"
    place = folder / "run.json"
    if place.exists():
        taken = json.loads(place.read_text())
        if taken["finished"] or taken["failed"]:
            return taken
    folder.mkdir(parents=True, exist_ok=True)
    return run(folder, Console(stderr=True), told)


def _name() -> str:
    parent = os.getppid()
    try:
        born = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        born = ""
    digest = hashlib.sha256(f"{parent} {born} {os.environ.get('MLA_VERIFY_IMPL', '')}".encode())
    for part in ("kernels", "integrations", "phases/phase4_deploy_200k", "tests/sglang_cpu", "bench"):
        for path in sorted((ROOT / part).rglob("*")):
            if path.suffix in (".py", ".cu"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ---- what it comes to ----


def near_ties(taken: Run) -> tuple[list, int]:
    """First differences between the two engines over all compared requests, and how many requests those are."""
    parts = ["short", *(f"{text} {depth}" for text in TEXTS for depth in SIZE.depths)]
    found, requests = [], 0
    for part in parts:
        a, b = (taken["cells"][engine].get(part) for engine in (OURS, PEER))
        if not a or not b:
            raise RuntimeError(f"{part} was not served by both engines: {taken['failed'] or 'interrupted'}")
        requests += len(a["tokens"])
        differences = first_differences(a, b, dtype=SIZE.model.dtype, largest_logit=tiny_model.LOGIT_SCALE)
        found += [(part, d) for d in differences]
    return found, requests


def ms_per_token(taken: Run, engine: str, text: str, depth: int) -> list[float]:
    cell = taken["cells"][engine].get(f"{text} {depth}") or {}
    if not cell.get("ms_per_step") or not cell.get("accept_length"):
        return []
    return [ms / cell["accept_length"] for ms in cell["ms_per_step"]]


def report(taken: Run) -> dict:
    """Gates, ratios and samples in the form that the gate runner reads."""
    first, last = SIZE.depths[0], SIZE.depths[-1]

    def gate(pairs: dict[str, tuple[list[float], list[float]]]) -> dict:
        if lost := [name for name, sides in pairs.items() if not all(sides)]:
            return {"passed": None, "reason": f"{lost[0]} was not measured: {taken['failed'] or 'interrupted'}"}
        ratios: dict[str, Ratio] = {
            name: ratio_of_medians(ours, theirs, peer=name, seed=SEED) for name, (ours, theirs) in pairs.items()
        }
        worst = min(ratios, key=lambda name: ratios[name].low)
        plain = {name: r.model_dump() for name, r in ratios.items()}
        return {"metrics": {"ratio_low": ratios[worst].low}, "ratios": plain, "reason": f"worst: {worst}"}

    gates = {
        "headline-185k": gate({
            f"built-in, {text}": (ms_per_token(taken, OURS, text, last), ms_per_token(taken, PEER, text, last))
            for text in TEXTS
        }),
        "headline-flat": gate({
            f"ours at 1k, {text}": (ms_per_token(taken, OURS, text, last), ms_per_token(taken, OURS, text, first))
            for text in TEXTS
        }),
    }  # fmt: skip
    samples, metrics = {}, {}
    for engine, text, depth in ((e, t, d) for e in (OURS, PEER) for t in TEXTS for d in SIZE.depths):
        cell = taken["cells"][engine].get(f"{text} {depth}") or {}
        if values := ms_per_token(taken, engine, text, depth):
            samples[f"ms per step {engine} {text} {depth}"] = {
                "values": cell["ms_per_step"], "warmups": 1, "unit": "ms",
            }  # fmt: skip
            metrics[f"tokens_s {engine} {text} {depth}"] = 1e3 / statistics.median(values)
            metrics[f"accept_length {engine} {text} {depth}"] = cell["accept_length"]
    model = SIZE.model
    notes = [
        f"{model.layers} layers, {model.heads} heads, hidden {model.hidden}, dense MLP {model.hidden}, {model.dtype}, "
        f"random weights; NGRAM, {SIZE.nodes} nodes, batch 1",
        "both texts share the context before their last tokens; it is random words",
        "the built-in backend prefills in one chunk",
    ]
    return {"gates": gates, "samples": samples, "metrics": metrics, "notes": notes, "seeds": {"text": SEED}}


def show(taken: Run, console: Console) -> None:
    table = Table(
        "depth", "text", "ours, tokens/s", "built-in", "ratio", "ours, ms a step", "built-in", "accept length"
    )
    for text in TEXTS:
        for depth in SIZE.depths:
            sides = [ms_per_token(taken, engine, text, depth) for engine in (OURS, PEER)]
            cells = [taken["cells"][engine].get(f"{text} {depth}") for engine in (OURS, PEER)]
            if all(sides):
                mine, theirs = map(statistics.median, sides)
                steps = [statistics.median(cell["ms_per_step"]) for cell in cells]
                table.add_row(
                    f"{depth:,}", text, f"{1e3 / mine:.1f}", f"{1e3 / theirs:.2f}", f"{theirs / mine:.1f} ×",
                    f"{steps[0]:.1f}", f"{steps[1]:.1f}", f"{cells[0]['accept_length']:.2f}",
                )  # fmt: skip
    console.print(table)
    if taken["failed"]:
        console.print(taken["failed"], markup=False)


def plot(taken: Run, path: Path) -> None:
    """Tokens/s over depth, ours and built-in, one panel a text."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mla-verify"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TEXTS), figsize=(9.2, 4.0), layout="constrained", sharey=True)
    for axes, text in zip(panels, TEXTS, strict=True):
        sides = ((PEER, "SGLang's triton", "#8a8f99", -15), (OURS, "mla_verify", "#2b6cb0", 8))
        for engine, name, colour, above in sides:
            points = [(d, ms_per_token(taken, engine, text, d)) for d in SIZE.depths]
            points = [(d, 1e3 / statistics.median(ms)) for d, ms in points if ms]
            axes.loglog(*zip(*points, strict=True) if points else ((), ()), "o-", color=colour, label=name)
            for depth, rate in points[:1] + points[-1:]:
                axes.annotate(
                    f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}", (depth, rate), xytext=(0, above),
                    textcoords="offset points", ha="center", fontsize=9, color=colour,
                )  # fmt: skip
        axes.set_title(f"{text} text", fontsize=11)
        labels = [f"{d // 1024}k" if d % 1024 == 0 else f"{d / 1000:g}k" for d in SIZE.depths]
        labels[-2] = ""  # too near the last
        axes.set_xticks(SIZE.depths, labels)
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.2)
        axes.set_xlabel("context, tokens")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("decode, tokens/s")
    panels[0].legend(frameon=False, fontsize=9)
    model = SIZE.model
    figure.suptitle(
        f"One request, NGRAM speculation, {model.layers} MLA layers of {model.heads} heads, real SGLang", fontsize=11
    )
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw tokens/s over depth")
    args = parser.parse_args()
    out = os.environ.get("MLA_VERIFY_GATE_OUT")

    def told(taken: Run) -> None:
        if out:
            Path(out).write_text(json.dumps(report(taken)), encoding="utf-8")

    taken = this_run(told)
    told(taken)
    if args.plot:
        plot(taken, args.plot)
    show(taken, Console() if args.what == "table" else Console(stderr=True, width=140))


if __name__ == "__main__":
    main()
