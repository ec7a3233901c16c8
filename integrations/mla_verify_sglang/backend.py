"""The attention backend: every step of an MLA model is one call of ``mla_verify.verify`` per layer.

decode         a tree of one node per request
target_verify  the draft tree, from either layout of SGLang's mask
extend         chains: M new tokens are ceil(M / 128) pieces of one request, which share its slots and whose
               lengths grow; draft_extend and mixed batches are the same
The slot table is ``req_to_token`` itself, so nothing here grows with the context, and a step never waits for
the device: what a captured graph reads are five small static buffers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from mla_verify import HEAD_DIM, LATENT_DIM, MAX_NODES, Slots, Tree, verify
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from . import compat
from .refusals import UnsupportedError, require_served

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What all layers of one step share."""

    slots: Slots
    tree: Tree


class MlaVerifyBackend(AttentionBackend):
    """SGLang's AttentionBackend on ``mla_verify.verify``.

    The class name matters: SGLang captures a backend called TritonAttnBackend without the mask of a tree.
    """

    # Lengths are read on the device. NGRAM makes SGLang keep the host copy all the same.
    needs_cpu_seq_lens = False

    def __init__(self, runner) -> None:
        super().__init__()
        require_served(runner)
        self.device = runner.device
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.max_context_len = runner.model_config.context_len  # EAGLE sizes masks by it when a batch is too wide
        self.draft_tokens: int = get_spec().speculative_num_draft_tokens or 1
        self.forward_metadata: Step | None = None
        self._served_layers: dict[int, float] = {}
        self._chains: dict[int, Tensor] = {}  # kept on the device: a copy from the host would wait for it
        self._verify_mask: VerifyMask | None = None
        if self.draft_tokens > 1 and not runner.is_draft_worker:
            # Where a release lets the backend choose the layout (EAGLE and STANDALONE), take the one whose
            # size does not grow with context.
            requests = runner.req_to_token_pool.size
            self._verify_mask = VerifyMask(
                buffer=torch.zeros(requests * self.draft_tokens**2, dtype=torch.bool, device=self.device),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=requests,
            )

    # ---- what SGLang asks of a backend ----

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def shared_read_ends(self, mode):
        return compat.read_ends(mode)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        # Not 0: SGLang also makes dummy prefill batches of this many tokens.
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    # ---- eager steps ----

    def init_forward_metadata(self, forward_batch) -> None:
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle() or batch == 0:
            self.forward_metadata = None
        elif mode.is_decode():
            tree = Tree(self._chain_words(1, batch), self._node_starts(1, batch), 1)
            self.forward_metadata = Step(self._slots(forward_batch, 0), tree)
        elif mode.is_target_verify():
            nodes = self._nodes(forward_batch.spec_info)
            words = self._mask_words(forward_batch.spec_info, forward_batch.seq_lens, batch, nodes)
            if words is None:
                words = self._chain_words(nodes, batch)
            tree = Tree(words, self._node_starts(nodes, batch), nodes)
            self.forward_metadata = Step(self._slots(forward_batch, nodes), tree)
        elif mode.is_dllm_extend():
            raise UnsupportedError("mla_verify does not serve diffusion models; leave --dllm-algorithm out")
        else:
            self.forward_metadata = self._extend_step(forward_batch)

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs: int | None) -> None:
        """Pack the tree again: a step planned beside the draft was planned before its mask was there."""
        step = self.forward_metadata if cuda_graph_bs is None else self._graph_step
        if step is None or spec_info is None or getattr(spec_info, "custom_mask", None) is None:
            return
        nodes = self._nodes(spec_info)
        batch = step.slots.batch - self._graph_padding if cuda_graph_bs is not None else step.slots.batch
        words = self._mask_words(spec_info, step.slots.lens[:batch] - nodes, batch, nodes)
        if words is not None:
            step.tree.words[: len(words)].copy_(words)

    # ---- captured steps ----

    _graph_step: Step | None = None
    _graph_padding = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read; ``max_num_tokens`` is ``max_bs`` times the nodes."""
        compat.fence_whole_steps()
        words = max(max_num_tokens, max_bs) * _width(self.draft_tokens)
        self._starts = torch.zeros(max_bs, dtype=torch.int64, device=self.device)
        self._lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self._words = torch.zeros(words, dtype=torch.int32, device=self.device)
        self._roots = self._chain_words(1, max_bs)  # of trees of one node, which are never written
        self._graph_steps: dict[tuple[int, int], Step] = {}
        if self.draft_tokens > 1 and torch.device(self.device).type == "cuda":
            from .masks import pack

            # Have it compiled now, where nobody waits for a token.
            pack(torch.zeros(self.draft_tokens**2, dtype=torch.bool, device=self.device), 1, self.draft_tokens)
        kept = [self._starts, self._lens, self._words, self._roots]
        kept += [self._verify_mask.buffer] if self._verify_mask is not None else []
        size = sum(t.numel() * t.element_size() for t in kept)
        logger.info(
            "mla_verify: CUDA-graph state %.2f MiB for %d requests of %d nodes, whatever the context",
            size / 2**20,
            max_bs,
            self.draft_tokens,
        )

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Refresh the static buffers for a capture or a replay: a few small kernels, no wait."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        spec_info = forward_batch.spec_info
        if mode.is_decode_or_idle() and (spec_info is None or not in_capture):
            nodes, tree = 1, False
        elif mode.is_target_verify():
            nodes, tree = self._nodes(spec_info), True
        else:
            raise UnsupportedError(
                f"mla_verify captures decode and verify steps, not {mode.name}; use "
                "--speculative-draft-attention-backend triton for drafts, and no full-graph prefill"
            )
        padding = getattr(forward_batch, "num_padding", 0) or 0
        torch.mul(forward_batch.req_pool_indices[:batch], self.req_to_token.shape[1], out=self._starts[:batch])
        torch.add(forward_batch.seq_lens[:batch], nodes if tree else 0, out=self._lens[:batch])
        if padding:
            self._lens[batch - padding : batch].zero_()
        step = self._captured(nodes, batch)
        words = None
        if nodes > 1 and in_capture:
            words = self._chain_words(nodes, batch)
        elif nodes > 1 and batch > padding:
            words = self._mask_words(spec_info, forward_batch.seq_lens, batch - padding, nodes)
            if words is None:
                words = self._chain_words(nodes, batch)
        if words is not None:
            step.tree.words[: len(words)].copy_(words)
        self._graph_step, self._graph_padding = step, padding
        if in_capture:
            self.forward_metadata = step

    def _captured(self, nodes: int, batch: int) -> Step:
        """The step of one captured shape: views of the static buffers, the same tensors at every replay."""
        if (nodes, batch) not in self._graph_steps:
            width = _width(nodes)
            rows = nodes * batch
            words = self._words[: rows * width].view(rows, width) if nodes > 1 else self._roots[:batch]
            slots = Slots(self.req_to_token, self._starts[:batch], self._lens[:batch], self.req_to_token.shape[1])
            self._graph_steps[nodes, batch] = Step(slots, Tree(words, self._node_starts(nodes, batch), nodes))
        return self._graph_steps[nodes, batch]

    # ---- layers ----

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache: bool, extra: dict) -> Tensor:
        kv_scale = self._served_layers.get(layer.layer_id)
        if kv_scale is None:
            kv_scale = self._served_layers[layer.layer_id] = _require_layer(layer)
        for name, value in extra.items():
            if value is not None:
                raise UnsupportedError(f"mla_verify does not know the attention argument {name}; use triton")
        if k is not None and save_kv_cache:
            stored = k if layer.k_scale is None else k / layer.k_scale
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, stored, v)
        step = self.forward_metadata
        q = q.view(-1, layer.tp_q_head_num, HEAD_DIM)
        rows = step.tree.rows if step is not None else 0
        if rows == len(q):
            out = self._verify(q, layer, step, kv_scale)
        else:
            # Data parallelism pads a batch with rows that belong to no request.
            out = q.new_zeros(len(q), layer.tp_q_head_num, LATENT_DIM)
            if rows:
                out[:rows] = self._verify(q[:rows], layer, step, kv_scale)
        return out.view(len(q), layer.tp_q_head_num * LATENT_DIM)

    def _verify(self, q: Tensor, layer, step: Step, kv_scale: float) -> Tensor:
        kv = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        out, _ = verify(q, kv, step.slots, step.tree, sm_scale=layer.scaling, kv_scale=kv_scale)
        return out

    # ---- slots and trees ----

    def _slots(self, forward_batch, nodes: int) -> Slots:
        """The rows of a decode or verify batch; ``seq_lens`` does not count the ``nodes`` of a draft tree."""
        bound = None
        on_host, total = forward_batch.seq_lens_cpu, forward_batch.seq_lens_sum
        # A host copy may be a stale one: it is believed only when it agrees with the sum SGLang keeps beside
        # it.
        if on_host is not None and total is not None and int(on_host.sum()) == total:
            bound = int(on_host.max()) + nodes
        lens = forward_batch.seq_lens + nodes if nodes else forward_batch.seq_lens
        return Slots.from_table(self.req_to_token, forward_batch.req_pool_indices, lens, bound)

    def _extend_step(self, forward_batch) -> Step | None:
        """Chains of at most 128 new tokens; a request's pieces share its row of the slot table."""
        new = _on_host(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens)
        prefix = _on_host(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_prefix_lens)
        pieces = [
            (request, min(MAX_NODES, count - at), before + min(count, at + MAX_NODES))
            for request, (before, count) in enumerate(zip(prefix, new, strict=True))
            for at in range(0, count, MAX_NODES)
        ]
        if not pieces:
            return None
        requests, nodes, lens = zip(*pieces, strict=True)
        uploaded = torch.tensor([requests, lens], dtype=torch.int64)
        if torch.device(self.device).type == "cuda":
            uploaded = uploaded.pin_memory()
        which, lens_there = uploaded.to(self.device, non_blocking=True)
        rows = forward_batch.req_pool_indices[which]
        slots = Slots.from_table(self.req_to_token, rows, lens_there, max(lens))
        return Step(slots, Tree.chain(nodes, device=self.device))

    def _nodes(self, spec_info) -> int:
        nodes = getattr(spec_info, "draft_token_num", None)
        return self.draft_tokens if nodes is None or nodes < 1 else int(nodes)

    def _mask_words(self, spec_info, seq_lens: Tensor, batch: int, nodes: int) -> Tensor | None:
        """The packed trees of a verify batch from SGLang's mask, either layout; None where there is none.

        DDTREE hands over packed words. The layouts of a mask differ in size: QLEN_ONLY has batch * nodes ** 2
        entries, FULL_MASK that plus nodes for each prefix token. Our own ``verify_mask`` is QLEN_ONLY whatever its
        size.
        """
        words = getattr(spec_info, "tree_words", None)
        if words is not None:
            return words[: batch * nodes]
        mask = getattr(spec_info, "custom_mask", None)
        if mask is None or nodes == 1:
            return None
        if mask.dtype != torch.bool:
            mask = mask != 0
        own = self._verify_mask is not None and mask.data_ptr() == self._verify_mask.buffer.data_ptr()
        size = batch * nodes * nodes
        if own or mask.numel() == size:
            if mask.is_cuda:
                from .masks import pack

                return pack(mask.view(-1), batch, nodes)
            return Tree.from_mask(mask.view(-1)[:size].view(batch, nodes, nodes), checked=False).words
        if mask.numel() < size:
            raise ValueError(
                f"custom_mask has {mask.numel()} entries; {batch} requests of {nodes} nodes have {size} "
                "(QLEN_ONLY) or more (FULL_MASK)"
            )
        return Tree.from_full_mask(mask.view(-1), seq_lens[:batch], nodes, checked=False).words

    def _chain_words(self, nodes: int, batch: int) -> Tensor:
        if nodes not in self._chains:
            self._chains[nodes] = Tree.chain(nodes, device=self.device).words
        return self._chains[nodes].repeat(batch, 1)

    def _node_starts(self, nodes: int, batch: int) -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=self.device) * nodes


