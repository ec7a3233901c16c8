"""Compile the Triton kernels for cards that need not be here, with the tiles chosen there; print JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from mla_verify import triton_kernels as k
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Opt-in shared memory of a block. sm_103 and 121 differ from 100 and 120 in nothing that these kernels use.
SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376}
POINTERS = dict(
    q="q", kv="kv", indices="i32", starts="i64", lens="i32", words="i32", node_starts="i32", part_out="fp32",
    part_lse="fp32", out="q", lse_out="fp32",
)  # fmt: skip
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "u8"}


def compile_kernel(kernel, capability: int, q: torch.dtype, kv: torch.dtype) -> dict:
    dtype = k.product_dtype(q, kv)
    cfg = k.config(dtype, divmod(capability, 10), 188, SHARED_LIMIT[capability])
    values = dict(
        WIDTH=128, DTYPE=k._DTYPES[dtype], E4M3=kv == torch.float8_e4m3fn, BLOCK_ROWS=cfg.block_rows,
        BLOCK_KEYS=cfg.block_keys, MAX_SPLITS=cfg.max_splits, MIN_SPLIT=cfg.min_split, STAGES=cfg.stages, CHUNK=32,
        COLUMNS=512 // cfg.tail_parts, SLOTS=triton.next_power_of_2(cfg.max_splits + 1),
    )  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in values:
            signature[name], constants[(i,)] = "constexpr", values[name]
        elif name in POINTERS:
            element = {"q": NAMES[q], "kv": NAMES[kv]}.get(POINTERS[name], POINTERS[name])
            signature[name], attributes[(i,)] = "*" + element, [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("score_scale", "kv_scale") else "i32"
    warps, stages = (cfg.warps, cfg.stages) if kernel is k._prefix else (cfg.warps, 1)
    built = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=warps, num_stages=stages),
    )
    return dict(
        kernel=kernel.fn.__name__, capability=capability, q=NAMES[q], kv=NAMES[kv],
        shared_bytes=built.metadata.shared, shared_limit=SHARED_LIMIT[capability], **_resources(built.asm["cubin"]),
        # sm_120 is what the tiles are cut for. On sm_90 and 100 the 8-bit kernel spills a little.
        must_not_spill=capability == 120,
    )  # fmt: skip


def _resources(cubin: bytes) -> dict:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", text)[1]),
        "local_bytes": int(re.search(r"LOCAL:(\d+)", text)[1]),
    }


if __name__ == "__main__":
    pairs = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)]
    report = [
        compile_kernel(kernel, capability, *pair)
        for capability in SHARED_LIMIT
        for pair in pairs
        for kernel in (k._prefix, k._tail)
    ]
    report += [compile_kernel(k._merge, c, *pairs[0]) for c in SHARED_LIMIT]
    print(json.dumps(report, indent=1))
