"""An SGLang plugin for the tests of DDTREE alone: lets a random drafter guess well, and watches the steps.

``$MLA_VERIFY_DDTREE_PROBE`` (JSON):
  answers  path to a JSON list of [prompt, answer], token ids: a request's true continuation is proposed, at each
           position with a rank that is drawn, among words that are drawn. Without it the drafter speaks for itself
  ranks    the ranks that the true token is drawn from; [0] is a perfect drafter
  record   path: counts of what happened are written there
  mode_file  path to a file; while it says "graph", steps run on the buffers of a captured graph, padded by a request
  widths   how many nodes each step verifies, over and over: of an automatic budget, in its place
  fault    "unmoved": accepted K/V stays where the tree had it; a negative control
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The worker's module pulls in the scheduler: it is patched once the scheduler asks for it.
    target = "mla_verify_sglang.ddtree.algorithm.DdtreeAlgorithm.create_worker"
    HookRegistry.register(target, _watched, HookType.AROUND)


def _watched(original, algorithm, server_args):
    worker = original(algorithm, server_args)
    _watch(worker, json.loads(os.environ["MLA_VERIFY_DDTREE_PROBE"]))
    return worker


def _watch(cls, wanted: dict) -> None:
    import torch
    from mla_verify_sglang.ddtree import head

    answers = {tuple(p): a for p, a in json.loads(Path(wanted["answers"]).read_text())} if "answers" in wanted else {}
    ranks, fault = wanted.get("ranks", [0, 0, 0, 1, 2, 3]), wanted.get("fault", "")
    counts: Counter[str] = Counter()
    draft, commit, candidates = cls._draft, cls._commit, head.TreeHead.candidates
    lengths, now = set(), {}

    def save() -> None:
        if wanted.get("record"):
            Path(wanted["record"]).write_text(json.dumps(counts | {"different_lengths": len(lengths)}))

    def draft_known(self, batch, window):
        now["batch"] = batch
        tree = draft(self, batch, window)
        counts["steps"] += 1
        lengths.update(batch.seq_lens.tolist())
        counts["largest_batch"] = max(counts["largest_batch"], len(batch.seq_lens))
        if len({int(n) for n in batch.seq_lens}) > 1:
            counts["unequal_lengths"] += 1
        shapes = {tuple(p) for p in tree.parents.tolist()}
        counts["unequal_trees"] += len(shapes) > 1
        counts["branching"] += any(n > 1 for p in shapes for n in Counter(x for x in p if x >= 0).values())
        counts["token_zero"] += int(((tree.tokens == 0) & (tree.parents >= 0)).any())
        counts["largest_tree"] = max(counts["largest_tree"], int((tree.parents >= 0).sum(1).max()))
        counts["mask_bytes"] = max(counts["mask_bytes"], tree.words.numel() * 4 // len(batch.seq_lens))
        words = tree.words.view(len(batch.seq_lens), tree.nodes, -1)
        counts["root_sees_more"] += int((words[:, 0, 0] != 1).any()) + int((words[:, 0, 1:] != 0).any())
        return tree

    def candidates_known(self, logits):
        if answers:
            size = logits.shape[1], wanted.get("vocabulary", logits.shape[-1])
            whole = torch.stack([_guess(r, int(n), *size) for r, n in zip(*_running(), strict=True)])
            logits = whole[..., self.start : self.start + logits.shape[-1]].to(logits.dtype)
        ids, logprobs = candidates(self, logits)
        if answers:
            for req, length, first in zip(*_running(), ids[:, :, 0].tolist(), strict=True):
                truth = _truth(req, int(length), len(first))
                agreed = [a == b for a, b in zip(first, truth, strict=False)]
                counts["chain_committed"] += (agreed + [False]).index(False) + 1
        return ids, logprobs

    def _truth(req, length: int, depth: int):
        # The root is the token at position ``length``; what follows it in the true answer:
        prompt = tuple(req.origin_input_ids)
        return answers[prompt][length + 1 - len(prompt) :][:depth]

    def _running():
        batch = now["batch"]
        return batch.reqs, batch.seq_lens

    def _guess(req, length: int, depth: int, vocabulary: int):
        truth = _truth(req, length, depth)
        rng = random.Random(f"{tuple(req.origin_input_ids)} {length}")
        logits = torch.full((depth, vocabulary), -30.0)
        for d in range(depth):
            others = [t for t in rng.sample(range(vocabulary), 8) if d >= len(truth) or t != truth[d]][:7]
            if d < len(truth):
                others.insert(rng.choice(ranks), truth[d])
            for rank, token in enumerate(others):
                logits[d, token] = -0.7 * rank - 0.3 * rng.random()
        return logits

    def commit_watched(self, prefix, window, accepted, hidden):
        steps = torch.arange(accepted.path.shape[1])
        moved = (accepted.path != steps) & (steps < accepted.count[:, None])
        counts[f"steps_of_{len(hidden) // len(accepted.count)}_nodes"] += 1
        counts["committed"] += int(accepted.count.sum())
        counts["request_steps"] += len(accepted.count)
        counts["scattered"] += int(moved.any(1).sum())
        counts["rounds_after_scatter"] += counts["scattered"] > 0
        save()
        if fault == "unmoved":
            mover, self._mover = self._mover, _Still()
            commit(self, prefix, window, accepted, hidden)
            self._mover = mover
        else:
            commit(self, prefix, window, accepted, hidden)

    if wanted.get("widths"):
        from mla_verify_sglang.ddtree.budget import Policy

        forced = itertools.cycle(wanted["widths"])
        Policy._next = lambda self, cell: next(forced)
    cls._draft, cls._commit, head.TreeHead.candidates = draft_known, commit_watched, candidates_known
    if wanted.get("mode_file"):
        _pad_as_a_graph(Path(wanted["mode_file"]), counts)


def _pad_as_a_graph(mode_file: Path, counts: Counter) -> None:
    """Verify on the buffers of a captured graph with a request of padding, as the probe of the backend does it."""
    from mla_verify_probe import captured, on_probe_graph
    from mla_verify_sglang.backend import MlaVerifyBackend

    plan = MlaVerifyBackend.init_forward_metadata

    def init_forward_metadata(self, forward_batch):
        plan(self, forward_batch)
        self.probe_graph = None
        if forward_batch.forward_mode.is_target_verify() and mode_file.read_text().strip() == "graph":
            self.probe_graph = captured(self, forward_batch)
            counts["graph_steps"] += 1

    MlaVerifyBackend.init_forward_metadata = init_forward_metadata
    MlaVerifyBackend._verify = on_probe_graph(MlaVerifyBackend._verify)


class _Still:
    def move(self, window, path, count) -> None:
        pass
