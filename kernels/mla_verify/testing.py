"""Seeded problems for ``verify`` and the comparison with the oracle, for tests, benches and the self-test.

A test parameter is one ``Case`` with its seed. Everything a right implementation must not touch is poisoned: unused
slots hold NaN, and the index entries between requests point far outside the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .reference import verify_float64
from .slots import Slots
from .tree import Tree

# Relative L2 error of a row, by the coarser of the dtypes that an implementation rounds to: the query's for the output,
# the products' for P. Half a unit in the last place of each, plus what accumulating in float32 costs.
ROW_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}
# Scores are float32 sums of exact products.
LSE_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    """One batch. ``prefixes`` and ``nodes`` are per request; a prefix of -1 makes the request padding."""

    prefixes: tuple[int, ...]
    nodes: tuple[int, ...]
    heads: int = 4
    q_dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    kv_scale: float = 1.0
    branching: float = 0.5  # 0: chains; 1: a parent is any earlier node
    scattered: bool = True
    wide_index: bool = False  # int64 slot ids
    seed: int = 0

    def build(self, device: torch.device | str = "cpu") -> Problem:
        g = torch.Generator().manual_seed(self.seed)
        used = sum(max(p, 0) + n if p >= 0 else 0 for p, n in zip(self.prefixes, self.nodes, strict=True))
        pool = used + 61
        order = torch.randperm(pool, generator=g) if self.scattered else torch.arange(pool)
        kv = torch.randn(pool, 576, generator=g)
        kv[:, :512] *= 1.0 + torch.rand(512, generator=g)
        kv = (kv / self.kv_scale).clamp(-440, 440).to(self.kv_dtype)
        gap = torch.tensor([-7, 1 << 30])
        flat, starts, lens, at, taken = [], [], [], 0, 0
        parents = []
        for p, n in zip(self.prefixes, self.nodes, strict=True):
            length = p + n if p >= 0 else 0
            flat += [gap, order[taken : taken + length]]
            starts.append(at + 2)
            lens.append(length)
            at, taken = at + 2 + length, taken + length
            loose = torch.rand(n, generator=g) < self.branching
            pick = [int(torch.randint(0, max(i, 1), (1,), generator=g)) for i in range(n)]
            parents.append([-1] + [pick[i] if loose[i] else i - 1 for i in range(1, n)])
        poison = torch.ones(pool, dtype=torch.bool)
        poison[order[:taken]] = False
        if self.kv_dtype == torch.float8_e4m3fn:
            kv.view(torch.uint8)[poison] = 0x7F
        else:
            kv[poison] = float("nan")
        q = torch.randn(sum(self.nodes), self.heads, 576, generator=g)
        return Problem(
            q.to(self.q_dtype).to(device),
            kv.to(device),
            Slots(
                torch.cat([*flat, gap]).to(torch.int64 if self.wide_index else torch.int32).to(device),
                torch.tensor(starts, dtype=torch.int64, device=device),
                torch.tensor(lens, dtype=torch.int32, device=device),
                max(lens),
            ),
            Tree.from_parents(parents, device=device),
            sm_scale=0.0417,
            kv_scale=self.kv_scale,
            parents=parents,
        )


@dataclass(frozen=True)
class Problem:
    q: Tensor
    kv: Tensor
    slots: Slots
    tree: Tree
    sm_scale: float
    kv_scale: float
    parents: list[list[int]]

    def run(self, impl: str | None = None, checked: bool = False) -> tuple[Tensor, Tensor]:
        from .op import verify

        return verify(
            self.q, self.kv, self.slots, self.tree, sm_scale=self.sm_scale, kv_scale=self.kv_scale, impl=impl,
            checked=checked,
        )  # fmt: skip

    def oracle(self) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        return verify_float64(self.q, self.kv, self.slots, self.tree, self.sm_scale, self.kv_scale)

    def lists(self) -> list[list[int]]:
        """Each request's slots, on the host."""
        flat = self.slots.indices.flatten().tolist()
        return [flat[s : s + n] for s, n in zip(self.slots.starts.tolist(), self.slots.lens.tolist(), strict=True)]

    def rows(self, request: int) -> slice:
        starts = self.tree.node_starts.tolist()
        return slice(starts[request], starts[request + 1])

    def only(self, requests: list[int]) -> Problem:
        """These requests alone, in this order."""
        lists, device = self.lists(), self.q.device
        return replace(
            self,
            q=torch.cat([self.q[self.rows(b)] for b in requests]),
            slots=Slots.from_lists([lists[b] for b in requests], device),
            tree=Tree.from_parents([self.parents[b] for b in requests], device=device),
            parents=[self.parents[b] for b in requests],
        )

    def path(self, request: int, node: int) -> Problem:
        """The node's own ancestors as a chain, with no siblings: its last row is the node's."""
        own = self.parents[request]
        chain = [node]
        while own[chain[0]] >= 0:
            chain.insert(0, own[chain[0]])
        slots, first = self.lists()[request], self.rows(request).start
        prefix = len(slots) - len(own)
        parents = [list(range(-1, len(chain) - 1))]
        return replace(
            self,
            q=self.q[[first + i for i in chain]],
            slots=Slots.from_lists([slots[:prefix] + [slots[prefix + i] for i in chain]], self.q.device),
            tree=Tree.from_parents(parents, device=self.q.device),
            parents=parents,
        )

    def moved(self, seed: int) -> Problem:
        """The same tokens in other slots of the pool."""
        g = torch.Generator().manual_seed(seed)
        to = torch.randperm(self.kv.shape[0], generator=g)
        kv = torch.empty_like(self.kv)
        wide = self.kv.view(torch.uint8) if self.kv.element_size() == 1 else self.kv
        (kv.view(torch.uint8) if kv.element_size() == 1 else kv)[to.to(kv.device)] = wide
        lists = [[int(to[s]) for s in own] for own in self.lists()]
        return replace(self, kv=kv, slots=Slots.from_lists(lists, self.q.device))


