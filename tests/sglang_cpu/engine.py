"""One SGLang engine run in a process of its own: ``engine.py JOB.json RESULT.json``.

The gates call ``run_engine``; it starts the interpreter that runs the gate again, in a clean environment, so
an engine never inherits what a test set, and a hanging one is killed with all its children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KEPT = ("HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR")


@dataclass
class Job:
    """prompts are token ids; ``turns`` says how many tokens each turn generates. From the second turn on a
    prompt is the conversation so far and the request's suffix. ``modes`` repeats all that, once for each mode
    of the probe."""

    model: str
    prompts: list[list[int]]
    suffixes: list[list[int]] = field(default_factory=list)
    turns: tuple[int, ...] = (24,)
    modes: tuple[str, ...] = ("",)
    mode_file: str = ""
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a run. ``rounds`` has an entry for each mode, and in it one for each turn."""

    returncode: int
    log: str
    rounds: list[list[dict[str, Any]]]
    seconds: float


def environment(python: Path, **more: str) -> dict[str, str]:
    """The environment of an engine: nothing of ours but what the CPU engine needs and ``more``."""
    wrapper = python.parent / "c++-cstddef"
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        # Thousands of tiny products: on a busy machine a second thread costs a time slice at each of them.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return env | ({"CXX": str(wrapper)} if wrapper.exists() else {}) | more


def write_plugin(folder: Path, source: Path, *beside: Path) -> Path:
    """Write a distribution that names ``register`` of ``source``, which an engine with ``folder`` on its path loads.

    Modules are copied as mla_verify_<stem>, those of ``beside``, which ``source`` imports by that name, as well.
    """
    name = f"mla_verify_{source.stem}"
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    for module in (source, *beside):
        (folder / f"mla_verify_{module.stem}.py").write_text(module.read_text())
    return folder


def start(words: Sequence[object], folder: Path, log: Path, env: Mapping[str, str], **pipes) -> subprocess.Popen:
    """This interpreter on ``words``, in ``folder``, in a process group of its own; output goes to ``log``."""
    command = [sys.executable, *map(str, words)]
    with log.open("w") as sink:
        return subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, cwd=folder, env=env, start_new_session=True,
            **({"stdin": subprocess.DEVNULL} | pipes),
        )  # fmt: skip


def stop(process: subprocess.Popen) -> None:
    """End a process of ``start`` with its children: the scheduler and the detokenizer."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(words: Sequence[object], folder: Path, log: Path, env: Mapping[str, str], timeout: float) -> int:
    """Exit code of a process of ``start``; -SIGALRM after ``timeout`` seconds."""
    process = start(words, folder, log, env)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM
    finally:
        stop(process)


def run_engine(job: Job, folder: Path, timeout: float = 500, **env: str) -> Outcome:
    """Run ``job`` in a subprocess; ``folder`` keeps the job, the result and the log."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    wanted.write_text(json.dumps(asdict(job)))
    result.unlink(missing_ok=True)
    began = time.monotonic()
    python, script = Path(sys.executable), Path(__file__).resolve()
    code = run([script, wanted, result], folder, log, environment(python, **env), timeout)
    rounds = json.loads(result.read_text()) if result.exists() else []
    return Outcome(code, log.read_text(errors="replace"), rounds, time.monotonic() - began)


def _serve(job: Job, result: Path) -> None:
    import sglang

    options = {
        "model_path": job.model,
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "max_running_requests": 4,
        "max_total_tokens": 8192,
        "log_level": "error",
        "watchdog_timeout": 3600,
    }
    engine = sglang.Engine(**options | job.engine)
    rounds = []
    for mode in job.modes:
        engine.flush_cache()
        if job.mode_file:
            Path(job.mode_file).write_text(mode)
        prompts, turns = job.prompts, []
        for count in job.turns:
            sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
            began = time.monotonic()
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.monotonic() - began
            turns.append(
                {
                    "tokens": [out["output_ids"] for out in outputs],
                    "cached": [out["meta_info"].get("cached_tokens", 0) for out in outputs],
                    "verify_steps": [out["meta_info"].get("spec_verify_ct", 0) for out in outputs],
                    "seconds": seconds,
                }
            )
            suffixes = job.suffixes or [[]] * len(prompts)
            prompts = [p + out["output_ids"] + s for p, out, s in zip(prompts, outputs, suffixes, strict=True)]
        rounds.append(turns)
    result.write_text(json.dumps(rounds))
    engine.shutdown()


if __name__ == "__main__":
    _serve(Job(**json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
