"""STATUS.md: what is measured, what went stale, and a text that only the checkout and its records decide."""

from __future__ import annotations

import json

import pytest
import toy
from mla_verify_bench import cli, records, status

GATES = (
    toy.gate("exact"),
    toy.figure("fast", ">=", 2, needs=["gpu", "sm_120"], unit="×"),
    toy.gate("later", "test_of_next_year"),
)


@pytest.fixture
def root(tmp_path):
    return toy.checkout(tmp_path / "checkout", *GATES)


def states(root):
    (found,), _ = status.compute(root, root / "results")
    return {gate: {kind: cell.state for kind, cell in row.items()} for gate, row in found.cells.items()}


def text(root):
    return status.render(*status.compute(root, root / "results"))


def add(root, *results, **fields):
    return records.write(toy.record(root, list(results), **fields), root / "results")


def test_nothing_measured(root):
    nothing = {"exact": {"any": "NOT MEASURED"}, "fast": {"gpu": "NOT MEASURED", "sm_120": "NOT MEASURED"}}
    assert states(root) == {**nothing, "later": {"any": "NOT MEASURED"}}
    assert "NOT MEASURED (not built yet)" in text(root)
    assert "sm_120 has not been measured" in text(root) and "`nox -s toy` is all" in text(root)


def test_classes(root):
    add(root, toy.result(root, "exact"), toy.result(root, "fast", value=3.0), capability="9.0")
    assert states(root)["exact"] == {"any": "PASS", "gpu": "PASS"}
    assert states(root)["fast"] == {"gpu": "PASS", "sm_120": "NOT MEASURED"}
    assert "sm_120 has not been measured" in text(root)
    add(root, toy.result(root, "fast", value=2.5), capability="12.0", utc="2026-02-01T00:00:00Z")
    assert states(root)["fast"] == {"gpu": "PASS", "sm_120": "PASS"}, "an sm_120 record is a GPU record too"
    assert "Measured on sm_120: Toy GPU 12.0." in text(root)
    assert "PASS 2.5 × [2]" in text(root) and "[2] results/toy-gpu-12-0/20260201T000000Z-toy.json" in text(root)


def test_a_cpu_record_says_nothing_of_a_gpu(root):
    add(root, toy.result(root, "fast", value=3.0))
    assert states(root)["fast"] == {"gpu": "NOT MEASURED", "sm_120": "NOT MEASURED"}


def test_a_changed_file_makes_it_stale(root):
    add(root, toy.result(root, "exact"))
    (root / "src" / "code.py").write_text("right = 'perhaps'\n")
    assert states(root)["exact"]["any"] == "STALE" and "STALE [1] (code.py changed)" in text(root)
    (root / "src" / "code.py").write_text("right = True\n")
    assert states(root)["exact"]["any"] == "PASS", "the same files again are the files that were measured"
    (root / "src" / "new.py").write_text("")
    assert states(root)["exact"]["any"] == "STALE"


@pytest.mark.parametrize(
    "change", [{"sentence": "another promise"}, {"run": {"test": "phases/toy/test_toy.py::test_no_figure"}}]
)
def test_a_changed_gate_is_stale(root, change):
    add(root, toy.result(root, "exact"))
    toy.define(root, {**toy.gate("exact"), **change})
    assert states(root)["exact"]["any"] == "STALE" and "gate changed" in text(root)


def test_a_changed_threshold_is_stale(root):
    add(root, toy.result(root, "fast", value=3.0), capability="12.0")
    toy.define(root, toy.gate("exact"), toy.figure("fast", ">=", 2.9, needs=["gpu", "sm_120"], unit="×"))
    assert states(root)["fast"] == {"gpu": "STALE", "sm_120": "STALE"}


@pytest.mark.parametrize("edit", [{"status": "PASS"}, {"value": 300.0}, {"reason": ""}])
def test_an_edited_record_is_stale(root, edit):
    path = add(root, toy.result(root, "exact", "FAIL", reason="wrong", value=1.0))
    assert states(root)["exact"]["any"] == "FAIL"
    content = json.loads(path.read_text())
    content["results"][0].update(edit)
    path.write_text(json.dumps(content))
    assert states(root)["exact"]["any"] == "STALE" and "record edited after its run" in text(root)


def test_newest_valid_counts(root):
    add(root, toy.result(root, "exact"), utc="2026-01-01T00:00:00Z")
    add(root, toy.result(root, "exact", "FAIL", reason="broke"), utc="2026-01-02T00:00:00Z")
    assert states(root)["exact"]["any"] == "FAIL" and "(broke)" in text(root)
    (root / "src" / "code.py").write_text("right = 1\n")
    add(root, toy.result(root, "exact"), utc="2026-01-01T12:00:00Z")
    assert states(root)["exact"]["any"] == "PASS", "older, but of these files"
    add(root, toy.result(root, "fast", value=4.0), capability="9.0", utc="2026-01-03T00:00:00Z")
    assert states(root)["exact"]["any"] == "PASS", "a partial run does not hide what it did not measure"