def _require_layer(layer) -> float:
    """Refuse a layer that is not causal MLA of our size; return the scale of its stored K/V."""
    say = f"mla_verify cannot serve attention layer {layer.layer_id}: "
    if (layer.qk_head_dim, layer.v_head_dim) != (HEAD_DIM, LATENT_DIM):
        raise UnsupportedError(
            f"{say}its heads are {layer.qk_head_dim} and {layer.v_head_dim} wide, expected the absorbed "
            f"form, {HEAD_DIM} and {LATENT_DIM}; use --attention-backend triton"
        )
    if layer.logit_cap:
        raise UnsupportedError(f"{say}logit cap {layer.logit_cap}; use --attention-backend triton")
    if layer.sliding_window_size is not None and layer.sliding_window_size > 0:
        raise UnsupportedError(f"{say}sliding window {layer.sliding_window_size}; use --attention-backend triton")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise UnsupportedError(f"{say}it is not causal self-attention; use --attention-backend triton")
    if layer.k_scale is None:
        return 1.0
    return float(layer.k_scale if layer.k_scale_float is None else layer.k_scale_float)


def _on_host(on_host, on_device: Tensor) -> list[int]:
    """Extend lengths, which SGLang has on the host but for draft_extend, where this waits for the device."""
    return [int(n) for n in (on_host if on_host is not None else on_device.tolist())]


def _width(nodes: int) -> int:
    return (nodes + 31) // 32
