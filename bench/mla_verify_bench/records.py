"""Records: what a run measured, on which machine, of which files. One JSON file per run, append-only.

A record vouches for the files its gates cover, through their digests, and for the gates' own definitions, through
theirs. ``status.py`` compares both with the checkout, so a figure goes stale by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import machine

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A record that cannot be read; the message names the file."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Samples(_Model):
    """Raw samples of one quantity in the order they were taken, warm-ups not among them."""

    unit: str = "us"
    n: int
    warmups: int = 0
    median: float
    q1: float
    q3: float
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float], *, warmups: int = 0, unit: str = "us") -> Samples:
        import numpy as np

        if not values:
            raise ValueError("values is empty; give at least one sample")
        q1, median, q3 = (float(x) for x in np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75]))
        return cls(unit=unit, n=len(values), warmups=warmups, median=median, q1=q1, q3=q3, values=list(values))


class Ratio(_Model):
    """How many times faster ours is than a named peer: median(peer) / median(ours), with a bootstrap interval."""

    peer: str
    ratio: float
    low: float
    high: float
    confidence: float = 0.95
    resamples: int
    seed: int


class GateResult(_Model):
    """What one gate came to in one run. A gate that did not run is in ``Record.not_run`` instead."""

    gate: str
    kind: Literal["exact", "static", "ratio", "bound"]
    status: Literal["PASS", "FAIL"]
    reason: str = ""
    value: float | None = None
    """The figure that was compared, or None for a gate without a threshold."""
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: dict[str, Samples] = Field(default_factory=dict)
    ratios: dict[str, Ratio] = Field(default_factory=dict)
    seconds: float = 0.0
    env: str = "main"
    gate_digest: str
    covers_digest: str


class CommandRun(_Model):
    """One command that served one or more gates, with the samples that it shared among them."""

    command: list[str]
    env: str = "main"
    exit_code: int
    seconds: float
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: dict[str, Samples] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class Gpu(_Model):
    name: str
    capability: str
    sm_count: int
    memory_bytes: int
    shared_memory_per_block_bytes: int = 0
    count: int = 1
    cuda: str = ""
    driver: str = ""
    clock_sm_mhz: float = 0.0
    clock_memory_mhz: float = 0.0
    clock_sm_max_mhz: float = 0.0
    clock_memory_max_mhz: float = 0.0
    power_limit_w: float = 0.0


class Cpu(_Model):
    model: str
    cores: int
    memory_bytes: int
    architecture: str


class Hardware(_Model):
    gpu: Gpu | None = None
    cpu: Cpu
    system: str

    @property
    def classes(self) -> list[str]:
        """Hardware classes that this machine serves: any, gpu, sm_120."""
        return machine.classes(self.gpu.capability if self.gpu else None)

    @property
    def slug(self) -> str:
        """The machine's folder in results/."""
        return machine.slug(self.gpu.name if self.gpu else f"cpu {self.cpu.model}")

    @property
    def name(self) -> str:
        return self.gpu.name if self.gpu else self.cpu.model


class Record(_Model):
    """One run of one phase."""

    schema_version: Literal[1] = SCHEMA_VERSION
    phase: str
    utc: str
    wall_s: float
    command: list[str]
    git_commit: str = ""
    git_dirty: bool = False
    interrupted: bool = False
    hardware: Hardware
    environments: dict[str, dict[str, str]]
    """Environment -> library -> version; "" where it is not installed."""
    seeds: dict[str, int] = Field(default_factory=dict)
    results: list[GateResult]
    not_run: dict[str, str] = Field(default_factory=dict)
    """Gate -> why it was not run or could not be measured."""
    runs: list[CommandRun] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    """Covered file -> its sha256, so that a stale figure can name what changed."""
    seal: str = ""
    """sha256 of everything else: shows that a record was edited after it was written."""

    def sealed(self) -> str:
        """The seal that this record's content calls for."""
        return _sha(canonical(self.model_dump(mode="json", exclude={"seal"})))


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no blanks: equal values, equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def covered_files(root: Path, covers: Iterable[str]) -> dict[str, str]:
    """sha256 of each file under ``root`` that a glob of ``covers`` names, by its path, sorted.

    Line ends count as \\n, so a checkout on another system has the same digests. Caches and hidden files don't count.
    """
    found: dict[str, str] = {}
    for pattern in covers:
        for path in root.glob(pattern + "/*" if pattern.endswith("**") else pattern):
            inside = path.relative_to(root)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in inside.parts)
            if path.is_file() and not hidden and path.suffix != ".pyc":
                found[inside.as_posix()] = _sha(path.read_bytes().replace(b"\r\n", b"\n"))
    return dict(sorted(found.items()))


