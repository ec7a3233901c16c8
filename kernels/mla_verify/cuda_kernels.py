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
BLOCK_ROWS = (16, 32, 64)  # query rows of a block: the fewest that hold a request's, for bits do not depend on it
THREADS = 256
MERGE_SLICES = 4  # blocks that join a row's partial results, 128 columns each
MOST_PIECES = 512  # room for the weights of a row's partial results in merge
WORKSPACE_BYTES = 1 << 28  # partial results of one launch; larger batches take several launches
SOURCE = Path(__file__).with_name("verify.cu")


@dataclass(frozen=True)
class SplitRule:
    """Into how many pieces a prefix is cut. It decides bits, so it depends on the device alone."""

    max_splits: int  # with the tree's block one wave, where a request's rows fit one block
    min_split: int = 64  # tokens of a piece at least: four tiles, or loading never overlaps


@dataclass(frozen=True)
class Variant:
    """What the source is compiled for, beside the architecture."""

    q: torch.dtype  # bf16 or fp16
    kv: torch.dtype  # the same, or e4m3
    index: torch.dtype  # slot ids: int32 or int64

    def shared_bytes(self, rows: int) -> int:
        """What a block of partial_rows asks for: its own struct, or that of the tree, which is always 16 rows."""
        return max(self.struct_bytes(rows), self.struct_bytes(16))

    def struct_bytes(self, rows: int) -> int:
        """sizeof(Shared<rows>) in verify.cu, which asserts it."""
        narrow = self.kv == torch.float8_e4m3fn
        stages = (10 if rows == 16 else 7) if narrow else (5 if rows == 16 else 4)
        always = stages * (16 * (592 if narrow else 1168) + 8) + 360 * rows + (16 * rows if narrow else 16)
        return always + (stages * 8 + 2056 if rows == 64 else 24)

    def macros(self) -> list[tuple[str, str]]:
        return [
            ("USE_BF16", str(int(self.q == torch.bfloat16))),
            ("KV_E4M3", str(int(self.kv == torch.float8_e4m3fn))),
            ("INDEX_TYPE", "int" if self.index == torch.int32 else "long long"),
            ("SHARED_BYTES_64", str(self.struct_bytes(64))),
            ("SHARED_BYTES_16", str(self.struct_bytes(16))),
        ]


VARIANTS = [
    Variant(q, kv, index)
    for q in (torch.bfloat16, torch.float16)
    for kv in (q, torch.float8_e4m3fn)
    for index in (torch.int32, torch.int64)
]


def unsupported(q_dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """ "" where the kernel takes these dtypes, else why not and what to use."""
    if Variant(q_dtype, kv_dtype, torch.int32) not in VARIANTS:
        return f"q {q_dtype} with kv {kv_dtype} is not compiled; q bfloat16 or float16, kv the same or float8_e4m3fn"
    if kv_dtype == torch.float8_e4m3fn and capability < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    return ""


def build(architecture: str, variant: Variant) -> bytes:
    """The cubin for ``architecture`` ("sm_120"), from the disk cache or compiled now (some seconds)."""
    import cuda.pathfinder
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    source, macros = SOURCE.read_text(encoding="utf-8"), variant.macros()
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((source, macros, architecture, version)).encode()).hexdigest()[:32]
    folder = cache_folder()
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


def cache_folder() -> Path:
    """Where cubins are kept: $MLA_VERIFY_CACHE, else ~/.cache/mla_verify."""
    return Path(os.environ.get("MLA_VERIFY_CACHE") or Path.home() / ".cache" / "mla_verify")


@functools.cache
def _kernels(device: int, variant: Variant):
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    major, minor = torch.cuda.get_device_capability(device)
    Device(device).set_current()
    code = ObjectCode.from_cubin(build(f"sm_{major}{minor}", variant))
    kernels = {"merge": code.get_kernel("merge")}
    for rows in BLOCK_ROWS:
        kernels[f"partial_{rows}"] = kernel = code.get_kernel(f"partial_{rows}")
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            variant.shared_bytes(rows),
            driver.CUkernel(int(kernel.handle)),
            driver.CUdevice(device),
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"this GPU refuses a block {variant.shared_bytes(rows):,} B of shared memory: {status.name}; "
                "use impl='triton'"
            )
    return kernels


@functools.cache
def split_rule(device: int) -> SplitRule:
    return SplitRule(min(MOST_PIECES, torch.cuda.get_device_properties(device).multi_processor_count) - 1)


@functools.lru_cache(maxsize=256)
def _stream(device: int, handle: int):
    from cuda.core import Device, Stream

    del device
    return Stream.from_handle(handle) if handle else Device().default_stream


