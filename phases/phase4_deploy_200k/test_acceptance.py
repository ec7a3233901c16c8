"""Gates of phase 4 that need no GPU: the benchmark catches bad cells and measures good ones right."""

import asyncio
import statistics

import pytest
from mla_verify_bench.longctx import cells
from mla_verify_bench.longctx.misbehaving import MisbehavingServer, Script
from mla_verify_bench.longctx.run import Grid, Job, Measurement, ServerGone

TOKENS = 48


def measure(server, tmp_path, depths, *, api="auto", done=(), label="fake", texts=("natural",), **more):
    """Cells by depth, as they stand in the file."""
    tokens = more.pop("tokens", TOKENS)
    grid = Grid(depths=depths, concurrency=(more.pop("concurrency", 1),), texts=texts, max_new_tokens=tokens)
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "cells.jsonl"
    job = Job(base_url=server.url, label=label, grid=grid, output=file, api=api, vocab_size=4096, **more)
    measured = asyncio.run(Measurement(job, done).measure())
    return measured, {cell.key.depth: cell for cell in cells.load(file)}


GENERATE = {
    "good": set(),
    "multi_token_events": set(),
    "incremental": set(),
    "no_usage": {"no_usage"},
    "cached": {"cached"},
    "loop": {"loop"},
    "late_loop": {"loop"},
    "empty": {"no_text"},
    "nan_text": {"nan"},
    "nan_figure": {"nan"},
    "early_stop": {"stopped_early"},
    "disconnect": {"disconnect"},
    "http_error": {"http_error"},
    "error_in_stream": {"http_error"},
    "garbage": {"malformed"},
    "flood": {"malformed"},
    "miscount": {"count_mismatch"},
    "silence": {"timeout"},
    "stall": {"stall"},
}
OPENAI = {
    "good": set(),
    "multi_token_events": set(),
    "reasoning_only": set(),
    "no_usage": {"no_usage"},
    "cached": {"cached"},
    "loop": {"loop"},
    "empty": {"no_text"},
    "nan_text": {"nan"},
    "nan_figure": {"nan"},
    "early_stop": {"stopped_early"},
    "disconnect": {"disconnect"},
    "http_error": {"http_error"},
    "miscount": {"count_mismatch", "stopped_early"},  # which of the two it was can't be told
    "usage_sum": {"count_mismatch"},
}


@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
def test_misbehaving_server_is_caught(api, tmp_path, gate_metrics):
    """Each way to misbehave has its own cell, and the cell has its flag and no other."""
    expected = GENERATE if api == "generate" else OPENAI
    if api == "completions":
        expected = {name: flags for name, flags in expected.items() if name != "reasoning_only"}
    depths = {round(200 * 1.25**i): name for i, name in enumerate(expected)}
    script = Script(by_depth=depths)
    with MisbehavingServer(script) as server:
        _, found = measure(server, tmp_path, list(depths), api=api, silence_s=1.0)
    wrong = {}
    for depth, name in depths.items():
        flags = {flag.name for flag in found[depth].flags}
        if flags != expected[name]:
            wrong[name] = found[depth].reasons or "valid"
    gate_metrics["behaviours"] = len(depths)
    gate_metrics["caught_wrongly"] = len(wrong)
    assert not wrong
    assert found[next(iter(depths))].figures.decode_tok_s


def test_misbehaviour_of_a_whole_server_is_caught(tmp_path):
    """A cold server, a small pool, and a server that goes away."""
    with MisbehavingServer(Script(slow_requests=1)) as server:
        _, found = measure(server, tmp_path / "a", [256, 512])
        assert all(cell.valid for cell in found.values()), "the warm-up takes the cold request"
    with MisbehavingServer(Script(slow_requests=1)) as server:
        _, found = measure(server, tmp_path / "b", [256, 512], warm_up=False)
        assert [f.name for f in found[256].flags] == ["cold"] and found[512].valid
    with MisbehavingServer(Script(pool_tokens=400)) as server:
        _, found = measure(server, tmp_path / "c", [256, 512])
        assert found[256].valid and [f.name for f in found[512].flags] == ["over_pool"]
        assert all(len(p) < 300 for p in server.prompts), "a prompt that can't be held is not sent"
    with MisbehavingServer(Script(dies_at=512)) as server:
        with pytest.raises(ServerGone, match="no longer answers"):
            measure(server, tmp_path / "d", [256, 512, 1024])
        found = {cell.key.depth: cell for cell in cells.load(tmp_path / "d" / "cells.jsonl")}
        assert found[256].valid and [f.name for f in found[512].flags] == ["disconnect"] and 1024 not in found


@pytest.mark.parametrize("accept_length", [1, 4])
def test_known_rate_within_1_percent(accept_length, tmp_path, gate_metrics):
    """Decode tok/s, ms per verify step, accept length of a server whose rate is known. Median of 5."""
    rate, tokens = 100.0, 201
    with MisbehavingServer(Script(tokens_per_second=rate, accept_length=accept_length)) as server:
        _, found = measure(server, tmp_path, [256, 512, 768, 1024, 1280], tokens=tokens)
    assert all(cell.valid for cell in found.values()), [cell.reasons for cell in found.values()]
    figures = [cell.figures for cell in found.values()]
    measured = [f.decode_tok_s for f in figures]
    sent = server.rates[-len(figures) :]  # of a server that a busy machine may slow down
    error = abs(statistics.median(m / r for m, r in zip(measured, sent, strict=True)) - 1)
    step_error = abs(
        statistics.median(f.ms_per_step * r / 1000 / accept_length for f, r in zip(figures, sent, strict=True)) - 1
    )
    assert statistics.median(sent) == pytest.approx(rate, rel=0.1), "the machine is too busy to stream at this rate"
    gate_metrics["error"] = max(error, step_error)
    gate_metrics.samples("decode_tok_s", measured, warmups=1, unit="tok/s")
    assert max(error, step_error) < 0.01
    assert {f.accept_length for f in figures} == {accept_length}


def test_resume(tmp_path, gate_metrics):
    """Finished cells are not asked for again, a broken one is, and the run completes."""
    depths = [256, 512, 1024]
    with MisbehavingServer(Script(dies_at=512)) as server, pytest.raises(ServerGone):
        measure(server, tmp_path, depths)
    file = tmp_path / "cells.jsonl"
    with open(file, "ab") as torn:
        torn.write(b'{"schema_version": 1, "key": {"lab')
    done = cells.load(file, repair=True)
    assert [cell.key.depth for cell in done] == [256, 512]
    with MisbehavingServer() as server:
        measured, found = measure(server, tmp_path, depths, done=done)
        asked = sorted({len(p) for p in server.prompts})
        assert measured == 2 and asked == [512, 1024], "256 was finished"
        assert all(cell.valid for cell in found.values()) and sorted(found) == depths
        again, _ = measure(server, tmp_path, depths, done=list(found.values()))
        assert again == 0 and sorted({len(p) for p in server.prompts}) == asked
    gate_metrics["cells_measured_again"] = measured - 2
    heads = [tuple(p[:1]) for p in server.prompts]
    assert len(set(heads)) == len(heads), "no two prompts share even their first token"
