"""The speculation worker: SGLang's DFLASH worker with a tree in place of the chain.

Prefill, the drafter's weights, K/V and graphs are DFLASH's own. A decode step here:
  draft    the drafter fills a block of masks; the target's head gives each position's best tokens; ``build``
  verify   one target pass over the tree, its nodes in the request's next slots, at the positions of their depths
  accept   ``accept`` finds the path that the target agrees with
  commit   accepted K/V rows move to the front of the window; the drafter is given their hidden states in order
The drafter's block and the verify window have widths of their own: SGLang's speculative_num_draft_tokens is the
window's, and the drafter is built and captured under an override of it.
With an automatic budget each step verifies the first nodes of its tree alone, as many as ``budget`` chooses: the window
is for the widest, the draft is the same whatever the width, and each width has graphs of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from ..refusals import UnsupportedError
from . import algorithm, compat, sampling
from .accept import Accepted, accept
from .budget import Observation, Policy, note_nodes
from .build import DraftTree
from .commit import Mover
from .head import TreeHead
from .meter import Meter

logger = logging.getLogger(__name__)
SHARE = 16  # steps after which ranks are told what the first of them has observed


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
        self.policy = Policy(algorithm.widths(self.nodes, block))
        self.speculative_num_draft_tokens = self.nodes  # what /server_info reports
        self._require_plain_drafter()
        self._head: TreeHead | None = None
        self._mover: Mover | None = None
        self._counts = sampling.OutputCounts()
        self._meter = Meter(self.device)
        self._observed: list[Observation] = []  # and not told to all ranks yet
        self._steps = 0
        self._running: deque[tuple[int, list]] = deque()  # width and requests of steps without a result yet
        self._roots: dict[int, DraftTree] = {}  # by batch size
        self._runners: dict[int, Any] = {}  # target graphs of the widths below the widest
        self._node_steps = torch.arange(self.nodes, device=self.device)
        self.model_runner.spec_algorithm.block = self.block_size
        compat.gather_verify_logits(self)
        if self.draft_model_runner.dtype != torch.bfloat16:
            # SGLang's eager path casts given embeddings to bfloat16; what the drafter looks up itself it leaves alone.
            self.draft_model.forward_embed = lambda ids: compat.draft_embedding(self, ids)
        if get_tp_group().rank_in_group == 0:
            logger.info(
                "DDTREE: budget %s, verify %s nodes, drafter block %d",
                "auto" if self.policy.is_choice else self.budget,
                " or ".join(map(str, self.policy.widths)),
                self.block_size,
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
        drafter = parse_dflash_draft_config(draft_hf_config=self.draft_model_runner.model_config.hf_config)
        layers, read = int(self.model_runner.model_config.num_hidden_layers), drafter.target_layer_ids
        if read and max(read) >= layers - 1:
            raise UnsupportedError(
                f"the drafter reads layers {list(read)} of the target's {layers}; SGLang takes a layer's "
                f"output where the next one begins, so the last that can be read is {layers - 2}; train it on others"
            )
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
        if not self.policy.is_choice:
            return
        runner = self.model_runner
        kind = runner._decode_cuda_graph_runner_cls()
        if isinstance(runner.decode_cuda_graph_runner, kind):
            before, began = get_available_gpu_memory(self.device, self.gpu_id), time.perf_counter()
            with _buffers_kept(runner.attn_backend):
                for width in reversed(self.policy.widths[:-1]):
                    self._runners[width] = kind(runner, speculative_num_draft_tokens=width)
            taken = before - get_available_gpu_memory(self.device, self.gpu_id)
            self._additional_graph_memory_usage["target_verify"] = taken
            logger.info("DDTREE: graphs of %s nodes, %.2f GB, %.1f s", list(self._runners), taken,
                        time.perf_counter() - began)  # fmt: skip
        if torch.device(self.device).type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Have the kernels of each width compiled now, where nobody waits for a token."""
        nothing = torch.zeros(1, self.nodes, dtype=torch.int64, device=self.device)
        whole = DraftTree.empty(1, self.nodes, self.device)
        whole.parents.fill_(-1)
        for width in self.policy.drafting:
            # As a step has them: a kernel is compiled for strides and widths of 1, of multiples of 16, and others.
            tree = whole.first(1, width)
            done = accept(tree, tree.tokens, min(width, self.block_size))
            # Slot 0 is nobody's, and a path of one node moves nothing.
            self._mover_of_target().move(nothing[:, :width].contiguous(), done.path, done.count)

    @contextmanager
    def _graphs_of(self, width: int):
        """The target runs in the graphs that were captured for ``width`` nodes a request."""
        runner = self.model_runner
        widest = runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = self._runners.get(width, widest)
        try:
            yield
        finally:
            runner.decode_cuda_graph_runner = widest

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
                widths=self.policy.widths if self.policy.is_choice else (),
            )
        return self._head

    # ---- the width of a step ----

    def _choose(self, batch) -> int:
        """How many nodes this step verifies; the same on all ranks, and nothing waits for the device."""
        if not self.policy.is_choice:
            self.policy.choose(len(batch.reqs), 0)
            return self.nodes
        group = get_tp_group()
        self._observed += self._meter.read()
        self._steps += 1
        if group.world_size == 1 or self._steps % SHARE == 0:
            # Clocks differ from rank to rank: the first one's go for all.
            self.policy.observe(group.broadcast_object(self._observed, src=0))
            self._observed = []
        depth = int(compat.host_lens(batch, 0).max())
        width = self.policy.choose(len(batch.reqs), depth)
        self._meter.begin(width, depth, tuple(map(id, batch.reqs)), self.policy.settled())
        self._running.append((width, list(batch.reqs)))
        return width

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang calls it for each decode step, in order, when its result is on the host."""
        if not self._running:
            return
        width, requests = self._running.popleft()
        if len(requests) != len(num_correct_drafts_per_req):
            self._running.clear()  # a step was dropped: what is left can't be told apart
            return
        self.policy.accepted(width, num_correct_drafts_per_req)
        for request, drafts in zip(requests, num_correct_drafts_per_req, strict=True):
            note_nodes(request, width, drafts + 1)

    def report(self) -> dict[str, Any]:
        """What /server_info says of the budget."""
        steps = self.policy.steps
        verified = sum(width * count for width, count in steps.items())
        return {
            "ddtree_budget": "auto" if self.policy.is_choice else self.budget,
            "ddtree_mean_nodes": verified / max(1, sum(steps.values())),
            "ddtree_steps_by_nodes": {str(width): steps[width] for width in self.policy.widths},
        }

    # ---- steps ----

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, **others):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._meter.interrupt()
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, **others)
            self._counts.begin(batch, result.next_token_ids, self.model_runner)
            for request in batch.reqs if self.policy.is_choice else ():
                note_nodes(request, 0, 1)
            return result
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, **others)
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        prefix = batch.seq_lens
        if prefix.is_cuda:
            prefix.record_stream(torch.cuda.current_stream())
        width = self._choose(batch)
        longest = min(width, self.block_size)
        table = self.model_runner.req_to_token_pool.req_to_token
        if width == 1:
            window = table[batch.req_pool_indices, prefix].long()[:, None]
        else:
            window = table[batch.req_pool_indices[:, None], prefix[:, None] + self._node_steps[:width]].long()
        widest = batch.spec_info.max_top_k  # verify puts its own in the place of the draft input
        if width == 1:
            tree = self._undrafted(batch.spec_info.bonus_tokens)
        else:
            tree = self._draft(batch, window).first(len(prefix), width)
            if self.policy.reads_promise():
                self._meter.promise(self._tree_head().expected[: len(prefix)])
        grammar_tree = _grammar_tree(tree) if batch.has_grammar else None

        output, graph = self._verify(batch, window, tree)
        logits = output.next_token_logits
        mask = None
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=grammar_tree, sampling_info=batch.sampling_info, device=logits.device,
                barrier=grammar_barrier,
            )  # fmt: skip
        counts = self._counts.of(batch)
        sampling.adjust(logits, batch.sampling_info, tree, batch.reqs, counts)
        if mask is not None:
            mask.apply(logits)
        targets = sampling.targets(logits, batch.sampling_info, width, widest)
        accepted = accept(tree, self._same_on_all_ranks(targets), longest)
        lens = prefix + accepted.count
        if on_publish is not None:
            on_publish(lens)
        self._commit(prefix, window, accepted, output.hidden_states)
        if counts is not None:
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
            speculative_num_draft_tokens=longest,  # the tokens' stride
            new_seq_lens=lens,
        )

    def _undrafted(self, bonus: Tensor) -> DraftTree:
        """Trees of the root alone: a plain decode step, after which the drafter's K/V is as complete as after any."""
        if len(bonus) not in self._roots:
            self._roots[len(bonus)] = DraftTree.roots(torch.zeros_like(bonus))
        return replace(self._roots[len(bonus)], tokens=bonus[:, None])

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
        alone = tree.nodes == 1  # where the backend needs no words
        inputs = TreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=batch.seq_lens if alone else (batch.seq_lens[:, None] + tree.depths).reshape(-1),
            draft_token_num=tree.nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            tree_words=None if alone else tree.words.flatten(0, 1),
        )
        batch.out_cache_loc = window.reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = compat.host_lens(batch, self.block_size).to(torch.int64)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        with self._graphs_of(tree.nodes):
            forward_batch, _ = inputs.prepare_for_verify(batch, self.target_worker)
            batch.seq_lens_cpu, batch.seq_lens_sum = kept
            result = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            )
        return result.logits_output, result.can_run_cuda_graph

    def _commit(self, prefix: Tensor, window: Tensor, accepted: Accepted, hidden: Tensor) -> None:
        """Target K/V into path order, then the drafter's K/V of the accepted tokens from their hidden states."""
        size, longest = accepted.path.shape
        slots, positions, parts = window[:, :longest].contiguous(), prefix, {}
        if longest > 1:
            self._mover_of_target().move(window, accepted.path, accepted.count)
            hidden = hidden[accepted.rows(len(hidden) // size)]
            positions = (prefix[:, None] + self._block_pos_offsets[:longest]).view(-1)
        runner = self.draft_model_runner
        if longest > 1 or runner.token_to_kv_pool.dtype != runner.dtype:
            # A root's row is whole, which SGLang's plain store is quicker with; but that rounds to fp8 in its own way.
            parts = {"cache_loc_2d": slots, "commit_lens": accepted.count}
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=slots.view(-1), positions=positions, **parts
        )

    def _mover_of_target(self) -> Mover:
        if self._mover is None:
            self._mover = Mover(list(self.model_runner.token_to_kv_pool.kv_buffer))
        return self._mover

    def _same_on_all_ranks(self, targets: Tensor) -> Tensor:
        """Rank 0's tokens: a draw, or the argmax of logits that differ in the last bit, must not part the ranks."""
        group = get_tp_group()
        return group.broadcast(targets, src=0) if group.world_size > 1 else targets


@contextmanager
def _buffers_kept(backend):
    """Graphs that are captured now read the buffers that those of the widest window have: they are large enough, and
    new ones would take them from graphs that go on reading them."""
    backend.init_cuda_graph_state = lambda max_bs, max_num_tokens: None
    try:
        yield
    finally:
        del backend.init_cuda_graph_state


def _grammar_tree(tree: DraftTree) -> GrammarTree:
    """Links from node to first child and next sibling, which the grammar follows on the host."""
    if tree.nodes == 1:
        return GrammarTree.from_linear_chain(tree.tokens)
    nodes, parents = tree.nodes, tree.parents.long()
    index = torch.arange(nodes, device=parents.device)
    child = parents[:, None, :] == index[:, None]
    sibling = (parents[:, None, :] == parents[:, :, None]) & (index > index[:, None]) & (parents >= 0)[:, :, None]
    first, following = (torch.where(links, index, nodes).amin(-1) for links in (child, sibling))
    return GrammarTree.from_device(
        torch.where(first < nodes, first, -1), torch.where(following < nodes, following, -1), tree.tokens
    )
