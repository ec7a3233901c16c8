"""What this machine's GPU does while a cell is measured, where nvidia-ml-py and a GPU are there."""

from __future__ import annotations

import statistics
import threading
from typing import Any

from .cells import Telemetry

PERIOD_S = 0.2


class Sampler:
    """``with Sampler() as s: …; s.telemetry``. Without NVML it measures nothing and says nothing."""

    def __init__(self) -> None:
        self.telemetry: Telemetry | None = None
        self._samples: list[tuple[float, ...]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no library, no driver, no GPU: the cell goes without
            return self
        self._thread = threading.Thread(target=self._loop, args=(pynvml, device), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=2)
        if self._samples:
            means = [round(statistics.fmean(column), 3) for column in zip(*self._samples, strict=True)]
            self.telemetry = Telemetry(samples=len(self._samples), **dict(zip(_FIELDS, means, strict=True)))

    def _loop(self, pynvml: Any, device: Any) -> None:
        while not self._stop.is_set():
            try:
                used = pynvml.nvmlDeviceGetUtilizationRates(device)
                self._samples.append(
                    (
                        used.gpu,
                        used.memory,
                        pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
                        pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
                        pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
                        pynvml.nvmlDeviceGetMemoryInfo(device).used / 2**30,
                    )
                )
            except Exception:  # a query that this card doesn't know ends the telemetry, never the cell
                return
            self._stop.wait(PERIOD_S)


_FIELDS = (
    "sm_busy_percent",
    "memory_busy_percent",
    "power_w",
    "sm_clock_mhz",
    "temperature_c",
    "memory_used_gib",
)
