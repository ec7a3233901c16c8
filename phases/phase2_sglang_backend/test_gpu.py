"""Gates of phase 2 in the real engine on a GPU: a random-weight MLA model of realistic attention geometry.

Each engine configuration runs once, in a process of its own, with all the jobs that the selected tests need; on a
GPU the configurations run beside one another, for nothing here is timed. Where two answers differ, the first
difference must be a near tie (``session.first_differences``); near ties are counted and listed. The model is float16,
whose rounding is an eighth of bfloat16's: so a difference has less to hide behind, and a correct engine has few.

With no GPU the same code runs small, in float32, on SGLang's CPU engine: that tests this file, not the kernel.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from mla_verify_bench import tiny_model
from mla_verify_bench.tiny_model import TinyModel

pytest.importorskip("sglang", reason="this gate runs where SGLang is installed")

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu"
sys.path.insert(0, str(SUPPORT))

import drafter  # noqa: E402
import session  # noqa: E402
from session import Difference, Plan, Reply  # noqa: E402

GPU = torch.cuda.is_available()
SEED = 11


@dataclass(frozen=True)
class Size:
    """All that differs between a GPU and a rehearsal without one."""

    model: TinyModel
    requests: int  # of the exactness gates
    longest: int  # tokens of the longest prompt; the shortest has 10
    tokens: int  # of each answer
    some: int  # requests of the gates that compare modes, the shorter ones
    some_longest: int
    pool: int
    small_pool: int  # too small for a batch
    churn: int  # requests on the small pool
    churn_longest: int
    churn_tokens: int
    batch: int
    nodes: int
    at_once: int  # engines side by side


SIZE = (
    Size(
        TinyModel(
            context=65_536, vocab=512, hidden=256, layers=8, heads=16, dtype="float16", sharpness=4.0,
            preference=(1.0, 1.0), forks=1 / 24,
        ),
        requests=200, longest=60_000, tokens=16, some=48, some_longest=4_000, pool=140_000, small_pool=4_096, churn=64,
        churn_longest=600, churn_tokens=100, batch=16, nodes=16, at_once=10,
    )
    if GPU
    else Size(
        TinyModel(context=512, sharpness=4.0, preference=(1.0, 1.0), forks=1 / 4),
        requests=20, longest=150, tokens=12, some=8, some_longest=100, pool=4_096, small_pool=260, churn=12,
        churn_longest=80, churn_tokens=20, batch=4, nodes=8, at_once=1,
    )
)  # fmt: skip
STATE_CONTEXT, STATE_REQUESTS = 200_000, 48


# ---- what is asked ----


def random_prompts(count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Random words. Lengths from shortest to longest, most of them short: attention's work grows with the square.

    No two begin with the same word: the built-in backend leaves its fast prefill when a prefix of one token is cached.
    Nor do two end with the same one: what ends alike goes on alike.
    """
    words = range(len(tiny_model.SPECIAL), SIZE.model.vocab)
    rng = random.Random(f"gpu gates {seed}")
    first, last = rng.sample(words, count), rng.sample(words, count)
    lengths = [round(shortest * (longest / shortest) ** ((i / max(1, count - 1)) ** 3)) for i in range(count)]
    rng.shuffle(lengths)
    return [[f, *rng.choices(words, k=n - 2), z] for f, z, n in zip(first, last, lengths, strict=True)]


def main_prompts() -> list[list[int]]:
    """Every fourth ends in a walk from which n-gram speculation guesses several ways from the first step on."""
    prompts = random_prompts(SIZE.requests, 10, SIZE.longest, SEED)
    for i in range(0, len(prompts), 4):
        walk = tiny_model.rehearsal(37 * i, SIZE.model)
        prompts[i] = prompts[i][: max(1, len(prompts[i]) - len(walk))] + walk
    return prompts


def some() -> list[int]:
    """Which of the main requests the modes are compared on."""
    lengths = [(len(p), i) for i, p in enumerate(main_prompts()) if len(p) <= SIZE.some_longest]
    return sorted(i for _, i in sorted(lengths)[-SIZE.some :])


