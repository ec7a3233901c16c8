"""What DDTREE costs beside the model, and what it brings, on one GPU.

usage: bench_ddtree.py steps|accept|auto [--rounds N]   the gates of phase.yaml that name this file and this word

steps:
ddtree-step-batch-1, -16  tree build with its masks, walk, and commit of the K/V rows of 61 layers, at B = 64 and a
                          block of 16: one CUDA graph, as long as its replay takes. The drafter, its head and top-k,
                          and the target's pass are not in it. us_high: the upper end of a 95 % bootstrap interval of
                          the median
accept:
ddtree-accept-length      tokens of a verify step on held-out text, trained model and drafter, greedy: fixed budgets
ddtree-accept-grows       against the chain of SGLang's own DFLASH. A budget below the drafter's block is held to a
                          chain of as many drafts, DFLASH with a smaller block
auto:
ddtree-auto-budget        ms a token of the automatic budget against DFLASH, fixed budgets and no speculation, all on
                          this backend: the trained model up to its context, then a large model of random weights, whose
                          drafter is hardly ever right, to 64k. Batch 1, 4, 16. ratio_low of the worst cell against the
                          best of its peers

All engines start side by side; the timed ones are alone on the card while they are timed. Each request of a batch ends
in tokens of its own; what comes before is found in the radix cache. Before a cell is timed it is run once, which is
when the automatic budget learns it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mla_verify_bench import tiny_model
from mla_verify_bench.records import ratio_of_medians
from mla_verify_bench.timing import graph, measure
from mla_verify_sglang.ddtree.accept import accept
from mla_verify_sglang.ddtree.build import DraftTree, build
from mla_verify_sglang.ddtree.commit import Mover

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu"))

import drafter  # noqa: E402
from session import Session, accept_length, device_options  # noqa: E402

BUDGET, DEPTH, LAYERS, SLOTS = 64, 15, 61, 65_536
WARMUPS, SEED = 20, 5
ACCEPT = ("ddtree-accept-length", "ddtree-accept-grows")
AUTO = "ddtree-auto-budget"


# ---- the tree's own work ----


class Step:
    """One step's tree work on random marginals; the target agrees with a path of some depth."""

    def __init__(self, batch: int, device: str, layers: int = LAYERS, slots: int = SLOTS) -> None:
        g = torch.Generator().manual_seed(SEED)
        logits = torch.randn(batch, DEPTH, 1000, generator=g) * 3
        best, ids = logits.topk(BUDGET)
        self.bonus = torch.arange(batch, device=device)
        self.ids, self.logprobs = ids.to(device), (best - logits.logsumexp(-1, keepdim=True)).to(device)
        self.tree = DraftTree.empty(batch, BUDGET + 1, device)
        build(self.bonus, self.ids, self.logprobs, BUDGET, self.tree)
        # The target says at each node what its child with the deepest descendant holds: scattered, long paths.
        targets = torch.zeros_like(self.tree.tokens)
        for b, parents in enumerate(self.tree.parents.tolist()):
            height = [0] * len(parents)
            for node in range(len(parents) - 1, 0, -1):
                if parents[node] >= 0 and height[node] + 1 >= height[parents[node]]:
                    height[parents[node]] = height[node] + 1
                    targets[b, parents[node]] = self.tree.tokens[b, node]
        self.targets = targets
        self.mover = Mover([torch.zeros(slots, 576, dtype=torch.bfloat16, device=device) for _ in range(layers)])
        order = torch.randperm(slots, generator=g)[: batch * (BUDGET + 1)]
        self.window = order.view(batch, BUDGET + 1).to(device)

    def run(self) -> torch.Tensor:
        build(self.bonus, self.ids, self.logprobs, BUDGET, self.tree)
        done = accept(self.tree, self.targets, DEPTH + 1)
        self.mover.move(self.window, done.path, done.count)
        return done.count


