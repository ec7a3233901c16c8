"""What the backend cannot serve, refused at start in words that name the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from mla_verify import HEAD_DIM, LATENT_DIM, MAX_NODES, ROPE_DIM

from . import BACKEND_NAME


class UnsupportedError(ValueError):
    """This server's model or flags are outside what the backend serves."""


def require_served(runner) -> None:
    """Raise UnsupportedError with every reason why this ModelRunner cannot use the backend."""
    flag = "--speculative-draft-attention-backend" if runner.is_draft_worker else "--attention-backend"
    reasons = list(_reasons(runner, flag))
    if reasons:
        raise UnsupportedError(f"{flag} {BACKEND_NAME} cannot serve this: " + "; ".join(reasons))


def _reasons(runner, flag: str) -> Iterator[str]:
    import torch
    from mla_verify.op import KV_DTYPES, QUERY_DTYPES

    model, args = runner.model_config, runner.server_args
    whose = "draft model" if runner.is_draft_worker else "model"
    names = ", ".join(getattr(model.hf_config, "architectures", None) or ["unknown"])
    if not runner.use_mla_backend:
        yield f"the {whose} {names} has no multi-head latent attention (MLA); use {flag} triton"
        return
    latent, rope = getattr(model, "kv_lora_rank", None), getattr(model, "qk_rope_head_dim", None)
    if (latent, rope) != (LATENT_DIM, ROPE_DIM):
        yield (
            f"the {whose} {names} has {latent} latent + {rope} rope columns, the kernel {LATENT_DIM} + "
            f"{ROPE_DIM}; use {flag} triton"
        )
    text_config = getattr(model, "hf_text_config", model.hf_config)
    if getattr(text_config, "index_topk", None):
        yield f"{names} attends a selected subset of tokens (index_topk); use {flag} dsa"
    if (runner.sliding_window_size or -1) > 0:
        yield f"sliding-window attention (window {runner.sliding_window_size}); use {flag} triton"
    if getattr(text_config, "attn_logit_softcapping", None):
        yield f"capped attention logits (attn_logit_softcapping); use {flag} triton"
    if model.dtype not in QUERY_DTYPES:
        yield f"--dtype {model.dtype} is none of bfloat16, float16, float32"
    pool = runner.token_to_kv_pool
    if pool.dtype not in KV_DTYPES:
        yield f"--kv-cache-dtype {pool.dtype}; use auto or fp8_e4m3"
    elif pool.dtype == torch.float8_e4m3fn and getattr(pool, "dsa_kv_cache_store_fp8", False):
        yield "the fp8 pool of a sparse-attention model has scales in its rows; use --kv-cache-dtype auto"
    else:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        if not isinstance(pool, MLATokenToKVPool) or getattr(pool, "kv_cache_dim", None) != HEAD_DIM:
            yield f"the K/V pool is a {type(pool).__name__}, expected MLATokenToKVPool of {HEAD_DIM} columns"
    nodes = args.speculative_num_draft_tokens or 1
    if nodes > MAX_NODES:
        yield f"--speculative-num-draft-tokens {nodes} is over {MAX_NODES}, the most nodes of a tree"
    for field, name in (
        ("dcp_size", "--dcp-size"),
        ("attn_cp_size", "--attn-cp-size"),
    ):
        if (getattr(args, field, 1) or 1) > 1:
            yield f"{name} {getattr(args, field)}: context parallelism is not supported; set it to 1"
    for field, name in (
        ("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        ("enable_pdmux", "--enable-pdmux"),
        ("enable_unified_memory", "--enable-unified-memory"),
        ("enable_hisparse", "--enable-hisparse"),
    ):
        if getattr(args, field, False):
            yield f"{name} is not supported; leave it out"
    if getattr(args, "dllm_algorithm", None):
        yield f"--dllm-algorithm {args.dllm_algorithm}: a diffusion model attends both ways"
