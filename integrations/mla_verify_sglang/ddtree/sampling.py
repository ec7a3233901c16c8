"""The target's token at every node, by each request's sampling parameters.

A penalty counts the tokens put out so far; at a node these are the committed ones and those on its path. SGLang's own
speculation leaves both out, which samples from another distribution; so the counts are kept here, on the device, and
only while a request asks for a penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .build import DraftTree


class OutputCounts:
    """How often each request has put out each token: int16 [request slots, vocabulary], once one is asked for."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def begin(self, batch, next_tokens: Tensor, runner) -> None:
        """After a prefill: what a request put out before (it may have been retracted), and its next token."""
        if not _penalized(batch.reqs):
            return
        if self._counts is None:
            shape = (runner.req_to_token_pool.req_to_token.shape[0], int(runner.model_config.vocab_size))
            self._counts = torch.zeros(shape, dtype=torch.int16, device=next_tokens.device)
        rows = batch.req_pool_indices.long()
        self._counts[rows] = 0
        before = [(i, token) for i, req in enumerate(batch.reqs) for token in req.output_ids]
        if before:
            which, tokens = torch.tensor(before, dtype=torch.int64).T.to(rows.device, non_blocking=True)
            self._add(rows[which], tokens)
        self._add(rows, next_tokens.long())

    def add(self, batch, tokens: Tensor, count: Tensor) -> None:
        """The first ``count[b]`` of ``tokens`` [batch, P] are committed; for a batch that has counts (``of``)."""
        rows, places = batch.req_pool_indices.long()[:, None].expand_as(tokens), tokens.shape[1]
        live = torch.arange(places, device=tokens.device) < count[:, None] if places > 1 else None
        self._add(rows, tokens, live)

    def of(self, batch) -> Tensor | None:
        """int16 [batch, vocabulary], or None where no request of the batch has a penalty."""
        if self._counts is None or not _penalized(batch.reqs):
            return None
        return self._counts[batch.req_pool_indices.long()]

    def _add(self, rows: Tensor, tokens: Tensor, live: Tensor | None = None) -> None:
        ones = torch.ones_like(tokens, dtype=torch.int16) if live is None else live.to(torch.int16)
        self._counts.index_put_((rows, tokens), ones, accumulate=True)


def _penalized(reqs) -> bool:
    return any(
        p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens
        for p in (req.sampling_params for req in reqs)
    )


def adjust(logits: Tensor, info, tree: DraftTree, reqs, counts: Tensor | None) -> None:
    """Change ``logits`` [batch * N, V] in place as the requests ask: custom processors, penalties, biases.

    ``counts`` [batch, V] is how often a token was put out up to the root, which is among them.
    """
    if info is None:
        return
    batch, nodes = tree.tokens.shape
    if info.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, info, num_tokens_in_batch=nodes)
    wide = logits.view(batch, nodes, -1)
    if counts is not None:
        penalize(wide, tree, counts, reqs)
    if info.logit_bias is not None:
        wide += info.logit_bias[:, None].to(wide.dtype)


def penalize(logits: Tensor, tree: DraftTree, counts: Tensor, reqs) -> None:
    """Frequency, presence and repetition penalties and the least number of new tokens, at every node.

    logits [batch, N, V], counts [batch, V]. As SGLang's penalties without speculation: the additive ones first, then a
    logit of a token that was put out is divided by the repetition penalty where positive, else multiplied.
    """
    batch, nodes, vocabulary = logits.shape
    device = logits.device
    seen = counts[:, None]
    if nodes > 1:
        see = tree.sees()
        see[:, :, 0] = False  # the root is counted already
        seen = seen.repeat(1, nodes, 1)
        seen.scatter_add_(2, tree.tokens[:, None].expand(-1, nodes, -1), see.to(seen.dtype))

    def of(name: str) -> Tensor:
        values = torch.tensor([float(getattr(r.sampling_params, name)) for r in reqs])
        if device.type == "cuda":
            values = values.pin_memory()
        return values.to(device, non_blocking=True)[:, None, None]

    there = seen > 0
    logits -= (of("frequency_penalty") * seen + of("presence_penalty") * there).to(logits.dtype)
    repetition = torch.where(there, of("repetition_penalty"), 1.0)
    logits.copy_(torch.where(logits < 0, logits * repetition, logits / repetition))
    if any(r.sampling_params.min_new_tokens for r in reqs):
        early = counts.sum(-1)[:, None] + tree.depths < of("min_new_tokens")[:, 0]
        stop = [(i, t) for i, r in enumerate(reqs) for t in _stop_tokens(r) if t < vocabulary]
        which, tokens = torch.tensor(stop, dtype=torch.int64).view(-1, 2).T.to(device, non_blocking=True)
        ends = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)
        ends[which, tokens] = True
        logits.masked_fill_(early[:, :, None] & ends[:, None], float("-inf"))


def _stop_tokens(req) -> set[int]:
    tokens = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        tokens |= {req.tokenizer.eos_token_id} - {None}
    return tokens


def targets(logits: Tensor, info, nodes: int, widest: int) -> Tensor:
    """int64 [batch, N]: the argmax, or a draw after temperature, top-k, top-p and min-p, independent at each node.

    logits [batch * N, V]; ``widest`` is the largest top-k of the batch, a host number.
    """
    if info is None or info.is_all_greedy:
        return logits.argmax(-1).view(-1, nodes)

    def each(values: Tensor) -> Tensor:
        values = values.view(-1, 1)
        return values.repeat_interleave(nodes, 0) if nodes > 1 else values

    probabilities = torch.softmax(logits.float() / each(info.temperatures), -1)
    ids = None
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        whole, ids = probabilities.topk(min(widest, logits.shape[-1]), -1)
        probabilities = whole
        if info.need_top_k_sampling:
            rank = torch.arange(whole.shape[1], device=logits.device)
            probabilities = probabilities.masked_fill(rank >= each(info.top_ks), 0.0)
        if info.need_top_p_sampling:
            probabilities = probabilities.masked_fill(whole.cumsum(-1) - whole > each(info.top_ps), 0.0)
        if info.need_min_p_sampling:
            probabilities = probabilities.masked_fill(whole < whole[:, :1] * each(info.min_ps), 0.0)
    # The largest of p / Exp(1) is a draw from p; it needs no sum and no wait.
    drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    drawn = (drawn if ids is None else ids.gather(-1, drawn)).view(-1, nodes)
    if not info.need_top_k_sampling:
        return drawn
    return torch.where(info.top_ks.view(-1, 1) <= 1, logits.argmax(-1).view(-1, nodes), drawn)