def upper(samples: list[float]) -> float:
    """The upper end of a 95 % bootstrap interval of the median."""
    rng = np.random.default_rng(SEED)
    medians = np.median(rng.choice(samples, (2000, len(samples))), axis=1)
    return float(np.quantile(medians, 0.975))


def steps(rounds: int) -> dict[str, dict]:
    told: dict[str, dict] = {}
    for batch in (1, 16):
        step = Step(batch, "cuda")
        accepted = step.run().float().mean().item()
        times = measure({"step": graph(step.run)}, rounds, WARMUPS)["step"]
        print(f"batch {batch}: median {np.median(times):.1f} µs, {accepted:.1f} tokens committed a request")
        told[f"ddtree-step-batch-{batch}"] = {
            "metrics": {"us_high": upper(times)},
            "samples": {"step": {"values": times, "warmups": WARMUPS, "unit": "us"}},
        }
    return told


# ---- engines ----

BUDGETS = (4, 8, 16, 32, 64, 96)
TEXTS, TEXT_TOKENS = 64, 96  # of the accept lengths: held-out texts, and tokens of an answer
BATCHES = (1, 4, 16)
OWN = 16  # tokens at the end of a prompt that no other of its batch has


@dataclass(frozen=True)
class Kind:
    """A model of the timed engines: the cells are its depths times ``BATCHES``."""

    name: str
    depths: tuple[int, ...]  # shallowest first
    tokens: int  # of an answer
    learning: int  # tokens of the run before, in which the automatic budget learns the cell
    rounds: int
    peers: tuple[str, ...]


TRAINED = Kind(
    "trained", (1024, 4096, 7680), tokens=96, learning=256, rounds=7,
    peers=("plain", "auto", "chain 8", "tree 8", "tree 16", "tree 32"),
)  # fmt: skip
DEEP = Kind("deep", (16_384, 65_536), tokens=40, learning=96, rounds=5, peers=("plain", "auto", "chain 8"))
# bench_engine.py's model without speculation: so many layers that the card is the limit and not the host.
DEEP_MODEL = tiny_model.TinyModel(
    context=66_560, vocab=8192, hidden=2048, width=256, layers=61, heads=16, dtype="bfloat16"
)


@contextmanager
def budget(text: str) -> Iterator[None]:
    """Engines that are started inside have this budget; an engine takes no flags but SGLang's own."""
    os.environ["MLA_VERIFY_DDTREE_BUDGET"] = text
    try:
        yield
    finally:
        del os.environ["MLA_VERIFY_DDTREE_BUDGET"]


def common(dtype: str) -> dict:
    return device_options(True, dtype) | {
        "attention_backend": "mla_verify",
        "max_running_requests": 16,
        "mem_fraction_static": 0.8,  # pools are capped; this only has to leave room for them beside the others
        "decode_log_interval": 1000,
    }


def drafted(algorithm: str, path: str) -> dict:
    return {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}


def deep_models(folder: Path) -> tuple[str, str]:
    """The large model: a config alone, its weights are whatever SGLang draws; and a drafter for it, random too."""
    target = tiny_model.write_config(folder / "deep-model", DEEP_MODEL)
    return str(target), str(drafter.write(folder / "deep-drafter", DEEP_MODEL, block=8))


def engines(folder: Path, kind: Kind, names: Sequence[str], base: dict, pair: tuple[str, str]) -> dict[str, Session]:
    """The engines of a (target, drafter) pair by name: plain, auto, "chain B" or "tree B"; none has been waited for."""
    found = {}
    for name in names:
        what, _, size = name.partition(" ")
        options = base | {"model_path": pair[0]}
        if what == "chain":
            options |= drafted("DFLASH", pair[1]) | {"speculative_dflash_block_size": int(size)}
        elif what != "plain":
            options |= drafted("DDTREE", pair[1])
        place = folder / f"{kind.name}-{name.replace(' ', '-')}"
        with budget(size or "auto"):
            found[name] = Session(place, options, gpu=True, abridged_prefill=kind is DEEP)
    return found


