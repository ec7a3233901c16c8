"""Where SGLang's releases differ. Everything else in this package is one code path for all of them."""

from __future__ import annotations

import contextlib
import copy
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


# ---- DDTREE on SGLang's DFLASH worker ----


def with_draft_width(server_args, block: int):
    """A copy that says ``block`` draft tokens where a release builds the drafter from its server arguments."""
    if not hasattr(server_args, "override"):
        return server_args  # it reads the context, which the worker overrides
    copied = copy.deepcopy(server_args)
    copied.override("mla_verify.ddtree", speculative_num_draft_tokens=block)
    return copied


def gather_verify_logits(worker) -> None:
    """Have verify's logits whole on every rank: newer releases leave shards to their own accept step."""
    processor = getattr(worker, "_target_logits_processor", None)
    if processor is not None:
        processor.defer_verify_gather = False
        worker._target_logits_processor = None


def draft_embedding(worker, ids):
    """The embedding of ``ids`` [tokens] that the release's DFLASH feeds a drafter: [tokens, hidden]."""
    import torch
    from sglang.srt.speculative import dflash_worker_v2

    whole = getattr(worker, "_full_embed_gpu", None)
    if whole is not None:
        found = torch.nn.functional.embedding(ids, whole)
    else:
        target = worker.target_worker.model_runner.model
        resolve = getattr(dflash_worker_v2, "_resolve_dflash_embedding_module", None)
        found = (resolve(worker.draft_model, target) if resolve else target.get_input_embeddings())(ids)
    scale = getattr(worker, "_noise_embed_scale", 1.0)
    return found if scale == 1.0 else found * scale


def host_lens(batch, more: int):
    """int32 [batch] on the host, at least each request's length and ``more``; for planning alone."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu.int() + more
    for name in ("reserved_seq_lens_cpu", "nxt_kv_lens_cpu"):
        reserved = getattr(batch.spec_info, name, None)
        if reserved is not None:
            return reserved.int()
    return batch.seq_lens.cpu().int() + more


def draft_batch(worker, batch, slots, lens, host, prefix, **fields):
    """The ForwardBatch of a drafter's block: ``slots`` [batch * block] are written, ``lens`` [batch] precede them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    made = ForwardBatch(
        req_pool_indices=batch.req_pool_indices, seq_lens=lens, out_cache_loc=slots, seq_lens_sum=int(host.sum()),
        seq_lens_cpu=host, **fields,
    )  # fmt: skip
    translator = getattr(worker.target_worker.model_runner, "kv_index_translator", None)
    if translator is None:
        return made
    block = slots.numel() // len(host)
    plan = translator.plan(
        req_pool_indices=batch.req_pool_indices, seq_lens=prefix, seq_lens_cpu=host, write_virtual=slots,
        read_extent=block,
    )  # fmt: skip
    own = worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        plan = plan.reads_from(own, seq_lens=lens, seq_lens_cpu=host, read_extent=block)
    plan.bind(made, own)
    made.can_run_decode_cuda_graph = batch.can_run_decode_cuda_graph
    made.global_num_token_non_padded_cpu = slots.numel()
    return made


def draft_scope(worker):
    """The parallel layout that the drafter runs in."""
    layout = getattr(worker, "draft_parallel_layout", None)
    if layout is None:
        return contextlib.nullcontext()
    from sglang.srt.speculative.dflash_worker_v2 import draft_tp_context

    return draft_tp_context(layout)


def path_logprobs(batch, output, accepted, logits) -> None:
    """Log-probabilities of the committed tokens; releases without this never get such a request here."""
    import torch
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs

    size, longest = accepted.path.shape
    nodes = logits.shape[0] // size
    rows = accepted.path.clamp(max=nodes - 1) + nodes * torch.arange(size, device=logits.device)[:, None]
    output.next_token_logits = logits[rows.view(-1)]
    compute_spec_logprobs(batch, output, accepted.tokens.reshape(-1), chain_stride=longest)
