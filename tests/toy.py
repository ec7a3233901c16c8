"""A checkout of one toy phase in a temporary folder, for the tests of gates, records and status."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from mla_verify_bench import records
from mla_verify_bench.gates import Phase, load_phases

TESTS = """
import os, time
import pytest

def test_exact():
    assert "wrong" not in open("src/code.py").read()

def test_fails():
    assert 1 + 1 == 3, "arithmetic"

def test_skips():
    pytest.skip("no such device")

@pytest.mark.xfail(reason="known")
def test_xfails():
    assert False

@pytest.mark.xdist_group("figures")
@pytest.mark.parametrize("n", [3, 5, 4])
def test_figure(n, gate_metrics):
    gate_metrics["ratio"] = n
    gate_metrics.samples("ours", [1.0, 2.0, n], warmups=2, unit="ms")

def test_no_figure():
    pass

def test_nan(gate_metrics):
    gate_metrics["ratio"] = float("nan")

@pytest.mark.parametrize("n", [1, 2])
def test_partly_skipped(n):
    if n == 2:
        pytest.skip("half of it")

def test_environ():
    assert os.environ["TOY"] == "1"

def test_slow():
    time.sleep(60)
"""
COMMAND = """
import json, os, sys
answer = json.loads(sys.argv[1])
if "exit" in answer:
    sys.exit(answer["exit"])
with open("calls.txt", "a") as calls:
    calls.write("called\\n")
json.dump(answer, open(os.environ["MLA_VERIFY_GATE_OUT"], "w"))
"""


def gate(id: str, test: str = "test_exact", **fields: Any) -> dict[str, Any]:
    """A gate of phases/toy/test_toy.py, exact unless told otherwise."""
    run = fields.pop("run", {"test": f"phases/toy/test_toy.py::{test}"})
    return {"id": id, "sentence": f"{id} holds", "kind": "exact", "run": run, **fields}


def figure(id: str, op: str, value: float, test: str = "test_figure", **fields: Any) -> dict[str, Any]:
    """A ratio gate on the metric ``ratio``."""
    return gate(id, test, kind="ratio", metric="ratio", threshold={"op": op, "value": value}, **fields)


def checkout(folder: Path, *gates: dict[str, Any]) -> Path:
    """Write the toy checkout and return its root."""
    (folder / "phases" / "toy").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "__pycache__").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "code.py").write_text("right = True\n")
    (folder / "phases" / "toy" / "test_toy.py").write_text(textwrap.dedent(TESTS))
    (folder / "phases" / "toy" / "command.py").write_text(COMMAND)
    define(folder, *gates)
    return folder


def define(root: Path, *gates: dict[str, Any]) -> None:
    """Write the toy's phase.yaml."""
    phase = {"id": "toy", "title": "a toy", "covers": ["src/**"], "gates": list(gates)}
    (root / "phases" / "toy" / "phase.yaml").write_text(yaml.safe_dump(phase, sort_keys=False))


def phase_of(root: Path) -> Phase:
    return load_phases(root)[0]


def hardware(capability: str | None = None) -> records.Hardware:
    """A CPU, or a GPU of this capability."""
    cpu = records.Cpu(model="Toy CPU", cores=2, memory_bytes=1 << 30, architecture="x86_64")
    gpu = capability and records.Gpu(
        name=f"Toy GPU {capability}", capability=capability, sm_count=188, memory_bytes=96 << 30
    )
    return records.Hardware(cpu=cpu, gpu=gpu or None, system="Linux")


def record(
    root: Path,
    results: list[records.GateResult],
    *,
    capability: str | None = None,
    utc: str = "2026-01-01T00:00:00Z",
) -> records.Record:
    """A record of the toy phase as it stands in ``root``."""
    return records.Record(
        phase="toy",
        utc=utc,
        wall_s=1.0,
        command=["mla-verify", "gates", "run", "toy"],
        hardware=hardware(capability),
        environments={"main": {"python": "3.11"}},
        results=results,
        files=records.covered_files(root, ["src/**"]),
    )


def result(root: Path, id: str, status: str = "PASS", **fields: Any) -> records.GateResult:
    """A result of the gate as it is defined now, over the files as they are now."""
    phase = phase_of(root)
    defined = next(g for g in phase.gates if g.id == id)
    covered = records.digest(records.covered_files(root, phase.covers_of(defined)))
    return records.GateResult(
        gate=id, kind=defined.kind, status=status, gate_digest=defined.digest(), covers_digest=covered, **fields
    )
