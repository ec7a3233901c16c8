"""pytest plugin of the gates: the ``gate_metrics`` fixture, and a JSON line per event for the gate runner.

The runner starts ``python -m mla_verify_bench.pytest_plugin REPORT NODE…`` and reads REPORT, never pytest's text.
A line is written as soon as a test ends, so an interrupted run keeps what it has finished. In an ordinary pytest
run the fixture works and nothing is written.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

_REASON_LIMIT = 2000
_KEY = "gate_metrics"


def shortened(reason: str, limit: int = _REASON_LIMIT) -> str:
    """The beginning and, of what is too long, the end: a test that quotes a log ends with what the log ends with."""
    if len(reason) <= limit:
        return reason
    kept = limit - 3
    return f"{reason[: kept // 3]} … {reason[-(kept - kept // 3) :]}"


class GateMetrics(dict[str, float]):
    """Figures of one test: ``gate_metrics["ratio"] = 123.4``; the runner compares them with the gate's threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.all_samples: dict[str, dict[str, Any]] = {}
        self.all_ratios: dict[str, dict[str, Any]] = {}

    def samples(self, name: str, values: Sequence[float], *, warmups: int = 0, unit: str = "us") -> None:
        """Keep raw samples in the order they were taken."""
        self.all_samples[name] = {"values": [float(v) for v in values], "warmups": warmups, "unit": unit}

    def ratio(self, peer: str, ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Any:
        """Keep and return how many times faster ours is than ``peer``: records.ratio_of_medians."""
        from .records import ratio_of_medians

        found = ratio_of_medians(ours, theirs, peer=peer, seed=seed)
        self.all_ratios[peer] = found.model_dump()
        return found


@pytest.fixture
def gate_metrics(request: pytest.FixtureRequest) -> Iterator[GateMetrics]:
    """A dict for the figures of this test; they go into the record of the gate that the test serves."""
    metrics = GateMetrics()
    yield metrics
    # plain dicts: with pytest-xdist a report comes from another process
    told = {"metrics": dict(metrics), "samples": metrics.all_samples, "ratios": metrics.all_ratios}
    request.node.user_properties.append((_KEY, told))


class Reporter:
    """Appends one JSON line per event to a file."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        self._open: dict[str, dict[str, Any]] = {}

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("collect-error", node=report.nodeid, reason=str(report.longrepr)[-_REASON_LIMIT:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", nodes=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._write("collected", nodes=[_plain(node) for node in ids])  # each worker collects the same

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._open[nodeid] = {"outcome": "passed", "reason": "", "seconds": 0.0}
        self._write("start", node=_plain(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._open[report.nodeid]
        test["seconds"] += report.duration
        if hasattr(report, "wasxfail"):
            test.update(outcome="failed", reason=f"marked xfail, which a gate can't be: {report.wasxfail}")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = f"{report.when}: {crash.message if crash else report.longrepr}"
            test.update(outcome="failed", reason=shortened(reason))
        elif report.skipped and test["outcome"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            test.update(outcome="skipped", reason=shortened(reason))
        for key, told in report.user_properties:
            if key == _KEY:
                test.update(told)
        if report.when == "teardown":
            self._write("end", node=_plain(report.nodeid), **self._open.pop(report.nodeid))


def _plain(node: str) -> str:
    """Without the group that pytest-xdist appends to the tests that share a worker."""
    return re.sub(r"@[\w-]+$", "", node)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate-report", metavar="PATH", help="append a JSON line per finished test (mla-verify gates)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests that share a worker of pytest-xdist")
    path = config.getoption("--gate-report")
    if path and not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to the process that started it
        config.pluginmanager.register(Reporter(path), "mla_verify_gate_reporter")


def main(argv: list[str]) -> int:
    """Run pytest on nodes (and options), with this plugin whether or not mla-verify is installed here."""
    report, *nodes = argv
    installed = importlib.metadata.entry_points(group="pytest11", name="mla_verify_gates")
    plugin = [] if installed else ["-p", "mla_verify_bench.pytest_plugin"]
    return int(pytest.main([*plugin, "-p", "no:cacheprovider", f"--gate-report={report}", *nodes]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
