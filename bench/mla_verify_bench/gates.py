"""Phases and their gates (phases/*/phase.yaml), and the runner that measures them and writes a record.

A gate's test or command only reports figures; the runner compares them with the threshold. Exactness comes first:
a ratio or bound counts only beside passed exactness gates of the same run.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import itertools
import json
import operator
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.markup import escape

from . import records
from .records import CommandRun, GateResult, Ratio, Record, Samples

HardwareClass = Literal["any", "gpu", "sm_120"]
CLASSES: tuple[HardwareClass, ...] = ("any", "gpu", "sm_120")
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
NOT_BUILT = "not built yet"
VOID = "exactness failed in this run"
BUSY_PERCENT = 10.0  # of a GPU that others use so much, times say nothing
TURN = Path(
    tempfile.gettempdir(), f"mla-verify-gates-{os.getuid()}.lock"
)  # what a user's runs on one machine take turns by


class PhaseError(ValueError):
    """A phase.yaml that cannot be used, or a phase or gate that does not exist; the message says which."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Threshold(_Model):
    op: Literal[">=", "<=", ">", "<", "=="]
    value: float

    def holds(self, figure: float) -> bool:
        return _OPERATORS[self.op](figure, self.value)


class Run(_Model):
    """What measures a gate: a pytest node, or a command that writes JSON to $MLA_VERIFY_GATE_OUT."""

    test: str | None = None
    command: list[str] | None = None
    environ: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the process, e.g. TRITON_INTERPRET."""
    timeout_s: int = 1800

    @model_validator(mode="after")
    def _one(self) -> Run:
        if (self.test is None) == (self.command is None):
            raise ValueError("run needs either test or command, not both and not neither")
        return self


class Gate(_Model):
    """One promise: what is to be shown, how it is measured, and on which hardware it must hold."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    sentence: str
    kind: Literal["exact", "static", "ratio", "bound"]
    run: Run
    env: str = "main"
    metric: str | None = None
    threshold: Threshold | None = None
    unit: str = ""
    aim: float | None = None
    """What we hope for beyond what is required; shown, never compared."""
    needs: list[HardwareClass] = Field(default=["any"], min_length=1)
    covers: list[str] | None = None
    """Globs of the files this gate vouches for, where they are not the phase's."""

    @model_validator(mode="after")
    def _complete(self) -> Gate:
        if (self.metric is None) != (self.threshold is None):
            raise ValueError(f"gate {self.id}: metric and threshold go together")
        if self.kind in ("ratio", "bound") and self.metric is None:
            raise ValueError(f"gate {self.id}: a {self.kind} gate needs a metric and a threshold")
        return self

    def digest(self) -> str:
        """sha256 of the canonical JSON of this definition."""
        return records.digest(self.model_dump(mode="json"))

    @property
    def required(self) -> str:
        """The threshold as a person reads it."""
        if self.threshold is None:
            return "passes"
        sign = {">=": "≥ ", "<=": "≤ ", "==": "= "}.get(self.threshold.op, self.threshold.op + " ")
        aim = f" (aim {self.aim:g})" if self.aim is not None else ""
        return f"{sign}{self.threshold.value:g}{' ' + self.unit if self.unit else ''}{aim}"


class Phase(_Model):
    id: str = Field(pattern=r"^[a-z0-9]+$")
    title: str
    depends_on: list[str] = Field(default_factory=list)
    covers: list[str]
    gates: list[Gate]

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        ids = [gate.id for gate in self.gates]
        if twice := {i for i in ids if ids.count(i) > 1}:
            raise ValueError(f"gate ids appear twice: {', '.join(sorted(twice))}")
        if any(g.kind in ("ratio", "bound") for g in self.gates) and not any(g.kind == "exact" for g in self.gates):
            raise ValueError("ratio and bound gates count only beside an exact gate, and this phase declares none")
        return self

    def covers_of(self, gate: Gate) -> list[str]:
        return gate.covers if gate.covers is not None else self.covers


