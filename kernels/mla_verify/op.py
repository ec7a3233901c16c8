"""``verify``: the checks that every implementation shares, the choice among them, and the torch.library op."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os

import torch
from torch import Tensor

from .reference import LATENT_DIM
from .slots import Slots
from .tree import Tree

ROPE_DIM = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
MAX_HEADS = 128
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)
_MODULES = {"reference": "reference", "triton": "triton_kernels", "cuda": "cuda_kernels"}


def implementations(device: torch.device | str | None = None) -> dict[str, str]:
    """Each implementation by name: "" where it can run on ``device``, else one sentence saying why not.

    ``device`` is this machine's GPU if it has one, else its CPU.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {"reference": "", "triton": _why_not_triton(device), "cuda": _why_not_cuda(device)}


@functools.cache
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _why_not_cuda(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CUDA kernels do not run on {device.type}"
    if not _installed("cuda.core"):
        return "cuda.core is not installed; pip install 'mla-verify[cuda]'"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return ""


@functools.cache
def _why_not_interpreter() -> str:
    triton, numpy = (importlib.metadata.version(name) for name in ("triton", "numpy"))
    if triton.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
        return (
            f"Triton {triton}'s interpreter fails with numpy {numpy}; pip install 'numpy<2.4', or Triton 3.7 or newer"
        )
    return ""


def _why_not_triton(device: torch.device) -> str:
    if not _installed("triton"):
        return "Triton is not installed; torch's CUDA wheels bring it, or pip install 'mla-verify[interpreter]'"
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return _why_not_interpreter()
    if device.type != "cuda":
        return f"Triton has no {device.type} target; set TRITON_INTERPRET=1 to run it in its interpreter (tests)"
    return ""


def choose(device: torch.device | str, q_dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None) -> str:
    """The implementation that ``impl=None`` means: $MLA_VERIFY_IMPL, else the fastest that runs on ``device``.

    The CUDA kernel takes bf16 or fp16 queries, and K/V of the same dtype or e4m3. Where it can run it is the fastest at
    the shapes of a verify step (plans/0002).
    """
    wanted = os.environ.get("MLA_VERIFY_IMPL", "auto")
    if wanted not in ("auto", ""):
        return wanted
    device = torch.device(device)
    if device.type != "cuda":
        return "reference"
    if not _why_not_cuda(device):
        from .cuda_kernels import unsupported

        if q_dtype is None or not unsupported(q_dtype, kv_dtype, torch.cuda.get_device_capability(device)):
            return "cuda"
    return "reference" if _why_not_triton(device) else "triton"


def verify(
    q: Tensor,
    kv: Tensor,
    slots: Slots,
    tree: Tree,
    *,
    sm_scale: float,
    kv_scale: float = 1.0,
    impl: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention of draft-tree nodes (or of single decode tokens) over their requests' K/V.

    q         [T, H, 576] bf16, fp16 or fp32: T nodes of all requests, request-major; 512 latent + 64 rope; H 1..128
    kv        [S, 576] or [S, 1, 576], the pool: bf16, fp16, fp32 or float8_e4m3fn. V is the first 512 columns
    slots     where each request's tokens lie; the last ones are its tree's nodes, whose K/V are already written
    tree      which nodes see which; every node sees the whole prefix
    sm_scale  multiplies q·k. The model's own (qk head dim ** -0.5, times any YaRN factor), hence no default
    kv_scale  a stored element times this is its value; 1.0 for an unscaled pool
    impl      "reference", "triton", "cuda", or None: ``choose``
    checked   also look at the contents (slot ids, lengths, tree words). Waits for the device; not while capturing

    Returns out [T, H, 512] in q's dtype and lse [T, H] float32, natural log. A row with nothing to see gives 0, -inf.
    A row's bits do not depend on the other requests, on its siblings, on where its slots lie, or on graph capture.
    Raises ValueError for an argument that does not fit, RuntimeError where the implementation can't run here.
    """
    if kv.dim() == 3 and kv.shape[1] == 1:
        kv = kv.squeeze(1)
    name = impl if impl not in (None, "auto") else choose(q.device, q.dtype, kv.dtype)
    _check(q, kv, slots, tree, name)
    if checked:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("checked=True reads the device, which a CUDA graph capture forbids; check before it")
        tree.check()
        slots.check(kv.shape[0], tree.nodes())
    return torch.ops.mla_verify.verify(
        q, kv, slots.indices, slots.starts, slots.lens, slots.max_len, tree.words, tree.node_starts,
        tree.max_nodes, float(sm_scale), float(kv_scale), name,
    )  # fmt: skip


def _check(q: Tensor, kv: Tensor, slots: Slots, tree: Tree, name: str) -> None:
    """Shapes, dtypes and devices: host facts, checked on every call."""
    if q.dim() != 3 or q.shape[2] != HEAD_DIM:
        raise ValueError(f"q has shape {list(q.shape)}; expected [rows, heads, {HEAD_DIM}]")
    if not 1 <= q.shape[1] <= MAX_HEADS:
        raise ValueError(f"q has {q.shape[1]} heads; expected 1 to {MAX_HEADS}")
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; expected bfloat16, float16 or float32")
    if kv.dim() != 2 or kv.shape[1] != HEAD_DIM:
        raise ValueError(f"kv has shape {list(kv.shape)}; expected [slots, {HEAD_DIM}] or [slots, 1, {HEAD_DIM}]")
    if kv.dtype not in KV_DTYPES:
        raise ValueError(f"kv has dtype {kv.dtype}; expected bfloat16, float16, float32 or float8_e4m3fn")
    if kv.stride(1) != 1 or kv.stride(0) != HEAD_DIM:
        raise ValueError(f"kv has strides {kv.stride()}; expected contiguous rows, ({HEAD_DIM}, 1)")
    if tree.rows != q.shape[0]:
        raise ValueError(f"tree has {tree.rows} nodes but q has {q.shape[0]} rows; one row of q per node")
    if tree.batch != slots.batch:
        raise ValueError(f"tree has {tree.batch} requests but slots has {slots.batch}")
    for what, tensor in (
        ("kv", kv), ("slots.indices", slots.indices), ("tree.words", tree.words),
        ("tree.node_starts", tree.node_starts),
    ):  # fmt: skip
        if tensor.device != q.device:
            raise ValueError(f"{what} is on {tensor.device} but q is on {q.device}; put them on one device")
    if name not in _MODULES:
        raise ValueError(f"impl is {name!r}; expected one of {', '.join(_MODULES)} (impl= or MLA_VERIFY_IMPL)")
    why = {"reference": lambda _: "", "triton": _why_not_triton, "cuda": _why_not_cuda}[name](q.device)
    if why:
        raise RuntimeError(f"impl {name!r} cannot run here: {why}")


@torch.library.custom_op("mla_verify::verify", mutates_args=())
def _verify(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    starts: Tensor,
    lens: Tensor,
    max_len: int,
    words: Tensor,
    node_starts: Tensor,
    max_nodes: int,
    sm_scale: float,
    kv_scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    module = importlib.import_module(f"{__package__}.{_MODULES[impl]}")
    slots, tree = Slots(indices, starts, lens, max_len), Tree(words, node_starts, max_nodes)
    return module.verify(q, kv, slots, tree, sm_scale, kv_scale)


@_verify.register_fake
def _(q, kv, indices, starts, lens, max_len, words, node_starts, max_nodes, sm_scale, kv_scale, impl):
    return q.new_empty(q.shape[0], q.shape[1], LATENT_DIM), q.new_empty(q.shape[:2], dtype=torch.float32)
