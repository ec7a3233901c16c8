"""Gates of DDTREE. What is arithmetic is compared with plain Python; the rest is seen in SGLang's real engine.

In the engine a random drafter would hardly ever be right, so a probe lets it propose the true continuation at ranks
that are drawn: trees branch, accepted paths are scattered, K/V rows move, and the tokens must be those of no
speculation all the same.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mla_verify import Slots, Tree, testing, verify
from mla_verify_bench import tiny_model
from torch import Tensor

pytest.importorskip("sglang", reason="this gate runs in an environment made by tests/sglang_cpu/install.py")

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu"
sys.path.insert(0, str(SUPPORT))

import drafter  # noqa: E402
import engine  # noqa: E402
import session  # noqa: E402
from mla_verify_sglang import masks  # noqa: E402
from mla_verify_sglang.ddtree import budget as budgets  # noqa: E402
from mla_verify_sglang.ddtree import kernels, sampling  # noqa: E402
from mla_verify_sglang.ddtree.accept import Accepted, accept  # noqa: E402
from mla_verify_sglang.ddtree.build import MAX_BUDGET, DraftTree, build, log_probabilities  # noqa: E402
from mla_verify_sglang.ddtree.commit import Mover  # noqa: E402
from mla_verify_sglang.ddtree.head import TreeHead  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = tiny_model.TinyModel(context=512)
BLOCK, BUDGET = 8, 16


# ---- the oracle ----


def python_tree(bonus: int, ids: list[list[int]], logprobs: list[list[float]], budget: int) -> tuple[list, list, list]:
    """Best first with a heap: tokens, parents and depths of the root and at most ``budget`` nodes."""
    tokens, parents, depths = [bonus], [-1], [0]
    f, nothing = np.float32, float("-inf")
    heap = [(-f(logprobs[0][0]), (0,), 0, f(0))] if logprobs[0][0] > nothing else []
    while heap and len(tokens) <= budget:
        negative, ranks, parent, above = heapq.heappop(heap)
        depth, rank, node = len(ranks), ranks[-1], len(tokens)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        if rank + 1 < len(ids[0]) and logprobs[depth - 1][rank + 1] > nothing:
            sibling = f(above + f(logprobs[depth - 1][rank + 1]))
            heapq.heappush(heap, (-sibling, ranks[:-1] + (rank + 1,), parent, above))
        if depth < len(ids) and logprobs[depth][0] > nothing:
            child = f(-negative + f(logprobs[depth][0]))
            heapq.heappush(heap, (-child, ranks + (0,), node, f(-negative)))
    return tokens, parents, depths


def python_walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """The accepted nodes and the committed tokens."""
    path, committed = [0], []
    while True:
        said = targets[path[-1]]
        committed.append(said)
        follow = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == said]
        if not follow:
            return path, committed
        path.append(follow[0])


@dataclass(frozen=True)
class Marginals:
    """Random marginals of a batch. ``grid`` rounds logits, so that probabilities tie; ``cut`` leaves few candidates."""

    depth: int
    width: int
    grid: bool = False
    cut: bool = False
    batch: int = 3
    seed: int = 0

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Bonus tokens (0 among them), ids and log-probabilities."""
        g = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(self.batch, self.depth, self.width + 60, generator=g) * 3
        if self.grid:
            logits = (logits / 2).round() * 2
        if self.cut:
            logits[1, :, 2:] = float("-inf")
            logits[-1, 0] = float("nan")
        ids, logprobs = whole_head(logits, self.width)
        bonus = torch.tensor([0, 5, 7, 0, 9][: self.batch])
        return bonus.to(DEVICE), ids.to(DEVICE), logprobs.to(DEVICE)


