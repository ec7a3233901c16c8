"""Gates of phase 4 on a real server started from a plan: what its pool holds, what it serves, what it answers.

All three read the run that headline.py makes; the first of them that is asked makes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="this gate runs where SGLang is installed")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import headline  # noqa: E402


@pytest.fixture(scope="module")
def taken() -> dict:
    return headline.this_run()


def part(taken: dict, name: str) -> dict:
    if name not in taken:
        pytest.fail(f"the run ended before its {name}: {taken['failed'] or 'interrupted'}")
    return taken[name]


def test_planned_tokens(taken, gate_metrics):
    plan, server = part(taken, "plan"), part(taken, "server")
    got = server["memory_usage"]["token_capacity"]
    # without a GPU the pool is capped: only that the figures arrive is tested
    wanted = plan["pool_tokens"] if headline.GPU else 2 * headline.SIZE.context
    assert plan["pool_tokens"] >= plan["target_tokens"] >= headline.SIZE.context
    gate_metrics["planned_tokens"], gate_metrics["pool_tokens"] = wanted, got
    gate_metrics["mem_fraction_static"] = plan["mem_fraction_static"]
    gate_metrics["error"] = abs(got - wanted) / wanted


def test_longest_request(taken, gate_metrics):
    longest = part(taken, "longest")
    gate_metrics["seconds"] = longest["seconds"]
    gate_metrics["tokens"] = longest["tokens"]


def test_headline_tokens(taken, gate_metrics):
    found, requests = headline.near_ties(taken)
    for where, difference in found:
        print(f"{where}: {difference}")
    wrong = [f"{where}: {difference}" for where, difference in found if not difference.near_tie]
    assert not wrong, f"{len(wrong)} differences that rounding does not explain: {'; '.join(wrong[:5])}"
    cells = taken["cells"][headline.OURS]
    for text in headline.TEXTS:
        accept = [cells[f"{text} {depth}"]["accept_length"] for depth in headline.SIZE.depths]
        gate_metrics[f"accept_length {text}"] = min(accept)
    assert gate_metrics["accept_length predictable"] > gate_metrics["accept_length natural"]
    gate_metrics["requests"] = requests
    gate_metrics["near_tie_differences_per_200"] = 200 * len(found) / requests
