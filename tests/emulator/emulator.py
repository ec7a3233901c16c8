"""``verify`` in CUDA C++, run on a CPU: the kernels of verify.cu thread by thread, with the address sanitizer.

The launches are those of a GPU (``cuda_kernels.plan``); a C++ compiler is all it needs. It is slow: a small batch takes
seconds. What it shows is that the kernels compute the right thing, never read out of bounds, and keep their barriers
and asynchronous copies in order; not the rounding inside a tensor core, nor any speed.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from mla_verify import cuda_kernels
from mla_verify.testing import Problem
from torch import Tensor

HERE = Path(__file__).parent
# Few splits keep a test small; the rule is the same.
RULE = cuda_kernels.SplitRule(max_splits=3, min_split=64)


class EmulatorError(RuntimeError):
    """The program ended with an error: a read out of bounds, a deadlock, a misused barrier."""


def compiler() -> str | None:
    """A C++ compiler, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def program(variant: cuda_kernels.Variant, bulk: bool, source: str = "") -> Path:
    """The emulator for one set of macros; ``source`` is the text of verify.cu unless a test has changed it.

    The sanitizer of undefined behaviour takes more than half of the compiler's time: only verify.cu as it is has it.
    """
    folder = Path(tempfile.mkdtemp(prefix="mla-verify-emulator-"))
    kernels, target = folder / "verify.cu", folder / "emulator"
    kernels.write_text(source or cuda_kernels.SOURCE.read_text())
    macros = [f"-D{name}={value}" for name, value in variant.macros()]
    sanitizers = "address" if source else "address,undefined"
    command = [
        compiler(), "-std=c++17", "-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-w",
        f"-DBULK={int(bulk)}", f'-DSOURCE="{kernels}"', *macros, str(HERE / "main.cpp"), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"verify.cu does not compile for the emulator:\n{done.stderr[-4000:]}")
    return target


def run(problem: Problem, *, bulk: bool = True, seed: int = 0, source: str = "") -> tuple[Tensor, Tensor]:
    """out and lse of a problem on the CPU. ``seed`` draws the order in which warps run."""
    p = problem
    out, lse, launches = cuda_kernels.plan(p.q, p.kv, p.slots, p.tree, p.sm_scale, p.kv_scale, RULE)
    variant = cuda_kernels.Variant(p.q.dtype, p.kv.dtype, p.slots.indices.dtype)
    tensors: list[Tensor] = []
    where: dict[int, int] = {}

    def word(value) -> bytes:
        if isinstance(value, Tensor):
            if value.data_ptr() not in where:
                where[value.data_ptr()] = len(tensors)
                tensors.append(value)
            return struct.pack("<II", 0, where[value.data_ptr()])
        return struct.pack("<Ii" if isinstance(value, np.int32) else "<If", 1 + isinstance(value, np.float32), value)

    body = struct.pack("<I", len(launches))
    for one in launches:
        rows = int(one.kernel.removeprefix("partial_")) if one.kernel != "merge" else 0
        body += struct.pack("<7I", rows, *one.grid, one.threads, one.shared_bytes, len(one.args))
        body += b"".join(map(word, one.args))
    for written in (out, lse):  # so that what no kernel writes shows
        written.fill_(float("nan"))
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job"), Path(folder, "result")
        with job.open("wb") as f:
            f.write(struct.pack("<II", seed, len(tensors)))
            for t in tensors:
                f.write(struct.pack("<Q", t.numel() * t.element_size()) + _bytes(t).tobytes())
            f.write(body)
        done = subprocess.run(
            [program(variant, bulk, source), str(job), str(result)],
            capture_output=True, text=True, env={"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},
        )  # fmt: skip
        if done.returncode:
            raise EmulatorError(f"the emulator ended with {done.returncode}:\n{done.stderr[:4000]}")
        data = result.read_bytes()
    at = 0
    for t in tensors:
        size = t.numel() * t.element_size()
        if t.data_ptr() in (out.data_ptr(), lse.data_ptr()):
            _bytes(t)[:] = np.frombuffer(data, np.uint8, size, at)
        at += size
    return out, lse


def _bytes(t: Tensor) -> np.ndarray:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy()
