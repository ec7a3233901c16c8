"""The command line: quick, and clear about what it can't do."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from mla_verify_bench import cli


def seconds(*argv: str, tries: int = 5) -> float:
    """The best of a few runs: what the command takes, not what else the machine does."""
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        subprocess.run([sys.executable, *argv], check=True, capture_output=True, timeout=60)
        best = min(best, time.perf_counter() - started)
    return best


def test_help_is_fast(gate_metrics):
    gate_metrics["seconds"] = seconds("-m", "mla_verify_bench.cli", "--help")
    assert gate_metrics["seconds"] < 0.5


def test_import_is_fast(gate_metrics):
    """What importing mla_verify takes once torch is there."""
    program = "import torch, time; t = time.perf_counter(); import mla_verify; print(time.perf_counter() - t)"
    told = [subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(3)]
    gate_metrics["seconds"] = min(map(float, told))
    assert gate_metrics["seconds"] < 2


def test_help_loads_nothing_heavy():
    program = (
        "import sys, mla_verify_bench.cli as cli; cli.main([]);"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'rich', 'yaml', 'httpx', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in cli.COMMANDS:
        assert command.name in done.stdout


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    assert stopped.value.code == 0 and f"mla-verify {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["speed"], ["gates"], ["gates", "walk"], ["bench"]])
def test_an_unknown_command_is_one_sentence(argv, capsys):
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and repr(" ".join(argv)) in error and "doctor" in error


def test_a_missing_part_does_not_break_the_rest(monkeypatch, capsys):
    absent = cli.Command("bench absent", "is not there", cli._elsewhere("absent.cli", "add_arguments"), lambda _: 0)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, absent))
    assert cli.main([]) == 0 and "bench absent" in capsys.readouterr().out
    capsys.readouterr()
    assert cli.main(["bench", "absent"]) == 2
    assert "can't load" in capsys.readouterr().err


def test_outside_a_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mla_verify_bench.gates.__file__", str(tmp_path / "a" / "b" / "c" / "gates.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["status"]) == 2
    assert "run this inside a checkout or pass --root" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("mla-verify ")


def test_doctor(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["self_test"]["ok"] and told["chosen"] in told["implementations"]
    assert told["implementations"][told["chosen"]] == "" and "any" in told["classes"]
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "self-test" in shown and "SGLang" in shown


def test_doctor_notices_a_wrong_kernel(monkeypatch, capsys):
    import mla_verify

    right = mla_verify.verify

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return out * 1.01, lse

    monkeypatch.setattr(mla_verify, "verify", wrong)
    assert cli.main(["doctor", "--json"]) == 1
    assert "WRONG" in json.loads(capsys.readouterr().out)["self_test"]["sentence"]


@pytest.mark.parametrize(
    ("version", "in_range"),
    [
        ("0.5.17", True),
        ("0.5.23", True),
        ("0.5.20.post1", True),
        ("0.5.16", False),
        ("0.5.24", False),
        ("0.6.0", False),
        ("", False),
    ],  # fmt: skip
)
def test_sglang_range(version, in_range):
    from mla_verify_bench.doctor import _sglang

    assert _sglang(version)["in_range"] is in_range
