"""Phase 1 gates under NVIDIA's compute-sanitizer: no bad access, race, barrier misuse or read of unwritten memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="needs compute-sanitizer, of the CUDA toolkit"),
]
KERNELS = "kernel_substring=partial_"


def cases():
    """Every code path: 16, 32 and 64 rows a block, trees of 1 to 128, no prefix, padding, whole and broken tiles."""
    from mla_verify.cuda_kernels import VARIANTS, unsupported
    from mla_verify.testing import Case

    capability = torch.cuda.get_device_capability()
    for v in VARIANTS:
        if unsupported(v.q, v.kv, capability):
            continue
        told = dict(q_dtype=v.q, kv_dtype=v.kv, wide_index=v.index == torch.int64)
        yield Case((70,), (1,), heads=16, **told)
        yield Case((0, -1, 33), (4, 4, 4), heads=8, **told)
        yield Case((64, 17), (33, 16), heads=4, branching=1.0, **told)
        yield Case((200,), (128,), heads=1, **told)


def check(tool: str, metrics: dict) -> None:
    # One allocation a tensor, so that a read past the end of one is not a read of the next.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [TOOL, "--tool", tool, "--kernel-name", KERNELS, "--error-exitcode", "9", sys.executable, __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    said = done.stdout + done.stderr
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    assert done.returncode == 0 and found and found[1] == "0", said[-3000:]
    assert "cases ran" in said, said[-3000:]
    metrics["errors"] = int(found[1])
    metrics["cases"] = int(re.search(r"(\d+) cases ran", said)[1])


def test_memcheck(gate_metrics):
    check("memcheck", gate_metrics)


def test_racecheck(gate_metrics):
    check("racecheck", gate_metrics)


def test_synccheck(gate_metrics):
    check("synccheck", gate_metrics)


def test_initcheck(gate_metrics):
    check("initcheck", gate_metrics)


if __name__ == "__main__":
    count = 0
    for case in cases():
        case.build("cuda").run("cuda")
        torch.cuda.synchronize()
        count += 1
    print(f"{count} cases ran")
