"""Phase 1 gates under NVIDIA's compute-sanitizer: no bad access, race, barrier misuse or read of unwritten memory.

usage: test_sanitizer.py cases          run the set, compare it with the oracle (what the tools watch)
       test_sanitizer.py planted TOOL   run a kernel with the fault that TOOL is to find
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
BULK, CP_ASYNC = "#define BULK (__CUDA_ARCH__ >= 900)", "#define BULK 0"
# Kernels of 64 threads. ``in`` is allocated and never written; ``out`` has 64 integers.
PLANTED = {
    "memcheck": "out[64 + threadIdx.x] = 1;",
    "racecheck": "__shared__ volatile int s[64]; s[threadIdx.x] = threadIdx.x; out[threadIdx.x] = s[threadIdx.x ^ 32];",
    "synccheck": "if (threadIdx.x < 32) __syncthreads(); out[threadIdx.x] = 1;",  # the hardware does not hang on it
    "initcheck": "out[threadIdx.x] = in[threadIdx.x];",
}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


pytestmark = [
    pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="needs compute-sanitizer, of the CUDA toolkit"),
]


def settings(q, kv) -> Iterator[tuple]:
    """(case, most pieces of a prefix, workspace bytes, factor of q): every code path, in these dtypes.

    A prefix of up to 131 pieces would need 8,384 tokens before a piece fills the ring of tiles; with two pieces 500 do.
    """
    from mla_verify.testing import Case

    told = dict(q_dtype=q, kv_dtype=kv, kv_scale=0.5 if kv != q else 1.0)
    usual = 131, 1 << 28, 1
    yield Case((70,), (1,), heads=16, **told), *usual  # 16 rows a block; a piece of 6 tokens
    yield Case((0, -1, 33), (4, 4, 4), heads=8, **told), *usual  # 32 rows; no prefix; padding
    yield Case((64, 17), (33, 16), heads=4, branching=1.0, wide_index=True, **told), *usual  # 64 rows, three blocks
    yield Case((200,), (128,), heads=1, **told), *usual
    for nodes, heads in ((5, 3), (3, 8), (16, 3)):  # tiles over tiles in the ring, bases that move, in each row block
        yield Case((515,), (nodes,), heads=heads, wide_index=nodes == 3, **told), 2, 1 << 28, 30
    yield Case((2200,), (1,), heads=2, **told), *usual  # more pieces than merge's warp has threads
    yield Case((90, 40), (20, 3), heads=5, **told), 131, 1, 1  # a launch for each block of rows of each request


def run_cases() -> int:
    """Run the set with bulk copies, where this GPU has them, and with cp.async; returns the number of calls.

    Tensors are made on the CPU and copied: the only kernels are ours, and a driver's copy counts as written.
    """
    import torch
    from mla_verify import Slots, cuda_kernels
    from mla_verify.testing import compare

    capability = torch.cuda.get_device_capability()
    text = cuda_kernels.SOURCE.read_text(encoding="utf-8")
    if BULK not in text:
        raise SystemExit(f"verify.cu has no line {BULK!r} any more; this test takes its place to reach both paths")
    sources = [CP_ASYNC] if capability < (9, 0) else [BULK, CP_ASYNC]
    count = 0
    for line in sources:
        with tempfile.NamedTemporaryFile("w", suffix=".cu", encoding="utf-8") as source:
            source.write(text.replace(BULK, line))
            source.flush()
            cuda_kernels.SOURCE = Path(source.name)
            cuda_kernels._kernels.cache_clear()
            for q, kv in dict.fromkeys((v.q, v.kv) for v in cuda_kernels.VARIANTS):
                if cuda_kernels.unsupported(q, kv, capability):
                    continue
                for case, pieces, workspace, factor in settings(q, kv):
                    p = case.build()
                    p = dataclasses.replace(p, q=p.q * factor)
                    slots = Slots(*(t.cuda() for t in (p.slots.indices, p.slots.starts, p.slots.lens)), p.slots.max_len)
                    there = dataclasses.replace(p, q=p.q.cuda(), kv=p.kv.cuda(), slots=slots, tree=p.tree.to("cuda"))
                    rule = cuda_kernels.SplitRule(pieces)
                    cuda_kernels.split_rule = lambda device, rule=rule: rule
                    cuda_kernels.WORKSPACE_BYTES = workspace
                    out, lse = there.run("cuda")
                    found = compare(p, out.cpu(), lse.cpu(), vocabulary=8)
                    if found.problem:
                        raise SystemExit(f"{case}, {line}: {found.problem}")
                    count += 1
    return count


def run_planted(tool: str) -> None:
    """Without torch, so that it costs little."""
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    source = f'extern "C" __global__ void planted(const int* in, int* out) {{ {PLANTED[tool]} }}'
    program = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}", std="c++17"))
    kernel = program.compile("cubin").get_kernel("planted")
    memory = [driver.cuMemAlloc(256) for _ in range(2)]
    if any(status != driver.CUresult.CUDA_SUCCESS for status, _ in memory):
        raise SystemExit(f"cuMemAlloc of 256 B failed: {memory}")
    stream = device.create_stream()
    launch(stream, LaunchConfig(grid=1, block=64), kernel, *(int(address) for _, address in memory))
    stream.sync()


def summary(said: str) -> int | None:
    """Errors and hazards by the tool's last summary; None where it gave none."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    return int(found[-1]) if found else None


def watched(tool: str, *arguments: str) -> tuple[int, str]:
    """This file as a program under the tool: exit code, and all that was said."""
    # One allocation for each tensor: a read past the end of one is not a read of the next, and a block that is used
    # again does not count as written.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.setdefault("OMP_NUM_THREADS", "2")  # the oracle's: else four tools at once crowd each other out
    # Kernels are watched, not calls: cuda.bindings asks the driver for functions that it may not have.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [TOOL, "--tool", tool, *options, "--error-exitcode", "9", sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this GPU here: its driver refuses the debugger's interface")
    return done.returncode, done.stdout


def check(tool: str, metrics: dict) -> None:
    code, said = watched(tool, "planted", tool)
    found = summary(said)
    metrics["planted_errors"] = found or 0
    assert found is not None, f"{tool} ended with exit code {code} and no summary: {said[-1500:]}"
    if tool != "synccheck":  # there it is recorded, not required: not seen yet that it reports threads that have left
        assert found > 0, f"{tool} did not notice a planted fault: {said[-1500:]}"
    code, said = watched(tool, "cases")
    first = said.find("========= ", said.find("COMPUTE-SANITIZER") + 1)
    ran = re.search(r"(\d+) cases ran", said)
    assert code == 0 and summary(said) == 0, f"exit code {code}: {said[first : first + 1400]} … {said[-500:]}"
    assert ran, f"the set did not end: {said[-1500:]}"
    metrics["errors"], metrics["cases"] = 0, int(ran[1])


def test_memcheck(gate_metrics):
    check("memcheck", gate_metrics)


def test_racecheck(gate_metrics):
    check("racecheck", gate_metrics)


def test_synccheck(gate_metrics):
    check("synccheck", gate_metrics)


def test_initcheck(gate_metrics):
    check("initcheck", gate_metrics)


if __name__ == "__main__":
    if sys.argv[1:] == ["cases"]:
        print(f"{run_cases()} cases ran")
    elif len(sys.argv) == 3 and sys.argv[1] == "planted" and sys.argv[2] in PLANTED:
        run_planted(sys.argv[2])
    else:
        raise SystemExit(__doc__)
