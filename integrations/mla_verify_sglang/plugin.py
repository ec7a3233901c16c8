"""The entry point ``sglang.srt.plugins``: registers the attention backend in every SGLang process.

SGLang logs what a plugin raises and goes on without it. So ``register`` keeps its error, and the backend's
factory, which SGLang does not shield, raises it: a server that was asked for this backend never starts on
another one. Only the standard library is imported at the top, for an import error here would be swallowed as
well.
"""

from __future__ import annotations

import logging

from . import BACKEND_NAME

logger = logging.getLogger(__name__)

_error: BaseException | None = None


class PluginError(RuntimeError):
    """The plugin did not load; carries the reason to a place where SGLang lets it through."""


def register() -> None:
    """Make ``--attention-backend mla_verify`` known. Never raises: see ``create_backend``."""
    global _error
    try:
        # First the name and the factory, so that whatever fails afterwards has a place to be raised from.
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import add_attention_backend_choices

        add_attention_backend_choices([BACKEND_NAME])
        register_attention_backend(BACKEND_NAME)(create_backend)
        _prepare()
    except Exception as error:  # noqa: BLE001 - kept, and raised by create_backend
        _error = error
        logger.error("The %s plugin failed: %s", BACKEND_NAME, error)


def _prepare() -> None:
    """What can fail: the release check, our imports, the DeepSeek dispatch, DDTREE, the defragmenter's hooks."""
    from .compat import require_tested_sglang

    require_tested_sglang()
    import mla_verify  # noqa: F401 - a broken install is found here, not at the first step
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    # Without a handler SGLang sends prefix-free prefill down the non-absorbed path, as if this were "triton".
    AttentionBackendRegistry.register(BACKEND_NAME, absorbed_attention)
    from .ddtree import algorithm
    from .defrag import serving

    algorithm.register()
    serving.register()


def create_backend(runner):
    """The factory that SGLang calls with its ModelRunner when a server wants this backend.

    Raises PluginError when ``register`` failed and UnsupportedError (refusals) for what the backend cannot
    serve.
    """
    if _error is not None:
        raise PluginError(
            f"--attention-backend {BACKEND_NAME} cannot serve: its plugin failed to load: "
            f"{type(_error).__name__}: {_error}"
        ) from _error
    from .backend import MlaVerifyBackend
    from .compat import keep_ngram_flat, keep_ngram_masks_short
    from .defrag import serving

    serving.require_installed()
    keep_ngram_flat()
    keep_ngram_masks_short(runner)
    return MlaVerifyBackend(runner)


def absorbed_attention(attn, forward_batch):
    """Handler of the DeepSeek models: always the absorbed form, q [T, H, 576] against the latent pool.

    SGLang 0.5.17 asks here for an MLA drafter's steps too: what serves those has no name there, so it goes by the
    server's. They are answered by the handler of the backend that --speculative-draft-attention-backend names.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.runtime_context import get_spec

    backend, drafts = get_attn_backend(), get_spec().speculative_draft_attention_backend
    if backend.prefill_attention_backend_str is None and drafts not in (None, BACKEND_NAME):
        attn.current_attention_backend = drafts
        return AttentionBackendRegistry.get_handler(drafts)(attn, forward_batch)
    _require_ours(backend)
    return AttnForwardMethod.MLA


_seen: set[int] = set()


def _require_ours(backend) -> None:
    """Raise when SGLang resolved the name to this backend but built another one.

    It does so when --prefill-attention-backend and --decode-attention-backend both name it: they agree, so
    SGLang builds what --attention-backend says.
    """
    if id(backend) in _seen:
        return
    from .backend import MlaVerifyBackend

    wrapped = ("prefill_backend", "decode_backend", "full_attn_backend", "primary")
    parts, found = [backend], False
    while parts and not found:
        part = parts.pop()
        found = isinstance(part, MlaVerifyBackend)
        parts += [p for p in (getattr(part, name, None) for name in wrapped) if p is not None]
    if not found:
        raise PluginError(
            f"a step was dispatched to {BACKEND_NAME} but {type(backend).__name__} serves it; set "
            f"--attention-backend {BACKEND_NAME} instead of naming it for prefill and decode both"
        )
    _seen.add(id(backend))