def find_root(start: Path | None = None) -> Path:
    """The checkout: the nearest folder at or above ``start`` (default: here) that holds phases/."""
    start = (start or Path.cwd()).resolve()
    installed = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents, installed):
        if list(folder.glob("phases/*/phase.yaml")):
            return folder
    raise PhaseError(f"no phases/*/phase.yaml at or above {start}; run this inside a checkout or pass --root")


def load_phases(root: Path) -> list[Phase]:
    """All phases of a checkout in the order of their folders' names."""
    phases = []
    for path in sorted(root.glob("phases/*/phase.yaml")):
        try:
            phase = Phase.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            raise PhaseError(f"{path} is not YAML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise PhaseError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        phases.append(phase)
    known = [phase.id for phase in phases]
    if twice := {i for i in known if known.count(i) > 1}:
        raise PhaseError(f"two phase.yaml have the id {', '.join(sorted(twice))}")
    for phase in phases:
        if missing := [i for i in phase.depends_on if i not in known]:
            raise PhaseError(f"phase {phase.id} depends on {missing[0]}, which does not exist")
    return phases


def find_phase(phases: Sequence[Phase], wanted: str) -> Phase:
    for phase in phases:
        if wanted == phase.id:
            return phase
    raise PhaseError(f"phase is {wanted!r}; expected one of {', '.join(phase.id for phase in phases)}")


def why_not_built(root: Path, gate: Gate) -> str:
    """ "" if what measures this gate is in the checkout, else NOT_BUILT. A function of the files alone."""
    if gate.run.test:
        file, *names = gate.run.test.split("::")
        path = root / file
        built = path.is_file() and (not names or names[-1].split("[")[0] in _names_in(path))
    else:
        built = all((root / part).is_file() for part in gate.run.command or [] if part.endswith(".py"))
    return "" if built else NOT_BUILT


def _names_in(path: Path) -> set[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:  # pytest will say it better, and the gate fails
        return _Everything()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


class _Everything(set):
    def __contains__(self, item: object) -> bool:
        return True


def find_python(env: str, root: Path, given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Interpreter of an environment as (path, ""), or ("", why there is none).

    Order: --python ENV=PATH, $MLA_VERIFY_ENV_<ENV>, for main this interpreter, for sglang this interpreter if it has
    SGLang, else .nox/<env>.
    """
    variable = "MLA_VERIFY_ENV_" + re.sub(r"[^A-Z0-9]", "_", env.upper())
    for source, path in ((f"--python {env}=", given.get(env)), (f"${variable}", environ.get(variable))):
        if path:
            return (path, "") if os.access(path, os.X_OK) else ("", f"{source} names {path}, which can't be executed")
    if env == "main":
        return sys.executable, ""
    if env == "sglang":
        import importlib.util

        if importlib.util.find_spec("sglang") is not None:
            return sys.executable, ""
        return find_python("sglang-0.5.17", root, given, environ)
    place = root / ".nox" / env / "bin" / "python"
    return (str(place), "") if place.exists() else ("", f"environment {env} is not installed")


@dataclass
class Outcome:
    """What a test or command reported for one gate, before it is judged. passed=None: it could not be measured."""

    passed: bool | None
    reason: str = ""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> one figure per parametrised case; the worst is compared."""
    samples: dict[str, Samples] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    seconds: float = 0.0


def judge(gate: Gate, outcome: Outcome, covers_digest: str) -> GateResult | str:
    """PASS or FAIL by what was reported and the gate's threshold; a string says why the gate was not measured."""
    if outcome.passed is None:
        return outcome.reason or "its test could not measure it"
    worst: dict[str, float] = {}
    low_is_bad = gate.threshold is not None and gate.threshold.op in (">=", ">")
    for name, figures in outcome.metrics.items():
        finite = [records.finite(figure) for figure in figures]
        if finite and None not in finite:
            worst[name] = (min if low_is_bad else max)(f for f in finite if f is not None)
    value, reason = None, outcome.reason
    passed = outcome.passed
    if gate.metric is not None and gate.threshold is not None:
        value = worst.get(gate.metric)
        if passed and value is None:
            said = "is not a finite number" if gate.metric in outcome.metrics else "was not reported"
            passed, reason = False, f"metric {gate.metric} {said}"
        elif passed and value is not None and not gate.threshold.holds(value):
            passed, reason = False, f"{gate.metric} is {value:.6g}, required {gate.required}"
    return GateResult(
        gate=gate.id,
        kind=gate.kind,
        status="PASS" if passed else "FAIL",
        reason="" if passed else (reason or "failed"),
        value=value,
        metrics=worst,
        samples=outcome.samples,
        ratios=outcome.ratios,
        seconds=round(outcome.seconds, 3),
        env=gate.env,
        gate_digest=gate.digest(),
        covers_digest=covers_digest,
    )


def void_figures(phase: Phase, results: list[GateResult], not_run: dict[str, str]) -> list[GateResult]:
    """Apply the rule that a ratio or bound counts only beside exactness of the same run.

    An exact FAIL turns each of them into a FAIL; with no exact PASS on the hardware that the figure needs, where the
    phase declares such a gate, the figure is not a measurement at all and goes to ``not_run``.
    """
    gates = {gate.id: gate for gate in phase.gates}
    exact_failed = any(r.kind == "exact" and r.status == "FAIL" for r in results)
    passed = [gates[r.gate] for r in results if r.kind == "exact" and r.status == "PASS"]
    declared = [gate for gate in phase.gates if gate.kind == "exact"]

    def on_gpu(gate: Gate) -> bool:
        return "any" not in gate.needs

    gpu_exact_declared, gpu_exact_passed = any(map(on_gpu, declared)), any(map(on_gpu, passed))
    kept = []
    for result in results:
        if result.kind in ("exact", "static"):
            kept.append(result)
        elif exact_failed:
            reason = VOID + (f"; besides, {result.reason}" if result.reason else "")
            kept.append(result.model_copy(update={"status": "FAIL", "reason": reason}))
        elif on_gpu(gates[result.gate]) and gpu_exact_declared and not gpu_exact_passed:
            not_run[result.gate] = "no exactness gate passed on the GPU in this run, so its figure does not count"
        elif not passed:
            not_run[result.gate] = "no exactness gate passed in this run, so its figure does not count"
        else:
            kept.append(result)
    return kept


class Runner:
    """Runs the gates of one phase that this machine can run, and holds what they came to."""

    def __init__(
        self,
        root: Path,
        phase: Phase,
        *,
        only: Sequence[str] = (),
        pythons: Mapping[str, str] | None = None,
        jobs: int = 1,
        console: Console | None = None,
    ) -> None:
        self.root, self.phase, self._jobs = root, phase, jobs
        self.console = console or Console(stderr=True)
        self.results: dict[str, GateResult] = {}
        self.not_run: dict[str, str] = {}
        self.runs: list[CommandRun] = []
        self.seeds: dict[str, int] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self._pythons = dict(pythons or {})
        self._only = self._selection(only)
        self._command = ["mla-verify", "gates", "run", phase.id, *(part for g in only for part in ("--only", g))]
        self._started = time.monotonic()
        self._stopped, self._numbers = threading.Event(), itertools.count()
        self._logs = Path(tempfile.mkdtemp(prefix="mla-verify-gates-"))
        self._environ = dict(os.environ)
        # the code under test is the checkout whose files the record covers, whatever else is installed
        paths = [str(root / part) for part in ("kernels", "integrations", "bench")]
        self._environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])

    def _selection(self, only: Sequence[str]) -> set[str]:
        known = {gate.id: gate for gate in self.phase.gates}
        if unknown := [g for g in only if g not in known]:
            raise PhaseError(
                f"--only is {unknown[0]!r}, no gate of {self.phase.id}; expected one of {', '.join(known)}"
            )
        chosen = set(only) or set(known)
        if any(known[g].kind in ("ratio", "bound") for g in chosen):
            chosen |= {gate.id for gate in self.phase.gates if gate.kind == "exact"}  # else the figure would not count
        return chosen

    def run(self) -> Record:
        """Run everything and return the record, unwritten. A Ctrl-C ends the run; what finished is in the record."""
        utc, interrupted = records.utc_now(), False
        python, why = find_python("main", self.root, self._pythons, os.environ)
        if why:
            raise PhaseError(why)
        hardware, versions, no_gpu = records.hardware_and_versions(python, self._environ)
        self.environments["main"] = versions
        self._say(f"{self.phase.id}: {self.phase.title} on {hardware.name}" + (f" ({no_gpu})" if no_gpu else ""))
        files, digests = self._digest_files()
        ready = self._ready(hardware.classes)
        try:
            # Nothing runs beside what is timed.
            for kinds, jobs in ((("exact", "static"), self._jobs), (("ratio", "bound"), 1)):
                chosen = [gate for gate in ready if gate.kind in kinds]
                timed = "ratio" in kinds
                with self._turn(alone=timed) if chosen and hardware.gpu else contextlib.nullcontext():
                    if timed and hardware.gpu:
                        chosen = self._alone(chosen, python)
                    self._run_kinds(chosen, digests, jobs)
        except KeyboardInterrupt:
            interrupted = True
            self._say("[yellow]interrupted[/]: keeping the gates that had finished")
        ordered = [self.results[gate.id] for gate in self.phase.gates if gate.id in self.results]
        ordered = void_figures(self.phase, ordered, self.not_run)
        commit, dirty = records.git_state(self.root)
        return Record(
            phase=self.phase.id,
            utc=utc,
            wall_s=round(time.monotonic() - self._started, 1),
            command=self._command,
            git_commit=commit,
            git_dirty=dirty,
            interrupted=interrupted,
            hardware=hardware,
            environments=self.environments,
            seeds=self.seeds,
            results=ordered,
            not_run=self.not_run,
            runs=self.runs,
            files=files,
        )

    def _digest_files(self) -> tuple[dict[str, str], dict[str, str]]:
        files: dict[str, str] = {}
        digests: dict[str, str] = {}
        for gate in self.phase.gates:
            covered = records.covered_files(self.root, self.phase.covers_of(gate))
            digests[gate.id] = records.digest(covered)
            files.update(covered)
        return dict(sorted(files.items())), digests

    def _ready(self, classes: Sequence[str]) -> list[Gate]:
        ready = []
        for gate in self.phase.gates:
            if gate.id not in self._only:
                continue
            why = why_not_built(self.root, gate)
            if not why and not set(gate.needs) & set(classes):
                why = f"needs {' or '.join(gate.needs)}"
            if not why:
                _, why = find_python(gate.env, self.root, self._pythons, os.environ)
            if why:
                self.not_run[gate.id] = why
            else:
                ready.append(gate)
        return ready

    @contextlib.contextmanager
    def _turn(self, alone: bool) -> Iterator[None]:
        """On a GPU, runs of several phases may stand side by side: exact gates share it, what is timed has it alone."""
        with open(TURN, "a", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as lock:
            told = False
            while True:
                try:
                    fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not told:
                        self._say(
                            "waiting until another run of gates has done " + ("its part" if alone else "what it times")
                        )
                    told = True
                    time.sleep(0.2)
            yield

    def _alone(self, gates: list[Gate], python: str) -> list[Gate]:
        """The gates that can be timed now: those of a GPU only where no other program keeps it busy."""
        on_gpu = [gate for gate in gates if "any" not in gate.needs]
        busy = records.busy_percent(python, self._environ) if on_gpu else None
        if busy is None or busy <= BUSY_PERCENT:
            return gates
        why = f"another program keeps the GPU {busy:.0f} % busy; end it and run again"
        self.not_run |= {gate.id: why for gate in on_gpu}
        self._say(f"[yellow]NOT MEASURED[/] {len(on_gpu)} timed gates: {why}")
        return [gate for gate in gates if gate not in on_gpu]

    def _run_kinds(self, gates: list[Gate], digests: dict[str, str], jobs: int) -> None:
        tests: dict[tuple, list[Gate]] = {}
        commands: dict[tuple, list[Gate]] = {}
        for gate in gates:
            key = (gate.env, tuple(sorted(gate.run.environ.items())))
            if gate.run.test:
                tests.setdefault(key, []).append(gate)
            else:
                commands.setdefault((*key, tuple(gate.run.command or ())), []).append(gate)
        engines = {key: tests.pop(key) for key in list(tests) if key[0] != "main"}
        for (env, environ), group in tests.items():
            self._run_tests(env, dict(environ), group, digests, jobs)
        self._run_engines(engines, digests, jobs)
        for (env, environ, command), group in commands.items():
            self._run_command(env, dict(environ), list(command), group, digests)

    def _run_engines(self, groups: Mapping[tuple, list[Gate]], digests: dict[str, str], jobs: int) -> None:
        """Tests of other environments than main start engines: an environment's run one by one beside another's."""

        def run(item: tuple[tuple, list[Gate]]) -> None:
            (env, environ), group = item
            self._run_tests(env, dict(environ), group, digests, 1)

        if jobs == 1:
            for item in groups.items():
                run(item)
            return
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(run, item) for item in groups.items()]
            beside = ", ".join(env for env, _ in groups)
            try:
                with self._spinner() as show:
                    while not wait(running, timeout=0.2).done >= set(running):
                        show(f"{self.phase.id} · {beside} · {_clock(time.monotonic() - self._started)}")
                for future in running:
                    future.result()
            except BaseException:  # Ctrl-C comes to this thread alone
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _finish(self, gate: Gate, outcome: Outcome, digests: dict[str, str]) -> None:
        for text in self._secrets():
            outcome.reason = outcome.reason.replace(*text)
        result = judge(gate, outcome, digests[gate.id])
        if isinstance(result, str):
            self.not_run[gate.id] = result
            self._say(f"[yellow]NOT MEASURED[/] {gate.id}: {_line(result)}")
            return
        self.results[gate.id] = result
        figure = f"  {result.value:.4g} {gate.unit}" if result.value is not None else ""
        colour = "green" if result.status == "PASS" else "red"
        why = f": {_line(result.reason)}" if result.reason else ""
        self._say(f"[{colour}]{result.status}[/] {gate.id}{figure}  [dim]{result.seconds:.1f} s[/]{why}")
        if result.status == "FAIL" and not self.console.is_terminal and _line(result.reason).endswith("…"):
            # a log of CI is all that is left of a machine: the whole of what the line above had no room for
            self._say(escape(textwrap.indent(result.reason, "  | ")))

    def _secrets(self) -> list[tuple[str, str]]:
        """Paths of this machine that have no place in a record."""
        return [(str(self.root), "."), (str(self._logs), "…"), (str(Path.home()), "~")]

    def _run_tests(
        self, env: str, environ: dict[str, str], gates: list[Gate], digests: dict[str, str], jobs: int
    ) -> None:
        """All tests of one interpreter in one pytest run; each gate is judged as soon as its tests have ended."""
        python = self._python(env)
        name = f"pytest-{env}-{next(self._numbers)}"
        report, log = self._logs / f"{name}.jsonl", self._logs / f"{name}.log"
        report.touch()
        nodes = list(dict.fromkeys(gate.run.test or "" for gate in gates))
        workers = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
        command = [python, "-m", "mla_verify_bench.pytest_plugin", str(report), *workers, *nodes]
        waiting = list(gates)
        events = _Events(report)

        def settle(final: bool = False, fallback: str = "") -> None:
            events.read()
            for gate in list(waiting):
                outcome = events.outcome(gate.run.test or "", final, fallback)
                if outcome is not None:
                    waiting.remove(gate)
                    self._finish(gate, outcome, digests)

        def doing() -> str:
            settle()
            return f"{events.running or 'collecting'} · {len(gates) - len(waiting)} of {len(gates)} gates"

        try:
            code, why = self._process(command, environ, log, sum(g.run.timeout_s for g in gates), doing)
        except KeyboardInterrupt:
            settle()
            raise
        settle(final=True, fallback=why or f"pytest ended with exit code {code} before this test did")
        if any(g.id in self.results and self.results[g.id].status == "FAIL" for g in gates):
            self._say(f"[dim]pytest's output: {log}[/]")

    def _run_command(
        self, env: str, environ: dict[str, str], command: list[str], gates: list[Gate], digests: dict[str, str]
    ) -> None:
        """One command for all the gates that name it; its JSON says what it measured for each."""
        python = self._python(env)
        number = next(self._numbers)
        out, log = self._logs / f"command-{number}.json", self._logs / f"command-{number}.log"
        environ = {**environ, "MLA_VERIFY_GATE_OUT": str(out)}
        started = time.monotonic()
        argv = [python if part == "{python}" else part for part in command]
        shown = " ".join(part for part in command if part != "{python}")
        code, why = self._process(
            argv, environ, log, sum(g.run.timeout_s for g in gates), lambda: f"{shown} · {len(gates)} gates"
        )
        seconds = time.monotonic() - started
        if code and not why:
            why = f"the command ended with exit code {code}"
        told: Any = {}
        if not out.exists():
            why = why or "the command wrote no $MLA_VERIFY_GATE_OUT"
        else:
            try:
                told = json.loads(out.read_text(encoding="utf-8"))
                run = CommandRun(
                    command=command,
                    env=env,
                    exit_code=code,
                    seconds=round(seconds, 1),
                    metrics=_finite_metrics(told.get("metrics")),
                    samples=_samples(told.get("samples")),
                    notes=[str(note) for note in told.get("notes", [])],
                )
                self.runs.append(run)
                self.seeds.update({str(k): int(v) for k, v in told.get("seeds", {}).items()})
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                told, why = {}, f"the command's $MLA_VERIFY_GATE_OUT is not as CONTRIBUTING.md says: {error}"
        for gate in gates:
            self._finish(gate, _command_outcome(gate, told, why, seconds), digests)
        if why:
            self._say(f"[dim]its output: {log}[/]")

    def _python(self, env: str) -> str:
        python, _ = find_python(env, self.root, self._pythons, os.environ)
        if env not in self.environments:
            self.environments[env] = records.versions_of(python, self._environ)
        return python

    def _process(self, argv: list[str], environ: dict[str, str], log: Path, timeout: int, doing) -> tuple[int, str]:
        """Run a process in a group of its own, so that its children end with it: (exit code, why it was ended)."""
        started = time.monotonic()
        with open(log, "wb") as output, self._spinner() as show:
            process = subprocess.Popen(
                argv, cwd=self.root, env={**self._environ, **environ}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    if self._stopped.is_set():
                        raise KeyboardInterrupt
                    if time.monotonic() - started > timeout:
                        return -1, f"it ran past its {timeout} s"
                    show(f"{self.phase.id} · {doing()} · {_clock(time.monotonic() - self._started)}")
                    time.sleep(0.2)
                return process.returncode, ""
            finally:
                _end_group(process)

    @contextlib.contextmanager
    def _spinner(self) -> Iterator[Any]:
        # a terminal shows one of them at a time
        if not self.console.is_terminal or threading.current_thread() is not threading.main_thread():
            yield lambda text: None
            return
        with self.console.status("") as status:
            yield lambda text: status.update(escape(text))

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _end_group(process: subprocess.Popen) -> None:
    """End what is left of the process and of its children: asked first, then killed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Events:
    """The lines that our pytest plugin has written so far."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, encoding="utf-8")
        self._rest = ""
        self.running = ""
        self._collected: list[str] | None = None
        self._ended: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, str] = {}

    def read(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "collected":
                self._collected = event["nodes"]
            elif event["event"] == "collect-error":
                self._errors[event["node"]] = event["reason"]
            elif event["event"] == "start":
                self.running = event["node"].split("::", 1)[-1]
            elif event["event"] == "end":
                self._ended[event["node"]] = event

    def outcome(self, test: str, final: bool, fallback: str) -> Outcome | None:
        """What the gate's test came to; None while it still runs. ``fallback`` is the reason when it never ended."""
        collected = [node for node in self._collected or [] if _serves(node, test)]
        ended = [self._ended[node] for node in collected if node in self._ended]
        if not collected or len(ended) < len(collected):
            if not final:
                return None
            broken = next((why for node, why in self._errors.items() if test.startswith(node)), "")
            return Outcome(False, broken.strip().splitlines()[-1] if broken.strip() else fallback)
        outcome = Outcome(True, seconds=sum(e["seconds"] for e in ended))
        for event in ended:
            case = event["node"][len(test) :]
            for name, figure in event.get("metrics", {}).items():
                outcome.metrics.setdefault(name, []).append(figure)
            outcome.samples.update({k + case: v for k, v in _samples(event.get("samples")).items()})
            outcome.ratios.update({k + case: Ratio.model_validate(v) for k, v in event.get("ratios", {}).items()})
        failed = [e for e in ended if e["outcome"] == "failed"]
        skipped = [e for e in ended if e["outcome"] == "skipped"]
        if failed:
            outcome.passed, outcome.reason = False, failed[0]["reason"]
            if len(ended) > 1:
                outcome.reason = f"{len(failed)} of {len(ended)} cases; {failed[0]['node']}: {outcome.reason}"
        elif skipped:  # a gate of which a part was skipped has not been shown
            part = f"{len(skipped)} of {len(ended)} cases skipped: " if len(ended) > 1 else ""
            outcome.passed, outcome.reason = None, part + skipped[0]["reason"]
        return outcome


def _serves(node: str, test: str) -> bool:
    return node == test or node.startswith((test + "[", test + "::"))


def _command_outcome(gate: Gate, told: dict[str, Any], why: str, seconds: float) -> Outcome:
    """What a command's JSON says of one gate: its own metrics, else the metric it names among the command's."""
    mine = told.get("gates", {}).get(gate.id, {})
    metrics = dict(mine.get("metrics", {}))
    shared = told.get("metrics", {})
    if gate.metric in shared:
        metrics.setdefault(gate.metric, shared[gate.metric])
    # a figure speaks for itself; without one the command has to say that the gate passed
    passed, reason = mine.get("passed", gate.metric is not None), str(mine.get("reason") or "")
    if gate.metric is None and "passed" not in mine:
        reason = "the command did not report this gate"
    outcome = Outcome(passed, reason, {name: [figure] for name, figure in metrics.items()}, seconds=seconds)
    try:
        outcome.samples = _samples(mine.get("samples"))
        outcome.ratios = {str(k): Ratio.model_validate(v) for k, v in mine.get("ratios", {}).items()}
    except (ValueError, TypeError, KeyError) as error:
        why = why or f"samples or ratios of {gate.id}: {error}"
    if why:
        outcome.passed, outcome.reason = False, why
    return outcome


def _samples(told: Any) -> dict[str, Samples]:
    return {
        str(name): Samples.of(given["values"], warmups=given.get("warmups", 0), unit=given.get("unit", "us"))
        for name, given in (told or {}).items()
    }


def _finite_metrics(told: Any) -> dict[str, float]:
    pairs = ((str(name), records.finite(figure)) for name, figure in (told or {}).items())
    return {name: figure for name, figure in pairs if figure is not None}


def _line(text: str, width: int = 200) -> str:
    line = " ".join(text.split())
    return escape(line if len(line) <= width else line[: width - 1] + "…")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def explain_not_run(record: Record) -> str:
    """One line: how many gates were not measured, grouped by why. "" if every one was."""
    groups: dict[str, list[str]] = {}
    for gate, why in record.not_run.items():
        groups.setdefault(why, []).append(gate)
    parts = [
        f"{len(gates)} {_line(why, 90)}" if len(gates) > 1 else f"{gates[0]} ({_line(why, 90)})"
        for why, gates in groups.items()
    ]
    return f"not measured here: {'; '.join(parts)}" if parts else ""