def shared_prompts() -> list[list[int]]:
    """Prompts with common beginnings, so that a radix cache has something to find."""
    beginnings = random_prompts(4, SIZE.some_longest // 2, SIZE.some_longest // 2, SEED + 1)
    ends = random_prompts(SIZE.some, 5, SIZE.some_longest // 4, SEED + 2)
    rng = random.Random(SEED)
    return [b[: rng.randrange(len(b) // 2, len(b) + 1)] + e for b, e in zip(beginnings * len(ends), ends, strict=False)]


def churn_job() -> dict:
    """Requests whose answers do not fit the small pool together; every seventh is aborted on its way."""
    prompts = random_prompts(SIZE.churn, SIZE.churn_longest // 2, SIZE.churn_longest, SEED + 3)
    aborts = [3 + i % 5 if i % 7 == 3 else 0 for i in range(len(prompts))]
    return _job("churn", prompts, tokens=SIZE.churn_tokens, abort_after=aborts, logprobs=False)


def _job(name: str, prompts: list[list[int]], **more) -> dict:
    return {"name": name, "flush": True, "prompts": prompts, "tokens": SIZE.tokens} | more


# ---- engines ----

OURS = {"attention_backend": "mla_verify"}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": SIZE.nodes}
DRAFTED = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": SIZE.nodes,
    "speculative_draft_attention_backend": "triton",
}
STANDALONE = DRAFTED | {"speculative_algorithm": "STANDALONE"}
EAGLES = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
# What each test needs; it runs what its engines' plans list.
NEEDS = {
    "test_ngram_token_exact": ("builtin", "plain", "ngram"),
    "test_standalone_token_exact": ("builtin", "plain", "standalone"),
    "test_eagle_token_exact": ("builtin", *EAGLES),
    "test_pool_balance": ("small",),
    "test_graph_equals_eager": ("ngram", "eager"),
    "test_overlap": ("ngram", "no-overlap"),
    "test_radix": ("ngram", "no-radix"),
    "test_batch_invariant": ("ngram",),
    "test_page_size": ("plain", "page-64"),
    "test_graph_state": ("state",),
}


def plans(folder: Path) -> dict[str, Plan]:
    model = str(tiny_model.write(folder / "model", SIZE.model))
    one_layer = replace(SIZE.model, layers=1, context=STATE_CONTEXT + 64 if GPU else SIZE.model.context)
    state_model = str(tiny_model.write(folder / "one-layer", one_layer))
    base = session.device_options(GPU, SIZE.model.dtype) | {
        "model_path": model,
        "max_running_requests": SIZE.batch,
        "max_total_tokens": SIZE.pool,
        # One chunk for any prompt: the built-in backend's prefill is fast only where nothing came before it.
        "chunked_prefill_size": SIZE.model.context,
        "max_prefill_tokens": 8_192,  # of a batch; a longer prompt comes alone
    }
    if GPU:
        # Ten engines start side by side on one card, and SGLang counts what the others took as its own.
        base |= {"mem_fraction_static": 0.8}
    else:
        base |= {"triton_attention_num_kv_splits": 1}
    prompts = main_prompts()
    few = [prompts[i] for i in some()]
    everything, chosen = _job("main", prompts), _job("some", few)
    shared = _job("shared", shared_prompts(), at_once=4)
    single = _job("single", few, at_once=1)
    state = {
        "model_path": state_model,
        "context_length": STATE_CONTEXT if GPU else SIZE.model.context,
        "max_running_requests": STATE_REQUESTS,
        "max_total_tokens": STATE_CONTEXT + 8_192 if GPU else SIZE.pool,
        "chunked_prefill_size": 8_192,
    }
    if GPU:
        state |= {"cuda_graph_max_bs_decode": STATE_REQUESTS}
    page = {"page_size": 64}
    eagles = {}
    for name, algorithm in EAGLES.items():
        draft = drafter.write_eagle(folder / name, SIZE.model, three=algorithm == "EAGLE3")
        told = DRAFTED | {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
        eagles[name] = Plan(base | OURS | told, {"some": chosen})
    return {
        "builtin": Plan(base | {"attention_backend": "triton"}, {"main": everything}),
        "plain": Plan(base | OURS, {"main": everything}),
        "ngram": Plan(base | OURS | NGRAM, {"main": everything, "shared": shared, "single": single}),
        "standalone": Plan(base | OURS | STANDALONE | {"speculative_draft_model_path": model}, {"main": everything}),
        "small": Plan(
            base | OURS | NGRAM | {"max_total_tokens": SIZE.small_pool, "schedule_conservativeness": 0.1},
            {"before": {"flush": True}, "churn": churn_job(), "after": {"flush": True}},
        ),
        "eager": Plan(base | OURS | NGRAM | {"disable_cuda_graph": True}, {"some": chosen}),
        "no-overlap": Plan(base | OURS | NGRAM | {"disable_overlap_schedule": True}, {"some": chosen}),
        "no-radix": Plan(base | OURS | NGRAM | {"disable_radix_cache": True}, {"shared": shared}),
        "page-64": Plan(base | OURS | page, {"some": chosen}),
        "state": Plan(base | OURS | NGRAM | state, {}),
        **eagles,
    }


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What came of an engine's jobs, by its name. All engines that the selected tests need run on first use."""
    folder = tmp_path_factory.mktemp("engines")
    served = plans(folder)
    if not GPU:
        del served["standalone"], served["state"]  # see their tests
    return session.run_needed(request, NEEDS, folder, served, gpu=GPU, at_once=SIZE.at_once)


# ---- comparing ----


def differences(a: Reply, b: Reply) -> list[Difference]:
    return session.first_differences(a, b, dtype=SIZE.model.dtype, largest_logit=tiny_model.LOGIT_SCALE)


def chosen(main: Reply) -> Reply:
    """The part of a main reply that other modes are asked for."""
    return {key: [main[key][i] for i in some()] for key in ("tokens", "top2")}


def compare(gate_metrics, pairs: dict[str, tuple[Reply, Reply]]) -> None:
    """Fail on a difference that rounding does not explain; count the requests with a near tie, over all pairs."""
    near: set[int] = set()
    for what, (a, b) in pairs.items():
        assert all(len(x) == len(y) > 0 for x, y in zip(a["tokens"], b["tokens"], strict=True)), what
        found = differences(a, b)
        for difference in found:
            print(f"{what}: {difference}")
        gate_metrics[f"differences {what}"] = len(found)
        near |= {d.request for d in found}
    for what, (a, b) in pairs.items():
        session.require_near_ties(differences(a, b), what)
    requests = len(next(iter(pairs.values()))[0]["tokens"])
    gate_metrics["requests"] = requests
    gate_metrics["near_tie_differences_per_200"] = 200 * len(near) / requests


def require_walks(gate_metrics, reply: Reply) -> None:
    """Loops of few tokens would pass whatever the attention does; so would answers that are all alike."""
    least = min(tiny_model.distinct_ratio(tokens) for tokens in reply["tokens"])
    assert least >= 0.8, f"an answer has only {least:.0%} distinct tokens: a loop shows nothing"
    assert len(set(map(tuple, reply["tokens"]))) >= 0.9 * len(reply["tokens"])
    gate_metrics["distinct_ratio"] = least


def require_modes(engine: Reply, *, graph: bool = True, overlap: bool = True) -> None:
    """The engine really ran as the gate says; the CPU engine has neither graphs nor overlap."""
    if GPU:
        share = session.graph_share(engine["log"])
        assert share > 0.9 if graph else share == 0, f"{share:.0%} of the decode batches ran in a graph"
        assert engine["start"]["disable_overlap_schedule"] is not overlap


def test_comparison_can_fail():
    """Negative control of the rule: what is no near tie is said, and nothing after a first difference counts."""
    limit = 4 * session.ROUNDING[SIZE.model.dtype] * tiny_model.LOGIT_SCALE

    def reply(tokens: list[int], second: int, gap: float) -> Reply:
        return {"tokens": [tokens], "top2": [[(9.0, 1, 7), (gap, tokens[1], second), (9.0, tokens[2], 7)]]}

    a = reply([1, 2, 3], 4, limit / 2)
    assert differences(a, reply([1, 2, 3], 4, limit / 2)) == []
    (tie,) = differences(a, reply([1, 4, 8], 2, limit / 3))
    assert tie.near_tie and (tie.request, tie.token, tie.pair) == (0, 1, (2, 4))
    for other in (reply([1, 4, 3], 2, 2 * limit), reply([1, 5, 3], 2, limit / 2), reply([1, 4, 3], 5, limit / 2)):
        with pytest.raises(AssertionError, match="rounding does not explain"):
            session.require_near_ties(differences(a, other), "control")


def test_ngram_token_exact(runs, gate_metrics):
    builtin, plain, ngram = runs("builtin"), runs("plain"), runs("ngram")
    require_walks(gate_metrics, builtin["main"])
    require_modes(ngram)
    gate_metrics["accept_length"] = accept = session.accept_length(ngram["main"])
    assert accept > 1, f"accept length {accept:.2f}: speculation never helped, so it was hardly tested"
    compare(gate_metrics, {
        "NGRAM, no speculation": (ngram["main"], plain["main"]),
        "no speculation, built-in": (plain["main"], builtin["main"]),
        "NGRAM, built-in": (ngram["main"], builtin["main"]),
    })  # fmt: skip


def test_standalone_token_exact(runs, gate_metrics):
    if not GPU:
        pytest.skip("the stand-in for sgl_kernel has no EAGLE tree builder")
    builtin, plain, standalone = runs("builtin"), runs("plain"), runs("standalone")
    require_walks(gate_metrics, builtin["main"])
    require_modes(standalone)
    gate_metrics["accept_length"] = accept = session.accept_length(standalone["main"])
    assert accept > 2, f"accept length {accept:.2f}: a target that drafts for itself is accepted nearly always"
    compare(gate_metrics, {
        "STANDALONE, no speculation": (standalone["main"], plain["main"]),
        "no speculation, built-in": (plain["main"], builtin["main"]),
        "STANDALONE, built-in": (standalone["main"], builtin["main"]),
    })  # fmt: skip


def test_eagle_token_exact(runs, gate_metrics):
    """Drafters of random weights: EAGLE's guesses are hardly ever right, EAGLE3's at times."""
    builtin, pairs = runs("builtin"), {}
    require_walks(gate_metrics, builtin["main"])
    for name, algorithm in EAGLES.items():
        engine = runs(name)
        require_modes(engine)
        gate_metrics[f"accept_length {algorithm}"] = accept = session.accept_length(engine["some"])
        assert accept > 1 if algorithm == "EAGLE3" else accept >= 1, f"{algorithm}: accept length {accept:.2f}"
        pairs[f"{algorithm}, built-in"] = engine["some"], chosen(builtin["main"])
    compare(gate_metrics, pairs)


def test_pool_balance(runs, gate_metrics):
    small = runs("small")
    job, churn = churn_job(), small["churn"]
    retracted = small["log"].count("Retract requests")
    assert retracted > 0, "nothing was retracted: the pool was large enough"
    cut = [i for i, n in enumerate(job["abort_after"]) if n and len(churn["tokens"][i]) < SIZE.churn_tokens]
    assert cut, "no request was aborted on its way"
    for i, tokens in enumerate(churn["tokens"]):
        assert job["abort_after"][i] or len(tokens) == SIZE.churn_tokens, f"request {i} ended with {len(tokens)} tokens"
    assert "leak" not in small["log"]
    gate_metrics["requests"] = len(churn["tokens"])
    gate_metrics["retractions"] = retracted
    gate_metrics["aborted"] = len(cut)
    gate_metrics["lost_slots"] = small["before"]["free_slots"] - small["after"]["free_slots"]
    assert small["before"]["free_slots"] >= SIZE.small_pool - 1, small["before"]


def test_graph_equals_eager(runs, gate_metrics):
    graph, eager = runs("ngram"), runs("eager")
    require_modes(graph)
    require_modes(eager, graph=False)
    compare(gate_metrics, {"graph, eager": (chosen(graph["main"]), eager["some"])})


def test_overlap(runs, gate_metrics):
    on, off = runs("ngram"), runs("no-overlap")
    require_modes(on)
    require_modes(off, overlap=False)
    compare(gate_metrics, {"overlap on, off": (chosen(on["main"]), off["some"])})


def test_radix(runs, gate_metrics):
    on, off = runs("ngram")["shared"], runs("no-radix")["shared"]
    hits = sum(n > 0 for n in on["cached"])
    assert 2 * hits >= len(on["cached"]) and not any(off["cached"]), (on["cached"], off["cached"])
    compare(gate_metrics, {"radix on, off": (on, off)})
    gate_metrics["hits"] = hits


def test_batch_invariant(runs, gate_metrics):
    ngram = runs("ngram")
    compare(gate_metrics, {f"batch {SIZE.batch}, 1": (chosen(ngram["main"]), ngram["single"])})


def test_page_size(runs, gate_metrics):
    """Without speculation: SGLang refuses NGRAM, and trees on a backend of another name, with pages above 1."""
    one, many = runs("plain"), runs("page-64")
    assert many["start"]["page_size"] == 64 and one["start"]["page_size"] == 1
    compare(gate_metrics, {"page 1, 64": (chosen(one["main"]), many["some"])})


def test_graph_state(runs, gate_metrics):
    """What the backend says it allocated, and all that capturing the graphs of a one-layer model took besides.

    The second holds the kernels' workspace, which layers share, and whatever else SGLang's capture allocates.
    """
    if not GPU:
        pytest.skip("there are no CUDA graphs here")
    engine = runs("state")
    said = re.search(r"CUDA-graph state ([\d.]+) MiB for (\d+) requests of (\d+) nodes", engine["log"])
    assert said, "the backend did not print its graph state"
    assert (int(said[2]), int(said[3])) == (STATE_REQUESTS, SIZE.nodes), said[0]
    printed, captured = float(said[1]) / 1024, sum(engine["start"]["memory_usage"]["graph"].values())
    gate_metrics["printed_gib"], gate_metrics["captured_gib"] = printed, captured
    gate_metrics["gib"] = printed + captured
