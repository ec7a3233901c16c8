"""The gate runner on a toy phase: it can pass, it can fail, and nothing counts that was not shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import toy
from mla_verify_bench import cli, gates, pytest_plugin, records, status
from mla_verify_bench.gates import Gate, Outcome, PhaseError
from rich.console import Console


def run(root, only=(), **fields):
    """(results by gate, record) of one run of the toy phase."""
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    record = gates.Runner(root, toy.phase_of(root), only=only, console=quiet, **fields).run()
    return {r.gate: r for r in record.results}, record


def command(answer, **fields):
    return {"run": {"command": ["{python}", "phases/toy/command.py", json.dumps(answer)]}, **fields}


@pytest.mark.parametrize("jobs", [1, 2])
def test_pass_fail_skip(tmp_path, jobs):
    root = toy.checkout(
        tmp_path,
        toy.gate("exact"),
        toy.gate("fails", "test_fails"),
        toy.gate("skips", "test_skips"),
        toy.gate("xfails", "test_xfails"),
        toy.gate("partly", "test_partly_skipped"),
        toy.gate("figures", "test_figure"),
        toy.gate("environ", run={"test": "phases/toy/test_toy.py::test_environ", "environ": {"TOY": "1"}}),
        toy.gate("absent-test", "test_of_next_year"),
        toy.gate("absent-file", run={"test": "phases/toy/test_other.py::test_x"}),
        toy.gate("absent-command", run={"command": ["{python}", "phases/toy/bench.py"]}),
        toy.gate("on-gpu", needs=["sm_120"]),
        toy.gate("elsewhere", env="sglang-9.9"),
    )
    results, record = run(root, jobs=jobs)
    assert {id: r.status for id, r in results.items()} == {
        "exact": "PASS", "fails": "FAIL", "xfails": "FAIL", "figures": "PASS", "environ": "PASS",
    }  # fmt: skip
    assert sorted(results["figures"].samples) == ["ours[3]", "ours[4]", "ours[5]"]
    assert "arithmetic" in results["fails"].reason and "xfail" in results["xfails"].reason
    not_run = record.not_run
    assert "no such device" in not_run["skips"] and not_run["partly"].startswith("1 of 2 cases skipped")
    assert [not_run[f"absent-{what}"] for what in ("test", "file", "command")] == ["not built yet"] * 3
    assert not_run["elsewhere"] == "environment sglang-9.9 is not installed"
    if "sm_120" not in record.hardware.classes:
        assert not_run["on-gpu"] == "needs sm_120"
        assert "not measured here" in gates.explain_not_run(record)


def test_figures(tmp_path):
    root = toy.checkout(
        tmp_path,
        toy.gate("exact"),
        toy.figure("worst-low", ">=", 3),
        toy.figure("worst-high", "<=", 5),
        toy.figure("too-slow", ">=", 3.001),
        toy.figure("missing", ">=", 1, "test_no_figure"),
        toy.figure("nan", ">=", 1, "test_nan"),
    )
    results, _ = run(root)
    assert {id: (r.status, r.value) for id, r in results.items()} == {
        "exact": ("PASS", None), "worst-low": ("PASS", 3.0), "worst-high": ("PASS", 5.0), "too-slow": ("FAIL", 3.0),
        "missing": ("FAIL", None), "nan": ("FAIL", None),
    }  # fmt: skip
    assert results["too-slow"].reason == "ratio is 3, required ≥ 3.001"
    assert results["missing"].reason == "metric ratio was not reported"
    assert results["nan"].reason == "metric ratio is not a finite number"
    samples = results["worst-low"].samples["ours[5]"]
    assert (samples.values, samples.n, samples.warmups, samples.median) == ([1.0, 2.0, 5.0], 3, 2, 2.0)


@pytest.mark.parametrize(
    ("op", "limit", "figure", "status"),
    [
        (">=", 20, 20.0, "PASS"), (">=", 20, 19.999999, "FAIL"), (">", 20, 20.0, "FAIL"), (">", 20, 20.000001, "PASS"),
        ("<=", 2, 2.0, "PASS"), ("<=", 2, 2.000001, "FAIL"), ("<", 2, 2.0, "FAIL"), ("==", 0, 0.0, "PASS"),
        ("==", 0, 1e-9, "FAIL"), (">=", 20, float("inf"), "FAIL"), (">=", 20, float("nan"), "FAIL"),
        (">=", 0, True, "FAIL"),
    ],
)  # fmt: skip
def test_threshold_edges(op, limit, figure, status):
    gate = Gate.model_validate(toy.figure("g", op, limit))
    judged = gates.judge(gate, Outcome(True, metrics={"ratio": [figure]}), "")
    assert judged.status == status


def test_failing_exactness_voids_figures(tmp_path):
    root = toy.checkout(tmp_path, toy.gate("exact"), toy.figure("fast", ">=", 2))
    assert run(root)[0]["fast"].status == "PASS"
    (root / "src" / "code.py").write_text("wrong = True\n")
    results, _ = run(root)
    assert results["exact"].status == "FAIL" and results["fast"].status == "FAIL"
    assert results["fast"].reason == "exactness failed in this run" and results["fast"].value == 3.0


def test_no_exactness_no_figure(tmp_path):
    root = toy.checkout(tmp_path, toy.gate("exact", "test_skips"), toy.figure("fast", ">=", 2))
    results, record = run(root)
    assert not results and "does not count" in record.not_run["fast"]


def test_a_figure_of_a_gpu_needs_exactness_on_the_gpu(tmp_path):
    root = toy.checkout(
        tmp_path, toy.gate("on-cpu"), toy.gate("on-gpu", needs=["gpu"]), toy.figure("fast", ">=", 2, needs=["gpu"])
    )
    on_cpu, on_gpu, fast = (toy.result(root, id) for id in ("on-cpu", "on-gpu", "fast"))
    not_run: dict[str, str] = {}
    assert gates.void_figures(toy.phase_of(root), [on_cpu, fast], not_run) == [on_cpu]
    assert "no exactness gate passed on the GPU" in not_run["fast"]
    assert gates.void_figures(toy.phase_of(root), [on_cpu, on_gpu, fast], {}) == [on_cpu, on_gpu, fast]


def test_engines_run_side_by_side(tmp_path):
    """Environments other than main: one beside another with two jobs, and all that they report arrives."""
    other = {f"env-{i}": sys.executable for i in range(3)}
    root = toy.checkout(tmp_path, *(toy.gate(f"{what}-{env}", f"test_{what}", env=env) for env in other
                                    for what in ("exact", "figure", "fails")))  # fmt: skip
    results, record = run(root, jobs=2, pythons=other)
    statuses = {"exact": "PASS", "figure": "PASS", "fails": "FAIL"}
    assert {id: r.status for id, r in results.items()} == {f"{w}-{e}": s for e in other for w, s in statuses.items()}
    assert set(record.environments) == {"main", *other}


@pytest.mark.parametrize("busy, measured", [(87.0, False), (3.0, True), (None, True)])
def test_nothing_is_timed_on_a_busy_gpu(tmp_path, monkeypatch, busy, measured):
    root = toy.checkout(
        tmp_path,
        toy.gate("exact", needs=["gpu"]),
        toy.figure("fast", ">=", 2, needs=["gpu"]),
        toy.figure("any", ">=", 2),
    )
    hardware, versions, _ = gates.records.hardware_and_versions()
    card = {"name": "toy card", "capability": "9.0", "sm_count": 1, "memory_bytes": 1}
    card = hardware.model_copy(update={"gpu": gates.records.Gpu(**card)})
    monkeypatch.setattr(gates.records, "hardware_and_versions", lambda *_: (card, versions, ""))
    monkeypatch.setattr(gates.records, "busy_percent", lambda *_: busy)
    results, record = run(root)
    assert set(results) == {"exact", "any"} | ({"fast"} if measured else set())
    if not measured:
        assert record.not_run["fast"] == "another program keeps the GPU 87 % busy; end it and run again"


def test_runs_take_turns_on_a_gpu(tmp_path, monkeypatch):
    """Exact gates of two runs stand side by side; what is timed waits for both, and both wait for it."""
    monkeypatch.setattr(gates, "TURN", tmp_path / "turn.lock")
    root = toy.checkout(tmp_path / "root", toy.gate("exact"))
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    one, other = (gates.Runner(root, toy.phase_of(root), console=quiet) for _ in range(2))
    order: list[str] = []

    def wanted(alone: bool) -> threading.Thread:
        def take():
            with other._turn(alone):
                order.append("other")

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(1)
        return thread

    with one._turn(alone=False):
        assert not wanted(alone=False).is_alive()
        waiting = wanted(alone=True)
        assert waiting.is_alive()
        order.append("one")
    waiting.join(10)
    with one._turn(alone=True):
        waiting = wanted(alone=False)
        assert waiting.is_alive()
        order.append("one")
    waiting.join(10)
    assert order == ["other", "one", "other", "one", "other"]


def test_only_brings_exactness_along(tmp_path):
    root = toy.checkout(tmp_path, toy.gate("exact"), toy.gate("static", kind="static"), toy.figure("fast", ">=", 2))
    assert set(run(root, ["fast"])[0]) == {"exact", "fast"}
    assert set(run(root, ["static"])[0]) == {"static"}
    with pytest.raises(PhaseError, match="--only is 'fats', no gate of toy"):
        run(root, ["fats"])


def test_one_command_for_many_gates(tmp_path):
    answer = {
        "metrics": {"ratio": 4.0},
        "samples": {"ours": {"values": [1, 2, 3], "warmups": 1, "unit": "us"}},
        "notes": ["rotated"],
        "seeds": {"order": 5},
        "gates": {
            "own": {"metrics": {"ratio": 1.5}},
            "unable": {"passed": None, "reason": "FlashInfer is not installed"},
            "denied": {"metrics": {"ratio": 9.0}, "passed": False, "reason": "clocks moved"},
            "yes": {"passed": True},
        },
    }
    root = toy.checkout(
        tmp_path,
        toy.gate("exact"),
        toy.figure("shared", ">=", 4, **command(answer)),
        toy.figure("own", ">=", 2, **command(answer)),
        toy.figure("unable", ">=", 2, **command(answer)),
        toy.figure("denied", ">=", 2, **command(answer)),
        toy.figure("other", ">=", 2, **command({"metrics": {"speed": 9}})),
        toy.gate("yes", **command(answer)),
        toy.gate("silent", **command({"gates": {}})),
    )
    # the exact "silent" fails, which voids every figure: judge the figures without it
    results, record = run(root, ["shared", "own", "unable", "denied", "other", "yes"])
    assert results["silent"].reason == "the command did not report this gate" and results["yes"].status == "PASS"
    toy.define(root, *[g for g in json_gates(root) if g["id"] != "silent"])
    (root / "calls.txt").unlink()
    results, record = run(root)
    assert {id: r.status for id, r in results.items()} == {
        "exact": "PASS", "yes": "PASS", "shared": "PASS", "own": "FAIL", "denied": "FAIL", "other": "FAIL",
    }  # fmt: skip
    assert record.not_run == {"unable": "FlashInfer is not installed"}
    assert results["denied"].reason == "clocks moved" and "was not reported" in results["other"].reason
    # once for the exact gate, once for the figures of the same command, once for the other command
    assert len((root / "calls.txt").read_text().split()) == 3
    assert record.runs[-2].samples["ours"].median == 2.0 and record.runs[-2].notes == ["rotated"]
    assert record.seeds == {"order": 5} and record.runs[0].command[0] == "{python}", "no path of this machine"


def json_gates(root):
    return [g.model_dump(mode="json", exclude_none=True) for g in toy.phase_of(root).gates]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"exit": 3}, "exit code 3"),
        ({"exit": 0}, "wrote no"),
        ([1, 2], "not as CONTRIBUTING.md says"),
        ({"samples": {"ours": {"values": []}}}, "not as CONTRIBUTING.md says"),
    ],
)
def test_a_command_that_breaks_fails_its_gates(tmp_path, answer, says):
    root = toy.checkout(tmp_path, toy.gate("exact"), toy.figure("fast", ">=", 2, **command(answer)))
    fast = run(root)[0]["fast"]
    assert fast.status == "FAIL" and says in fast.reason


def test_broken_test_files_fail(tmp_path):
    root = toy.checkout(tmp_path, toy.gate("exact"))
    (root / "phases" / "toy" / "test_toy.py").write_text("import nothing_like_this\ndef test_exact(): pass\n")
    assert run(root)[0]["exact"].status == "FAIL"
    (root / "phases" / "toy" / "test_toy.py").write_text("def test_exact(:\n")
    assert run(root)[0]["exact"].status == "FAIL"
    (root / "phases" / "toy" / "test_toy.py").write_text("import os\ndef test_exact(): os._exit(7)\n")
    failed = run(root)[0]["exact"]
    assert failed.status == "FAIL" and "exit code 7" in failed.reason


def test_a_hanging_test_fails(tmp_path):
    slow = toy.gate("slow", run={"test": "phases/toy/test_toy.py::test_slow", "timeout_s": 3})
    failed = run(toy.checkout(tmp_path, slow))[0]["slow"]
    assert failed.status == "FAIL" and "ran past its 3 s" in failed.reason


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_run_keeps_what_finished(tmp_path, jobs):
    root = toy.checkout(tmp_path, toy.gate("exact"), toy.gate("slow", "test_slow"))
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_verify_bench.cli", "gates", "run", "toy", "--root", str(root), "--jobs", jobs],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("PASS exact"):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, "".join(seen) + rest
    ((_, record),) = records.read_all(root / "results")
    assert record.interrupted and [(r.gate, r.status) for r in record.results] == [("exact", "PASS")]
    assert "PASS" in (root / "STATUS.md").read_text()


def test_the_command_line(tmp_path, capsys):
    later = toy.gate("later", "test_of_next_year")
    root = toy.checkout(tmp_path, toy.gate("exact"), toy.figure("fast", ">=", 2), later)
    here = ["gates", "run", "toy", "--root", str(root)]
    assert cli.main([*here, "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [r["status"] for r in told["results"]] == ["PASS", "PASS"] and told["not_run"] == {"later": "not built yet"}
    assert "not measured here: later (not built yet)" in captured.err
    assert "PASS 3 [1]" in (root / "STATUS.md").read_text()
    assert cli.main(["status", "--root", str(root), "--check"]) == 0
    assert cli.main([*here, "--strict"]) == 1, "a gate is NOT MEASURED"
    (root / "src" / "code.py").write_text("wrong = True\n")
    scratch = tmp_path / "scratch"
    before = (root / "STATUS.md").read_text()
    assert cli.main([*here, "--results", str(scratch)]) == 1
    assert (root / "STATUS.md").read_text() == before, "other results have their own STATUS.md"
    assert "FAIL" in (scratch / "STATUS.md").read_text()
    assert len(list((root / "results").glob("*/*.json"))) == 2


def test_a_log_has_the_whole_of_a_long_reason(tmp_path, capsys):
    root = toy.checkout(tmp_path, toy.gate("exact"))
    (root / "src" / "code.py").write_text(f"wrong = {'[x' * 150 + ']the cause'!r}\n")
    assert cli.main(["gates", "run", "toy", "--root", str(root)]) == 1
    assert "[x]the cause" in capsys.readouterr().err
    short = pytest_plugin.shortened("the engine ended" + 99 * "\nnoise" + " of a port", 60)
    assert short.startswith("the engine ended") and short.endswith("noise of a port") and len(short) == 60


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["gates", "run", "toys"], "phase is 'toys'; expected one of toy"),
        (["gates", "run", "toy", "--only", "x"], "--only is 'x'"),
        (["gates", "run", "toy", "--jobs", "0"], "--jobs is 0"),
        (["gates", "run", "toy", "--python", "main"], "--python is 'main'; expected ENV=PATH"),
        (["gates", "run", "toy", "--python", "main=/nowhere/python"], "can't be executed"),
    ],
)
def test_wrong_use(tmp_path, capsys, argv, says):
    root = toy.checkout(tmp_path, toy.gate("exact"))
    assert cli.main([*argv, "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, "one sentence"


def test_a_corrupt_record_stops_a_run_before_it_starts(tmp_path, capsys):
    root = toy.checkout(tmp_path, toy.gate("exact"))
    (root / "results" / "x").mkdir(parents=True)
    (root / "results" / "x" / "bad.json").write_text("{")
    assert cli.main(["gates", "run", "toy", "--root", str(root)]) == 2
    assert "bad.json" in capsys.readouterr().err


def test_interpreters(tmp_path):
    def found(env, given=None, environ=None):
        return gates.find_python(env, tmp_path, given or {}, environ or {})

    assert found("main") == (sys.executable, "")
    assert found("sglang-0.5.17", environ={"MLA_VERIFY_ENV_SGLANG_0_5_17": sys.executable}) == (sys.executable, "")
    other = {"sglang-0.5.17": sys.executable}
    assert found("sglang-0.5.17", other, {"MLA_VERIFY_ENV_SGLANG_0_5_17": "/nowhere"}) == (sys.executable, "")
    place = tmp_path / ".nox" / "sglang-0.5.17" / "bin"
    place.mkdir(parents=True)
    (place / "python").symlink_to(sys.executable)
    assert found("sglang-0.5.17") == (str(place / "python"), "")
    assert "not installed" in found("sglang-0.5.23")[1]


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (toy.gate("g", run={}), "either test or command"),
        (toy.gate("g", kind="ratio"), "needs a metric and a threshold"),
        (toy.gate("g", metric="ratio"), "metric and threshold go together"),
        (toy.gate("g", needs=["sm_90"]), "needs"),
        (toy.gate("g", needs=[]), "needs"),
        (toy.gate("g", status="PASS"), "Extra inputs"),
        (toy.figure("g", ">=", 1), "declares none"),
    ],
)
def test_a_wrong_phase_yaml_is_named(tmp_path, gate, says):
    root = toy.checkout(tmp_path, gate)
    with pytest.raises(PhaseError, match=says) as error:
        gates.load_phases(root)
    assert "phases/toy/phase.yaml" in str(error.value)


def test_a_record_goes_stale_by_itself(tmp_path):
    root = toy.checkout(tmp_path, toy.gate("exact"))
    assert cli.main(["gates", "run", "toy", "--root", str(root)]) == 0
    assert cli.main(["status", "--root", str(root), "--strict"]) == 0
    (root / "src" / "code.py").write_text("right = True  # one more comment\n")
    assert cli.main(["status", "--root", str(root), "--strict"]) == 1
    (found,), _ = status.compute(root, root / "results")
    assert found.cells["exact"]["any"].state == "STALE"
