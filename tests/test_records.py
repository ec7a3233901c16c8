"""Records: append-only, whole or absent, readable, and never skipped when they are not."""

from __future__ import annotations

import json
import random

import pytest
import toy
from mla_verify_bench import machine, records


@pytest.fixture
def root(tmp_path):
    return toy.checkout(tmp_path / "checkout", toy.gate("exact"))


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def a_record(root, **fields):
    return toy.record(root, [toy.result(root, "exact")], **fields)


def test_round_trip(root, results):
    samples = records.Samples.of([3.0, 1.0, 2.5e-7], warmups=4, unit="ms")
    written = a_record(root)
    written.results[0].samples["ours"] = samples
    written.results[0].reason = "shape [1,576] and [2,  3] stay as they are"
    path = records.write(written, results)
    assert path == results / "cpu-toy-cpu" / "20260101T000000Z-toy.json"
    read = records.read(path)
    assert read == written and read.seal == read.sealed()
    assert '"values": [3.0, 1.0, 2.5e-07]' in path.read_text(), "samples in order, on one line"
    assert not list(path.parent.glob(".*")), "a temporary file was left behind"


def test_append_only(root, results):
    first = records.write(a_record(root), results)
    content = first.read_bytes()
    others = {records.write(a_record(root), results).name for _ in range(2)}
    assert others == {"20260101T000000Z-toy-2.json", "20260101T000000Z-toy-3.json"}
    assert first.read_bytes() == content


def test_append_only_without_hard_links(root, results, monkeypatch):
    def refuse(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(records.os, "link", refuse)
    first = records.write(a_record(root), results)
    content = first.read_bytes()
    assert records.write(a_record(root), results) != first
    assert first.read_bytes() == content


def test_a_failed_write_leaves_nothing(root, results, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(records.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        records.write(a_record(root), results)
    assert not list(results.glob("*/*.json")), "half a record was left where records are read"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not readable JSON"),
        ('{"schema_version": 1, "pha', "not readable JSON"),
        ("[]", "schema version None"),
        ('{"schema_version": 2}', "schema version 2, but this checkout reads 1"),
        ('{"schema_version": 1}', "phase: Field required"),
        ('{"schema_version": 1, "wall_s": NaN}', "NaN is not a figure"),
    ],
)
def test_a_bad_record_is_named(root, results, content, says):
    records.write(a_record(root), results)
    bad = results / "cpu-toy-cpu" / "20250101T000000Z-toy.json"
    bad.write_text(content)
    with pytest.raises(records.RecordError, match=says) as error:
        records.read_all(results)
    assert str(bad) in str(error.value)


def test_an_unknown_field_is_an_error(root, results):
    path = records.write(a_record(root), results)
    content = json.loads(path.read_text())
    content["surprise"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(records.RecordError, match="surprise"):
        records.read(path)


def test_oldest_first_whatever_the_machine(root, results):
    for month, capability in (("03", None), ("01", "9.0"), ("02", None)):
        records.write(a_record(root, utc=f"2026-{month}-01T00:00:00Z", capability=capability), results)
    assert [r.utc[5:7] for _, r in records.read_all(results)] == ["01", "02", "03"]


def test_digest_of_covered_files(root):
    before = records.digest(records.covered_files(root, ["src/**"]))
    code = root / "src" / "code.py"
    (root / "src" / "__pycache__" / "code.pyc").write_bytes(b"cache")
    (root / "src" / ".swap").write_text("an editor's")
    code.write_bytes(code.read_bytes().replace(b"\n", b"\r\n"))
    assert records.digest(records.covered_files(root, ["src/**", "src/*.py"])) == before
    code.write_text("right = False\n")
    assert records.digest(records.covered_files(root, ["src/**"])) != before
    code.write_text("right = True\n")
    assert records.digest(records.covered_files(root, ["src/**"])) == before
    code.rename(root / "src" / "other.py")
    assert records.digest(records.covered_files(root, ["src/**"])) != before, "a path counts, not the content alone"


def test_ratio_of_medians():
    random_ = random.Random(7)
    ours = [random_.gauss(10, 1) for _ in range(60)]
    theirs = [random_.gauss(200, 10) for _ in range(60)]
    found = records.ratio_of_medians(ours, theirs, peer="sglang", seed=3)
    assert found == records.ratio_of_medians(ours, theirs, peer="sglang", seed=3), "a seed gives the same interval"
    assert found.low < found.ratio < found.high and found.low < 20 < found.high
    assert 0.7 * found.ratio < found.low, "the interval of 60 quiet samples is narrow"
    exact = records.ratio_of_medians([2.0], [3.0], peer="p")
    assert (exact.low, exact.ratio, exact.high) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize("bad", [[], [0.0], [float("nan")], [-1.0, 2.0]])
def test_ratio_refuses(bad):
    with pytest.raises(ValueError, match="ours has"):
        records.ratio_of_medians(bad, [1.0], peer="p")
    with pytest.raises(ValueError, match="theirs has"):
        records.ratio_of_medians([1.0], bad, peer="p")


@pytest.mark.parametrize(
    ("capability", "classes"),
    [
        (None, ["any"]),
        ("9.0", ["any", "gpu"]),
        ("10.0", ["any", "gpu"]),
        ("12.0", ["any", "gpu", "sm_120"]),
        ("12.1", ["any", "gpu", "sm_120"]),
    ],
)
def test_hardware_classes(capability, classes):
    assert toy.hardware(capability).classes == classes


def test_this_machine():
    hardware, versions, why_not = records.hardware_and_versions()
    assert (hardware.gpu is None) == bool(why_not)
    assert versions["torch"] and versions["python"] and set(machine.LIBRARIES) <= set(versions)
    assert machine.slug("NVIDIA RTX PRO 6000 (Max-Q)") == "nvidia-rtx-pro-6000-max-q"
