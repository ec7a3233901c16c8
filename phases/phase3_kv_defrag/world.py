"""SGLang's own allocator, prefix tree, request rows and K/V pool, without an engine, and a model to hold them to.

What a token's row must hold depends on its prefix alone, so each distinct prefix gets a number, and a row is that
number in every layer and column. Whoever reads a slot through a request's row or through the tree can be checked.
Requests go through the same calls of SGLang as in its scheduler; its names differ between releases, which is all
that ``_Release17`` and ``_Release23`` are about.
"""

from __future__ import annotations

import importlib.metadata
import random
from array import array
from collections.abc import Sequence

import torch
from mla_verify_sglang.defrag.defragmenter import Defragmenter
from mla_verify_sglang.defrag.holders import Holders
from mla_verify_sglang.defrag.move import buffers_of
from mla_verify_sglang.defrag.policy import BestFit

VERSION = importlib.metadata.version("sglang")
CORES = (None,) if VERSION.startswith("0.5.17") else ("rust", "python")
LAYERS = 2
DRAFT_LAYERS = 1


def publish_server_args() -> None:
    """What SGLang's functions ask their process-wide configuration for."""
    from sglang.srt.runtime_context import get_context

    override = get_context().override_server_args(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    override.install()


class World:
    """Pool of ``slots`` slots, ``rows`` requests at once; ``core`` picks the tree core of releases that have two."""

    def __init__(self, slots: int = 96, rows: int = 6, page: int = 1, core: str | None = None, growth: int = 4) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

        common = {
            "size": slots,
            "page_size": page,
            "dtype": torch.float32,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        self.pool = MLATokenToKVPool(kv_lora_rank=6, qk_rope_head_dim=2, layer_num=LAYERS, **common)
        self.draft = MHATokenToKVPool(head_num=1, head_dim=4, layer_num=DRAFT_LAYERS, **common)
        self.rows = ReqToTokenPool(rows, 128, "cpu", False)
        kind = {"dtype": torch.float32, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(slots, **kind)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page, **kind)
        self.release = (_Release17 if VERSION.startswith("0.5.17") else _Release23)(self, page, core)
        self.tree = self.release.tree
        self.slots, self.page = slots, page
        self.live: list = []  # requests with a row
        self.waiting: list = []  # retracted ones
        self.numbers: dict[tuple[int, ...], int] = {}
        self.cached: list[tuple[int, ...]] = []  # sequences that went into the tree at some time
        self.buffers = [*buffers_of(self.pool), *buffers_of(self.draft)]
        for buffer in self.buffers:
            buffer.fill_(float("nan"))
        self.holders = Holders(self.tree, self.requests, growth)
        self.defragmenter = Defragmenter(self.holders, self.buffers)
        self.serial = 0

    def use_policy(self, lane: int) -> None:
        """Hand slots out by best fit from now on."""
        if self.page == 1:
            self.defragmenter.policy = BestFit(self.allocator, lane)

    def requests(self) -> list:
        return [*self.live, *self.waiting]

    # ---- what a scheduler does ----

    def start(self, tokens: Sequence[int], chunk: int | None = None, request=None) -> bool:
        """Prefill a request, its first ``chunk`` tokens or all; False where rows or slots do not suffice."""
        if not self.rows.free_slots:
            return False
        if request is None:
            self.serial += 1
            request = self.release.new_request(f"r{self.serial}", array("q", tokens))
        request.init_next_round_input(self.tree)
        self.release.lock(request)
        if not self._prefill(request, chunk):
            self.release.unlock(request)
            request.reset_for_retract()
            if request not in self.waiting:
                self.waiting.append(request)
            return False
        if request in self.waiting:
            self.waiting.remove(request)
        self.live.append(request)
        return True

    def resume(self, request, chunk: int | None = None) -> bool:
        """Go on with a chunked prefill; a chunk that is in the tree already is not put there again."""
        if self.release.has_new_chunk(request):
            self.checkpoint(request)
        self.release.next_chunk(request)
        return self._prefill(request, chunk)

    def unfinished(self, request) -> bool:
        """Whether a part of the prompt has not been prefilled yet."""
        return self.release.committed(request) < len(request.origin_input_ids) + len(request.output_ids)

    def checkpoint(self, request) -> None:
        """Put what is there into the tree, as after a prefill."""
        self.release.checkpoint(request, self.unfinished(request))
        self.cached.append(tuple(request.get_fill_ids()))

    def decode(self, request, token: int, accepted: int, reserve: int) -> bool:
        """One speculative step: slots for ``reserve`` tokens, of which ``accepted`` stay."""
        at = self.release.committed(request)
        room = at + max(reserve, accepted)
        have = request.kv.kv_allocated_len
        if self.page > 1:
            room = -(-room // self.page) * self.page
        if room > self.rows.max_context_len:
            return False
        if room > have:
            slots = self._slots(request, room - have, have, self.row(request))
            if slots is None:
                return False
            self.row(request)[have:room] = slots.to(torch.int32)
            request.kv.kv_allocated_len = room
        request.output_ids.extend((token + i) % 5 for i in range(accepted))
        self.release.commit(request, at + accepted)
        self._write(request, at, at + accepted)
        return True

    def finish(self, request) -> None:
        self.live.remove(request)
        tokens = self.tokens(request)
        self.release.finish(request, keep=True)
        self.cached.append(tokens)

    def abort(self, request) -> None:
        self.live.remove(request)
        self.release.finish(request, keep=False)

    def retract(self, request) -> None:
        self.live.remove(request)
        self.release.retract(request)
        self.waiting.append(request)

    def forget(self, request) -> None:
        self.waiting.remove(request)

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens))

    def churn(self, order) -> None:
        """What hours of serving leave: free slots in no order. ``order`` is a random.Random."""
        taken = self.allocator.alloc(self.allocator.available_size())
        pages = list(taken.view(-1, self.page).unbind())
        order.shuffle(pages)
        for page in pages:
            self.allocator.free(page)

    def flush(self) -> None:
        """What /flush_cache does to an idle server."""
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    # ---- what must hold ----

    def tokens(self, request) -> tuple[int, ...]:
        whole = tuple(request.origin_input_ids) + tuple(request.output_ids)
        return whole[: self.release.committed(request)]

    def row(self, request) -> torch.Tensor:
        return self.rows.req_to_token[self.release.row_index(request)]

    def number(self, prefix: tuple[int, ...]) -> int:
        return self.numbers.setdefault(prefix, len(self.numbers) + 1)

    def match(self, tokens: Sequence[int]) -> torch.Tensor:
        """Slots of the longest cached prefix."""
        return self.release.match(array("q", tokens))

    def check_contents(self) -> None:
        """Every row and every cached prefix reads what was written for its tokens."""
        for request in self.live:
            tokens = self.tokens(request)
            self._check(tokens, self.row(request)[: len(tokens)].long(), f"request {request.rid}")
        for tokens in self.cached[-12:]:
            slots = self.match(tokens)
            self._check(tokens[: len(slots)], slots, f"cached {tokens}")

    def check_holders(self) -> None:
        """Every slot has one holder, and the tree's locks are those of the live requests."""
        layout = self.holders.read()
        held = sum(len(c) for c in layout.chains)
        assert held + len(layout.free) == self.slots // self.page
        own = [self.row(r)[self.release.protected(r) : r.kv.kv_allocated_len].long() for r in self.live]
        pages = sum(len(torch.unique(o // self.page)) for o in own)
        assert len(layout.free) * self.page == self.allocator.available_size()
        in_tree = self.release.tree_size()
        assert held == pages + in_tree // self.page, (held, pages, in_tree)
        locked = set()
        for request in self.live:
            locked.update(self.row(request)[: self.release.protected(request)].tolist())
        assert self.release.protected_size() == len(locked), (self.release.protected_size(), sorted(locked))
        self.release.sanity_check()

    def _check(self, tokens: tuple[int, ...], slots: torch.Tensor, who: str) -> None:
        if not tokens:
            return
        want = torch.tensor([self.number(tokens[: i + 1]) for i in range(len(tokens))], dtype=torch.float32)
        for layer, buffer in enumerate(self.buffers):
            got = buffer[slots].reshape(len(tokens), -1)
            wrong = (got != (want + layer / 16)[:, None]).any(1)
            assert not wrong.any(), (
                f"{who}: buffer {layer}, positions {wrong.nonzero().flatten().tolist()[:8]} of {len(tokens)}, "
                f"slots {slots[wrong].tolist()[:8]} hold {got[wrong][:3, 0].tolist()}, not {want[wrong][:3].tolist()}"
            )

    def _write(self, request, start: int, stop: int) -> None:
        tokens = self.tokens(request)
        slots = self.row(request)[start:stop].long()
        values = torch.tensor([self.number(tokens[: i + 1]) for i in range(start, stop)], dtype=torch.float32)
        for layer, buffer in enumerate(self.buffers):
            buffer[slots] = (values + layer / 16).view(-1, *[1] * (buffer.dim() - 1)).expand_as(buffer[slots])

    def _prefill(self, request, chunk: int | None) -> bool:
        prefix = self.release.prefix(request)
        whole = len(request.full_untruncated_fill_ids)
        stop = whole if chunk is None else min(whole, len(prefix) + max(chunk, self.page) // self.page * self.page)
        slots = self._slots(request, stop - len(prefix), len(prefix), prefix)
        if slots is None:
            return False
        self.release.set_extend(request, len(prefix), stop)
        self.rows.alloc([request])
        row = self.row(request)
        row[: len(prefix)] = prefix.to(torch.int32)
        row[len(prefix) : stop] = slots.to(torch.int32)
        self.release.allocated(request, stop)
        self.release.commit(request, stop)
        self._write(request, len(prefix), stop)
        return True

    def _slots(self, request, count: int, before: int, row: torch.Tensor) -> torch.Tensor | None:
        """``count`` slots for positions from ``before`` on, evicting what must go; None where that is not enough."""
        from sglang.srt.mem_cache import allocation, common

        if count == 0:
            return torch.zeros(0, dtype=torch.int64)
        common.evict_from_tree_cache(self.tree, count + 2 * self.page)
        if self.allocator.available_size() < count + self.page * (self.page > 1):
            return None
        if self.page == 1:
            if self.defragmenter.policy is not None:
                self.defragmenter.policy.expect([(request.rid, count)])
            return allocation.alloc_token_slots(self.tree, count)
        whole = torch.tensor([before + count])
        start = torch.tensor([before])
        last = row[before - 1 : before].long() if before else torch.tensor([-1])
        return self.allocator.alloc_extend(start, start, whole, whole, last, count)


def busy_world(seed: int, page: int = 1, core: str | None = None, lane: int = 0) -> World:
    """A world after some traffic: shared prefixes, chunks, draft reserves, a retracted request, scattered slots."""
    order = random.Random(seed)
    world = World(slots=128 * page, page=page, core=core)
    if lane:
        world.use_policy(lane)
    world.churn(order)
    for i in range(5):
        family = [(3 * (i % 2) + j * j) % 5 for j in range(20)]
        world.start(
            family[: 12 + 2 * i] + [order.randrange(3) for _ in range(order.randrange(1, 8))], 8 if i == 4 else None
        )  # noqa: E501
        if i % 2:
            world.checkpoint(world.live[-1])
    for step in range(6):
        for request in list(world.live):
            if not world.unfinished(request):
                world.decode(request, step + order.randrange(3), order.randrange(1, 4), 8)
        if step == 2:
            world.finish(world.live[0])
        if step == 3:
            world.retract(world.live[1])
    world.check_holders()
    world.check_contents()
    return world


class _Release17:
    def __init__(self, world: World, page: int, core: str | None) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.tree = RadixCache(CacheInitParams(False, world.rows, world.allocator, page))

    def new_request(self, name: str, tokens: array):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req(name, "", tokens, SamplingParams(max_new_tokens=64))

    def lock(self, request) -> None:
        self.tree.inc_lock_ref(request.last_node)

    def unlock(self, request) -> None:
        self.tree.dec_lock_ref(request.last_node)

    def prefix(self, request) -> torch.Tensor:
        return request.prefix_indices

    def set_extend(self, request, start: int, stop: int) -> None:
        request.set_extend_range(start, stop)

    def allocated(self, request, stop: int) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        if request.kv is None:
            request.kv = ReqKvInfo(kv_allocated_len=stop, swa_evicted_seqlen=0)
        request.kv.kv_allocated_len = stop

    def commit(self, request, stop: int) -> None:
        request.kv_committed_len = stop

    def committed(self, request) -> int:
        return request.kv_committed_len

    def protected(self, request) -> int:
        return request.cache_protected_len

    def row_index(self, request) -> int:
        return request.req_pool_idx

    def next_chunk(self, request) -> None:
        request.init_next_round_input()
        request.inflight_middle_chunks += 1

    def has_new_chunk(self, request) -> bool:
        return request.extend_range.end > len(request.prefix_indices)

    def checkpoint(self, request, chunked: bool) -> None:
        self.tree.cache_unfinished_req(request, chunked=chunked)

    def finish(self, request, keep: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(request, self.tree, is_insert=keep)

    def retract(self, request) -> None:
        self.finish(request, keep=False)
        request.reset_for_retract()

    def match(self, tokens: array) -> torch.Tensor:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_indices

    def tree_size(self) -> int:
        return self.tree.total_size()

    def protected_size(self) -> int:
        return self.tree.protected_size()

    def sanity_check(self) -> None:
        assert self.tree.evictable_size() + self.tree.protected_size() == self.tree.total_size()


class _Release23(_Release17):
    def __init__(self, world: World, page: int, core: str | None) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params = CacheInitParams(
            False, world.rows, world.allocator, page, tree_components=(ComponentType.FULL,), tree_core_backend=core
        )
        self.tree = UnifiedRadixCache(params)
        found = type(self.tree.tree_core).__name__
        assert core is None or (core == "rust") == found.startswith("Rust"), f"asked for {core}, got {found}"

    def lock(self, request) -> None:
        request.lock = self.tree.lock(request.last_node)

    def unlock(self, request) -> None:
        self.tree.unlock(request.lock)
        request.lock = None

    def prefix(self, request) -> torch.Tensor:
        if request.kv.holds_kv:  # a chunk goes on in its own row
            return self.tree.req_to_token_pool.req_to_token[request.kv.req_pool_idx, : request.prefix_len].long()
        return self.tree.prefix_device_indices(request)

    def set_extend(self, request, start: int, stop: int) -> None:
        request.extend_end = stop

    def allocated(self, request, stop: int) -> None:
        request.kv.kv_allocated_len = stop

    def commit(self, request, stop: int) -> None:
        request.kv.kv_committed_len = stop

    def committed(self, request) -> int:
        return request.kv.kv_committed_len

    def protected(self, request) -> int:
        return request.kv.cache_protected_len

    def row_index(self, request) -> int:
        return request.kv.req_pool_idx

    def has_new_chunk(self, request) -> bool:
        return request.extend_end > request.prefix_len

    def checkpoint(self, request, chunked: bool) -> None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        checkpoint_kv_cache(request, self.tree)

    def finish(self, request, keep: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(request, self.tree, checkpoint=keep)

    def match(self, tokens: array) -> torch.Tensor:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        return self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]

    def tree_size(self) -> int:
        return self.tree.total_size()[0]

    def sanity_check(self) -> None:
        assert self.tree.evictable_size() + self.tree.protected_size() == self.tree.total_size()[0]
