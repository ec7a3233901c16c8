"""Where SGLang's releases differ. Everything else in this package is one code path for all of them."""

from __future__ import annotations

import importlib.metadata
import os
import re

TESTED = ("0.5.17", "0.5.23")  # first and last release that the gates run on
ALLOW_UNTESTED = "MLA_VERIFY_ALLOW_UNTESTED_SGLANG"


def require_tested_sglang() -> None:
    """Raise RuntimeError when the installed SGLang is outside ``TESTED`` and nobody asked for that."""
    found = importlib.metadata.version("sglang")
    if os.environ.get(ALLOW_UNTESTED, "0") == "1":
        return
    if not _numbers(TESTED[0]) <= _numbers(found) <= _numbers(TESTED[1]):
        raise RuntimeError(
            f"SGLang {found} is outside the tested range {TESTED[0]} to {TESTED[1]}; install one in it, "
            f"or set {ALLOW_UNTESTED}=1 to try this one"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version.split("+")[0])[:3])


def read_ends(mode):
    """When a step of forward mode ``mode`` stops reading ``req_to_token``: only when its graph has run.

    The scheduler writes the table for the next step while this one runs. SGLang's own backends copy what they
    read before the graph starts; this one reads the table inside, so it must not be announced as done
    earlier. Releases before ``SharedReadEnds`` are told by ``fence_whole_steps``.
    """
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    graph = mode.is_decode() or mode.is_target_verify()
    return SharedReadEnds.POST_REPLAY if graph else SharedReadEnds.UNKNOWN


def fence_whole_steps() -> None:
    """Say the same to releases that announce it before every decode graph without asking."""
    from sglang.srt.layers.attention import base_attn_backend

    if not hasattr(base_attn_backend, "SharedReadEnds"):
        os.environ.setdefault("SGLANG_FORCE_COARSE_WAR_BARRIER", "1")
