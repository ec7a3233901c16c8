"""What one does with this project. `nox -l` lists it; `nox -s NAME -- ARGUMENTS` passes arguments on.

With no GPU, the environment gets a CPU torch and Triton for its interpreter, and phase 2 brings SGLang's CPU engine.
With a GPU, the torch, Triton and SGLang of the Python that nox is started from are used as they are; only where
that Python has no torch is one installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
HAS_GPU = shutil.which("nvidia-smi") is not None
SGLANG_CPU = ("0.5.17", "0.5.23")
# 2.13.0 is the release that the CPU gates run on. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives
# its CPU wheel, of a tenth of the size. numpy 2.5 has not been tried with Triton's interpreter.
CPU_PINS = ("torch==2.13.0", "numpy<2.5")
# an interrupted run first writes what it has finished; nox alone would kill it within a second
PATIENCE = {"interrupt_timeout": 60, "terminate_timeout": 30}

nox.options.sessions = ["tests"]


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Tests of everything that needs neither a GPU nor SGLang."""
    run(session, "-m", "pytest", "tests", *session.posargs)


@nox.session(name="sglang-cpu", python=False)
def install_sglang_cpu(session: nox.Session) -> None:
    """SGLang's CPU engine, both releases, ahead of the sessions that would install it."""
    sglang_cpu(session)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Ruff: style and imports."""
    run(session, "-m", "ruff", "check", *(session.posargs or ["."]))


@nox.session(python=False)
def phase1(session: nox.Session) -> None:
    """Gates of the verify kernel. All that the owner of an sm_120 card has to run."""
    mla_verify(session, "gates", "run", "phase1", *session.posargs)


@nox.session(python=False)
def phase2(session: nox.Session) -> None:
    """Gates of the SGLang backend, in the real engine."""
    mla_verify(session, "gates", "run", "phase2", *session.posargs, env=sglang_cpu(session))


@nox.session(python=False)
def phase3(session: nox.Session) -> None:
    """Gates of K/V defragmentation."""
    mla_verify(session, "gates", "run", "phase3", *session.posargs, env=sglang_cpu(session))


@nox.session(python=False)
def phase4(session: nox.Session) -> None:
    """Gates of the 200k deployment: planner, benchmark, diagnosis, headline."""
    mla_verify(session, "gates", "run", "phase4", *session.posargs)


@nox.session(python=False)
def status(session: nox.Session) -> None:
    """Regenerate STATUS.md; `-- --check` compares, `-- --strict` also wants everything measured and passed."""
    mla_verify(session, "status", *session.posargs)


@nox.session(name="bench-longctx", python=False)
def bench_longctx(session: nox.Session) -> None:
    """Decode speed by context depth, built-in backend against ours; serves a model itself if given no --base-url."""
    given = {word.split("=")[0] for word in session.posargs}
    serves = not given & {"--base-url", "--report", "--compare", "--sglang-python", "-h", "--help"}
    env = sglang_cpu(session, SGLANG_CPU[:1]) if serves else {}
    mla_verify(session, "bench", "longctx", *session.posargs, env=env)


@nox.session(name="bench-kernel", python=False)
def bench_kernel(session: nox.Session) -> None:
    """Time of verify by length, heads and nodes beside its peers, on this GPU."""
    run(session, "phases/phase1_verify_kernel/bench.py", *session.posargs)


# How environments come about


def mla_verify(session: nox.Session, *words: str, env: dict[str, str] | None = None) -> None:
    """The console script."""
    run(session, "-m", "mla_verify_bench.cli", *words, env=env)


def run(session: nox.Session, *words: str, env: dict[str, str] | None = None) -> None:
    """Python of .nox/main, which all sessions share: torch is too large to have it nine times."""
    python = environment(session)
    session.run(str(python), *words, env=env, external=True, **PATIENCE)


def environment(session: nox.Session) -> Path:
    """Python of .nox/main with this project in it, editable; quick when pyproject.toml has not changed."""
    donor = python_with_torch() if HAS_GPU else ""
    home = ROOT / ".nox" / "main"
    python, stamp = home / "bin" / "python", home / "installed"
    wanted = ["-e", f".[{'cuda' if HAS_GPU else 'interpreter,compile'},test]"]
    if not HAS_GPU:
        wanted = [*CPU_PINS, *wanted]
    facts = [donor or sys.executable, *wanted, (ROOT / "pyproject.toml").read_text(encoding="utf-8")]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return python
    session.run(donor or sys.executable, "-m", "venv", "--clear", str(home), external=True)
    if donor:
        share_packages(session, donor, python)
    session.run(str(python), "-m", "pip", "install", "--quiet", *wanted, external=True)
    stamp.write_text(digest, encoding="utf-8")
    return python


def python_with_torch() -> str:
    """The Python whose torch its user already has: of the active environment, else nox's own; "" if none."""
    active = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    for python in (*(str(Path(prefix, "bin", "python")) for prefix in active if prefix), sys.executable):
        probe = "import sys, importlib.util as u; sys.exit(u.find_spec('torch') is None)"
        if os.access(python, os.X_OK) and subprocess.run([python, "-c", probe], check=False).returncode == 0:
            return python
    return ""


def share_packages(session: nox.Session, donor: str, python: Path) -> None:
    """Show the donor's packages to ``python``, behind its own; pip then finds them installed.

    --system-site-packages would show those of the donor's base Python: none, where the donor is itself an environment.
    """
    ask = "import site; print(*site.getsitepackages(), sep='\\n')"
    folders = session.run(donor, "-c", ask, silent=True, external=True).split("\n")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = session.run(str(python), "-c", where, silent=True, external=True).strip()
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders if folder]
    Path(own, "zz_shared.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sglang_cpu(session: nox.Session, versions: tuple[str, ...] = SGLANG_CPU) -> dict[str, str]:
    """SGLang's CPU engine in .nox/sglang-VERSION, as variables that name its Pythons; none where there is a GPU."""
    python311 = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if HAS_GPU or not python311:
        session.log("no CPU SGLang here: " + ("this machine has a GPU" if HAS_GPU else "it needs python3.11"))
        return {}
    variables = {}
    for version in versions:
        home = ROOT / ".nox" / f"sglang-{version}"
        python = home / "bin" / "python"
        if not python.exists():
            session.run(python311, "-m", "venv", str(home), external=True)
        installer = ROOT / "tests" / "sglang_cpu" / "install.py"
        session.run(sys.executable, str(installer), "--python", str(python), "--version", version, external=True)
        variables["MLA_VERIFY_ENV_SGLANG_" + version.replace(".", "_")] = str(python)
    return variables
