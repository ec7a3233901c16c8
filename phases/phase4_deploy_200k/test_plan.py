"""Gates of phase 4 on ``mla-verify plan``: recorded start-ups come out right, logs are read, the rest is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_verify_bench import cli
from mla_verify_bench.plan import log, memory, model
from mla_verify_bench.plan.memory import GIB, Setup, plan

CASES = {case["id"]: case for case in yaml.safe_load((Path(__file__).parent / "cases" / "pool.yaml").read_text())}
LOG = Path(__file__).parent / "cases" / "start-up-0.5.17.log"  # made up, in the form of that release
PRO_6000 = 97887 / 1024


def setup(name="kimi-k2", **more) -> Setup:
    wanted = dict(total_gib=PRO_6000, free_before_gib=94.14, weights_gib=69.5, tp_size=8, sm_count=188, context=200_000,
                  max_running_requests=8)  # fmt: skip
    return Setup(model.read_model(name), **{**wanted, **more})


def just_too_heavy(**more) -> Setup:
    """With the lightest weights that leave no plan."""
    tried = (setup(weights_gib=w / 10, **more) for w in range(600, 930))
    return next(s for s in tried if not plan(s, suggest=False).feasible)


def test_pool_tokens(gate_metrics):
    """Tokens of the recorded start-ups, from the two decimals that a log prints."""
    errors = {}
    case = CASES["kimi-k2.5-int4-tp8"]
    told = log.StartUp(
        free_before_gib=case["free_before_gib"], free_after_gib=case["free_after_gib"], weights_gib=case["weights_gib"]
    )
    before, left = told.settled()
    s = setup("kimi-k2.5", free_before_gib=before, weights_gib=before - left, release=case["release"])
    got = memory.pool_tokens(s, case["fraction"])
    errors[case["id"]] = abs(got - case["pool_tokens"]) / case["pool_tokens"]

    case = CASES["glm-5-bf16"]
    cell = memory.cell(setup("glm-5", release=case["release"]))
    assert cell == 78 * (1152 + 132)
    got = int(case["kv_gib"] * GIB) // cell // case["page_size"] * case["page_size"]
    errors[case["id"]] = abs(got - case["pool_tokens"]) / case["pool_tokens"]

    gate_metrics["error"] = max(errors.values())
    gate_metrics["cases"] = len(errors)
    assert max(errors.values()) <= 0.01, errors


def test_fraction(gate_metrics):
    case = CASES["rtx-pro-6000-default-fraction"]
    told = dict(total_mib=case["gpu_mib"], chunk=case["chunk"], graph_bs=case["max_bs"], tp_size=case["tp_size"])
    vision = model.read_model("kimi-k2.5").vision
    errors = [
        memory.default_fraction(**told) - case["default_fraction"],
        memory.default_fraction(**told, prefill_graph=False) - case["without_prefill_graph"],
        memory.default_fraction(**told, prefill_graph=False, vision=vision) - case["of_kimi_k2.5"],
    ]
    gate_metrics["error"] = max(map(abs, errors))
    # The step of which only one end's fraction is on record: what the other was, for a person to see.
    case = CASES["192k-to-218k"]
    then = case["then"]
    s = setup(weights_gib=94.14 * then["fraction"] - then["pool_tokens"] * 70_272 / GIB, release=case["release"])
    gate_metrics["fraction_before_the_step"] = memory.fraction_for(s, case["pool_tokens"])
    assert max(map(abs, errors)) <= 0.005, errors


def test_from_log(gate_metrics, capsys, tmp_path):
    """A log in, the numbers out, and a plan from them; what is not understood is said."""
    started = log.read(LOG)
    assert (started.free_before_gib, started.weights_gib, started.pool_tokens) == (94.11, 74.19, 218_448)
    assert started.free_after_gib == 19.92, "of the rank that has least"
    assert (started.mem_fraction_static, started.tp_size, started.context_length) == (0.94, 8, 200_000)
    assert started.chunked_prefill_size == 8192 and started.free_at_end_gib == 4.19
    low, high = started.cell_bytes
    assert low <= 70_272 <= high, "the pool's bytes a token are those of the model"
    assert any("Mamba Cache" in line for line in started.unknown) and len(started.unknown) <= 20
    s = setup(free_before_gib=started.free_before_gib, weights_gib=started.weights_gib, release="0.5.17")
    got = memory.pool_tokens(s, started.fraction)
    assert abs(got - started.pool_tokens) / started.pool_tokens < 0.01
    words = ["plan", "--model", "kimi-k2", "--gpu", "rtx-pro-6000", "--tp-size", "8", "--max-running-requests", "8"]
    code = cli.main([*words, "--log", str(LOG), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["feasible"] else 1) and told["log"]["pool_tokens"] == 218_448
    assert cli.main([*words, "--log", str(LOG)]) == code and "not understood" in capsys.readouterr().out
    without = log.parse("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10, KV size: 1.00 GB")
    assert without.missing() == ["free_before_gib", "weights_gib"] and without.fraction is None
    with pytest.raises(ValueError, match="none of SGLang's start-up lines"):
        log.parse("GET /health 200\n" * 1000)
    unknown = tmp_path / "config.json"
    unknown.write_text(json.dumps({"architectures": ["NewForCausalLM"], "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="NewForCausalLM' is not known here and is not guessed"):
        model.read_model(str(unknown))
    gate_metrics["error"] = abs(got - started.pool_tokens) / started.pool_tokens


START_UP = {
    "0.5.17": "server_args=ServerArgs(mem_fraction_static={f}, max_total_tokens=None, tp_size=8, dcp_size=1)",
    "0.5.23": "server_args={{'mem_fraction_static': {f}, 'max_total_tokens': None, 'tp_size': 8, 'dcp_size': 1}}",
}


def start_up(s: Setup, fraction: float, ranks: int = 8) -> str:
    """What a server of this setup prints, rank by rank; ranks differ by up to 0.4 GiB and the least roomy decides."""
    after, cell = s.free_before_gib - s.weights_gib, memory.cell(s)
    tokens = memory.pool_tokens(s, fraction)
    lines = [START_UP[s.release].format(f=fraction)]
    for rank in range(ranks):
        more, stamp = 0.4 * (ranks - 1 - rank) / ranks, f"[2026-12-01 13:01:35 TP{rank}] "
        lines += [
            f"{stamp}Load weight begin. avail mem={s.free_before_gib + more:.2f} GB",
            f"{stamp}Load weight end. elapsed=61.06 s, type=DeepseekV3ForCausalLM, avail mem={after + more:.2f} GB, "
            f"mem usage={s.weights_gib:.2f} GB.",
            f"{stamp}KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, "
            f"KV size: {(tokens + s.page) * cell / GIB:.2f} GB",
            f"{stamp}Memory pool end. avail mem={after + more - tokens * cell / GIB:.2f} GB",
        ]
    return "\n".join(lines)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["kimi-k2", "kimi-k2.5", "glm-5"]), st.floats(20, 75), st.floats(93, 95), st.integers(880, 950),
    st.integers(-40, 40), st.sampled_from(["0.5.17", "0.5.23"]),
)  # fmt: skip
def test_plan_from_a_log_holds_what_it_says(name, weights, free, first, step, release):
    """A log at one fraction, a plan at another: the tokens that SGLang's arithmetic gives there, within 0.5 %."""
    from mla_verify_bench.plan.cli import _same_pool

    real = setup(name, weights_gib=weights, free_before_gib=free, release=release, capability="9.0")
    if memory.pool_tokens(real, first / 1000) < 1000 or memory.pool_tokens(real, (first + step) / 1000) < 20_000:
        return
    said = log.parse(start_up(real, first / 1000))
    assert said.mem_fraction_static == first / 1000 and said.tp_size == 8 and not said.unknown
    assert _same_pool(real, said)
    reserve = memory.static_gib(real) - real.weights_gib
    before, left = said.settled(memory.cell(real), reserve)
    planned = replace(real, free_before_gib=before, weights_gib=before - left)
    wanted = memory.pool_tokens(real, (first + step) / 1000)
    assert abs(memory.pool_tokens(planned, (first + step) / 1000) - wanted) <= 0.005 * wanted


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_log_of_a_real_engine(release):
    """SGLang's CPU engine printed these: every number is found, in either form of its arguments."""
    said = log.read(Path(__file__).parent / "cases" / f"cpu-engine-{release}.log")
    assert said.kv_tokens == said.pool_tokens == 8192 and said.context_length == 1024 and said.tp_size == 1
    assert said.max_total_tokens == 8192 and 0.7 < said.mem_fraction_static < 0.8
    assert said.free_at_end_gib and said.free_before_gib and said.unknown == []