def accept_lengths(sessions: dict[str, Session], pair: drafter.Trained) -> dict[str, float]:
    """Tokens of a verify step, by engine; the first token of an answer is the prefill's. All engines at once."""
    prompts = pair.prompts([64 + 16 * i for i in range(TEXTS)], SEED)
    job = {"name": "texts", "prompts": prompts, "tokens": TEXT_TOKENS, "logprobs": False}

    with ThreadPoolExecutor(len(sessions)) as pool:
        replies = pool.map(lambda session: session.ask(job), sessions.values())
        return {name: accept_length(reply) for name, reply in zip(sessions, replies, strict=True)}


def accept_gates(found: dict[str, float]) -> dict[str, dict]:
    block = max(int(name.split()[1]) for name in found if name.startswith("chain"))
    trees = [found[f"tree {value}"] for value in BUDGETS]
    ratios = {b: t / found[f"chain {min(b + 1, block)}"] for b, t in zip(BUDGETS, trees, strict=True)}
    growth = [after - before for before, after in zip(trees, trees[1:], strict=False)]
    said = ", ".join(f"{name} {length:.3f}" for name, length in found.items())
    print(f"tokens a step: {said}")
    return {
        ACCEPT[0]: {"metrics": {"ratio": min(ratios.values())}, "reason": f"worst at {min(ratios, key=ratios.get)}"},
        ACCEPT[1]: {"metrics": {"least_growth": min(growth)}, "reason": said},
    }


def milliseconds(session: Session, prompts: list[list[int]], tokens: int) -> float:
    """ms a token of the batch: of each request from its first arrival to its last, all requests together."""
    job = {"name": f"{random.random()}", "prompts": prompts, "tokens": tokens, "stream": True, "logprobs": False}
    rate = 0.0
    for marks in session.ask(job)["marks"]:
        (first, had, _), (last, has, _) = marks[0], marks[-1]
        rate += (has - had) / (last - first)
    return 1e3 / rate


def time_cells(kind: Kind, peers: dict[str, Session], text: list[int], save: Callable) -> None:
    """Every cell of a model; peers take turns. ``save(kind, depth, batch, samples)`` after each cell."""
    rng, names = random.Random(SEED), list(peers)

    def prompts(depth: int, batch: int) -> list[list[int]]:
        at = [rng.randrange(len(text) - OWN) for _ in range(batch)]
        return [text[: depth - OWN] + text[a : a + OWN] for a in at]

    for depth in reversed(kind.depths):  # the deepest prompt's prefix serves the others
        for batch in BATCHES:
            for session in peers.values():
                milliseconds(session, prompts(depth, batch), kind.learning)
            samples: dict[str, list[float]] = {name: [] for name in peers}
            for i in range(kind.rounds):
                asked = prompts(depth, batch)
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    samples[name].append(milliseconds(peers[name], asked, kind.tokens))
            save(kind, depth, batch, samples)
    print(f"{kind.name}: {peers['auto'].ask({'name': 'state'})['ddtree_mean_nodes']:.1f} nodes a step")


def auto_gate(cells: dict[str, dict[str, list[float]]]) -> dict:
    ratios = {}
    for cell, samples in cells.items():
        best = min((n for n in samples if n != "auto"), key=lambda n: statistics.median(samples[n]))
        peer = f"{best}, {cell}"
        ratios[peer] = ratio_of_medians(samples["auto"], samples[best], peer=peer, seed=SEED)
    worst = min(ratios, key=lambda peer: ratios[peer].low)
    return {
        "metrics": {"ratio_low": ratios[worst].low},
        "ratios": {peer: r.model_dump() for peer, r in ratios.items()},
        "reason": f"worst against {worst}",
    }


def small(pair: drafter.Trained) -> tuple[dict, tuple[str, str], int]:
    """Options of the trained model's engines, its pair, its drafter's block."""
    block = json.loads((pair.drafter / "config.json").read_text())["block_size"]
    options = common("bfloat16") | {"max_total_tokens": 150_000, "chunked_prefill_size": 8192}
    return options, (str(pair.target), str(pair.drafter)), block


