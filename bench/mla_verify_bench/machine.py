"""What this machine is: its GPU or CPU, its memory, the versions of the libraries that a figure depends on.

``python -m mla_verify_bench.machine`` prints it as JSON. The gate runner asks that way, in a process of its own,
so that it never holds a CUDA context beside the code it measures. Needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from typing import Any

LIBRARIES = {
    "mla-verify": "mla-verify",
    "torch": "torch",
    "triton": "triton",
    "cuda-core": "cuda-core",
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "numpy": "numpy",
}
"""Name in a record -> name of the distribution."""

_SMI = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def versions() -> dict[str, str]:
    """Versions of Python and of each of ``LIBRARIES`` in this interpreter; "" where it is not installed."""
    found = {"python": platform.python_version()}
    for name, distribution in LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def gpu() -> tuple[dict[str, Any] | None, str]:
    """The GPU that torch would use, or None and one sentence saying why there is none."""
    smi = _nvidia_smi()
    seen = f"; nvidia-smi lists {smi['name']}" if smi else ""
    if importlib.util.find_spec("torch") is None:
        return None, f"torch is not installed{seen}"
    import torch

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU{seen}"
    properties = torch.cuda.get_device_properties(0)
    told = _nvml() or {k: v for k, v in (smi or {}).items() if k != "name"}
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "shared_memory_per_block_bytes": getattr(properties, "shared_memory_per_block_optin", 0),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda or "",
        **told,
    }, ""


def _nvml_handle():
    """torch's device 0, found by PCI address: CUDA_VISIBLE_DEVICES shifts numbers."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    p = torch.cuda.get_device_properties(0)
    return pynvml.nvmlDeviceGetHandleByPciBusId(
        f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0".encode()
    )


def busy_percent(samples: int = 8, period_s: float = 0.25) -> float | None:
    """How busy the GPU is while we ask nothing of it, the least of some samples; None where it does not say."""
    try:
        import pynvml

        handle = _nvml_handle()
        least = 100.0
        for _ in range(samples):
            time.sleep(period_s)  # first: what asked for the handle is over then
            least = min(least, float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        return least
    except Exception:  # as in _nvml
        return None


def _nvml() -> dict[str, Any] | None:
    """Driver, clocks and power limit of torch's device 0."""
    try:
        import pynvml

        handle = _nvml_handle()
        driver = pynvml.nvmlSystemGetDriverVersion()
        return {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "clock_sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "clock_memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "clock_sm_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "clock_memory_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
        }
    except Exception:  # the library, the driver or one query may be missing: nvidia-smi is asked instead
        return None


def _nvidia_smi() -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        cells = [cell.strip() for cell in done.stdout.splitlines()[0].split(",")]
        name, driver, _, sm, mem, sm_max, mem_max, power = cells
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None

    def number(text: str) -> float:
        return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0

    return {
        "name": name,
        "driver": driver,
        "clock_sm_mhz": number(sm),
        "clock_memory_mhz": number(mem),
        "clock_sm_max_mhz": number(sm_max),
        "clock_memory_max_mhz": number(mem_max),
        "power_limit_w": number(power),
    }


def cpu() -> dict[str, Any]:
    """Model, usable cores and memory of this machine."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        memory = 0
    return {"model": model, "cores": cores, "memory_bytes": memory, "architecture": platform.machine()}


def describe() -> dict[str, Any]:
    """GPU or the reason there is none, CPU, operating system, library versions."""
    device, why_not = gpu()
    return {
        "gpu": device,
        "no_gpu_because": why_not,
        "cpu": cpu(),
        "system": platform.system(),
        "versions": versions(),
    }


def classes(capability: str | None) -> list[str]:
    """Hardware classes that a GPU of this compute capability serves; None is a machine without one.

    A capability 12.x card is sm_120 and also a GPU; every machine is of class any.
    """
    if not capability:
        return ["any"]
    return ["any", "gpu", "sm_120"] if capability.split(".")[0] == "12" else ["any", "gpu"]


def slug(text: str) -> str:
    """A file name for a machine: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


if __name__ == "__main__":
    told = {"--versions": lambda: {"versions": versions()}, "--busy": lambda: {"busy_percent": busy_percent()}}
    print(json.dumps(told.get(sys.argv[1] if len(sys.argv) > 1 else "", describe)()))