def whole_head(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    one = SimpleNamespace(world_size=1)
    head = TreeHead(
        torch.empty(0), own=logits.shape[-1], start=0, group=one, block=2, budget=1, count=count, trees=None
    )
    return head.candidates(logits)


def built(bonus: Tensor, ids: Tensor, logprobs: Tensor, budget: int, nodes: int | None = None) -> DraftTree:
    tree = DraftTree.empty(len(bonus), nodes or budget + 1, ids.device)
    return build(bonus, ids, logprobs, budget, tree)


def branching(tree: DraftTree) -> bool:
    return any(n > 1 for own in tree.parents.tolist() for n in Counter(p for p in own if p >= 0).values())


# ---- trees, walks and moves ----

BUDGETS = (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 48, 64, 96, 127)


def test_builder_equals_oracle(gate_metrics):
    """Nodes, order, ties, packed masks: against the heap, at budgets 1 to 127; and each tree begins the next one."""
    shapes = [
        Marginals(7, 40), Marginals(7, 5, grid=True, seed=1), Marginals(15, 64, grid=True, seed=2),
        Marginals(18, 2, seed=3), Marginals(1, 9, seed=4), Marginals(7, MAX_BUDGET, cut=True, seed=5),
        Marginals(7, 1, seed=6),
    ]  # fmt: skip
    trees = 0
    for shape in shapes:
        bonus, ids, logprobs = shape.draw()
        before = None
        for budget in BUDGETS:
            nodes = max(budget + 1, shape.depth + 1)
            tree = built(bonus, ids, logprobs, budget, nodes)
            for b in range(shape.batch):
                tokens, parents, depths = python_tree(int(bonus[b]), ids[b].tolist(), logprobs[b].cpu().numpy(), budget)
                here, outside = len(tokens), nodes - len(tokens)
                assert tree.tokens[b].tolist() == tokens + [0] * outside, (shape, budget, b)
                assert tree.parents[b].tolist() == parents + [-1] * outside, (shape, budget, b)
                assert tree.depths[b].tolist() == depths + [0] * outside, (shape, budget, b)
                words = Tree.from_parents(parents + [-1] * outside, device=tree.words.device).words
                assert torch.equal(tree.words[b], words), (shape, budget, b)
                assert torch.equal(tree.sees()[b].cpu(), Tree.from_parents(parents).dense()[0]) or outside
                if before is not None:
                    assert tree.tokens[b, : len(before[b])].tolist() == before[b], "not a prefix of the larger tree"
                if shape.width == 1:
                    assert parents == list(range(-1, here - 1)), "one candidate a position must give the chain"
                trees += 1
            before = [own[: budget + 1] for own in tree.tokens.tolist()]
            if here < budget + 1:
                before = None  # all there was is in the tree
    gate_metrics["trees"] = trees
    gate_metrics["differing"] = 0


def test_kernels_equal_torch(gate_metrics):
    """The Triton kernels, here under the interpreter, give what the torch forms give: trees, walks and moves."""
    for shape, budget in ((Marginals(7, 6, grid=True), 6), (Marginals(7, 20, cut=True, seed=1), 20),
                          (Marginals(15, 9, seed=2), 33), (Marginals(7, 70, seed=3), 70)):  # fmt: skip
        bonus, ids, logprobs = (t.cpu() for t in shape.draw())
        nodes = max(budget + 1, shape.depth + 1)
        tree = built(bonus, ids, logprobs, budget, nodes)
        other = DraftTree.empty(shape.batch, nodes, DEVICE)
        for field in (other.tokens, other.parents, other.depths, other.words, other.scores):
            field.fill_(77)
        column = torch.stack([bonus, bonus + 50], 1).to(DEVICE)[:, 0]  # as a drafter's input has it
        kernels.build_trees(column, ids.to(DEVICE), logprobs.to(DEVICE), budget, other)
        for name in ("tokens", "parents", "depths", "words", "scores"):
            assert torch.equal(getattr(other, name).cpu(), getattr(tree, name)), (shape, name)
        targets = agreeing(tree, shape.depth, seed=budget)
        longest = shape.depth + 1
        mine = accept(tree, targets, longest)
        done = Accepted(
            *(torch.full_like(t, 55, device=DEVICE) for t in (mine.path, mine.count, mine.tokens, mine.bonus))
        )
        kernels.accept_paths(other, targets.to(DEVICE), done)
        for name in ("path", "count", "tokens", "bonus"):
            assert torch.equal(getattr(done, name).cpu(), getattr(mine, name)), (shape, name)
        # The first nodes of each tree, in its storage, as an automatic budget verifies them.
        small, begin = built(bonus, ids, logprobs, budget // 2), other.first(shape.batch, budget // 2 + 1)
        mine = accept(small, targets[:, : small.nodes].contiguous(), min(longest, small.nodes))
        done = Accepted(*(torch.full_like(t, 55, device=DEVICE) for t in vars(mine).values()))
        kernels.accept_paths(begin, targets[:, : small.nodes].contiguous().to(DEVICE), done)
        for name in ("path", "count", "tokens", "bonus"):
            assert torch.equal(getattr(done, name).cpu(), getattr(mine, name)), (shape, name, "first nodes")
        # Roots alone, which no kernel is launched for.
        roots, said = DraftTree.roots(bonus.to(DEVICE)), targets[:, :1].contiguous().to(DEVICE)
        mine = accept(roots, said, 1)
        done = Accepted(*(torch.full_like(t, 55) for t in vars(mine).values()))
        kernels.accept_paths(roots, said, done)
        for name in ("path", "count", "tokens", "bonus"):
            assert torch.equal(getattr(done, name), getattr(mine, name)), (shape, name, "roots alone")
            assert getattr(done, name).dtype == getattr(mine, name).dtype
    for batch, nodes in ((3, 1), (70, 16), (2, 33), (5, 128)):
        mask = torch.rand(batch, nodes, nodes, generator=torch.Generator().manual_seed(nodes)) < 0.5
        longer = torch.cat([mask.flatten(), torch.ones(9, dtype=torch.bool)])  # SGLang's buffers are
        words = masks.pack(longer.to(DEVICE), batch, nodes)
        assert torch.equal(words.cpu(), Tree.from_mask(mask, checked=False).words), (batch, nodes)
    gate_metrics["differing"] = 0


def agreeing(tree: DraftTree, depth: int, seed: int) -> Tensor:
    """Targets that agree with a random path of each tree."""
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    targets = torch.randint(0, 60, tree.tokens.shape, generator=g)
    for b, parents in enumerate(tree.parents.tolist()):
        node = 0
        for _ in range(rng.randint(0, depth)):
            children = [i for i, p in enumerate(parents) if p == node]
            if not children:
                break
            child = rng.choice(children)
            targets[b, node] = tree.tokens[b, child]
            node = child
    return targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_move_as_if_all_were_read_first(dtype, gate_metrics):
    """Scattered paths over shared windows, by bytes; rows that are both read and written; padding untouched."""
    g = torch.Generator().manual_seed(3)
    buffers = [torch.randint(0, 200, (200, 1, 576), generator=g).to(dtype).to(DEVICE) for _ in range(3)]
    window = torch.randperm(200, generator=g)[:60].view(3, 20).to(DEVICE)
    path = torch.tensor([[0, 3, 7, 9, 4], [0, 1, 4, 3, 4], [0, 1, 2, 3, 4]], device=DEVICE)
    count = torch.tensor([4, 3, 1], dtype=torch.int32, device=DEVICE)
    expected = [b.clone() for b in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for b in range(3):
            for j in range(int(count[b])):
                after[window[b, j]] = before[window[b, path[b, j]]]
    copies = [b.clone() for b in buffers]
    Mover(buffers).move(window, path, count)
    mover = Mover(copies)
    kernels.move_rows(mover._addresses, mover.rows[0], window, path, count)
    for want, ours, kernel in zip(expected, buffers, copies, strict=True):
        assert torch.equal(want, ours) and torch.equal(want, kernel)
    gate_metrics["layers"] = len(buffers)


# ---- the 14 properties ----


class Ranks:
    """Tensor-parallel ranks in one process: each runs up to a gather and waits for the others' part."""

    def __init__(self, shards: list[Tensor], count: int, starts: list[int], own: list[int]) -> None:
        self.parts: list[list[Tensor]] = [[] for _ in shards]
        first = [self._head(i, starts[i], own[i], count, record=True) for i in range(len(shards))]
        for head, shard in zip(first, shards, strict=True):
            head.candidates(shard)
        second = [self._head(i, starts[i], own[i], count, record=False) for i in range(len(shards))]
        self.results = [head.candidates(shard) for head, shard in zip(second, shards, strict=True)]

    def _head(self, rank: int, start: int, own: int, count: int, record: bool) -> TreeHead:
        calls = [0]

        def all_gather(tensor: Tensor, dim: int) -> Tensor:
            if record:
                self.parts[rank].append(tensor)
                return tensor.repeat(len(self.parts), 1)
            calls[0] += 1
            return torch.cat([own[calls[0] - 1] for own in self.parts])

        group = SimpleNamespace(world_size=len(self.parts), all_gather=all_gather)
        return TreeHead(torch.empty(0), own=own, start=start, group=group, block=2, budget=1, count=count, trees=None)


def test_shard_local_ids(served, tmp_path, gate_metrics):
    """Four shards, the last one padded: every rank gets the ids and probabilities of the whole vocabulary. And two
    ranks in the engine, with an automatic budget and a pool so small that requests are retracted."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 7, 250, generator=g)
    own, starts, rows = [64, 64, 64, 58], [0, 64, 128, 192], 64
    shards = []
    for start, n in zip(starts, own, strict=True):
        part = torch.full((2, 7, rows), 99.0)  # rows that pad a shard hold anything
        part[..., :n] = logits[..., start : start + n]
        shards.append(part)
    for count in (1, 5, 64, 100):
        ids, logprobs = whole_head(logits, count)
        for rank, (mine, values) in enumerate(Ranks(shards, count, starts, own).results):
            assert torch.equal(mine, ids), f"rank {rank} of 4, {count} candidates"
            assert torch.allclose(values, logprobs, atol=1e-5)
    assert int(ids.max()) >= 192, "no id of the last shard was among them"
    outcome, counts = run_ddtree(
        tmp_path, served.model, served.drafter, served.prompts, [], (24,),
        probe={"answers": str(served.answers), "vocabulary": MODEL.vocab}, budget="auto",
        speculative_num_draft_tokens=BUDGET + 1, environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}, tp_size=2,
        max_total_tokens=320, log_level="info",
    )  # fmt: skip
    expected = [{"tokens": [t[:24] for t in served.plain[0]["tokens"]]}]
    assert not (wrong := differing(_served(outcome)[0], expected)), wrong
    retracted = outcome.log.count("Retract requests")
    assert retracted > 0 and "leak" not in outcome.log, "nothing was retracted, or slots were lost"
    gate_metrics["ranks"] = 4
    gate_metrics["retractions"] = retracted


@dataclass(frozen=True)
class Markov:
    """A target that is a table: the next token's logits by the last token. And marginals of a drafter for it."""

    vocabulary: int = 12
    seed: int = 0

    def tables(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        target = torch.randn(self.vocabulary, self.vocabulary, generator=g) * 1.5
        draft = target + torch.randn(target.shape, generator=g) * 0.7
        return target.to(DEVICE), draft.to(DEVICE)


def info(batch: int, *, temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0):
    """What ``sampling`` reads of SGLang's SamplingBatchInfo."""

    def of(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=DEVICE)

    return SimpleNamespace(
        temperatures=of(temperature)[:, None], top_ks=of(top_k, torch.int64).int(), top_ps=of(top_p), min_ps=of(min_p),
        is_all_greedy=top_k == 1, need_top_k_sampling=top_k < 1 << 30, need_top_p_sampling=top_p < 1,
        need_min_p_sampling=min_p > 0, has_custom_logit_processor=False, logit_bias=None,
    )  # fmt: skip


def request(**penalties):
    plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    parameters = SimpleNamespace(**(plain | {"stop_token_ids": None} | penalties))
    return SimpleNamespace(sampling_params=parameters, tokenizer=None, output_ids=[])


def decode(
    steps: int, batch: int, sampled, *, req=None, biased: bool = False, length: int = 8, nodes: int | None = None
) -> tuple[Tensor, float]:
    """Run DDTREE on the table, requests of ``length`` tokens that begin at token 0: [requests, length] and accept.

    ``nodes`` of each tree are verified; None: all.
    """
    target, draft = Markov().tables()
    vocabulary, depth, budget = len(target), 4, 9
    req = req or request()
    torch.manual_seed(11)
    rows = [[] for _ in range(batch)]
    finished, taken, passes = [], 0, 0
    bonus = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(batch, vocabulary, dtype=torch.int16, device=DEVICE)
    for _ in range(steps):
        last, marginals = torch.softmax(draft[bonus], -1), []
        for _ in range(depth):
            marginals.append(last)
            last = last @ torch.softmax(draft, -1)
        logits = torch.stack(marginals, 1).log()
        ids, logprobs = whole_head(logits, budget)
        tree = built(bonus, ids, logprobs, budget).first(batch, nodes)
        said = target[tree.tokens].flatten(0, 1).clone()
        penalized = bool(req.sampling_params.frequency_penalty or req.sampling_params.repetition_penalty != 1)
        sampling.adjust(said, sampled, tree, [req] * batch, counts if penalized else None)
        targets = sampling.targets(said, sampled, tree.nodes, int(sampled.top_ks.max()))
        if biased:  # a walk that follows the first child whatever the target drew, one time in eight
            lucky = torch.rand(batch, device=DEVICE) < 0.125
            targets[:, 0] = torch.where(lucky, tree.tokens[:, 1], targets[:, 0])
        done = accept(tree, targets, min(depth + 1, tree.nodes))
        taken, passes = taken + int(done.count.sum()), passes + batch
        bonus = done.bonus
        live = torch.arange(done.tokens.shape[1], device=DEVICE) < done.count[:, None]
        counts.scatter_add_(1, done.tokens, live.to(counts.dtype))
        for b, (tokens, n) in enumerate(zip(done.tokens.tolist(), done.count.tolist(), strict=True)):
            rows[b] += tokens[:n]
            if len(rows[b]) >= length:
                finished.append(rows[b][:length])
                rows[b], bonus[b] = [], 0
                counts[b] = 0
    return torch.tensor(finished), taken / passes


def direct(requests: int, sampled, *, req=None, length: int = 8) -> Tensor:
    """The same by plain sampling of one token after another, with a sampler of its own, in float64."""
    target, _ = Markov().tables()
    g = torch.Generator().manual_seed(5)
    target, parameters = target.double().cpu(), (req or request()).sampling_params
    last = torch.zeros(requests, dtype=torch.int64)
    counts = torch.zeros(requests, len(target), dtype=torch.float64)
    out = []
    for _ in range(length):
        logits = target[last] - parameters.frequency_penalty * counts - parameters.presence_penalty * (counts > 0)
        factor = torch.where(counts > 0, float(parameters.repetition_penalty), 1.0)
        logits = torch.where(logits < 0, logits * factor, logits / factor)
        p = torch.softmax(logits / float(sampled.temperatures[0]), -1)
        ordered, order = p.sort(-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered) <= float(sampled.top_ps[0])
        kept &= torch.arange(p.shape[1]) < int(sampled.top_ks[0])
        kept &= ordered >= ordered[:, :1] * float(sampled.min_ps[0])
        last = order.gather(1, torch.multinomial(torch.where(kept, ordered, 0.0), 1, generator=g))[:, 0]
        counts[torch.arange(requests), last] += 1
        out.append(last)
    return torch.stack(out, 1)


def p_value(ours: Tensor, theirs: Tensor) -> float:
    """χ² of homogeneity over (place, token, next token), rare ones together."""
    from scipy.stats import chi2_contingency

    def cells(tokens: Tensor) -> Counter:
        found: Counter = Counter()
        for row in tokens.tolist():
            found.update(zip(range(len(row) - 1), row[:-1], row[1:], strict=True))
        return found

    a, b = cells(ours), cells(theirs)
    frequent = [k for k in a.keys() | b.keys() if a[k] + b[k] >= 40]
    table = np.array([[a[k] for k in frequent], [b[k] for k in frequent]])
    rest = np.array([[sum(a.values())], [sum(b.values())]]) - table.sum(1, keepdims=True)
    return float(chi2_contingency(np.hstack([table, rest]) if rest.min() > 0 else table)[1])


SAMPLED = {
    "plain": ({}, {}, None),
    "temperature": ({"temperature": 0.6}, {}, None),
    "top-p": ({"top_p": 0.8}, {}, None),
    "top-k, min-p": ({"top_k": 5, "min_p": 0.1}, {}, None),
    "frequency": ({"top_p": 0.9}, {"frequency_penalty": 0.9, "presence_penalty": 0.4}, None),
    "repetition": ({}, {"repetition_penalty": 1.5}, None),
    "roots alone": ({"top_p": 0.9, "top_k": 9}, {"frequency_penalty": 0.9, "repetition_penalty": 1.5}, 1),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_honoured(name, gate_metrics):
    """χ² of DDTREE's tokens against plain sampling, penalties counted along the path; several accepted a step."""
    parameters, penalties, nodes = SAMPLED[name]
    sampled, req = info(64, **parameters), request(**penalties)
    ours, length = decode(130, 64, sampled, req=req, nodes=nodes)
    p = p_value(ours, direct(len(ours) * 2, sampled, req=req))
    assert length > 1.3 or nodes == 1, f"accept length {length:.2f}: hardly a walk"
    assert p >= 0.001, f"{name}: χ² rejects at p = {p:.2g}"
    gate_metrics["p_value"] = p
    gate_metrics["accept_length"] = length


def test_sampled_distribution(gate_metrics):
    """500,000 tokens, not rejected at 1 %. With 20,000 a bias has to be five times as large to show."""
    batch = 1024
    ours, length = decode(260, batch, info(batch))
    assert ours.numel() >= 500_000, ours.shape
    gate_metrics["p_value"] = p_value(ours, direct(len(ours) * 2, info(batch)))
    gate_metrics["tokens"] = ours.numel()
    gate_metrics["accept_length"] = length
    assert gate_metrics["p_value"] >= 0.01


def test_biased_walk_is_rejected(gate_metrics):
    """The same test sees a walk that takes the first child more often than the target would."""
    ours, _ = decode(260, 64, info(64), biased=True)
    gate_metrics["p_value"] = p_value(ours, direct(len(ours) * 2, info(64)))
    assert gate_metrics["p_value"] < 0.01


def test_token_zero(gate_metrics):
    """Token 0 as bonus, as node, as what the target says: a token like any other; nodes outside a tree hold 0 too."""
    ids = torch.tensor([[[0, 3], [4, 0], [0, 5]]], device=DEVICE)
    logprobs = torch.tensor([[[0.6, 0.4], [0.6, 0.4], [0.6, 0.4]]], device=DEVICE).log()
    tree = built(torch.tensor([0], device=DEVICE), ids, logprobs, 14, 20)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    second = next(i for i in range(1, 15) if parents[i] == 0 and tokens[i] == 0)
    third = next(i for i in range(1, 15) if parents[i] == second and tokens[i] == 0)
    targets = torch.full((1, 20), 9, device=DEVICE)
    targets[0, 0] = targets[0, second] = 0
    done = accept(tree, targets, 4)
    assert done.path[0, :3].tolist() == [0, second, third] and done.tokens[0].tolist() == [0, 0, 9, 0]
    assert int(done.count) == 3 and int(done.bonus) == 9
    targets.fill_(0)  # it says 0 everywhere: nodes outside the tree must not answer to it
    done = accept(tree, targets, 4)
    assert python_walk(tokens, parents, targets[0].tolist())[0] == done.path[0, : int(done.count)].tolist()
    gate_metrics["accepted"] = int(done.count)


def test_root_row(served, gate_metrics):
    """The root sees itself alone, in the packed masks of every step of the engine and of every budget."""
    bonus, ids, logprobs = Marginals(7, 9).draw()
    for budget in BUDGETS:
        tree = built(bonus, ids, logprobs, budget)
        words = tree.words.view(len(bonus), tree.nodes, -1)
        assert (words[:, 0, 0] == 1).all() and not words[:, 0, 1:].any()
    assert served.counts["root_sees_more"] == 0 and served.counts["steps"] > 0
    gate_metrics["steps"] = served.counts["steps"]


def test_node_logits(gate_metrics):
    """Each node's attention equals the last row of a chain run of its path, on trees that the builder made."""
    shape = Marginals(7, 9, batch=3)
    tree = built(*shape.draw(), 20)
    case = testing.Case(prefixes=(0, 37, 130), nodes=(21, 21, 21), heads=2, branching=0.0)
    problem = case.build(DEVICE)
    parents = tree.parents.tolist()
    drawn = Tree(tree.words.flatten(0, 1), problem.tree.node_starts, tree.nodes)
    out, lse = verify(problem.q, problem.kv, problem.slots, drawn, sm_scale=problem.sm_scale)
    problem = replace(problem, parents=parents, tree=drawn)
    worst = 0.0
    for b in range(3):
        for node in range(21):
            chain, _ = problem.path(b, node).run()
            row = problem.rows(b).start + node
            worst = max(worst, float((chain[-1] - out[row]).abs().max()))
            assert torch.allclose(chain[-1], out[row], atol=1e-5), (b, node)
    gate_metrics["worst"] = worst


def test_lse_base(gate_metrics):
    """Two halves of the prefix, merged by their natural-log LSE, are the whole; and splits agree with one pass."""
    case = testing.Case(prefixes=(700, 90), nodes=(9, 17), heads=2, seed=4)
    problem = case.build(DEVICE)
    for impl in ("reference", "triton"):
        out, lse = problem.run(impl)
        assert not testing.compare(problem, out, lse).problem
    slots, g = problem.lists(), problem.tree.node_starts.tolist()
    halves = []
    for part in (0, 1):
        lists = []
        for b, own in enumerate(slots):
            nodes = g[b + 1] - g[b]
            middle = (len(own) - nodes) // 2
            lists.append(own[:middle] if part == 0 else own[middle:])
        if part == 1:
            halves.append(
                verify(problem.q, problem.kv, Slots.from_lists(lists, DEVICE), problem.tree, sm_scale=problem.sm_scale)
            )
            continue
        # no node of its own: every row sees the first half through a tree of one node, its last token
        rows = torch.arange(len(problem.q), device=DEVICE)
        singles = [lists[b] for b in range(2) for _ in range(g[b + 1] - g[b])]
        tree = Tree.chain(1, len(rows), DEVICE)
        halves.append(verify(problem.q, problem.kv, Slots.from_lists(singles, DEVICE), tree, sm_scale=problem.sm_scale))
    (out1, lse1), (out2, lse2) = halves
    lse = torch.logaddexp(lse1, lse2)
    merged = out1 * (lse1 - lse).exp()[..., None] + out2 * (lse2 - lse).exp()[..., None]
    want, want_lse = problem.oracle()
    assert torch.allclose(lse.double(), want_lse, atol=1e-4) and torch.allclose(merged.double(), want, atol=1e-4)
    gate_metrics["worst"] = float((merged - want).abs().max())


def test_mask_bytes_constant(served, gate_metrics):
    """A request's mask is N rows of N bits, whatever its context."""
    nodes = BUDGET + 1
    assert served.counts["mask_bytes"] == nodes * ((nodes + 31) // 32) * 4
    assert served.counts["different_lengths"] > 10, "contexts hardly differed"
    for budget in BUDGETS:
        assert DraftTree.empty(1, budget + 1, "cpu").words.numel() * 4 == (budget + 1) * ((budget + 32) // 32) * 4
    gate_metrics["mask_bytes"] = served.counts["mask_bytes"]


def test_tree_not_worse_than_chain(served, gate_metrics):
    """By the draft's own probabilities the tree is never below the chain; nor is it in the engine's run."""
    least = float("inf")
    for seed in range(20):
        bonus, ids, logprobs = Marginals(7, 30, grid=seed % 2 == 0, batch=4, seed=seed).draw()
        chain = logprobs[:, :, 0].cumsum(1).exp().sum(1)
        for budget in (7, 8, 16, 31, 64):
            tree = built(bonus, ids, logprobs, budget)
            expected = expected_accepts(tree, ids, logprobs)
            assert torch.allclose(tree.expected_drafts([budget + 1])[:, 0], expected.float(), atol=1e-4), (seed, budget)
            least = min(least, float((expected / chain).min()))
            assert (expected >= chain - 1e-5).all(), (seed, budget)
    taken, chain = served.counts["committed"], served.counts["chain_committed"]
    assert taken >= chain > 0, f"{taken} tokens by trees, {chain} by chains of the same drafts"
    gate_metrics["least_ratio"] = least
    gate_metrics["engine_ratio"] = taken / chain


def expected_accepts(tree: DraftTree, ids: Tensor, logprobs: Tensor) -> Tensor:
    """The sum of the nodes' path probabilities, from their tokens and depths alone."""
    totals = []
    for b, parents in enumerate(tree.parents.tolist()):
        score = [0.0] * len(parents)
        for node, parent in enumerate(parents):
            if parent >= 0:
                depth = int(tree.depths[b, node]) - 1
                at = int((ids[b, depth] == tree.tokens[b, node]).nonzero()[0])
                score[node] = score[parent] + float(logprobs[b, depth, at])
        totals.append(sum(np.exp(s) for s, p in zip(score, parents, strict=True) if p >= 0))
    return torch.tensor(totals, device=ids.device)


# ---- the automatic budget ----


@dataclass(frozen=True)
class Server:
    """A made-up server: what a step costs and brings. Times and promises scatter and come steps later."""

    draft: float = 0.3  # of a plain step
    node: float = 0.005  # for each node and request
    depth: float = 2e-5  # for each token of context
    drafts: tuple[float, ...] = (2.0, 2.8, 3.3, 3.8)  # that are accepted at the block's width and those above
    truth: float = 1.0  # accepted over promised
    batch: int = 1
    context: int = 1000
    late: int = 2
    shared: int = 1  # steps after which observations are handed on, as with several ranks
    widths: tuple[int, ...] = budgets.ladder(8, 64)

    def seconds(self, width: int, context: float) -> float:
        return 1e-3 * (1 + self.node * width * self.batch + self.depth * context + (self.draft if width > 1 else 0.0))

    def accepted(self, width: int) -> float:
        return dict(zip(self.widths[1:], self.drafts, strict=True))[width] if width > 1 else 0.0

    def speeds(self) -> dict[int, float]:
        return {w: (1 + self.accepted(w)) / self.seconds(w, self.context) for w in self.widths}

    def run(self, policy: budgets.Policy, steps: int, seed: int = 0, skipped: int = 100) -> tuple[float, list[int]]:
        """Tokens a second after the first ``skipped`` steps, and the widths."""
        rng, chosen, tokens, seconds = random.Random(seed), [], 0.0, 0.0
        flying: list[tuple[int, budgets.Observation, int, list[int]]] = []
        for step in range(steps):
            landed = [f for f in flying if f[0] <= step]
            flying = [f for f in flying if f[0] > step]
            policy.observe([f[1] for f in landed])
            for _, _, width, drafts in landed:
                policy.accepted(width, drafts)
            width = policy.choose(self.batch, self.context)
            took, mean = self.seconds(width, self.context) * rng.gauss(1, 0.02), self.accepted(width)
            drafts = [sum(rng.random() < mean / 7 for _ in range(7)) for _ in range(self.batch)]
            promise, luck = None, rng.gauss(1, 0.3)
            if policy.reads_promise():
                promise = tuple(luck * self.accepted(w) / self.truth for w in self.widths)
            seen = budgets.Observation(width, self.batch, self.context, took if policy.settled() else None, promise)
            arrives = -(-(step + self.late) // self.shared) * self.shared
            flying.append((arrives, seen, width, drafts))
            chosen.append(width)
            if step >= skipped:
                tokens, seconds = tokens + 1 + mean, seconds + took
        return tokens / seconds, chosen


SERVERS = [
    Server(draft=draft, node=node, drafts=drafts, truth=truth, batch=batch)
    for draft in (0.15, 0.8)
    for node in (0.0003, 0.004, 0.03)
    for drafts in ((0.05, 0.06, 0.07, 0.08), (1.5, 1.8, 2.0, 2.1), (3.5, 4.4, 5.0, 5.4))
    for truth, batch in ((0.8, 1), (1.2, 16))
]


def test_budget_policy(gate_metrics):
    """The width that is chosen gives at least 97 % of the best width's tokens a second, exploration counted, whatever
    a node costs and brings; also where ranks hand observations on every 16 steps. It does not go to and fro."""
    least, best_of, most = 1.0, Counter(), 0
    for server in [*SERVERS, *(replace(s, shared=16) for s in SERVERS[::7])]:
        speeds = server.speeds()
        best = max(speeds, key=lambda w: speeds[w])
        got, chosen = server.run(budgets.Policy(server.widths), 900)
        best_of[best] += 1
        least = min(least, got / speeds[best])
        most = max(most, sum(a != b for a, b in zip(chosen[100:], chosen[101:], strict=False)))
        assert got >= 0.97 * speeds[best], (server, got / speeds[best], Counter(chosen))
    assert len(best_of) >= 4, f"the best widths were {best_of}: a choice was hardly needed"
    assert most <= 80, f"{most} switches in 800 steps"
    gate_metrics["least_share"] = least
    gate_metrics["servers"] = sum(best_of.values())


def test_budget_falls_back_and_recovers(gate_metrics):
    """A tree that loses gives way to the chain, and a chain that loses to no draft; when the text, the batch or the
    device changes, so does the width; the same observations give the same widths."""
    dear, cheap, hopeless = (
        Server(node=0.1),
        Server(node=0.0003, drafts=(3.5, 4.4, 5.0, 5.4)),
        Server(drafts=(0.02,) * 4),
    )
    policy = budgets.Policy(dear.widths)
    seen = []
    for server, width in ((dear, 8), (cheap, 64), (hopeless, 1), (cheap, 64), (replace(dear, batch=16), 1), (dear, 8)):
        _, chosen = server.run(policy, 1500)
        common = Counter(chosen[-300:]).most_common(1)[0]
        assert common[0] == width and common[1] > 280, (server, Counter(chosen[-300:]))
        seen.append(next(i for i, w in enumerate(chosen) if Counter(chosen[i : i + 20])[width] >= 18))
    again = budgets.Policy(dear.widths)
    assert dear.run(again, 400)[1] == dear.run(budgets.Policy(dear.widths), 400)[1]
    assert budgets.Policy((17,)).choose(3, 1000) == 17
    gate_metrics["steps_to_recover"] = max(seen)


def test_budget_is_told():
    """A request's meta_info has the nodes of the pass that gave each token, also after tokens were taken back."""
    asked = SimpleNamespace(customized_info=None, output_ids=[1])
    for width, tokens, kept in ((8, 3, 3), (16, 2, 1), (1, 1, 1)):
        budgets.note_nodes(asked, width, tokens)
        asked.output_ids += [1] * kept
    assert asked.customized_info == {"ddtree_nodes": [0, 8, 8, 8, 16, 1]}


# ---- the engine ----

PROMPTS, TURNS = 6, (60, 20)


@dataclass
class Served:
    """A run with the probe beside the run without speculation."""

    model: str
    drafter: str
    prompts: list
    suffixes: list
    answers: Path
    plain: list[dict]
    rounds: list[list[dict]]
    counts: dict
    log: str


def _served(outcome: engine.Outcome) -> list[list[dict]]:
    assert outcome.returncode == 0 and outcome.rounds, (
        f"the engine ended with {outcome.returncode} after {outcome.seconds:.0f} s; its log ends:\n"
        + outcome.log[-6000:]
    )
    return outcome.rounds


def run_ddtree(folder: Path, model: str, draft: str, prompts, suffixes, turns, *, probe=None, budget=BUDGET,
               timeout: float = 900, environ=(), modes=("",), **options) -> tuple[engine.Outcome, dict]:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    record, mode_file = folder / "counts.json", folder / "mode.txt"
    mode_file.write_text("")
    options = {"attention_backend": "mla_verify", "speculative_algorithm": "DDTREE"} | options
    job = engine.Job(
        model, prompts, suffixes, turns, modes, str(mode_file), {"speculative_draft_model_path": draft} | options
    )
    wanted = {"record": str(record), "mode_file": str(mode_file)} | (probe or {})
    plugin = engine.write_plugin(folder / "probe", SUPPORT / "ddtree_probe.py", SUPPORT / "probe.py")
    outcome = engine.run_engine(
        job, folder, timeout, MLA_VERIFY_IMPL="reference", MLA_VERIFY_DDTREE_BUDGET=str(budget),
        MLA_VERIFY_DDTREE_PROBE=json.dumps(wanted), PYTHONPATH=str(plugin),
        SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS="0", **dict(environ),
    )  # fmt: skip
    return outcome, json.loads(record.read_text()) if record.exists() else {}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    """Two turns, batch 4, six requests of unequal lengths, eager and on the buffers of a captured graph."""
    if DEVICE == "cuda":
        pytest.skip("the engine runs of this file are for a machine with no GPU")
    folder = tmp_path_factory.mktemp("ddtree")
    model = str(tiny_model.write(folder / "model", MODEL))
    draft = str(drafter.write(folder / "drafter", MODEL, block=BLOCK))
    prompts = tiny_model.prompts(PROMPTS, shortest=8, longest=90, seed=2, model=MODEL)
    suffixes = tiny_model.prompts(PROMPTS, shortest=3, longest=9, seed=3, model=MODEL)
    job = engine.Job(model, prompts, suffixes, TURNS, engine={"attention_backend": "mla_verify"})
    plain = _served(engine.run_engine(job, folder / "plain", 900, MLA_VERIFY_IMPL="reference"))[0]
    known, asked = [], prompts
    for turn in plain:
        known += [[p, a] for p, a in zip(asked, turn["tokens"], strict=True)]
        asked = [p + a + s for p, a, s in zip(asked, turn["tokens"], suffixes, strict=True)]
    answers = folder / "answers.json"
    answers.write_text(json.dumps(known))
    outcome, counts = run_ddtree(
        folder / "tree", model, draft, prompts, suffixes, TURNS, probe={"answers": str(answers)}, modes=("", "graph")
    )
    rounds = _served(outcome)
    return Served(model, draft, prompts, suffixes, answers, plain, rounds, counts, outcome.log)


def differing(ours: list[dict], theirs: list[dict]) -> list[str]:
    """Each request whose tokens differ, with the place."""
    found = []
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for i, (mine, other) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            if mine != other:
                at = next((k for k, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y), -1)
                found.append(f"turn {turn + 1}, request {i}, token {at}")
    return found


def test_greedy_token_exact(request, gate_metrics):
    """Greedy DDTREE = greedy without speculation: eager, on graph buffers, two turns with radix hits.

    On a GPU the trained model speaks: see ``exact_on_a_gpu``.
    """
    if DEVICE == "cuda":
        exact_on_a_gpu(request.getfixturevalue("on_gpu"), gate_metrics)
        return
    served = request.getfixturevalue("served")
    for mode, turns in zip(("eager", "graph"), served.rounds, strict=True):
        assert not (wrong := differing(turns, served.plain)), f"{mode}: {wrong}"
        assert min(turns[1]["cached"]) > 0, "no radix hits"
    least = min(tiny_model.distinct_ratio(t) for turn in served.plain for t in turn["tokens"])
    assert least >= 0.8, f"an answer has only {least:.0%} distinct tokens: a loop shows nothing"
    accept_length = served.counts["committed"] / served.counts["request_steps"]
    assert accept_length > 2 and served.counts["branching"] > 0, served.counts
    gate_metrics["near_tie_differences_per_200"] = 0
    gate_metrics["accept_length"] = accept_length


def test_scattered_accepts(served, gate_metrics):
    """Path [0, 3, 7] by itself; and in the engine many scattered paths, with more than 50 rounds after the first."""
    ids = torch.tensor([[[1, 2, 3], [4, 5, 6]]], device=DEVICE)
    logprobs = log_probabilities(
        torch.tensor([[[0.0, -0.1, -0.2], [-3.0, -3.1, -3.2]]], device=DEVICE), 0.0 * ids[..., :1]
    )
    tree = built(torch.tensor([9], device=DEVICE), ids, logprobs, 11)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    seventh = next(i for i in range(4, 12) if parents[i] == 3)
    targets = torch.zeros(1, 12, dtype=torch.int64, device=DEVICE)
    targets[0, 0], targets[0, 3], targets[0, seventh] = tokens[3], tokens[seventh], 8
    done = accept(tree, targets, 3)
    assert done.path[0].tolist() == [0, 3, seventh] and done.tokens[0].tolist() == [tokens[3], tokens[seventh], 8]
    assert served.counts["scattered"] >= 20 and served.counts["rounds_after_scatter"] >= 50, served.counts
    for turns in served.rounds:
        assert not (wrong := differing(turns, served.plain)), wrong
    gate_metrics["scattered"] = served.counts["scattered"]
    gate_metrics["rounds_after"] = served.counts["rounds_after_scatter"]


def test_unequal_batch(served, gate_metrics):
    """Batches of 4 with trees and lengths that differ, also padded by a request as a captured graph pads them."""
    counts = served.counts
    assert counts["largest_batch"] == 4 and counts["unequal_trees"] > 0 and counts["unequal_lengths"] > 0, counts
    assert counts["graph_steps"] > 0, counts
    for turns in served.rounds:
        assert not (wrong := differing(turns, served.plain)), wrong
    gate_metrics["unequal_trees"] = counts["unequal_trees"]
    gate_metrics["padded_steps"] = counts["graph_steps"]


@pytest.fixture(scope="module")
def changing(served, tmp_path_factory) -> tuple[engine.Outcome, dict]:
    """The same on an automatic budget that is made to change at nearly every step, and without the radix cache."""
    return run_ddtree(
        tmp_path_factory.mktemp("changing"), served.model, served.drafter, served.prompts, served.suffixes, TURNS,
        probe={"answers": str(served.answers), "widths": [8, 1, 17, 16, 16, 1, 8, 17, 1, 16]}, budget="auto",
        speculative_num_draft_tokens=BUDGET + 1, disable_radix_cache=True,
    )  # fmt: skip


def test_changing_widths(served, changing, gate_metrics):
    """Greedy tokens are those of no speculation whatever the sequence of widths."""
    outcome, counts = changing
    turns = _served(outcome)[0]
    assert not (wrong := differing(turns, served.plain)), wrong
    for nodes in (1, BLOCK, 16, BUDGET + 1):
        assert counts[f"steps_of_{nodes}_nodes"] >= 10, counts
    assert counts["scattered"] > 0, counts
    gate_metrics["steps"] = counts["steps"]


def test_radix_turns(served, changing, gate_metrics):
    """Without the radix cache the same tokens; an idle scheduler counts its slots and dies of a leak."""
    outcome, _ = changing
    turns = _served(outcome)[0]
    assert not (wrong := differing(turns, served.plain)), wrong
    assert max(turns[1]["cached"]) == 0 < min(served.rounds[0][1]["cached"])
    lengths = [len(p) + TURNS[0] for p in served.prompts]
    for cached, length in zip(served.rounds[0][1]["cached"], lengths, strict=True):
        assert cached <= length, f"{cached} tokens were cached of {length} committed ones"
    assert "leak" not in outcome.log and "leak" not in served.log
    gate_metrics["requests"] = len(served.prompts)


def test_negative_controls(served, tmp_path, gate_metrics):
    """The comparison can fail: K/V that stays where the tree had it changes tokens."""
    outcome, counts = run_ddtree(
        tmp_path, served.model, served.drafter, served.prompts[:4], [], TURNS[:1],
        probe={"answers": str(served.answers), "fault": "unmoved"},
    )  # fmt: skip
    turns = _served(outcome)[0]
    expected = [{"tokens": served.plain[0]["tokens"][:4]}]
    assert counts["scattered"] > 0
    assert differing(turns, expected), "rows that were not moved changed no token: the gates would not see it"
    gate_metrics["differing"] = len(differing(turns, expected))


def test_sliding_window(served, tmp_path, gate_metrics):
    """A drafter of sliding-window layers, of fewer tokens than the contexts have, serves and tokens stay exact.

    Its window is SGLang's own attention; this does not compare it query by query.
    """
    draft = str(drafter.write(tmp_path / "drafter", MODEL, block=BLOCK, window=16))
    outcome, counts = run_ddtree(
        tmp_path / "layers", served.model, draft, served.prompts[:4], [], (24,), probe={"answers": str(served.answers)}
    )
    expected = [{"tokens": [t[:24] for t in served.plain[0]["tokens"][:4]]}]
    assert not (wrong := differing(_served(outcome)[0], expected)), wrong
    gate_metrics["steps"] = counts["steps"]


def test_refusals(monkeypatch, gate_metrics):
    """Wrong combinations are refused in words that name the flag."""
    from mla_verify_sglang.ddtree import algorithm
    from mla_verify_sglang.refusals import UnsupportedError

    monkeypatch.delenv(algorithm.VARIABLE, raising=False)

    def args(**changed):
        plain = {
            "speculative_draft_model_path": "somewhere", "attention_backend": "mla_verify",
            "prefill_attention_backend": None, "decode_attention_backend": None,
            "speculative_attention_mode": "prefill", "speculative_draft_attention_backend": None, "pp_size": 1,
            "enable_dp_attention": False,
            "speculative_dflash_block_size": 8, "speculative_num_draft_tokens": None, "device": "cuda",
            "max_running_requests": None, "disaggregation_mode": "null",
        }  # fmt: skip
        return SimpleNamespace(**(plain | changed))

    known = algorithm.DdtreeAlgorithm("DDTREE", None)
    for changed, words in (
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"attention_backend": "triton"}, "triton would get them; set --attention-backend mla_verify"),
        ({"speculative_draft_attention_backend": "mla_verify"}, "--speculative-draft-attention-backend flashinfer"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention is not supported"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode is not supported"),
        ({"speculative_num_draft_tokens": 5}, "--speculative-num-draft-tokens is 5"),
        ({"speculative_num_draft_tokens": 129}, "--speculative-num-draft-tokens is 129"),
        ({"speculative_dflash_block_size": 32}, "the drafter's block is 32 tokens"),
        ({"speculative_draft_window_size": 4}, "--speculative-draft-window-size 4"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            known.handle_server_args(args(**changed))
    for text in ("0", "128", "Auto", "many", "-3"):
        with pytest.raises(ValueError, match="expected auto or a number of nodes, 1 to 127"):
            algorithm.parse_budget(text)
    for asked, given, nodes, widths in (
        ("", None, 32, (1, 8, 16, 32)), ("", 17, 17, (17,)), ("auto", 64, 64, (1, 8, 16, 32, 64)),
        ("auto", 8, 8, (1, 8)), ("auto", 40, 40, (1, 8, 16, 32, 40)), ("4", None, 8, (8,)), ("96", None, 97, (97,)),
    ):  # fmt: skip
        monkeypatch.setenv(algorithm.VARIABLE, asked)
        taken = args(speculative_num_draft_tokens=given)
        known.handle_server_args(taken)
        assert taken.speculative_num_draft_tokens == nodes, (asked, given)
        assert algorithm.widths(nodes, 8) == widths, (asked, given)
        assert algorithm.budget(nodes) == (int(asked) if asked.isdigit() else nodes - 1)
        assert taken.speculative_draft_attention_backend == "flashinfer"
    gate_metrics["refused"] = 15


# ---- on a GPU, with the trained model and its drafter ----

ASKED, DECIDED, ANSWER = 400, 200, 16  # requests; those of them that the model decides most clearly; tokens
GPU_NEEDS = {
    "test_greedy_token_exact": ("builtin", "plain", "tree", "auto"),
    "test_graph_and_overlap": ("plain", "tree", "eager", "no-overlap"),
    "test_fp8_kv": ("fp8", "fp8-tree"),
}


def gpu_plans(pair: drafter.Trained) -> dict[str, session.Plan]:
    """float16. A model that speaks is often nearly undecided: so more requests are asked than are counted."""
    lengths = [round(10 * 400 ** ((i / (ASKED - 1)) ** 2)) for i in range(ASKED)]
    job = {"name": "main", "flush": True, "prompts": pair.prompts(lengths, 7), "tokens": ANSWER}
    base = session.device_options(True, "float16") | {
        "model_path": str(pair.target),
        "max_running_requests": 16,
        "max_total_tokens": 100_000,
        "chunked_prefill_size": 8192,
        # Several engines start side by side on one card, and SGLang counts what the others took as its own.
        "mem_fraction_static": 0.8,
    }
    ours = base | {"attention_backend": "mla_verify"}
    auto = ours | {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": str(pair.drafter)}
    tree = auto | {"speculative_num_draft_tokens": BUDGET + 1}
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    plain, drafted = {"main": job}, {"main": job | {"logprobs": False}}  # which SGLang 0.5.17 has not with drafts
    return {
        "builtin": session.Plan(base | {"attention_backend": "triton"}, plain),
        "plain": session.Plan(ours, plain),
        "tree": session.Plan(tree, drafted),
        "auto": session.Plan(auto, drafted),
        "eager": session.Plan(tree | {"disable_cuda_graph": True}, drafted),
        "no-overlap": session.Plan(tree | {"disable_overlap_schedule": True}, drafted),
        "fp8": session.Plan(ours | fp8, plain),
        "fp8-tree": session.Plan(tree | fp8, drafted),
    }


@pytest.fixture(scope="module")
def on_gpu(request, tmp_path_factory):
    """The main reply of an engine, by its name, with its log; all engines that the selected tests need run at once."""
    if DEVICE != "cuda":
        pytest.skip("CUDA graphs, overlap scheduling and fp8 K/V need a GPU")
    pair = drafter.trained()
    if pair is None:
        pytest.skip(drafter.MISSING)
    plans, folder = gpu_plans(pair), tmp_path_factory.mktemp("engines")
    run = session.run_needed(request, GPU_NEEDS, folder, plans, gpu=True, at_once=len(plans))

    def get(name: str) -> session.Reply:
        engine = run(name)
        return engine["main"] | {"log": engine["log"], "start": engine["start"]}

    return get


def decided(plain: session.Reply) -> list[int]:
    """The requests whose smallest gap between the first and the second token is largest."""
    least = [min(gap for gap, _, _ in tokens) for tokens in plain["top2"]]
    return sorted(sorted(range(len(least)), key=lambda i: least[i])[-DECIDED:])


def compare(gate_metrics, plain: session.Reply, pairs: dict, dtype: str = "float16") -> None:
    """Every first difference is a near tie, by ``plain``'s gaps where an engine told none; counts the decided ones."""
    chosen, near = set(decided(plain)), set()
    for what, sides in pairs.items():
        told = [side if any(side["top2"]) else side | {"top2": plain["top2"]} for side in sides]
        assert all(len(t) == ANSWER for side in sides for t in side["tokens"]), what
        found = session.first_differences(*told, dtype=dtype, largest_logit=drafter.LARGEST_LOGIT)
        for difference in found:
            print(f"{what}: {difference}")
        gate_metrics[f"differences {what}"] = len(found)
        session.require_near_ties(found, what)
        near |= {d.request for d in found} & chosen
    gate_metrics["requests"] = len(chosen)
    gate_metrics["near_tie_differences_per_200"] = 200 * len(near) / len(chosen)


def exact_on_a_gpu(on_gpu, gate_metrics) -> None:
    plain, builtin, tree, auto = (on_gpu(name) for name in ("plain", "builtin", "tree", "auto"))
    assert all(session.graph_share(engine["log"]) > 0.9 for engine in (tree, auto))
    gate_metrics["accept_length"] = accept_length = session.accept_length(tree)
    assert accept_length > 1.5, f"accept length {accept_length:.2f}: the drafter hardly ever helped"
    compare(gate_metrics, plain, {
        "DDTREE, no speculation": (tree, plain),
        "DDTREE auto, no speculation": (auto, plain),
        "no speculation, built-in": (plain, builtin),
    })  # fmt: skip


def test_graph_and_overlap(on_gpu, gate_metrics):
    """CUDA graphs and eager, overlap scheduling on and off: the same tokens."""
    plain, tree, eager, no_overlap = (on_gpu(name) for name in ("plain", "tree", "eager", "no-overlap"))
    shares = [session.graph_share(engine["log"]) for engine in (tree, eager, no_overlap)]
    assert shares[0] > 0.9 and shares[1] == 0 and shares[2] > 0.9
    assert not tree["start"]["disable_overlap_schedule"] and no_overlap["start"]["disable_overlap_schedule"]
    compare(gate_metrics, plain, {"graph, eager": (tree, eager), "overlap on, off": (tree, no_overlap)})
    gate_metrics["accept_length"] = session.accept_length(tree)


def test_fp8_kv(on_gpu, gate_metrics):
    """DDTREE on fp8 K/V says what no speculation says on it. An ulp more or less before K/V are rounded to eight bits
    moves a logit further than float16 does: near ties are as wide as bfloat16's."""
    plain, tree = on_gpu("fp8"), on_gpu("fp8-tree")
    compare(gate_metrics, plain, {"DDTREE, no speculation": (tree, plain)}, dtype="bfloat16")
    assert gate_metrics["near_tie_differences_per_200"] <= 20
    gate_metrics["accept_length"] = session.accept_length(tree)