def accept_engines(folder: Path, pair: drafter.Trained, save: Callable) -> None:
    base, paths, block = small(pair)
    chains = [f"chain {value}" for value in sorted({min(b + 1, block) for b in BUDGETS})]
    found = engines(folder, TRAINED, [*chains, *(f"tree {value}" for value in BUDGETS)], base, paths)
    try:
        save(accept_gates(accept_lengths(found, pair)), {})
    finally:
        for session in found.values():
            session.stop()


def auto(folder: Path, pair: drafter.Trained, save: Callable) -> None:
    """``save(gates, samples)`` after each cell."""
    base, paths, _ = small(pair)
    large = common("bfloat16") | {
        "load_format": "dummy", "max_total_tokens": DEEP.depths[-1] + 8192, "chunked_prefill_size": 16_384,
    }  # fmt: skip
    cells: dict[str, dict[str, list[float]]] = {}
    samples: dict[str, dict] = {}
    wanted = sum(len(kind.depths) for kind in (TRAINED, DEEP)) * len(BATCHES)

    def timed_cell(kind: Kind, depth: int, batch: int, taken: dict[str, list[float]]) -> None:
        cell = f"{kind.name} {depth} tokens batch {batch}"
        cells[cell] = taken
        medians = ", ".join(f"{name} {statistics.median(values):.3f}" for name, values in taken.items())
        print(f"{cell}: {medians} ms a token")
        for name, values in taken.items():
            samples[f"{cell} {name}"] = {"values": values, "warmups": 1, "unit": "ms"}
        missing = {"passed": None, "reason": "it was not measured to the end"}
        save({AUTO: auto_gate(cells) if len(cells) == wanted else missing}, samples)

    found: list[dict[str, Session]] = []
    try:
        found.append(engines(folder, TRAINED, TRAINED.peers, base, paths))
        found.append(engines(folder, DEEP, DEEP.peers, large, deep_models(folder)))
        for session in (*found[0].values(), *found[1].values()):  # nobody may be starting while another is timed
            session.wait()
        held_out = pair.prompts([TRAINED.depths[-1]], SEED + 1)[0]
        words = range(len(tiny_model.SPECIAL), DEEP_MODEL.vocab)
        time_cells(TRAINED, found[0], held_out, timed_cell)
        time_cells(DEEP, found[1], random.Random(SEED).choices(words, k=DEEP.depths[-1]), timed_cell)
    finally:
        for session in itertools.chain.from_iterable(peers.values() for peers in found):
            session.stop()


GATES = {"steps": ("ddtree-step-batch-1", "ddtree-step-batch-16"), "accept": ACCEPT, "auto": (AUTO,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=GATES)
    parser.add_argument("--rounds", type=int, default=200, help="replays of a step that count (default 200)")
    options = parser.parse_args()

    def save(gates: dict[str, dict], samples: dict[str, dict]) -> None:
        if out := os.environ.get("MLA_VERIFY_GATE_OUT"):
            told = {"gates": gates, "samples": samples, "seeds": {"marginals": SEED, "texts": SEED}}
            Path(out).write_text(json.dumps(told), encoding="utf-8")

    def missing(why: str) -> None:
        save({name: {"passed": None, "reason": why} for name in GATES[options.what]}, {})

    pair = drafter.trained()
    if not torch.cuda.is_available():
        missing("no GPU here")
    elif options.what == "steps":
        save(steps(options.rounds), {})
    elif pair is None:
        missing(drafter.MISSING)
    else:
        missing("it was not measured")
        with tempfile.TemporaryDirectory(prefix="mla-verify-ddtree-") as folder:
            {"accept": accept_engines, "auto": auto}[options.what](Path(folder), pair, save)


if __name__ == "__main__":
    main()