def test_a_fail_counts_on_hardware_not_asked_for(root):
    add(root, toy.result(root, "exact"), utc="2026-01-02T00:00:00Z")
    add(root, toy.result(root, "exact", "FAIL"), capability="12.0", utc="2026-01-01T00:00:00Z")
    assert states(root)["exact"] == {"any": "PASS", "gpu": "FAIL", "sm_120": "FAIL"}
    (found,), _ = status.compute(root, root / "results")
    assert found.count("FAIL") == 2 and not found.complete


def test_complete(root):
    toy.define(root, toy.gate("exact"))
    assert "| toy: a toy | no |" in text(root)
    add(root, toy.result(root, "exact"))
    assert "| toy: a toy | yes | 1 | 0 | 0 | 0 |" in text(root) and "Complete: 1 of 1 pass." in text(root)


def test_the_text_is_deterministic(root, tmp_path):
    for day, capability in ((3, None), (1, "9.0"), (2, "12.0")):
        add(root, toy.result(root, "exact"), capability=capability, utc=f"2026-01-0{day}T00:00:00Z")
    elsewhere = toy.checkout(tmp_path / "another place", *GATES)
    for path in sorted((root / "results").glob("*/*.json"), reverse=True):
        copy = elsewhere / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert text(root) == text(root) == text(elsewhere)
    assert str(tmp_path) not in text(root)


def test_check(root, capsys):
    here = ["--root", str(root)]
    assert cli.main(["status", *here, "--check"]) == 1, "no STATUS.md is not the right STATUS.md"
    assert cli.main(["status", *here]) == 0
    written = (root / "STATUS.md").read_text()
    assert cli.main(["status", *here, "--check"]) == 0
    (root / "STATUS.md").write_text(written.replace("NOT MEASURED", "PASS"))
    capsys.readouterr()
    assert cli.main(["status", *here, "--check"]) == 1
    assert "+| **exact**: exact holds | passes | NOT MEASURED" in capsys.readouterr().out
    assert cli.main(["status", *here]) == 0
    add(root, toy.result(root, "exact"))
    assert cli.main(["status", *here, "--check"]) == 1, "a new record changes the text"


def test_strict(root):
    here = ["status", "--root", str(root), "--strict"]
    toy.define(root, toy.gate("exact"))
    assert cli.main(here) == 1, "NOT MEASURED"
    add(root, toy.result(root, "exact"))
    assert cli.main(here) == 0
    (root / "src" / "code.py").write_text("right = 2\n")
    assert cli.main(here) == 1, "STALE"
    add(root, toy.result(root, "exact", "FAIL"), utc="2026-03-01T00:00:00Z")
    assert cli.main(here) == 1, "FAIL"


def test_a_corrupt_record_stops_it(root, capsys):
    bad = add(root, toy.result(root, "exact"))
    bad.write_text(bad.read_text()[:-40])
    assert cli.main(["status", "--root", str(root)]) == 2
    assert str(bad) in capsys.readouterr().err and not (root / "STATUS.md").exists()


def test_summary_and_json(root, capsys):
    add(root, toy.result(root, "exact"))
    assert cli.main(["status", "--root", str(root), "--summary"]) == 0
    assert capsys.readouterr().out == "toy: 1 passed, 0 failed, 0 stale, 3 not measured\n"
    assert cli.main(["status", "--root", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["toy"]
    assert told["pass"] == 1 and told["gates"]["exact"]["any"]["state"] == "PASS"
    assert not (root / "STATUS.md").exists()


def test_the_projects_own_phases():
    """Every phase.yaml here is valid, and each gate that a phase stands on is declared once."""
    from mla_verify_bench.gates import find_root, load_phases

    phases = load_phases(find_root())
    assert [phase.id for phase in phases] == ["phase1", "phase2", "phase3", "phase4"]
    wanted = {
        "triton-vs-sglang-16k": (">=", 20), "triton-vs-sglang-185k": (">=", 100), "cuda-vs-sglang-185k": (">=", 150),
        "gpu-step-185k": (">=", 50), "ddtree-step-batch-1": ("<=", 150), "whole-pool": ("<=", 1),
        "headline-185k": (">=", 30),
    }  # fmt: skip
    found = {gate.id: gate.threshold for phase in phases for gate in phase.gates if gate.id in wanted}
    assert {id: (t.op, t.value) for id, t in found.items()} == wanted, "a threshold of the backlog was changed"