def places(splits: int, others: int, rule: SplitRule) -> int:
    """Among how many blocks of 64 rows a request's ``splits`` pieces are dealt out; ``others``: its row blocks.

    As few as keep every multiprocessor busy: a block fills its registers and its ring once for all of its pieces. Bits
    do not depend on it.
    """

    def turns(blocks: int) -> int:  # pieces that a multiprocessor takes, one after the other
        return -(-blocks * others // (rule.max_splits + 1)) * -(-splits // blocks)

    return min(range(1, splits + 1), key=lambda blocks: (turns(blocks), blocks), default=0)  # 0: no prefix at all


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``args`` in the kernel's order: tensors, and numpy's int32 and float32.

    ``early``: its blocks may start while the last ones of the launch before still run, and wait for what those write.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    args: tuple[Tensor | np.int32 | np.float32, ...]
    early: bool = False


def plan(
    q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float, rule: SplitRule
) -> tuple[Tensor, Tensor, list[Launch]]:
    """out, lse and the launches that fill them, in order. Reads host facts alone."""
    rows, heads = q.shape[:2]
    out = q.new_empty(rows, heads, LATENT)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0:
        return out, lse, []
    q = q.contiguous()
    if q.data_ptr() % 16:  # read 16 B at a time
        q = q.clone()
    variant = Variant(q.dtype, kv.dtype, slots.indices.dtype)
    block_rows = next((b for b in BLOCK_ROWS if tree.max_nodes * heads <= b), BLOCK_ROWS[-1])
    splits = min(rule.max_splits, -(-slots.max_len // rule.min_split))
    blocks = -(-tree.max_nodes * heads // block_rows)
    row_bytes = (splits + 1) * (LATENT + 1) * 4
    block_step = max(1, min(blocks, WORKSPACE_BYTES // (row_bytes * block_rows)))
    max_rows = block_step * block_rows
    request_step = max(1, min(slots.batch, WORKSPACE_BYTES // (row_bytes * max_rows)))
    part_out = torch.empty(request_step, max_rows, splits + 1, LATENT, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(request_step, max_rows, splits + 1, dtype=torch.float32, device=q.device)
    i, f = np.int32, np.float32
    launches = []
    for r in range(0, slots.batch, request_step):
        requests = min(request_step, slots.batch - r)
        for b in range(0, blocks, block_step):
            count = min(block_step, blocks - b)
            partial = (
                q, kv, slots.indices, slots.starts, slots.lens, tree.words, tree.node_starts, part_out, part_lse,
                f(sm_scale * kv_scale * LOG2_E), i(r), i(b), i(heads), i(max_rows), i(splits), i(tree.words.shape[1]),
                i(rule.max_splits), i(rule.min_split),
            )  # fmt: skip
            each = places(splits, count, rule) if block_rows == 64 else splits
            grid = (count, block_rows // 16 + each, requests)  # a tree takes a block for every 16 rows
            launches.append(Launch(f"partial_{block_rows}", grid, THREADS, variant.shared_bytes(block_rows), partial))
            merge = (
                part_out, part_lse, slots.lens, tree.node_starts, out, lse, f(kv_scale), i(r), i(b * block_rows),
                i(heads), i(max_rows), i(splits), i(rule.max_splits), i(rule.min_split),
            )  # fmt: skip
            merged = min(count * block_rows, tree.max_nodes * heads - b * block_rows)
            launches.append(Launch("merge", (merged, requests, MERGE_SLICES), 256, 0, merge, early=True))
    return out, lse, launches


def verify(q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float) -> tuple[Tensor, Tensor]:
    from cuda.core import LaunchConfig, launch

    device = q.get_device()
    capability = torch.cuda.get_device_capability(device)
    if why := unsupported(q.dtype, kv.dtype, capability):
        raise ValueError(f"impl 'cuda': {why}; or use impl='triton'")
    if kv.data_ptr() % 16:
        raise ValueError(
            f"impl 'cuda': kv begins {kv.data_ptr() % 16} B behind a multiple of 16; pass a pool that owns its memory, "
            "or use impl='triton'"
        )
    out, lse, launches = plan(q, kv, slots, tree, sm_scale, kv_scale, split_rule(device))
    if launches:
        kernels = _kernels(device, Variant(q.dtype, kv.dtype, slots.indices.dtype))
        stream = _stream(device, torch.cuda.current_stream(device).cuda_stream)
    for one in launches:
        args = [a.data_ptr() if isinstance(a, Tensor) else a for a in one.args]
        shape = LaunchConfig(
            grid=one.grid, block=one.threads, shmem_size=one.shared_bytes,
            programmatic_stream_serialization=one.early and capability >= (9, 0),
        )  # fmt: skip
        launch(stream, shape, kernels[one.kernel], *args)
    return out, lse
