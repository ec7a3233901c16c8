"""The speculation worker: SGLang's DFLASH worker with a tree in place of the chain.

Prefill, the drafter's weights, K/V and graphs are DFLASH's own. A decode step here:
  draft    the drafter fills a block of masks; the target's head gives each position's best tokens; ``build``
  verify   one target pass over the tree, its nodes in the request's next slots, at the positions of their depths
  accept   ``accept`` finds the path that the target agrees with
  commit   accepted K/V rows move to the front of the window; the drafter is given their hidden states in order
The drafter's block and the verify window have widths of their own: SGLang's speculative_num_draft_tokens is the
window's, and the drafter is built and captured under an override of it.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from .. import compat
from ..refusals import UnsupportedError
from . import algorithm, sampling
from .accept import Accepted, accept
from .build import DraftTree
from .commit import Mover
from .head import TreeHead

logger = logging.getLogger(__name__)


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """DFLASH's verify input with the trees' packed words, which ``MlaVerifyBackend`` reads in place of a mask."""

    tree_words: Tensor | None = None


class DdtreeWorker(DFlashWorkerV2):
    """See the module."""

    def __init__(self, server_args, **others) -> None:
        block = int(get_spec().speculative_dflash_block_size)
        with get_spec().override(speculative_num_draft_tokens=block):
            super().__init__(server_args=compat.with_draft_width(server_args, block), **others)
        self.server_args = server_args
        self.nodes = int(get_spec().speculative_num_draft_tokens)
        self.budget = algorithm.budget(self.nodes)
        self.speculative_num_draft_tokens = self.nodes  # what /server_info reports
        self._require_plain_drafter()
        self._head: TreeHead | None = None
        self._mover: Mover | None = None
        self._counts = sampling.OutputCounts()
        self._node_steps = torch.arange(self.nodes, device=self.device)
        self.model_runner.spec_algorithm.block = self.block_size
        compat.gather_verify_logits(self)
        if self.draft_model_runner.dtype != torch.bfloat16:
            # SGLang's eager path casts given embeddings to bfloat16; what the drafter looks up itself it leaves alone.
            self.draft_model.forward_embed = lambda ids: compat.draft_embedding(self, ids)
        if get_tp_group().rank_in_group == 0:
            logger.info(
                "DDTREE: budget %d, verify %d nodes, drafter block %d", self.budget, self.nodes, self.block_size
            )

    def _require_plain_drafter(self) -> None:
        head = getattr(self.model_runner.model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not torch.is_floating_point(weight) or weight.element_size() < 2:
            raise UnsupportedError(
                "DDTREE needs the target's lm_head unquantized, to read each position's distribution from it; "
                "use --speculative-algorithm DFLASH"
            )
        shard = getattr(head, "shard_indices", None)
        if shard is not None and int(shard.num_added_elements):
            raise UnsupportedError("DDTREE does not serve a vocabulary with added (LoRA) tokens")
        if shard is None and get_tp_group().world_size > 1:
            raise UnsupportedError("DDTREE can't tell which tokens this rank's lm_head holds; use --tp-size 1")
        for name in ("selector", "lilicorr", "_is_domino"):
            if getattr(self, name, None):
                raise UnsupportedError(
                    f"the drafter chooses its tokens one after another ({name.strip('_')}) and gives no marginals to "
                    "build a tree from; use --speculative-algorithm DFLASH"
                )

    # ---- widths ----

    @contextmanager
    def _draft_width(self):
        with get_spec().override(speculative_num_draft_tokens=self.block_size):
            yield

    def init_attention_backends(self) -> None:
        with self._draft_width():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._draft_width():
            super().init_cuda_graphs()

    def _maybe_build_draft_sampler(self) -> TreeHead:
        return self._tree_head()

    def _tree_head(self) -> TreeHead:
        if self._head is None:
            runner, head = self.model_runner, self.model_runner.model.lm_head
            captured = get_exec().graph.cuda_graph_config.decode.bs or [1]
            shard = getattr(head, "shard_indices", None)
            self._head = TreeHead(
                head.weight,
                own=int(shard.num_org_elements) if shard is not None else len(head.weight),
                start=int(shard.org_vocab_start_index) if shard is not None else 0,
                group=get_tp_group(),
                block=self.block_size,
                budget=self.budget,
                trees=DraftTree.empty(max(runner.req_to_token_pool.size, *captured), self.nodes, self.device),
                count=min(self.budget, int(runner.model_config.vocab_size)),
            )
        return self._head

    # ---- steps ----

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, **others):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, **others)
            self._counts.begin(batch, result.next_token_ids, self.model_runner)
            return result
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, **others)
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        prefix = batch.seq_lens
        if prefix.is_cuda:
            prefix.record_stream(torch.cuda.current_stream())
        table = self.model_runner.req_to_token_pool.req_to_token
        window = table[batch.req_pool_indices[:, None], prefix[:, None] + self._node_steps].long()
        widest = batch.spec_info.max_top_k  # verify puts its own in the place of the draft input
        tree = self._draft(batch, window)
        grammar_tree = _grammar_tree(tree) if batch.has_grammar else None

        output, graph = self._verify(batch, window, tree)
        logits = output.next_token_logits
        mask = None
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=grammar_tree, sampling_info=batch.sampling_info, device=logits.device,
                barrier=grammar_barrier,
            )  # fmt: skip
        sampling.adjust(logits, batch.sampling_info, tree, batch.reqs, self._counts.of(batch))
        if mask is not None:
            mask.apply(logits)
        targets = sampling.targets(logits, batch.sampling_info, tree.nodes, widest)
        accepted = accept(tree, self._same_on_all_ranks(targets), self.block_size)
        lens = prefix + accepted.count.to(prefix.dtype)
        if on_publish is not None:
            on_publish(lens)
        self._commit(prefix, window, accepted, output.hidden_states)
        self._counts.add(batch, accepted.tokens, accepted.count)
        output.hidden_states = None
        if getattr(batch, "return_logprob", False):
            compat.path_logprobs(batch, output, accepted, logits)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=accepted.count,
            can_run_cuda_graph=graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=accepted.bonus, new_seq_lens=lens),
            speculative_num_draft_tokens=self.block_size,  # the tokens' stride
            new_seq_lens=lens,
        )

    def _draft(self, batch, window: Tensor) -> DraftTree:
        """The drafter over [bonus, mask, …], non-causal within the block, and the trees of its marginals."""
        size, block, prefix = len(batch.seq_lens), self.block_size, batch.seq_lens
        ids = torch.full((size, block), int(self._mask_token_id), dtype=torch.int64, device=self.device)
        ids[:, 0] = batch.spec_info.bonus_tokens
        positions = prefix[:, None] + self._block_pos_offsets
        slots = window[:, :block].contiguous()
        looks_up = hasattr(self.draft_model, "forward_embed")
        embedded = None if looks_up else compat.draft_embedding(self, ids.view(-1))
        lens, host = prefix, compat.host_lens(batch, block)
        if self.use_compact_draft_cache:
            lens = self._compute_compact_draft_seq_lens(prefix)
            host = host.clamp(max=int(self.draft_window_size) + (self.page_size if self.page_size > 1 else 0))
            self._ensure_draft_block_buffers(size)
            self._rebuild_compact_draft_cache(
                req_pool_indices=batch.req_pool_indices, prefix_lens=prefix, draft_prefix_lens=lens,
                verify_out_cache_loc_2d=slots, bs=size, block_size=block,
            )  # fmt: skip
        forward_batch = compat.draft_batch(
            self, batch, slots.view(-1), lens, host, prefix,
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=ids.view(-1),
            positions=positions.view(-1),
            input_embeds=embedded,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        with torch.inference_mode(), compat.draft_scope(self):
            out = self.draft_model_runner.forward(forward_batch)
            if self._draft_sampler is not None and out.can_run_graph:
                return self._tree_head().trees.first(size)  # the graph has filled it
            return self._tree_head()(out.logits_output.hidden_states, ids)

    def _verify(self, batch, window: Tensor, tree: DraftTree) -> tuple[Any, bool]:
        """One pass of the target over all nodes: what it says at each, and whether a graph ran."""
        inputs = TreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=(batch.seq_lens[:, None] + tree.depths).reshape(-1),
            draft_token_num=self.nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            tree_words=tree.words,
        )
        batch.out_cache_loc = window.reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = compat.host_lens(batch, self.block_size).to(torch.int64)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = inputs.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return result.logits_output, result.can_run_cuda_graph

    def _commit(self, prefix: Tensor, window: Tensor, accepted: Accepted, hidden: Tensor) -> None:
        """Target K/V into path order, then the drafter's K/V of the accepted tokens from their hidden states."""
        if self._mover is None:
            self._mover = Mover(list(self.model_runner.token_to_kv_pool.kv_buffer))
        self._mover.move(window, accepted.path, accepted.count)
        size, block = accepted.path.shape
        rows = accepted.path.clamp(max=self.nodes - 1) + self.nodes * torch.arange(size, device=window.device)[:, None]
        slots = window[:, :block].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[rows.view(-1)],
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=(prefix[:, None] + self._block_pos_offsets).view(-1),
            commit_lens=accepted.count,
        )

    def _same_on_all_ranks(self, targets: Tensor) -> Tensor:
        """Rank 0's tokens: a draw, or the argmax of logits that differ in the last bit, must not part the ranks."""
        group = get_tp_group()
        return group.broadcast(targets, src=0) if group.world_size > 1 else targets


def _grammar_tree(tree: DraftTree) -> GrammarTree:
    """Links from node to first child and next sibling, which the grammar follows on the host."""
    nodes, parents = tree.nodes, tree.parents.long()
    index = torch.arange(nodes, device=parents.device)
    child = parents[:, None, :] == index[:, None]
    sibling = (parents[:, None, :] == parents[:, :, None]) & (index > index[:, None]) & (parents >= 0)[:, :, None]
    first, following = (torch.where(links, index, nodes).amin(-1) for links in (child, sibling))
    return GrammarTree.from_device(
        torch.where(first < nodes, first, -1), torch.where(following < nodes, following, -1), tree.tokens
    )
