"""``verify`` in CUDA C++ (``verify.cu``), compiled with NVRTC through cuda.core and cached on disk.

A user needs no CUDA toolkit: torch's CUDA wheels bring NVRTC and the headers. A machine with no GPU can compile too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .slots import Slots
from .tree import Tree

LATENT = 512
LOG2_E = 1.4426950408889634
BLOCK_ROWS = 32  # ROWS in verify.cu
SHARED_BYTES = 90_368  # sizeof(Shared) in verify.cu
MOST_PIECES = 512  # room for the weights of a row's partial results in merge
WORKSPACE_BYTES = 1 << 28  # partial results of one launch; larger batches take several launches
SOURCE = Path(__file__).with_name("verify.cu")


@dataclass(frozen=True)
class SplitRule:
    """Into how many pieces a prefix is cut. It decides bits, so it depends on the device alone."""

    max_splits: int  # one wave of blocks at 32 query rows
    min_split: int = 64  # tokens of a piece at least: four tiles, or loading never overlaps


def supports(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """ "" where the kernel takes these dtypes, else what to use instead."""
    if q_dtype == kv_dtype and q_dtype in (torch.bfloat16, torch.float16):
        return ""
    return f"q {q_dtype} with kv {kv_dtype} is not compiled; both bfloat16 or both float16, or impl='triton'"


def _macros(q_dtype: torch.dtype, index_dtype: torch.dtype) -> list[tuple[str, str]]:
    return [
        ("USE_BF16", "1" if q_dtype == torch.bfloat16 else "0"),
        ("INDEX_TYPE", "int" if index_dtype == torch.int32 else "long long"),
    ]


def build(architecture: str, q_dtype: torch.dtype, index_dtype: torch.dtype) -> bytes:
    """The cubin for ``architecture`` ("sm_120"), from the disk cache or compiled now (about a second)."""
    import cuda.pathfinder
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    source, macros = SOURCE.read_text(), _macros(q_dtype, index_dtype)
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((source, macros, architecture, version)).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("MLA_VERIFY_CACHE", Path.home() / ".cache" / "mla_verify"))
    cached = folder / f"verify-{architecture}-{key}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    headers = cuda.pathfinder.find_nvidia_header_directory("cudart")
    if headers is None:
        raise RuntimeError("CUDA's headers are not installed; pip install nvidia-cuda-runtime, or use impl='triton'")
    options = ProgramOptions(arch=architecture, std="c++17", include_path=[headers], define_macro=macros)
    cubin = bytes(Program(source, "c++", options).compile("cubin").code)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as f:
            f.write(cubin)
        os.replace(f.name, cached)  # another process sees the whole file or none
    except OSError:
        pass  # a read-only home costs a compilation, not an answer
    return cubin


@functools.cache
def _kernels(device: int, q_dtype: torch.dtype, index_dtype: torch.dtype):
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    major, minor = torch.cuda.get_device_capability(device)
    Device(device).set_current()
    code = ObjectCode.from_cubin(build(f"sm_{major}{minor}", q_dtype, index_dtype))
    partial, merge = code.get_kernel("partial"), code.get_kernel("merge")
    (status,) = driver.cuKernelSetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        SHARED_BYTES,
        driver.CUkernel(int(partial.handle)),
        driver.CUdevice(device),
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"this GPU refuses a block {SHARED_BYTES:,} B of shared memory: {status.name}; use impl='triton'"
        )
    return partial, merge


@functools.cache
def split_rule(device: int) -> SplitRule:
    return SplitRule(min(MOST_PIECES - 1, torch.cuda.get_device_properties(device).multi_processor_count))


@functools.lru_cache(maxsize=256)
def _stream(device: int, handle: int):
    from cuda.core import Device, Stream

    del device
    return Stream.from_handle(handle) if handle else Device().default_stream


def verify(q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float) -> tuple[Tensor, Tensor]:
    from cuda.core import LaunchConfig, launch

    if why := supports(q.dtype, kv.dtype):
        raise ValueError(why)
    rows, heads = q.shape[:2]
    out = q.new_empty(rows, heads, LATENT)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0:
        return out, lse
    q = q.contiguous()
    device = q.get_device()
    partial, merge = _kernels(device, q.dtype, slots.indices.dtype)
    rule = split_rule(device)
    stream = _stream(device, torch.cuda.current_stream(device).cuda_stream)
    splits = min(rule.max_splits, -(-slots.max_len // rule.min_split))
    blocks = -(-tree.max_nodes * heads // BLOCK_ROWS)
    row_bytes = (splits + 1) * (LATENT + 1) * 4
    block_step = max(1, min(blocks, WORKSPACE_BYTES // (row_bytes * BLOCK_ROWS)))
    max_rows = block_step * BLOCK_ROWS
    request_step = max(1, min(slots.batch, WORKSPACE_BYTES // (row_bytes * max_rows)))
    part_out = torch.empty(request_step, max_rows, splits + 1, LATENT, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(request_step, max_rows, splits + 1, dtype=torch.float32, device=q.device)
    i, f = np.int32, np.float32
    for r in range(0, slots.batch, request_step):
        requests = min(request_step, slots.batch - r)
        for b in range(0, blocks, block_step):
            count = min(block_step, blocks - b)
            launch(
                stream, LaunchConfig(grid=(count, splits + 1, requests), block=256, shmem_size=SHARED_BYTES), partial,
                q.data_ptr(), kv.data_ptr(), slots.indices.data_ptr(), slots.starts.data_ptr(), slots.lens.data_ptr(),
                tree.words.data_ptr(), tree.node_starts.data_ptr(), part_out.data_ptr(), part_lse.data_ptr(),
                f(sm_scale * kv_scale * LOG2_E), i(r), i(b), i(heads), i(max_rows), i(splits), i(tree.words.shape[1]),
                i(rule.max_splits), i(rule.min_split),
            )  # fmt: skip
            merged = min(count * BLOCK_ROWS, tree.max_nodes * heads - b * BLOCK_ROWS)
            launch(
                stream, LaunchConfig(grid=(merged, requests), block=512), merge,
                part_out.data_ptr(), part_lse.data_ptr(), slots.lens.data_ptr(), tree.node_starts.data_ptr(),
                out.data_ptr(), lse.data_ptr(), f(kv_scale), i(r), i(b * BLOCK_ROWS), i(heads), i(max_rows), i(splits),
                i(rule.max_splits), i(rule.min_split),
            )  # fmt: skip
    return out, lse
