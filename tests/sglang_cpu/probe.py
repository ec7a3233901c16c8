"""An SGLang plugin for the tests alone: looks into the scheduler's process and can break it on purpose.

``engine.write_plugin`` makes it visible to an engine; ``$MLA_VERIFY_PROBE`` (JSON) says what it does:
  record      path: counts of verify steps, trees with a branching node and mask layouts are written there
  full_mask   true: NGRAM passes FULL_MASK, the layout of the CUDA engine, not QLEN_ONLY
  mode_file   path to a file naming what happens to the decode and verify steps that follow (empty: nothing)
                graph               they run on the buffers of a captured graph, padded by one request
                mask, slot, prefix  verify steps with that fault: negative controls
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

DROPPED = 16  # tokens at the start of a prefix that the "prefix" fault hides


def register() -> None:
    wanted = json.loads(os.environ["MLA_VERIFY_PROBE"])
    if wanted.get("full_mask"):
        from sglang.srt.speculative import ngram_worker

        ngram_worker._is_cpu = False
    from mla_verify_sglang import backend

    _watch(backend.MlaVerifyBackend, wanted)


def _watch(cls, wanted: dict) -> None:
    counts: Counter[str] = Counter()
    pack, plan, verify = cls._mask_words, cls.init_forward_metadata, cls._verify

    def save():
        if wanted.get("record"):
            Path(wanted["record"]).write_text(json.dumps(counts))

    def mask_words(self, spec_info, seq_lens, batch, nodes):
        words = pack(self, spec_info, seq_lens, batch, nodes)
        if words is not None:
            counts["verify_steps"] += 1
            counts["largest_batch"] = max(counts["largest_batch"], batch)
            full = spec_info.custom_mask.numel() > batch * nodes * nodes
            counts["full_mask" if full else "qlen_only"] += 1
            counts["branching_trees"] += sum(_branches(words[b * nodes : (b + 1) * nodes]) for b in range(batch))
            save()
        return words

    def init_forward_metadata(self, forward_batch):
        plan(self, forward_batch)
        self.probe_graph = None
        kind = forward_batch.forward_mode
        mode = Path(wanted["mode_file"]).read_text().strip() if wanted.get("mode_file") else ""
        if mode == "graph" and (kind.is_decode() or kind.is_target_verify()):
            self.probe_graph = captured(self, forward_batch)
            counts["graph_steps"] += 1
            save()
        elif mode in FAULTS and kind.is_target_verify():
            self.forward_metadata = FAULTS[mode](self.forward_metadata)

    cls._mask_words, cls.init_forward_metadata, cls._verify = mask_words, init_forward_metadata, on_probe_graph(verify)


def on_probe_graph(verify):
    """``verify`` of a backend, on the buffers of its ``probe_graph`` with a request of padding where it has one."""

    def run(self, q, layer, step, kv_scale):
        if getattr(self, "probe_graph", None) is None:
            return verify(self, q, layer, step, kv_scale)
        import torch

        padded = torch.cat([q, torch.full_like(q[: step.tree.max_nodes], 7.0)])
        out = verify(self, padded, layer, self.probe_graph, kv_scale)
        assert not out[len(q) :].any(), "a padding row of a captured batch must give 0"
        return out[: len(q)]

    return run


def _branches(words) -> bool:
    """Whether some node has two children; a node's parent is its latest ancestor."""
    masks = [sum((int(w) & 0xFFFFFFFF) << 32 * k for k, w in enumerate(row)) for row in words.tolist()]
    parents = [(mask & ((1 << i) - 1)).bit_length() - 1 for i, mask in enumerate(masks)]
    return any(count > 1 for parent, count in Counter(parents).items() if parent >= 0)


def captured(self, forward_batch):
    """Capture and replay this step as SGLang's runner does, padded by a request; what layers read."""
    import torch

    batch = forward_batch.batch_size
    if not hasattr(self, "_graph_steps"):
        self.init_cuda_graph_state(64, 64 * self.draft_tokens)
    pad = torch.nn.functional.pad
    view = SimpleNamespace(
        batch_size=batch + 1,
        forward_mode=forward_batch.forward_mode,
        req_pool_indices=pad(forward_batch.req_pool_indices, (0, 1)),
        seq_lens=pad(forward_batch.seq_lens, (0, 1), value=self.get_cuda_graph_seq_len_fill_value()),
        seq_lens_cpu=None,
        seq_lens_sum=None,
        num_padding=1,
        spec_info=forward_batch.spec_info,
    )
    eager = self.forward_metadata
    self.init_forward_metadata_out_graph(SimpleNamespace(**{**vars(view), "num_padding": 0}), in_capture=True)
    step = self.forward_metadata
    self.init_forward_metadata_out_graph(view)
    self.forward_metadata = eager
    return step


def _wrong_mask_bit(step):
    """One wrong bit per tree: the second node does not see the root."""
    words = step.tree.words.clone()
    second = step.tree.node_starts[:-1].long() + 1
    words[second, 0] &= ~1
    return dataclasses.replace(step, tree=dataclasses.replace(step.tree, words=words))


def _shifted_slot(step):
    """Every slot is that of the token before it."""
    return dataclasses.replace(step, slots=dataclasses.replace(step.slots, starts=step.slots.starts - 1))


def _dropped_prefix(step):
    """The first tokens of the prefix are missing."""
    slots = step.slots
    drop = (slots.lens - step.tree.nodes()).clamp(0, DROPPED)
    changed = dataclasses.replace(slots, starts=slots.starts + drop, lens=slots.lens - drop)
    return dataclasses.replace(step, slots=changed)


FAULTS = {"mask": _wrong_mask_bit, "slot": _shifted_slot, "prefix": _dropped_prefix}
