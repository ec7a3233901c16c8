"""The state machine over SGLang's real allocator and prefix tree: 5,000 steps."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

pytest.importorskip("sglang", reason="this gate runs in an environment made by tests/sglang_cpu/install.py")

from state_machine import run  # noqa: E402
from world import CORES  # noqa: E402


def test_state_machine(gate_metrics):
    number = int(os.environ.get("MLA_VERIFY_SEED", random.randrange(1000)))
    total: Counter[str] = Counter()
    for core in CORES:
        for page, steps in ((1, 4000 // len(CORES)), (4, 1200 // len(CORES))):
            total += run(steps, page=page, core=core, number=number, examples=25)
    print(dict(total))
    for what in ("start", "come_back", "next_chunk", "share", "extend", "finish", "abort", "retract", "evict", "moved"):
        assert total[what] >= 10, f"{what} happened {total[what]} times in {total['steps']} steps: hardly tested"
    gate_metrics["steps"] = total["steps"]
    gate_metrics["defrags"] = total["defrag"]
    gate_metrics["moved"] = total["moved"]
    gate_metrics["seed"] = number
