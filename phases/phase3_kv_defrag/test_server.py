"""Gates of phase 3 on an engine: everything moved at every safe point, against nothing moved.

Prefixes that branch, requests aborted on their way, a pool too small for the batch (retraction, eviction), NGRAM
trees. On a GPU 200 requests, bfloat16, CUDA graphs, where the two runs batch requests as they come, so that the rule of
near ties applies (``session.first_differences``, one in 200). On SGLang's CPU engine fewer, float32, no difference at
all, and as many of the trained model (tests/models) on natural text.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from mla_verify_bench import tiny_model

pytest.importorskip("sglang", reason="this gate runs where SGLang is installed")

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path.insert(0, str(TESTS / "sglang_cpu"))

import engine  # noqa: E402
from session import first_differences, require_near_ties  # noqa: E402

GPU = torch.cuda.is_available()
MODEL = tiny_model.TinyModel(context=512, dtype="bfloat16" if GPU else "float32")
REQUESTS, CPU_REQUESTS, SEED = 200, 60, 7
OPTIONS = {
    "attention_backend": "mla_verify",
    "max_running_requests": 6,
    "max_total_tokens": 340,
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 8,
    "log_level": "info",
    "watchdog_timeout": 3600,
    "skip_tokenizer_init": True,
    **({"dtype": "bfloat16"} if GPU else {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}),
}


TRAINED = TESTS / "models" / "weights" / "target"


def requests(count: int, trained: bool = False) -> list[dict]:
    g = random.Random(SEED)
    if trained:
        beginnings, ends = pieces(6, 20, 70, SEED), pieces(count, 2, 40, SEED + 1)
    else:
        beginnings = tiny_model.prompts(6, shortest=20, longest=70, seed=SEED, model=MODEL)
        ends = tiny_model.prompts(count, shortest=2, longest=40, seed=SEED + 1, model=MODEL)
    made = []
    for i in range(count):
        shared = beginnings[g.randrange(6)]
        prompt = shared[: g.randrange(len(shared) + 1)] + ends[i]
        if i % 10 == 0:
            prompt = prompt[:30] * 2 if trained else prompt[:30] + tiny_model.rehearsal(20 * i, MODEL)
        abort = g.randrange(1, 6) if i % 9 == 4 else 0
        made.append({"prompt": prompt, "max_new_tokens": 8 + g.randrange(12), "abort_after": abort})
    return made


def pieces(count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Pieces of natural text."""
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    text = words.encode((TESTS / "models" / "prompts.txt").read_text(encoding="utf-8")).ids
    g = random.Random(f"pieces {seed}")
    found = []
    for _ in range(count):
        length = g.randrange(shortest, longest + 1)
        at = g.randrange(len(text) - length)
        found.append(text[at : at + length])
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    return _both(tmp_path_factory.mktemp("server"), REQUESTS)


def _both(folder: Path, count: int, trained: bool = False) -> dict[str, dict]:
    """What came of both modes."""
    model = str(TRAINED if trained else tiny_model.write(folder / "model", MODEL))
    job = {"engine": {"model_path": model} | OPTIONS, "requests": requests(count, trained), "at_once": 12}
    (folder / "job.json").write_text(json.dumps(job))
    return {mode: _run(folder, mode) for mode in ("off", "always")}


def _run(folder: Path, mode: str) -> dict:
    result, log = folder / f"{mode}.json", folder / f"{mode}.log"
    more = {
        "MLA_VERIFY_DEFRAG": mode,
        "MLA_VERIFY_DEFRAG_PROBE": json.dumps({"record": str(folder / f"{mode}-counters.json")}),
        "PYTHONPATH": os.pathsep.join(
            [
                str(engine.write_plugin(folder / "probe", HERE / "defrag_probe.py")),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
    }
    own = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}  # other files of this run set it
    env = own | more if GPU else engine.environment(Path(sys.executable), MLA_VERIFY_IMPL="reference", **more)
    code = engine.run([HERE / "traffic.py", folder / "job.json", result], folder, log, env, 1800)
    text = log.read_text(errors="replace")
    assert code == 0 and result.exists(), f"{mode} ended with {code}; its log ends:\n{text[-5000:]}"
    return json.loads(result.read_text()) | {"log": text}


def _require_equal(runs: dict[str, dict], asked: list[dict], gate_metrics) -> None:
    count = len(asked)
    off, always = runs["off"]["tokens"], runs["always"]["tokens"]
    differences = first_differences(
        runs["off"], runs["always"], dtype=MODEL.dtype, largest_logit=tiny_model.LOGIT_SCALE
    )
    require_near_ties(differences, "defragmentation at every safe point")
    assert len(differences) <= (count // 200 if GPU else 0), [str(d) for d in differences]
    aborted = 0
    for i, (request, a, b) in enumerate(zip(asked, off, always, strict=True)):
        shorter = min(len(a), len(b))
        if request["abort_after"]:
            aborted += shorter < request["max_new_tokens"]
        else:
            assert len(a) == len(b) == request["max_new_tokens"], f"request {i}: {len(a)} and {len(b)} tokens"
    done, log = runs["always"]["after"]["counters"], runs["always"]["log"]
    assert runs["off"]["before"] == {}, "it is on without being asked for"
    assert done["runs"] > count and done["failed"] == 0 and done["postponed"] <= done["runs"] // 20, done
    assert aborted > count // 40, f"only {aborted} requests were cut short"
    assert runs["always"]["cached_tokens"] > 5 * count, "hardly a hit in the prefix cache"
    assert log.count("Retract requests") > 0, "nothing was retracted: the pool was large enough"
    gate_metrics["requests"] = count
    gate_metrics["near_tie_differences"] = len(differences)
    gate_metrics["aborted"] = aborted
    gate_metrics["retractions"] = log.count("Retract requests")
    gate_metrics["moves"] = done["runs"]
    gate_metrics["moved_tokens"] = done["moved_tokens"]


def _require_balance(runs: dict[str, dict], gate_metrics) -> None:
    before, after = (runs["always"][when]["fragmentation"] for when in ("before", "after"))
    assert after["tokens"] == 0, f"{after['tokens']} slots are held after a flush"
    gate_metrics["lost_slots"] = before["tokens"] + before["free_tokens"] - after["free_tokens"]
    assert gate_metrics["lost_slots"] == 0
    assert all("leak" not in run["log"] for run in runs.values())


def test_tokens_equal(runs, gate_metrics):
    _require_equal(runs, requests(REQUESTS), gate_metrics)


def test_slots_balance(runs, gate_metrics):
    _require_balance(runs, gate_metrics)


@pytest.mark.skipif(GPU, reason="this machine has a GPU: the other tests ask more")
@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
def test_cpu_server_tokens(trained, tmp_path, gate_metrics):
    runs = _both(tmp_path, CPU_REQUESTS, trained)
    _require_equal(runs, requests(CPU_REQUESTS, trained), gate_metrics)
    _require_balance(runs, gate_metrics)
