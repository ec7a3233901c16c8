"""Gates of phase 4 on ``mla-verify diagnose``: each cause is named, mixed ones are apportioned, too little is said."""

from __future__ import annotations

import json
import math
import random

import pytest
from mla_verify_bench import cli
from mla_verify_bench.diagnose import Point, Server, diagnose, fit

KIMI = 61 * 1152  # K/V bytes of a token, bf16, one rank
PRO_6000 = dict(bandwidth_gb_s=1792.0, memory_gib=96.0)
DEPTHS = (1024, 16_384, 65_536, 131_072, 185_000)


def points(a_ms=30.0, gb_s=900.0, accept=4.0, depths=DEPTHS, noise=0.0, seed=0, prefill=3000.0, **more) -> list[Point]:
    """A server of known step time: a + K/V bytes over ``gb_s``."""
    rng = random.Random(seed)
    made = []
    for depth in depths:
        step = (a_ms / 1e3 + depth * KIMI / gb_s / 1e9) * (1 + rng.uniform(-noise, noise))
        made.append(Point(depth, accept / step, accept, ttft_s=depth / prefill, prompt_tokens=depth, **more))
    return made


def server(**more) -> Server:
    return Server(**{"kv_bytes": KIMI, "draft_tokens": 16, **PRO_6000, **more})


def first(diagnosis) -> str:
    every = [*diagnosis.causes, *diagnosis.outside]
    return max(every, key=lambda c: c.share).name if every else ""


def test_published_collapse(gate_metrics, capsys):
    """0.7 token/s at 185k, 61 layers, commit length 1, a card of 1,792 GB/s: from one number on the command line."""
    words = ["diagnose", "--point", "185k:0.7:1", "--layers", "61", "--gpu", "RTX PRO 6000", "--json"]
    assert cli.main(words) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["causes"][0]["name"] == "attention" and told["causes"][0]["share"] > 0.8
    assert "verify attention" in told["verdict"]
    bandwidth = told["bandwidth_gb_s"]
    # 13.0 GB of K/V in at most the whole step of 1.43 s
    assert bandwidth["low"] == pytest.approx(185_000 * KIMI * 0.7 / 1e9, rel=1e-6)
    assert bandwidth["low"] <= bandwidth["attention"] < 14, "the published figure is 14 GB/s"
    assert told["measure_next"], "one depth proves no slope"
    collapsed = points(a_ms=45, gb_s=9.3, accept=1.0)
    assert first(diagnose(collapsed, server(draft_tokens=0))) == "attention"
    gate_metrics["gb_s"] = bandwidth["attention"]


def test_each_cause(gate_metrics):
    easy = dict(predictable=True)
    made = {
        "attention": (points(gb_s=12), server()),
        "launch": (points(a_ms=700), server()),
        "drafter": (points(accept=1.05) + points(accept=1.1, **easy), server()),
        "text": (points(accept=1.2) + points(accept=6.0, **easy), server()),
        "prefill": (
            [
                Point(d, 60, 4.0, ttft_s=d / 5000 * (1 + d / 10_000), prompt_tokens=d, predictable=True)
                for d in (1024, 16_384, 65_536)
            ],
            server(),
        ),
        "cache": (points(concurrency=4, **easy), server(pool_tokens=101_134)),
    }
    named = {name: first(diagnose(*of)) for name, of in made.items()}
    assert named == {name: name for name in made}
    for name, of in made.items():
        diagnosis = diagnose(*of)
        found = next(c for c in [*diagnosis.causes, *diagnosis.outside] if c.name == name)
        assert any(ch.isdigit() for ch in found.evidence) and found.remedy
    fast = diagnose(points() + points(**easy), server())
    assert not [c for c in fast.causes if c.share > 0.05] and not fast.outside, "a healthy server has nothing"
    assert "nothing stands out" in fast.verdict
    gate_metrics["causes"] = len(made)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_causes(seed, gate_metrics):
    """Attention at 20 GB/s, 400 ms of fixed cost, a weak drafter: shares as they were put in, and they sum to 1."""
    rng = random.Random(seed)
    a_ms, gb_s, accept = rng.uniform(300, 900), rng.uniform(10, 40), rng.uniform(1.0, 1.5)
    of = server(weights_gib=30)
    made = points(a_ms, gb_s, accept, noise=0.01, seed=seed)
    diagnosis = diagnose(made, of)
    shares = {c.name: c.share for c in diagnosis.causes}
    assert sum(shares.values()) == pytest.approx(1)
    deep = DEPTHS[-1] * KIMI / 1e9
    good_a, good_step = 30 * 2**30 / 896e9 + 0.010, 30 * 2**30 / 896e9 + 0.010 + deep / 896
    parts = {
        "attention": (deep / gb_s - deep / 896) / accept,
        "launch": (a_ms / 1e3 - good_a) / accept,
        "drafter": good_step * (1 / accept - 1 / 3),
    }
    total = sum(parts.values())
    worst = max(abs(shares[name] - part / total) for name, part in parts.items())
    assert worst < 0.04, (shares, parts)
    gate_metrics["worst_share_error"] = worst


def test_too_few_points(gate_metrics):
    one = diagnose(points(gb_s=12, depths=(131_072,)), server())
    assert "one depth" in one.verdict and "bench longctx" in one.measure_next and "--depths" in one.measure_next
    two = diagnose(points(gb_s=12, depths=(100_000, 131_072)), server())
    assert math.isnan(two.bandwidth_gb_s["high"]) and "--depths" in two.measure_next, "two near depths are no range"
    text = diagnose(points(gb_s=12), server())
    assert "--text both" in text.measure_next and "--depths" not in text.measure_next
    assert diagnose(points(gb_s=12, predictable=True), server()).measure_next == ""
    with pytest.raises(ValueError, match="no valid measurement"):
        diagnose([], server())
    with pytest.raises(ValueError, match="K/V bytes"):
        diagnose(points(), server(kv_bytes=0))
    gate_metrics["cases"] = 6


def test_a_bad_cell_does_not_tilt_the_line():
    good = points(a_ms=40, gb_s=10)
    slow = [*good, Point(65_536, good[2].decode_tok_s / 9, 4.0)]
    a, b, low, high = fit(slow)
    assert KIMI / b / 1e9 == pytest.approx(10, rel=0.02) and low <= b <= high


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--point", "185k"], "185k:0.7:1"),
        (["--point", "1k:-3"], "is no point"),
        (["--point", "nan:3"], "is no point"),
        (["--point", "1k:30"], "K/V bytes"),
        (["--point", "1k:30", "--layers", "61", "--gpu", "GTX 970"], "--gpu is 'GTX 970'"),
        (["--point", "1k:30", "--layers", "61", "--weights-gib", "-4"], "--weights-gib is -4.0"),
        ([], "nothing to diagnose"),
        (["/nowhere/cells.jsonl"], "nowhere"),
    ],
)
def test_bad_input_is_one_sentence(words, says, capsys):
    try:
        code = cli.main(["diagnose", *words])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and says in capsys.readouterr().err