def digest(files: dict[str, str]) -> str:
    """One digest for what ``covered_files`` returned."""
    return _sha(canonical(files))


def ratio_of_medians(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    peer: str,
    seed: int = 0,
    resamples: int = 9999,
    confidence: float = 0.95,
) -> Ratio:
    """median(theirs) / median(ours) with a percentile bootstrap interval; gates compare its lower bound.

    Both are times, so above 1 ours is faster. The two sides are resampled independently, from a seeded generator.
    """
    import numpy as np

    sides = [np.asarray(side, dtype=float) for side in (ours, theirs)]
    for name, side in zip(("ours", "theirs"), sides, strict=True):
        if side.size == 0 or not np.all(np.isfinite(side)) or np.any(side <= 0):
            raise ValueError(f"{name} has {side.size} samples; expected at least one, all finite and above 0")
    rng = np.random.default_rng(seed)
    medians = [np.median(side[rng.integers(0, side.size, (resamples, side.size))], axis=1) for side in sides]
    low, high = np.quantile(medians[1] / medians[0], [(1 - confidence) / 2, (1 + confidence) / 2])
    return Ratio(
        peer=peer,
        ratio=float(np.median(sides[1]) / np.median(sides[0])),
        low=float(low),
        high=float(high),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def git_state(root: Path) -> tuple[str, bool]:
    """Commit of the checkout and whether tracked files differ from it; ("", False) where git does not know."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "", False
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "", False


def hardware_and_versions(
    python: str = sys.executable, env: dict[str, str] | None = None
) -> tuple[Hardware, dict[str, str], str]:
    """This machine as ``python`` sees it, the versions in that interpreter, and why there is no GPU ("" if one is)."""
    told = _ask_machine(python, env)
    versions, why_not = told.pop("versions"), told.pop("no_gpu_because")
    return Hardware.model_validate(told), versions, why_not


def versions_of(python: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """Library versions in another interpreter."""
    return _ask_machine(python, env, "--versions")["versions"]


def busy_percent(python: str, env: dict[str, str] | None = None) -> float | None:
    """How busy other programs keep the GPU; None where nobody can say."""
    return _ask_machine(python, env, "--busy")["busy_percent"]


def _ask_machine(python: str, env: dict[str, str] | None, *args: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-m", "mla_verify_bench.machine", *args], capture_output=True, text=True, timeout=300, env=env
    )
    if done.returncode:
        raise RuntimeError(f"{python} could not describe this machine: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


_NUMBER_LIST = re.compile(r"\[\n\s*(-?[\d.][^\[\]{}\"]*?)\n\s*\]")  # a raw newline: never inside a string


def dump(record: Record) -> str:
    """The record's file: two-space JSON with each list of numbers on one line, for a person's diff."""
    text = json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBER_LIST.sub(lambda m: "[" + ", ".join(m.group(1).replace(",", " ").split()) + "]", text) + "\n"


def write(record: Record, results: Path) -> Path:
    """Write a new file results/<machine>/<utc>-<phase>.json and return its path. No existing file is ever replaced."""
    record.seal = record.sealed()
    folder = results / record.hardware.slug
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record.utc.replace('-', '').replace(':', '')}-{record.phase}"
    temporary = folder / f".{stem}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(dump(record))
        file.flush()
        os.fsync(file.fileno())
    try:
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            path = folder / f"{stem}{suffix}.json"
            try:
                os.link(temporary, path)  # whole or not at all, and fails where a record already is
                return path
            except FileExistsError:
                continue
            except OSError:  # a file system without hard links
                if not path.exists():
                    os.replace(temporary, path)
                    return path
        raise RecordError(f"{folder} already has 999 records named {stem}")
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Record:
    """Read one record, or raise RecordError naming the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_nan)
    except (OSError, ValueError) as error:
        raise RecordError(f"record {path} is not readable JSON ({error}); restore it or move it away") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"record {path} has schema version {version!r}, but this checkout reads {SCHEMA_VERSION}; "
            "update the checkout or move the file out of results/"
        )
    try:
        return Record.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"record {path} is not a valid record: {where}: {first['msg']}") from None


def _no_nan(name: str) -> float:
    raise ValueError(f"{name} is not a figure")


def read_all(results: Path) -> list[tuple[str, Record]]:
    """Every record under ``results`` as (path from results/, record), oldest first. One bad file raises RecordError."""
    found = [(path.relative_to(results).as_posix(), read(path)) for path in sorted(results.glob("*/*.json"))]
    return sorted(found, key=lambda entry: (entry[1].utc, entry[0]))


def finite(value: Any) -> float | None:
    """``value`` as a float, or None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
