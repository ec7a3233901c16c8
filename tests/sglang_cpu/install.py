"""Make SGLang's CPU environment: ``install.py --python ENV/bin/python --version 0.5.17``.

Standard library only. Idempotent: a stamp in the environment names all that this file would install, and with
it nothing is done. About 2.5 GB and a minute and a half for a fresh one. Python 3.11, x86-64 Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

COMMON = """
torch==2.13.0 triton==3.8.0 numpy<3 apache-tvm-ffi==0.1.11
orjson psutil pybase64 requests packaging pillow starlette tqdm ipython pydantic aiohttp msgspec pyzmq dill
partial-json-parser sentencepiece einops loguru gguf setproctitle uvicorn fastapi uvloop jsonschema soundfile
python-multipart ninja PyYAML rich httpx matplotlib scipy pytest hypothesis
""".split()
RELEASES = {
    "0.5.17": (["transformers==5.12.1", "openai==2.6.1"], ["xgrammar==0.2.1"]),
    "0.5.23": (["transformers==5.19.0", "openai==2.8.0", "tokenizers==0.23.2"], ["xgrammar==0.2.7"]),
}
# Their own dependencies ask for CUDA builds.
WITHOUT_DEPENDENCIES = ["torchvision==0.28.0", "compressed-tensors==0.18.0"]

TORCHVISION_MARK = "\n# mla-verify: PyPI's torchvision is a CUDA build; its import wants these two ops declared"
TORCHVISION_PATCH = (
    TORCHVISION_MARK
    + """
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
)
CXX_WRAPPER = """#!/bin/sh
# NGRAM's C++ part of SGLang 0.5.17 uses std::size_t without <cstddef>; gcc 12 minds
exec c++ -include cstddef "$@"
"""


def install(python: Path, version: str) -> bool:
    """Bring the environment of ``python`` to SGLang ``version``; returns False when it already was there."""
    if version not in RELEASES:
        raise SystemExit(f"--version {version} is not pinned here; choose {' or '.join(RELEASES)}")
    found = _ask(python, "import sys; print('%d.%d' % sys.version_info[:2], sys.prefix != sys.base_prefix)").split()
    if found[1] != "True":
        raise SystemExit(f"--python {python} is no virtual environment; make one: python3.11 -m venv ENV")
    if found[0] != "3.11":
        raise SystemExit(f"--python {python} is Python {found[0]}; the pins are for 3.11: python3.11 -m venv ENV")
    site = Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    stamp, wanted = site / "mla_verify_sglang_cpu.json", _wanted(version)
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return False
    stamp.unlink(missing_ok=True)
    with_dependencies, without = RELEASES[version]
    _pip(python, *COMMON, *with_dependencies)
    _pip(python, "--no-deps", *WITHOUT_DEPENDENCIES, *without, f"sglang=={version}")
    _pip(python, "--no-deps", "--editable", str(PROJECT))
    _patch_torchvision(site / "torchvision" / "extension.py")
    shutil.copytree(HERE / "stand_in" / "sgl_kernel", site / "sgl_kernel", dirs_exist_ok=True)
    wrapper = python.parent / "c++-cstddef"
    wrapper.write_text(CXX_WRAPPER)
    wrapper.chmod(0o755)
    _ask(python, "import sgl_kernel.speculative, torch, torchvision, triton, mla_verify")
    stamp.write_text(json.dumps(wanted))
    return True


def _wanted(version: str) -> dict:
    """All that decides what is installed: this file, the stand-in, the release, where the project lies."""
    files = [Path(__file__), PROJECT / "pyproject.toml", *sorted((HERE / "stand_in").rglob("*.py"))]
    digest = hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()
    return {"version": version, "digest": digest, "project": str(PROJECT)}


def _patch_torchvision(path: Path) -> None:
    if not path.is_file():
        raise SystemExit(f"{path} is missing; torchvision did not install as expected")
    path.write_text(path.read_text().split(TORCHVISION_MARK)[0] + TORCHVISION_PATCH)


def _pip(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    if subprocess.run(command).returncode:
        raise SystemExit(f"this command failed, see above; with no network a local index may lack it:\n{command}")


def _ask(python: Path, code: str) -> str:
    try:
        found = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"--python {python} does not run: {error}") from error
    if found.returncode:
        raise SystemExit(f"{python} -c {code!r} failed:\n{found.stderr}")
    return found.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of a virtual environment")
    parser.add_argument("--version", required=True, help=f"SGLang release: {', '.join(RELEASES)}")
    options = parser.parse_args()
    # Not resolved: the link in the environment is what makes it one.
    python = options.python.absolute()
    done = install(python, options.version)
    print(
        f"SGLang {options.version} (CPU) {'installed' if done else 'already there'}: {python}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
