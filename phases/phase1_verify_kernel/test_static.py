"""Phase 1 gates on what the compiler made of verify.cu. No GPU needed: NVRTC compiles, Triton brings cuobjdump."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch
from mla_verify import cuda_kernels
from mla_verify.cuda_kernels import BLOCK_ROWS, THREADS, VARIANTS, Variant

for module in ("cuda.core", "cuda.bindings.nvrtc", "triton"):
    pytest.importorskip(module, reason="needs cuda-core, nvidia-cuda-nvrtc and Triton's cuobjdump")

pytestmark = pytest.mark.xdist_group("cubins")  # one worker compiles them, not all at once

TARGETS = (90, 100, 103, 120, 121)
OLDER = (80, 86, 89)  # cp.async in place of bulk copies; no e4m3 below 89
SHARED_PER_BLOCK = 101_376  # what sm_120 lets a block have; others have more
# sm_120: registers, warps and shared memory of an SM. The driver takes 1 KiB of shared memory for each block.
SM120_REGISTERS, SM120_WARPS, SM120_SHARED, BLOCK_RESERVE = 65_536, 48, 102_400, 1024
PLANNED_WARPS = 8  # one block a multiprocessor: plans/0002


def served(architecture: int) -> list[Variant]:
    """What is compiled here: everything for sm_90 and sm_120, SGLang's int32 slot ids for the others."""
    capability = divmod(architecture, 10)
    wide = architecture in (90, 120)
    return [
        v for v in VARIANTS
        if not cuda_kernels.unsupported(v.q, v.kv, capability) and (wide or v.index == torch.int32)
    ]  # fmt: skip


def tool(flag: str, cubin: bytes, folder: Path) -> str:
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, flag, str(path)], capture_output=True, text=True, check=True).stdout


@functools.cache
def cubin(architecture: int, variant: Variant) -> bytes:
    return cuda_kernels.build(f"sm_{architecture}", variant)


@pytest.fixture(scope="module")
def resources(tmp_path_factory) -> dict[tuple[int, Variant, str], dict[str, int]]:
    """Registers, stack, local and static shared bytes of every kernel of every cubin."""
    folder, found = tmp_path_factory.mktemp("cubins"), {}
    for architecture in (*TARGETS, *OLDER):
        for variant in served(architecture):
            text = tool("--dump-resource-usage", cubin(architecture, variant), folder)
            for name, usage in re.findall(r"Function (\w+):\s*\n\s*(.*)", text):
                values = {k.lower(): int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
                found[architecture, variant, name] = values
    return found


def test_cubins(resources, gate_metrics):
    """One cubin for each architecture and variant, with all of its kernels."""
    kernels = {name for _, _, name in resources}
    assert kernels == {"merge", *(f"partial_{rows}" for rows in BLOCK_ROWS)}
    gate_metrics["cubins"] = len(resources) // len(kernels)
    gate_metrics["architectures"] = len({architecture for architecture, _, _ in resources})


def test_shared_memory(resources, gate_metrics):
    """Dynamic shared memory, which verify.cu asserts against its own struct, is within a block's of sm_120."""
    largest = max(v.shared_bytes(rows) for v in VARIANTS for rows in BLOCK_ROWS)
    merge = max(usage["shared"] for (_, _, name), usage in resources.items() if name == "merge")
    gate_metrics["shared_bytes"] = max(largest, merge)
    assert merge <= 48 * 1024


def test_no_spills(resources, gate_metrics):
    """On the cards that the kernel is for. On sm_80 to 89 a few registers may spill: reported, not gated."""
    spilled = {key: usage["stack"] + usage["local"] for key, usage in resources.items()}
    gate_metrics["local_bytes"] = max(size for (a, _, _), size in spilled.items() if a in TARGETS)
    gate_metrics["local_bytes_older"] = max(size for (a, _, _), size in spilled.items() if a in OLDER)
    gate_metrics["cubins"] = len(spilled)


def test_registers(resources, gate_metrics):
    most = max(usage["reg"] for (a, _, _), usage in resources.items() if a in TARGETS)
    assert most * THREADS <= SM120_REGISTERS, "a block's registers do not fit a multiprocessor"
    gate_metrics["registers"] = most


def test_resident_warps(resources, gate_metrics):
    """Warps that an SM of sm_120 holds at once, over those that the plan counts on."""
    shares = []
    for (architecture, variant, name), usage in resources.items():
        if architecture == 120 and name != "merge":
            rows = int(name.removeprefix("partial_"))
            blocks = min(
                SM120_REGISTERS // (-(-usage["reg"] // 8) * 8 * THREADS),
                SM120_SHARED // (variant.shared_bytes(rows) + BLOCK_RESERVE),
                SM120_WARPS // (THREADS // 32),
            )
            shares.append(blocks * (THREADS // 32) / PLANNED_WARPS)
    gate_metrics["planned_share"] = min(shares)


def test_sass(gate_metrics, tmp_path):
    """The instructions that the plan names, and none that only some of the targets have."""
    for architecture in (*TARGETS, 80):
        for variant in (Variant(torch.bfloat16, torch.bfloat16, torch.int32), VARIANTS[2]):
            if variant not in served(architecture):
                continue
            sass = tool("--dump-sass", cubin(architecture, variant), tmp_path)
            per_kernel = dict(re.findall(r"Function : (\w+)(.*?)(?=Function :|\Z)", sass, re.DOTALL))
            for rows in BLOCK_ROWS:
                body = per_kernel[f"partial_{rows}"]
                wanted = {"HMMA.16816.F32": 17 * rows // 16, "LDSM": 9, "LDGSTS": 1}
                if architecture >= 90:
                    wanted |= {"UBLKCP": 1, "SYNCS": 2}
                for instruction, least in wanted.items():
                    count = body.count(instruction)
                    assert count >= least, f"sm_{architecture} partial_{rows}: {count} {instruction}, wanted {least}"
                assert "HGMMA" not in body and "UTCHMMA" not in body
                if architecture in TARGETS:
                    assert not re.search(r"\b(LDL|STL)\b", body), f"sm_{architecture} partial_{rows} uses local memory"
    gate_metrics["architectures"] = len(TARGETS) + 1


def test_prediction(gate_metrics):
    """Times on sm_120 cards, predicted from the newest record that timed the kernel."""
    import predict

    here = predict.MEASURED_CARDS["NVIDIA H200"]
    known = predict.Measured(here, 4270, 628, {(8, 1): 82.0, (8, 8): 113.0, (16, 16): 398.0, (64, 64): 7800.0})
    same = predict.Card("itself", here.multiprocessors, here.clock_ghz, here.bandwidth_gb_s, known.mma_tflops)
    for (h, n), us in known.us.items():
        assert predict.predict(known, same, h * n, us) == pytest.approx(us), "the model does not give back its own card"
    measured = predict.newest(Path(__file__).resolve().parents[2] / "results")
    if measured is None:
        pytest.skip("no record in results/ times the CUDA kernel on a card that predict.py knows")
    for what, us in predict.predictions(measured).items():
        gate_metrics[f"predicted us {what}"] = us
    assert all(us > predict.LENGTH * predict.ROW_BYTES / 1792e3 for us in gate_metrics.values()), "faster than memory"
