"""Where SGLang's releases differ. Everything else in this package is one code path for all of them."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
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


def keep_ngram_flat() -> None:
    """Releases whose NGRAM worker copies every request's whole prompt, twice a step, get to copy its end alone.

    Their copies of a prompt of 185,000 tokens take milliseconds a step, and only the last tokens are looked at.
    """
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    for name in ("_prepare_draft_tokens", "_update_ngram_corpus"):
        method = getattr(NGRAMWorker, name)
        if not hasattr(method, "__wrapped__") and "list(req.origin_input_ids)" in inspect.getsource(method):
            setattr(NGRAMWorker, name, on_prompt_tails(method))


def keep_ngram_masks_short(runner) -> None:
    """NGRAM's worker hands over QLEN_ONLY, which SGLang has for CPUs alone, where this backend verifies.

    FULL_MASK is a byte for each node and token of context, built anew each step, request by request.
    """
    from sglang.srt.speculative import ngram_worker

    from . import BACKEND_NAME

    args = runner.server_args
    decodes = args.speculative_attention_mode == "decode"
    verifies = (args.decode_attention_backend if decodes else args.prefill_attention_backend) or args.attention_backend
    if verifies == BACKEND_NAME and runner.device != "cpu" and hasattr(ngram_worker, "USE_FULL_MASK"):
        ngram_worker.USE_FULL_MASK = False


def on_prompt_tails(method):
    """``method`` (worker, batch), for which a prompt has its own length and its last ``max_trie_depth`` tokens."""

    @functools.wraps(method)
    def wrapped(self, batch):
        whole = batch.reqs
        batch.reqs = [_Tailed(req, self.max_trie_depth) for req in whole]
        try:
            return method(self, batch)
        finally:
            batch.reqs = whole

    return wrapped


class _Tailed:
    """A request whose ``origin_input_ids`` are listed by their end."""

    def __init__(self, req, count: int) -> None:
        self._req, self.origin_input_ids = req, _Tail(req.origin_input_ids, count)

    def __getattr__(self, name: str):
        return getattr(self._req, name)


class _Tail:
    def __init__(self, ids, count: int) -> None:
        self._ids, self._count = ids, count

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self):
        return iter(self._ids[-self._count :])