@dataclass(frozen=True)
class Comparison:
    """How far an output is from the oracle's; ``problem`` is "" where it is within rounding."""

    row_error: float  # the worst row's relative L2 error
    lse_error: float
    near_ties: int  # rows whose token differs, the oracle's own top two being closer than the rounding
    problem: str


def compare(problem: Problem, out: Tensor, lse: Tensor, vocabulary: int = 512) -> Comparison:
    """Hold out and lse to the oracle: rounding, and the same token after a projection and argmax."""
    want, want_lse = problem.oracle()
    tolerance = ROW_TOLERANCE[problem.q.dtype]
    empty = torch.isneginf(want_lse)
    got = out.to(torch.float64)
    if not torch.equal(torch.isneginf(lse), empty) or (got[empty] != 0).any():
        return Comparison(float("nan"), float("nan"), 0, "rows that see nothing are not 0 with LSE -inf")
    if not torch.isfinite(got).all() or not torch.isfinite(lse[~empty]).all():
        return Comparison(float("nan"), float("nan"), 0, "output or LSE has NaN or infinity")
    size = want.norm(dim=-1).clamp(min=1e-30)
    errors = torch.where(empty, 0.0, (got - want).norm(dim=-1) / size)
    lse_errors = torch.where(empty, 0.0, (lse.to(torch.float64) - want_lse).abs())
    row_error, lse_error = errors.max().item(), lse_errors.max().item()
    if row_error > tolerance:
        t, h = divmod(int(errors.argmax()), errors.shape[1])
        return Comparison(row_error, lse_error, 0, f"row {t} head {h} is off by {row_error:.2e}, over {tolerance:.0e}")
    if lse_error > LSE_TOLERANCE:
        return Comparison(row_error, lse_error, 0, f"LSE is off by {lse_error:.2e}, over {LSE_TOLERANCE:.0e}")
    g = torch.Generator().manual_seed(17)
    head = torch.randn(want.shape[1] * 512, vocabulary, generator=g, dtype=torch.float64).to(want.device)
    logits = want.flatten(1) @ head
    tokens = (got.flatten(1) @ head).argmax(-1)
    top = logits.max(-1).values
    gap = top - logits.gather(1, tokens[:, None])[:, 0]
    rounding = 2 * tolerance * want.flatten(1).norm(dim=-1) * head.norm(dim=0).max()
    wrong = gap > rounding
    if wrong.any():
        return Comparison(row_error, lse_error, 0, f"row {int(wrong.nonzero()[0])} gives another token")
    return Comparison(row_error, lse_error, int((gap > 0).sum()), "")
