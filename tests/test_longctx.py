"""The long-context benchmark: what it believes, what it writes, how it is told to stop."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from mla_verify_bench.longctx import cells, cli, report
from mla_verify_bench.longctx.cells import Cell, Facts, Figures, Key, Run, judge
from mla_verify_bench.longctx.client import Reply
from mla_verify_bench.longctx.misbehaving import MisbehavingServer, Script
from mla_verify_bench.longctx.prompts import Prompts
from mla_verify_bench.longctx.run import kv_bytes_per_token, read_config
from mla_verify_bench.longctx.server import Launch, sglang_python
from rich.console import Console

KIMI_K2 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def no_hardware(monkeypatch):
    """Asking what this machine is takes seconds, and nothing here depends on it."""
    monkeypatch.setattr(cli, "_hardware", dict)


def reply(*, tokens=32, step_s=0.01, start=0.0, ttft=0.5, prompt=1000, per_event=1, **fields):
    """A good server's reply: one token at ``ttft``, then ``per_event`` tokens every ``step_s``."""
    first = start + ttft
    marks = [(first + i * step_s, 1 + i * per_event) for i in range((tokens - 1) // per_event + 1)]
    told = dict(
        start_s=start,
        sent_tokens=prompt,
        first_s=first,
        last_s=marks[-1][0],
        marks=marks,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        cached_tokens=0,
        output_ids=list(range(100, 100 + tokens)),
        finish_reason="length",
    )
    return Reply(**(told | fields))


def judged(*replies, depth=1000, asked=32, **more):
    key = Key(label="x", depth=depth, concurrency=len(replies), text="natural")
    figures, flags = judge(replies, key, max_new_tokens=asked, **({"as_text": False, "speculates": False} | more))
    return figures, {flag.name for flag in flags}


def run_of(**fields):
    told = dict(
        id="r",
        started="2026-01-01T00:00:00+00:00",
        command=[],
        seed=0,
        nonce="n",
        max_new_tokens=32,
        base_url="http://127.0.0.1:1",
        embedded=False,
        server=Facts(name="sglang", version="0.0"),
    )
    return Run(**(told | fields))


def cell_of(label, depth, ms, *, flags=(), accept=2.0):
    figures = Figures(ms_per_step=ms, decode_tok_s=1000 * accept / ms, accept_length=accept, ttft_s=1.0)
    key = Key(label=label, depth=depth, concurrency=1, text="natural")
    found = [cells.Flag(name=name, detail="said so") for name in flags]
    return Cell(key=key, figures=figures, flags=found, seconds=1.0, run=run_of())


def test_figures_of_one_request():
    figures, flags = judged(
        reply(tokens=31, step_s=0.02, per_event=3, verify_steps=10), asked=31, kv_bytes_per_token=70272
    )
    assert not flags
    assert figures.ttft_s == pytest.approx(0.5) and figures.prefill_tok_s == pytest.approx(2000)
    assert figures.decode_tok_s == pytest.approx(150) and figures.accept_length == pytest.approx(3)
    assert figures.ms_per_step == pytest.approx(20)
    assert figures.kv_read_gb_s == pytest.approx(70272 * (1000 + 15.5) / 0.020 / 1e9)


def test_first_event_of_several_tokens_is_not_counted_as_decoded():
    marks = [(1.0, 8), (2.0, 16), (3.0, 24)]
    figures, _ = judged(reply(tokens=24, marks=marks, first_s=1.0, last_s=3.0, first_tokens=8), asked=24)
    assert figures.decode_tok_s == pytest.approx(8)


def test_counters_stand_in_for_meta_info():
    figures, _ = judged(reply(tokens=31), asked=31, speculates=True, counted_steps=10)
    assert figures.accept_length == pytest.approx(3)
    figures, _ = judged(reply(tokens=31), asked=31, speculates=None)
    assert figures.accept_length is None and figures.ms_per_step is None, "not told: not guessed"


def test_concurrent_requests_are_measured_where_all_decode():
    # The second prefills for 5 s, while the first gets one token per second; then both get 100 per second.
    slow = [(0.5 + i, 1 + i) for i in range(5)]
    fast = [(5.0 + i / 100, 6 + i) for i in range(95)]
    one = reply(tokens=100, marks=slow + fast, first_s=0.5, last_s=fast[-1][0])
    two = reply(tokens=100, step_s=0.01, ttft=5.0)
    figures, flags = judged(one, two, asked=100)
    assert not flags
    assert figures.decode_tok_s == pytest.approx(100, rel=0.03)
    assert figures.total_tok_s == pytest.approx(200, rel=0.03)
    _, flags = judged(reply(tokens=32), reply(tokens=32, ttft=5.0))
    assert flags == {"no_steady_window"}


@pytest.mark.parametrize(
    "fields, flag",
    [
        ({"cached_tokens": 1}, "cached"),
        ({"prompt_tokens": 999}, "count_mismatch"),
        ({"prompt_tokens": None}, "no_usage"),
        ({"completion_tokens": 31}, "count_mismatch"),
        ({"output_ids": [5, 6] * 16}, "loop"),
        ({"output_ids": [*range(16), *([9] * 16)]}, "loop"),
        ({"saw_nan": True}, "nan"),
        ({"output_ids": []}, "no_text"),
        ({"error": "disconnect", "detail": "x"}, "disconnect"),
        ({"count_problems": ["fell"]}, "count_mismatch"),
    ],
)
def test_flags(fields, flag):
    assert flag in judged(reply(**fields))[1]


def test_flags_of_the_depth_and_of_text():
    assert judged(reply(), depth=2000)[1] == {"depth_off"}
    assert judged(reply(cached_tokens=4), as_text=True)[1] == set(), "a chat template is shared"
    assert judged(reply(cached_tokens=40), as_text=True)[1] == {"cached"}
    assert judged(reply(last_s=0.5))[0].decode_tok_s is None, "no time passed: no rate, and no division by zero"


def test_kv_bytes_per_token():
    assert kv_bytes_per_token(KIMI_K2, Facts()) == 70272
    assert kv_bytes_per_token(KIMI_K2, Facts(kv_cache_dtype="fp8_e4m3", tp_size=8)) == 35136, (
        "MLA is not divided over TP"
    )
    llama = {
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "hidden_size": 4096,
    }
    assert kv_bytes_per_token(llama, Facts(dtype="bfloat16", tp_size=4)) == 32 * 2 * 2 * 128 * 2
    assert kv_bytes_per_token({**KIMI_K2, "index_topk": 2048}, Facts()) == 0
    assert kv_bytes_per_token({}, Facts()) == 0
    assert kv_bytes_per_token({"num_hidden_layers": "61; rm -rf /", "kv_lora_rank": -5}, Facts(dtype="bfloat16")) == 0


def test_prompts_are_exact_unique_and_seeded():
    made = Prompts(seed=3, nonce="a", alphabet=range(10, 500))
    same = Prompts(seed=3, nonce="a", alphabet=range(10, 500))
    other = Prompts(seed=3, nonce="b", alphabet=range(10, 500))
    some = [made.make(text, depth) for text in ("predictable", "natural") for depth in (1, 17, 300) for _ in range(5)]
    assert [len(p) for p in some[:15:5]] == [1, 17, 300]
    assert len({p[0] for p in some}) == len(some), "not even one token of prefix is shared"
    assert [same.make("predictable", 1) for _ in range(5)] == some[:5]
    assert (
        other.make("natural", 300)[:16] != Prompts(seed=3, nonce="a", alphabet=range(10, 500)).make("natural", 300)[:16]
    )
    pattern = some[10]
    assert pattern[16:80] == pattern[80:144] and len(set(pattern[16:80])) > 32
    text = Prompts(seed=0, nonce="a")
    assert isinstance(text.make("natural", 400), str) and text.as_text
    assert text.make("natural", 400)[:6] != text.make("natural", 400)[:6]
    with pytest.raises(ValueError, match="--vocab-size"):
        Prompts(seed=0, nonce="a", alphabet=[1, 2])


def test_file_of_cells_survives_a_crash_and_refuses_what_is_not_its_own(tmp_path):
    file = tmp_path / "cells.jsonl"
    for cell in (
        cell_of("a", 100, 1.0, flags=["disconnect"]),
        cell_of("b", 100, 2.0),
        cell_of("a", 100, 3.0),
    ):
        cells.append(file, cell)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"schema_version": 1, "ke')
    found = cells.load(file, repair=True)
    assert [(c.key.label, c.figures.ms_per_step) for c in found] == [("b", 2.0), ("a", 3.0)]
    assert file.read_bytes() == whole
    for junk in (
        b"[]\n",
        b"not json\n",
        b'{"schema_version": 99}\n',
        b'{"schema_version": 1, "x": 1}\n',
        b"[" * 99999 + b"\n",
    ):
        (tmp_path / "junk").write_bytes(whole + junk)
        with pytest.raises(ValueError, match="line 4"):
            cells.load(tmp_path / "junk")
    (tmp_path / "junk").write_bytes(b"x" * (2 << 20))
    with pytest.raises(ValueError, match="longer than"):
        cells.load(tmp_path / "junk")


def test_config_files_are_bounded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": KIMI_K2}))
    assert read_config(tmp_path) == KIMI_K2
    (tmp_path / "config.json").write_bytes(b" " * (5 << 20) + b"{}")
    assert read_config(tmp_path) == {} == read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"text_config": [1]}')
    assert read_config(tmp_path) == {}


def test_report_marks_what_is_not_valid_and_compares(tmp_path):
    found = [cell_of("triton", d, d / 10) for d in (1000, 10000, 100000)]
    found += [cell_of("mla_verify", d, 20.0) for d in (1000, 10000)]
    found.append(cell_of("mla_verify", 100000, 25.0, flags=["loop"]))
    console = Console(record=True, width=100, file=open(os.devnull, "w"))
    report.show(found, console)
    report.compare(found, "triton", "mla_verify", console)
    text = console.export_text()
    assert "is not valid: loop" in text and "50 x" in text and "400 x" in text and "no result" in text
    rows = report.summary(found)["comparisons"][0]["rows"]
    assert [(r["depth"], round(r["step_ratio"]), r["valid"]) for r in rows] == [
        (1000, 5, True),
        (10000, 50, True),
        (100000, 400, False),
    ]
    svg, png = report.plot(found, tmp_path)
    assert png.stat().st_size > 10000 and "not a valid cell" in svg.read_text()
    first = svg.read_bytes()
    assert report.plot(found, tmp_path) and svg.read_bytes() == first, "the same cells give the same picture"
    assert report.plot([], tmp_path) == []
    found.append(cell_of("<script>alert(1)</script>", 1000, 9.0))
    report.plot(found, tmp_path)
    page = report.html(found, tmp_path).read_text()
    assert "<svg" in page and "400 x" in page and "is not valid: loop" in page
    assert "<script" not in page and "&lt;script&gt;" in page, "what a server says is text"


def parse(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(list(map(str, words)))


@pytest.mark.parametrize(
    "words, names",
    [
        (["--base-url", "localhost:30000"], "--base-url"),
        (["--base-url", "http://x", "--model-path", "m"], "--model-path"),
        (["--resume"], "--output-dir"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--report", "/nonexistent"], "cells.jsonl"),
        (
            ["--device", "cpu", "--depths", "8192", "--sglang-python", sys.executable],
            "--(depths|sglang-python)",
        ),
        (["--device", "cpu", "--sglang-python", "/bin/false"], "--sglang-python"),
    ],
)
def test_wrong_use_is_refused_in_words(words, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=names):
        cli.run(parse(*words))


def test_no_server_is_said(tmp_path, capsys):
    code = cli.run(parse("--base-url", "http://127.0.0.1:9", "--output-dir", tmp_path / "o"))
    assert code == 1 and "--base-url" in capsys.readouterr().out


def test_cli_measures_compares_and_resumes(tmp_path, capsys):
    grid = (
        "--depths",
        "256,512",
        "--text",
        "natural",
        "--max-new-tokens",
        32,
        "--vocab-size",
        4096,
        "--json",
    )
    for name, rate in (("slow", 400.0), ("fast", 1600.0)):
        with MisbehavingServer(Script(tokens_per_second=rate, accept_length=2)) as server:
            capsys.readouterr()
            words = ("--base-url", server.url, "--label", name, "--output-dir", tmp_path / name, *grid)
            assert cli.run(parse(*words, "--api-key", "secret-key")) == 0
            told = json.loads(capsys.readouterr().out)
            assert [c["valid"] for c in told["cells"]] == [True, True]
            asked = len(server.prompts)
            with pytest.raises(ValueError, match="--resume"):
                cli.run(parse(*words))
            with pytest.raises(ValueError, match="--seed"):
                cli.run(parse(*words, "--resume", "--seed", 5))
            assert cli.run(parse(*words, "--resume")) == 0 and len(server.prompts) == asked
        lines = (tmp_path / name / "cells.jsonl").read_text()
        assert "secret-key" not in lines and (tmp_path / name / "decode.png").exists()
    capsys.readouterr()
    assert cli.run(parse("--compare", tmp_path / "slow", tmp_path / "fast", "--json")) == 0
    rows = json.loads(capsys.readouterr().out)["comparisons"][0]["rows"]
    assert all(row["decode_ratio"] == pytest.approx(4, rel=0.25) for row in rows)


def test_openai_server_that_refuses_other_fields(tmp_path):
    with MisbehavingServer(Script(refuses_extras=True, says_sglang=False)) as server:
        code = cli.run(
            parse(
                "--base-url",
                server.url,
                "--depths",
                "400,800",
                "--text",
                "both",
                "--max-new-tokens",
                32,
                "--output-dir",
                tmp_path,
            )
        )
    found = cells.load(tmp_path / "cells.jsonl")
    assert code == 0 and all(c.valid for c in found), [c.reasons for c in found]
    assert {c.run.server.api for c in found} == {"completions"} and len(found) == 4


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_finished_cells(number, tmp_path):
    program = (
        "import argparse, sys; from mla_verify_bench.longctx import cli; p = argparse.ArgumentParser(); "
        "cli.add_arguments(p); sys.exit(cli.run(p.parse_args()))"
    )
    with MisbehavingServer(Script(tokens_per_second=60.0)) as server:
        words = (
            "--base-url",
            server.url,
            "--depths",
            "256,300,350,400,450,500",
            "--text",
            "natural",
            "--max-new-tokens",
            "48",
            "--output-dir",
            str(tmp_path),
            "--vocab-size",
            "4096",
        )
        process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)
        file, deadline = tmp_path / "cells.jsonl", time.monotonic() + 60
        while (not file.exists() or file.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130 and "--resume" in out
        found = cells.load(file)
        assert 2 <= len(found) < 6 and all(c.valid for c in found)
        assert cli.run(parse(*words, "--resume")) == 0
    assert len(cells.load(file)) == 6


def test_launch_says_what_differs_between_servers():
    launch = Launch(
        "py", "model", "triton", cpu=True, context_length=8192, other_prefill="mla_verify", pool_tokens=9000
    )
    words = launch.command(1234)
    assert words[:3] == ["py", "-m", "sglang.launch_server"]

    def value(flag):
        return words[words.index(flag) + 1]

    assert (value("--host"), value("--port"), value("--dtype")) == ("127.0.0.1", "1234", "float32")
    assert value("--decode-attention-backend") == "triton" and value("--prefill-attention-backend") == "mla_verify"
    assert value("--speculative-attention-mode") == "decode" and value("--speculative-algorithm") == "NGRAM"
    assert launch.environment()["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_interpreter_of_sglang_is_found_by_environment(monkeypatch):
    monkeypatch.setattr(
        "mla_verify_bench.longctx.server.sglang_version", lambda python: "0.5.17" if "v17" in python else ""
    )
    monkeypatch.setenv("MLA_VERIFY_ENV_SGLANG_0_5_17", "/somewhere/v17/bin/python")
    assert sglang_python() == "/somewhere/v17/bin/python"
    monkeypatch.delenv("MLA_VERIFY_ENV_SGLANG_0_5_17")
    monkeypatch.delenv("MLA_VERIFY_ENV_SGLANG_0_5_23", raising=False)
    with pytest.raises(ValueError, match="--sglang-python"):
        sglang_python()


def test_random_replies_never_break_the_judge():
    """Whatever a server tells, there is a verdict and no exception."""
    rng = random.Random(7)
    values = [None, 0, 1, 5, 32, 1 << 39]
    for _ in range(2000):
        times = sorted(rng.choice([0.0, 0.5, 1.0, 1.0, 2.0]) for _ in range(2))
        replies = [
            Reply(
                start_s=0.0,
                first_s=rng.choice([None, times[0]]),
                last_s=rng.choice([None, times[1]]),
                first_tokens=rng.choice([0, 1, 40]),
                prompt_tokens=rng.choice(values),
                completion_tokens=rng.choice(values),
                cached_tokens=rng.choice(values),
                verify_steps=rng.choice(values),
                marks=[(t, rng.choice(values)) for t in times],
                output_ids=[1] * rng.choice([0, 1, 32]),
                text=rng.choice(["", "nan", "a b c"]),
                error=rng.choice(["", "", "disconnect", "http_error"]),
            )
            for _ in range(rng.choice([1, 2, 3]))
        ]
        for r in replies:
            if r.first_s is None or r.last_s is None:
                r.first_s = r.last_s = None
        figures, flags = judged(*replies, speculates=rng.choice([None, True, False]), kv_bytes_per_token=100)
        assert isinstance(figures, Figures) and isinstance(flags, set)