def test_infeasible(gate_metrics, capsys):
    """No fraction: what is missing, and the smallest change that would make it fit, which then does fit."""
    words = ["plan", "--model", "kimi-k2", "--gpu", "rtx-pro-6000", "--tp-size", "8", "--context-length", "200000"]
    tight = [*words, "--weights-gib", "76"]
    assert cli.main([*tight, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["feasible"] and told["missing_gib"] > 0 and told["mem_fraction_static"] is None
    assert "--mem-fraction-static" not in told["command"]
    assert cli.main([*tight, *told["change"].split(), "--json"]) == 0, f"{told['change']} was said to be enough"
    assert json.loads(capsys.readouterr().out)["pool_tokens"] >= 200_000
    made = {
        "--max-running-requests": just_too_heavy(max_running_requests=0),
        "--attention-backend": just_too_heavy(attention_backend="triton", max_running_requests=1),
        "--chunked-prefill-size": just_too_heavy(max_running_requests=1),
        "--kv-cache-dtype": just_too_heavy(max_running_requests=1, chunked_prefill_size=1024),
        "--context-length": just_too_heavy(
            max_running_requests=1, chunked_prefill_size=1024, kv_cache_dtype="fp8_e4m3"
        ),
        "more cards": setup(weights_gib=93),
    }
    for says, tried in made.items():
        p = plan(tried)
        assert not p.feasible and p.missing_gib > 0 and says in p.change, (says, p.change)
    gate_metrics["cases"] = len(made) + 1


def test_a_pool_smaller_than_the_context_is_no_plan():
    p = plan(setup(weights_gib=79), target_tokens=1000)
    assert p.target_tokens == 200_001 and not p.feasible


def test_kv_bytes():
    """The published table, replicated over TP; a draft layer; the indexer."""
    for name, bf16, fp8 in (("kimi-k2", 70_272, 35_136), ("deepseek-v3", 70_272, 35_136),
                            ("deepseek-v2-lite", 31_104, 15_552), ("glm-4.7-flash", 54_144, 27_072)):  # fmt: skip
        for tp_size in (1, 8):
            assert memory.cell(setup(name, tp_size=tp_size)) == bf16
            assert memory.cell(setup(name, tp_size=tp_size, kv_cache_dtype="fp8_e4m3")) == fp8
    assert memory.cell(setup("glm-5", release="0.5.17", kv_cache_dtype="fp8_e4m3")) == 78 * (656 + 132)
    mtp = model.nextn_draft(model.read_model("deepseek-v3"))
    assert memory.cell(setup("deepseek-v3", algorithm="NEXTN", draft=mtp, draft_tokens=4)) == 70_272 + 1152


setups = st.builds(
    setup,
    st.sampled_from(["kimi-k2", "glm-5", "deepseek-v2-lite"]),
    weights_gib=st.floats(1, 80),
    context=st.integers(1000, 300_000),
    max_running_requests=st.integers(0, 256),
    chunked_prefill_size=st.sampled_from([1024, 4096, 8192, 16384]),
    page_size=st.sampled_from([1, 64]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8_e4m3"]),
    algorithm=st.sampled_from(["none", "NGRAM"]),
    draft_tokens=st.integers(1, 64),
    attention_backend=st.sampled_from(["mla_verify", "triton"]),
    release=st.sampled_from(["0.5.17", "0.5.23"]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(setups, st.floats(0.3, 0.98), st.floats(0.001, 0.05))
def test_more_room_is_more_tokens(s, fraction, more):
    assert memory.pool_tokens(s, fraction + more) >= memory.pool_tokens(s, fraction)
    longer = replace(s, context=s.context + 5000)
    a, b = plan(s, suggest=False), plan(longer, suggest=False)
    assert b.high <= a.high and b.low >= a.low, "a longer context never needs less"
    tokens = memory.pool_tokens(s, fraction)
    if tokens:
        again = memory.fraction_for(s, tokens)
        assert again <= fraction + 1e-9 and abs(memory.pool_tokens(s, again + 1e-9) - tokens) <= s.page
    if a.feasible:
        # SGLang's own arithmetic, written down once more: the plan's fraction holds what was planned.
        rest = s.free_before_gib - memory.static_gib(s) - s.free_before_gib * (1 - a.fraction)
        assert a.tokens == int(rest * GIB) // a.cell_bytes // s.page * s.page >= a.target_tokens
        assert sum(t.gib for t in a.terms) <= s.free_before_gib * (1 - a.fraction) + 1e-9
        assert a.missing_gib == 0 and a.change == ""
    else:
        assert a.missing_gib > 0 and math.isfinite(a.missing_gib)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "kimi-k9"], "neither a file nor a preset"),
        (["--model", "kimi-k2", "--gpu", "gtx-970"], "--gpu is 'gtx-970'"),
        (["--model", "kimi-k2", "--gpu", "h200"], "--weights-gib is not given"),
        (["--model", "kimi-k2", "--gpu", "h200", "--weights-gib", "-3"], "weights_gib is -3.0"),
        (["--model", "kimi-k2", "--gpu", "h200", "--weights-gib", "70", "--kv-cache-dtype", "fp2"], "kv_cache_dtype"),
        (["--model", "kimi-k2", "--gpu", "h200", "--weights-gib", "70", "--speculative-algorithm", "EAGLE3"], "draft"),
        (["--model", "kimi-k2", "--gpu", "h200", "--log", "/nowhere.log"], "--log /nowhere.log can't be read"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(words, says, capsys):
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_the_picture(tmp_path, capsys):
    words = ["plan", "--model", "kimi-k2", "--gpu", "rtx-pro-6000", "--tp-size", "8", "--weights-gib", "69.5"]
    words += ["--context-length", "200000", "--max-running-requests", "8", "--what-if", "--picture"]
    assert cli.main([*words, str(tmp_path / "card.svg")]) == 0
    assert "K/V pool" in (tmp_path / "card.svg").read_text() and "what if" in capsys.readouterr().out
