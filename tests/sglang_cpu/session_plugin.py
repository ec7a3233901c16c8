"""An SGLang plugin of the tests alone, in the engines of session.py: the scheduler also tells its free slots; long
prefills leave attention out, where ``$MLA_VERIFY_ABRIDGED_PREFILL`` asks for it."""

from __future__ import annotations

import os

ABRIDGE = "MLA_VERIFY_ABRIDGED_PREFILL"
SHORT = 64  # new tokens up to which a prefill is whole, so that the text's end has seen its context


def register() -> None:
    """The plugin: the scheduler also tells its free slots; long prefills leave attention out, where that is asked.

    An abridged prefill writes K/V of the right shape and place, of hidden states that no attention has changed, alike
    for every backend. It builds a deep context in seconds where only the steps after it are measured.
    """
    from sglang.srt.managers.scheduler import Scheduler

    tell = Scheduler.get_internal_state

    def get_internal_state(self, request):
        reply = tell(self, request)
        reply.internal_state["free_slots"] = int(self.token_to_kv_pool_allocator.available_size())
        return reply

    Scheduler.get_internal_state = get_internal_state
    if os.environ.get(ABRIDGE):
        from mla_verify_sglang.backend import MlaVerifyBackend
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        for backend in (MlaVerifyBackend, TritonAttnBackend):
            _abridge(backend)


def _abridge(backend: type) -> None:
    attend = backend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not forward_batch.forward_mode.is_extend_without_speculative() or len(q) <= SHORT:
            return attend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)

    backend.forward_extend = forward_extend
