"""Who holds slot ids in an SGLang scheduler, and how they are told that rows have moved.

request rows   ``req_to_token[row, :kv_allocated_len]``; from ``cache_protected_len`` on the slots are the request's own
prefix tree    0.5.17 ``RadixCache.TreeNode.value``; 0.5.23 ``UnifiedRadixCache``, whose cores (Rust and Python) both
               hand out a node's own tensor, so that writing into it is enough
requests       0.5.17 ``req.prefix_indices``, a copy of slots; later releases keep a length only
allocator      the free lists

Every slot must be found exactly once among the requests' own slots, the tree and the free list. Where it is not,
somebody unknown holds slots, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .move import Point, nothing
from .plan import Layout, Moves, chains_of, where_to

UNKNOWN_IDS = 1 << 20  # node ids that are tried beyond the last known one before a Rust tree counts as unreadable


class NotNow(RuntimeError):
    """The pool can't be rearranged at this moment; nothing has been touched."""


class Holders:
    """Reads and rewrites slot ids.

    tree      SGLang's prefix cache, with its allocator and req_to_token pool
    requests  gives the requests that the scheduler knows at this moment, each once or more often
    growth    tokens to keep free behind a request that is still growing
    """

    def __init__(self, tree, requests: Callable[[], Iterable[Any]], growth: int = 0) -> None:
        self.tree = tree
        self.allocator = tree.token_to_kv_pool_allocator
        self.req_to_token_pool = tree.req_to_token_pool
        self.requests = requests
        self.page: int = self.allocator.page_size
        self.size: int = self.allocator.size // self.page
        self.growth = -(-growth // self.page)
        self.ends: list[tuple[str, int]] = []  # of the layout read last: requests and their last pages
        self._nodes = _nodes_of(tree)

    def read(self) -> Layout:
        """The layout in units of pages. Raises NotNow when a slot is not accounted for."""
        if _in_free_group(self.allocator):
            raise NotNow("the allocator collects frees (free_group_begin), so its free list is not complete")
        requests = self._holding()
        nodes = self._nodes()
        parts = [value for _, _, value in nodes]
        parts += [self._row(req)[_protected(req) : req.kv.kv_allocated_len] for req in requests]
        parts.append(_free_pages(self.allocator))
        units = self._units(parts)
        free = np.sort(units.pop())
        self._require_whole([*units, free])
        index = {key: i for i, (key, _, _) in enumerate(nodes)}
        segments = [(u, index.get(parent, -1), 0) for u, (_, parent, _) in zip(units, nodes, strict=False)]
        self.ends = []
        for req, own in zip(requests, units[len(nodes) :], strict=True):
            if len(own):
                self.ends.append((req.rid, int(own[-1])))
                segments.append((own, index.get(_node_key(req.last_node), -1), self.growth))
        chains, growth = chains_of(segments)
        return Layout(self.size, chains, growth, free)

    def rewrite(self, moves: Moves, undo: ExitStack, point: Point = nothing) -> None:
        """Tell every holder where its rows are now; ``undo`` tells them the old places again."""
        where = self._slot_map(moves)
        point("before the tree")
        _overwrite([value for _, _, value in self._nodes()], where, undo)
        point("before the rows of requests")
        _overwrite([self._row(req)[: req.kv.kv_allocated_len] for req in self._holding()], where, undo)
        for req in _once(self.requests()):
            slots = getattr(req, "prefix_indices", None)
            if slots is not None and len(slots):
                point("request prefix")
                _assign(req, "prefix_indices", where[slots.to(where.device)].to(slots), undo)
        point("free list")
        free = np.zeros(self.size + 1, dtype=bool)
        free[_free_pages(self.allocator).cpu().numpy()] = True
        free[moves.src] = True
        free[moves.dst] = False
        _set_free_pages(self.allocator, np.flatnonzero(free), undo)
        point("after the holders")

    def _holding(self) -> list[Any]:
        """Requests with a row, by row. Raises NotNow when a row in use belongs to no request found."""
        found = {_row_index(req): req for req in self.requests() if _row_index(req) is not None and req.kv is not None}
        pool = self.req_to_token_pool
        used = set(range(1, pool.size + 1)) - set(pool.free_slots)
        if used != set(found):
            raise NotNow(f"rows {sorted(used ^ set(found))} of req_to_token are in use by requests that are not known")
        return [found[row] for row in sorted(found)]

    def _row(self, req) -> Tensor:
        return self.req_to_token_pool.req_to_token[_row_index(req)]

    def _units(self, parts: list[Tensor]) -> list[np.ndarray]:
        """Page ids of runs of slots, and of the free pages that come last; one copy from the device."""
        if self.page > 1:
            parts = [p[:: self.page] // self.page for p in parts[:-1]] + parts[-1:]
        flat = torch.cat([p.to(torch.int64) for p in parts]).cpu().numpy()
        return np.split(flat, np.cumsum([len(p) for p in parts])[:-1])

    def _require_whole(self, parts: list[np.ndarray]) -> None:
        flat = np.concatenate(parts)
        if len(flat) and not 1 <= flat.min() <= flat.max() <= self.size:
            raise NotNow(f"pages {int(flat.min())} to {int(flat.max())} are held in a pool of 1 to {self.size}")
        held = np.bincount(flat, minlength=self.size + 1)[1:]
        if (held != 1).any():
            lost, twice = int((held == 0).sum()), int((held > 1).sum())
            raise NotNow(f"{lost} pages belong to no known holder and {twice} to several; nothing is moved")

    def _slot_map(self, moves: Moves) -> Tensor:
        """int64 [slots]: the new slot of each slot, on the pool's device."""
        where = where_to(moves, self.size)
        if self.page > 1:
            where = (where[:, None] * self.page + np.arange(self.page)).reshape(-1)
        return torch.from_numpy(where).to(self.allocator.device)


# How trees are walked: a function that gives (key, key of the parent, slots) of each node with slots


def _nodes_of(tree) -> Callable[[], list[tuple[Any, Any, Tensor]]]:
    core = getattr(tree, "tree_core", None)
    if core is not None:
        return _UnifiedNodes(core)
    if hasattr(tree, "root_node"):
        return lambda: _radix_nodes(tree)
    return lambda: []  # a cache that shares nothing (--disable-radix-cache) has no nodes


def _radix_nodes(tree) -> list[tuple[int, int, Tensor]]:
    found, stack = [], list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if node.value is not None and len(node.value):
            found.append((node.id, node.parent.id, node.value))
    return found


class _UnifiedNodes:
    """Nodes of a UnifiedRadixCache's core.

    The Rust core has no call that lists nodes. Their ids are handed out in order and never again, so each new id
    is tried once, until the slots found are as many as the core says it has.
    """

    def __init__(self, core) -> None:
        self.core = core
        self.known: list[int] = []
        self.next = 0

    def __call__(self) -> list[tuple[int, int, Tensor]]:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        full = ComponentType.FULL
        total = int(self.core.all_values_flatten().numel())
        found: dict[int, Tensor] = {}
        for node in self.known:
            self._try(node, full, found)
        held, began = sum(len(v) for v in found.values()), self.next
        while held < total and self.next < began + UNKNOWN_IDS:
            if self._try(self.next, full, found):
                held += len(found[self.next])
            self.next += 1
        if held != total:
            self.next = began
            raise NotNow(f"the prefix tree has {total} slots of which only {held} were found")
        self.known = sorted(found)
        parents = {info.node_id: info.parent_id for (*_, info) in self.core.collect_path_info(self.known)}
        return [(node, parents[node], found[node]) for node in self.known]

    def _try(self, node: int, component, found: dict[int, Tensor]) -> bool:
        try:
            value = self.core.get_component_device_value(node, component)
        except KeyError:
            return False
        if value is None or not len(value):
            return False
        found[node] = value
        return True


# Where releases differ in names


def _row_index(req) -> int | None:
    kv = req.kv
    return kv.req_pool_idx if hasattr(kv, "req_pool_idx") else getattr(req, "req_pool_idx", None)


def _protected(req) -> int:
    kv = req.kv
    return kv.cache_protected_len if hasattr(kv, "cache_protected_len") else req.cache_protected_len


def _node_key(node) -> Any:
    return getattr(node, "id", node)


def _in_free_group(allocator) -> bool:
    if hasattr(allocator, "is_not_in_free_group"):
        return not allocator.is_not_in_free_group
    return allocator.free_group is not None


def _free_pages(allocator) -> Tensor:
    if hasattr(allocator, "staged_pages"):
        return torch.cat((allocator.free_pages, *allocator.staged_pages))
    return torch.cat((allocator.free_pages, allocator.release_pages))


def _set_free_pages(allocator, pages: np.ndarray, undo: ExitStack) -> None:
    """The free list in ascending order, so that neighbours are handed out together."""
    fresh = torch.from_numpy(pages).to(allocator.free_pages)
    if hasattr(allocator, "staged_pages"):
        _assign(allocator, "staged_pages", [], undo)
        _assign(allocator, "num_staged_pages", 0, undo)
    else:
        _assign(allocator, "release_pages", allocator.release_pages[:0], undo)
    _assign(allocator, "free_pages", fresh, undo)


def _once(requests: Iterable[Any]) -> list[Any]:
    return list({id(req): req for req in requests}.values())


def _overwrite(kept: list[Tensor], where: Tensor, undo: ExitStack) -> None:
    """Map slot ids where they are kept, all tensors of one dtype in a few launches."""
    if not kept:
        return
    old = torch.cat(kept)
    new = where[old.long()].to(old.dtype)
    lengths = [len(t) for t in kept]
    undo.callback(torch._foreach_copy_, kept, list(old.split(lengths)))
    torch._foreach_copy_(kept, list(new.split(lengths)))


def _assign(thing, name: str, value, undo: ExitStack) -> None:
    undo.callback(setattr, thing, name, getattr(thing, name))
    setattr(thing, name, value)
