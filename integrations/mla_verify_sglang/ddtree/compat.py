"""Where SGLang's releases differ in the DFLASH worker that DDTREE builds on."""

from __future__ import annotations

import contextlib
import copy


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
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs

    size, longest = accepted.path.shape
    output.next_token_logits = logits[accepted.rows(logits.shape[0] // size)]
    compute_spec_logprobs(batch, output, accepted.tokens.reshape(-1), chain_stride=longest)
