"""What takes too long for every change: the state machine's 100,000 steps, and engines in other settings.

MLA_VERIFY_NIGHTLY=100000 asks for it; a smaller number tries it out and fails its gate.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from mla_verify_bench import tiny_model

pytest.importorskip("sglang", reason="this gate runs in an environment made by tests/sglang_cpu/install.py")

from state_machine import run  # noqa: E402
from test_acceptance import MODEL, serve  # noqa: E402
from world import CORES  # noqa: E402

STEPS = int(os.environ.get("MLA_VERIFY_NIGHTLY", 0))
pytestmark = pytest.mark.skipif(not STEPS, reason="it takes the better part of an hour: MLA_VERIFY_NIGHTLY=100000")


def test_state_machine_long(gate_metrics):
    number = int(os.environ.get("MLA_VERIFY_SEED", random.randrange(1000)))
    total: Counter[str] = Counter()
    for core in CORES:
        for page, steps in ((1, 3 * STEPS // 4), (4, STEPS // 4)):
            total += run(
                -(-steps // len(CORES)), page=page, core=core, number=number, examples=min(200, 5 + steps // 40)
            )
    print(dict(total))
    gate_metrics["steps"] = total["steps"]
    gate_metrics["moved"] = total["moved"]
    gate_metrics["seed"] = number


NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8, "log_level": "info"}
CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
VARIANTS = {
    "two ranks": ("always", NGRAM | {"tp_size": 2}, {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}),
    "no overlap": ("always", NGRAM | {"disable_overlap_schedule": True}, {}),
    "pages and chunks": ("always", {"page_size": 4, "chunked_prefill_size": 32}, {}),
    "python core": ("always", NGRAM, CORE),
    "no radix cache": ("always", NGRAM | {"disable_radix_cache": True}, {}),
    "budget": ("budget:200000:3", NGRAM, {}),
    "stock allocation": ("always", NGRAM, {"MLA_VERIFY_DEFRAG_POLICY": "stock"}),
}


def conversations() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that branch off a few beginnings, some that NGRAM can guess; what each user adds in the second turn."""
    shared = tiny_model.prompts(4, shortest=30, longest=60, seed=4, model=MODEL)
    own = tiny_model.prompts(20, shortest=3, longest=60, seed=5, model=MODEL)
    prompts = [
        (shared[i % 4] if i % 3 else []) + own[i] + tiny_model.rehearsal(100 * i, MODEL) * (i % 5 == 0)
        for i in range(20)
    ]
    suffixes = tiny_model.prompts(20, shortest=3, longest=9, seed=6, model=MODEL)
    return prompts, suffixes


def test_engine_settings(gate_metrics, tmp_path):
    """The tokens of an engine that moves nothing, in each setting; with a fault they are others."""
    prompts, suffixes = conversations()
    first, _ = serve(tmp_path / "first", "off", prompts, suffixes)
    assert first.rounds, first.log[-3000:]
    want = [turn["tokens"] for turn in first.rounds[0]]
    for name, (mode, options, environ) in VARIANTS.items():
        outcome, done = serve(tmp_path / name.replace(" ", "-"), mode, prompts, suffixes, environ=environ, **options)
        assert outcome.returncode == 0 and outcome.rounds, f"{name}: {outcome.returncode}\n" + outcome.log[-4000:]
        assert [turn["tokens"] for turn in outcome.rounds[0]] == want, name
        print(f"{name}: {outcome.seconds:.0f} s, {done}")
        assert done["runs"] > 5 and done["failed"] == 0 and done["postponed"] <= done["runs"] // 20, (name, done)
    for fault in ("rows", "order"):
        outcome, done = serve(tmp_path / fault, "always", prompts, suffixes, fault=fault, **NGRAM)
        same = bool(outcome.rounds) and [turn["tokens"] for turn in outcome.rounds[0]] == want
        assert not same, f"the fault {fault!r} changed no token"
    gate_metrics["settings"] = len(VARIANTS)
