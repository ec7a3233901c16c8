"""When a running SGLang scheduler has its pool rearranged: at the top of its loop, where no batch is being prepared.

There ``get_next_batch_to_run`` begins. Without overlap no step is running. With overlap the last step may still run
on the GPU; what is enqueued here waits for it, and the next step waits for what is enqueued here. Every decision
depends on what all tensor-parallel ranks share (how many steps were run, which requests came), never on a clock.

``MLA_VERIFY_DEFRAG`` asks for it:
  off                   not at all (default)
  idle                  once each time the server has run out of work, and on demand
  demand                when told to: POST /set_internal_state {"server_args": {"mla_verify_defrag": 1}}
  budget:BYTES[:STEPS]  at most BYTES moved after every STEPS steps (256 where not given); also idle and on demand
  always                everything at every safe point: for tests
Whoever asks for it also gets the allocation policy of ``policy``, unless MLA_VERIFY_DEFRAG_POLICY=stock.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "MLA_VERIFY_DEFRAG"
POLICY = "MLA_VERIFY_DEFRAG_POLICY"
KEY = "mla_verify_defrag"  # in /set_internal_state and in the internal states of /server_info
GROWTH = 64  # tokens kept free behind a growing request
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ALLOCATION = "sglang.srt.mem_cache.allocation"

logger = logging.getLogger(__name__)

_registered = False


class DefragError(ValueError):
    """The wish can't be understood, or this server can't be rearranged."""


@dataclass(frozen=True)
class Mode:
    """``idle``: when out of work; ``budget`` bytes every ``steps`` steps, 0 for never, -1 for all at every point."""

    idle: bool = False
    budget: int = 0
    steps: int = 256


def wanted() -> Mode | None:
    """The mode that the environment asks for; None for off. Raises DefragError."""
    text = os.environ.get(VARIABLE, "off").strip()
    if text in ("", "off"):
        return None
    if text in ("idle", "demand"):
        return Mode(idle=text == "idle")
    if text == "always":
        return Mode(idle=True, budget=-1, steps=1)
    if found := re.fullmatch(r"budget:([0-9]{1,15})(?::([0-9]{1,9}))?", text):
        budget, steps = int(found[1]), int(found[2] or 256)
        if budget and steps:
            return Mode(idle=True, budget=budget, steps=steps)
    raise DefragError(f"{VARIABLE}={text!r}; expected off, idle, demand, budget:BYTES or budget:BYTES:STEPS")


def policy_wanted() -> bool:
    """Whether free slots are handed out by best fit. Raises DefragError."""
    text = os.environ.get(POLICY, "best-fit").strip()
    if text not in ("best-fit", "stock"):
        raise DefragError(f"{POLICY}={text!r}; expected best-fit or stock")
    return text == "best-fit"


def asked() -> bool:
    """Whether the environment asks for anything, understood or not."""
    return os.environ.get(VARIABLE, "off").strip() not in ("", "off")


def register() -> None:
    """Hook into SGLang's scheduler, once, if the environment asks for it. What is wrong is raised when that starts."""
    global _registered
    if not asked() or _registered:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _registered = True
    for target, hook, kind in _HOOKS:
        HookRegistry.register(target, hook, HookType[kind])


def require_installed() -> None:
    """Raise DefragError where the environment asks for it and SGLang did not take the hooks, which it only logs."""
    if not asked():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target, _, _ in _HOOKS if target not in HookRegistry._patched]
    if missing:
        raise DefragError(f"{VARIABLE} is set, but SGLang did not apply the hooks on {', '.join(missing)}")


class Service:
    """The defragmenter of one scheduler."""

    def __init__(self, scheduler, mode: Mode) -> None:
        reasons = list(refusals(scheduler))
        if reasons:
            raise DefragError(f"{VARIABLE} can't be served: " + "; ".join(reasons))
        from .defragmenter import Defragmenter
        from .holders import Holders
        from .policy import BestFit

        self.scheduler, self.mode = scheduler, mode
        self.demanded = False
        self.off = False  # after a failure
        self.steps = 0
        self.busy = False  # a step was run since the last rearrangement when idle
        allocator, policy = scheduler.token_to_kv_pool_allocator, None
        if allocator.page_size == 1 and policy_wanted():
            policy = allocator.mla_verify_policy = BestFit(allocator, GROWTH)
        holders = Holders(scheduler.tree_cache, lambda: _requests(scheduler), GROWTH)
        self.defragmenter = Defragmenter(holders, _buffers(scheduler), policy)
        self.metrics = _Metrics(scheduler) if _metrics_enabled() else None
        logger.info("K/V defragmentation: %s, %d bytes a slot", mode, self.defragmenter.mover.row_bytes)

    def safe_point(self, last_batch) -> None:
        """Called by the scheduler between two steps."""
        if self.off:
            return
        if last_batch is not None:
            self.steps += 1
            self.busy = True
        budget: int | None
        if self.demanded or self.mode.budget < 0 and last_batch is not None:
            budget = None
        elif last_batch is None and self.busy and self.mode.idle and _is_idle(self.scheduler):
            budget, self.busy = None, False
        elif last_batch is not None and self.steps % self.mode.steps == 0:
            budget = self.mode.budget
            if budget == 0 and self.defragmenter.policy is None:
                return  # there would be nothing to cut
        else:
            return
        self.demanded = False
        self._wait_for_steps()
        from .defragmenter import UndoFailedError

        try:
            outcome = self.defragmenter.run(budget)
        except UndoFailedError:
            raise  # the server must not go on with such a pool
        except Exception:
            self.off = True
            logger.exception(
                "K/V defragmentation failed; all rows and slots are as they were, and it is off from now on"
            )
            return
        if outcome is not None:
            logger.log(
                logging.INFO if budget is None and self.mode.budget >= 0 else logging.DEBUG,
                "K/V defragmentation: %d tokens (%.1f MB) moved in %.1f ms; runs per 1,000 tokens %.0f -> %.0f, "
                "tokens in runs of 64 or more %.0f%% -> %.0f%%",
                outcome.tokens, outcome.bytes / 1e6, outcome.seconds * 1e3,
                outcome.before.runs_per_1000, outcome.after.runs_per_1000,
                100 * outcome.before.long_share, 100 * outcome.after.long_share,
            )  # fmt: skip
        if self.metrics is not None:
            self.metrics.update(self.defragmenter)

    def report(self) -> dict[str, Any]:
        """For /server_info: counters, fragmentation now, and a picture of the pool. Plain numbers and strings."""
        from .holders import NotNow
        from .picture import strip
        from .plan import measure

        report: dict[str, Any] = {
            "mode": asdict(self.mode),
            "off": self.off,
            "counters": asdict(self.defragmenter.counters),
        }
        try:
            layout = self.defragmenter.holders.read()
        except NotNow as reason:
            return report | {"not_now": str(reason)}
        page = self.defragmenter.holders.page
        now = measure(layout, page)
        report["fragmentation"] = asdict(now) | {"runs_per_1000": now.runs_per_1000, "long_share": now.long_share}
        return report | {"picture": strip(layout), "row_bytes": self.defragmenter.mover.row_bytes}

    def _wait_for_steps(self) -> None:
        """What follows on this stream comes after the steps that still run on theirs."""
        forward = getattr(self.scheduler, "forward_stream", None)
        if self.defragmenter.mover.device.type != "cpu" and forward is not None:
            import torch

            torch.get_device_module(self.defragmenter.mover.device).current_stream().wait_stream(forward)


def refusals(scheduler) -> Iterator[str]:
    """Why this server can't be rearranged, each naming the flag to change."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    args, tree = scheduler.server_args, scheduler.tree_cache
    for field, why in (
        ("enable_hierarchical_cache", "HiCache copies slots to the host on its own; leave --{} out"),
        ("enable_lmcache", "LMCache holds slot ids; leave --{} out"),
        ("enable_flexkv", "FlexKV holds slot ids; leave --{} out"),
        ("enable_unified_cache_external_linker", "an external cache holds slot ids; leave --{} out"),
        ("enable_streaming_session", "sessions hold slots between turns; leave --{} out"),
        ("enable_session_radix_cache", "sessions hold nodes of the prefix tree; leave --{} out"),
        ("enable_hisparse", "HiSparse holds slot ids; leave --{} out"),
        ("enable_unified_memory", "slot ids of unified memory are virtual; leave --{} out"),
        ("enable_return_routed_experts", "routed experts are kept by slot; leave --{} out"),
        ("enable_return_indexer_topk", "the indexer's choices are kept by slot; leave --{} out"),
    ):
        if getattr(args, field, False):
            yield why.format(field.replace("_", "-"))
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        yield f"--disaggregation-mode {args.disaggregation_mode}: PD transfers read slots at any time; leave it out"
    if getattr(args, "kv_canary", "none") not in (None, "none"):
        yield f"--kv-canary {args.kv_canary} keeps checksums by slot; set it to none"
    if getattr(args, "radix_cache_backend", None):
        yield f"--radix-cache-backend {args.radix_cache_backend} holds slot ids in a way of its own; leave it out"
    if getattr(args, "dllm_algorithm", None):
        yield f"--dllm-algorithm {args.dllm_algorithm}: a diffusion model keeps slots of blocks; leave it out"
    for field in ("pp_size", "dcp_size", "attn_cp_size"):
        if (getattr(args, field, 1) or 1) > 1:
            yield f"--{field.replace('_', '-')} {getattr(args, field)} is not supported; set it to 1"
    pool, allocator = scheduler.token_to_kv_pool_allocator.get_kvcache(), scheduler.token_to_kv_pool_allocator
    if tree.supports_mamba():
        yield "the model has mamba layers, whose states are held beside the slots; set MLA_VERIFY_DEFRAG=off"
    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        yield f"the allocator is a {type(allocator).__name__}, expected one of plain slots or pages"
    if type(pool) is not MLATokenToKVPool:
        yield f"the K/V pool is a {type(pool).__name__}, expected MLATokenToKVPool (multi-head latent attention)"
    elif getattr(pool, "kv_scale_buffer", None) is not None:
        yield "the K/V pool has scales beside its rows; use --kv-cache-dtype auto or fp8_e4m3"
    if type(tree).__name__ not in ("RadixCache", "UnifiedRadixCache", "ChunkCache"):
        yield f"the prefix cache is a {type(tree).__name__}, expected RadixCache or UnifiedRadixCache"
    if getattr(tree, "cache_controller", None) is not None or getattr(tree, "linker", None) is not None:
        yield "the prefix cache has a second level that holds slot ids; leave --enable-hierarchical-cache out"


def _is_idle(scheduler) -> bool:
    running = scheduler.running_batch
    return not scheduler.waiting_queue and scheduler.chunked_req is None and (running is None or running.is_empty())


def _requests(scheduler) -> list[Any]:
    """Every request the scheduler may still release or go on with."""
    batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
    batches += [batch for batch, _ in getattr(scheduler, "result_queue", None) or ()]
    found = list(scheduler.waiting_queue)
    for batch in batches:
        if batch is not None:
            found += batch.reqs or ()
            if getattr(batch, "chunked_req", None) is not None:
                found.append(batch.chunked_req)
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    return found


def _buffers(scheduler) -> list[Any]:
    """K/V tensors with rows for these slots: the target's and the draft's, a shared one once."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from .move import buffers_of

    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache()]
    for runner in _draft_runners(scheduler):
        pool = runner.token_to_kv_pool
        if type(pool) not in (MLATokenToKVPool, MHATokenToKVPool) or getattr(pool, "use_hnd", False):
            raise DefragError(
                f"{VARIABLE} can't be served: the draft's K/V pool is a {type(pool).__name__}, expected "
                "MLATokenToKVPool or MHATokenToKVPool with a row for each slot"
            )
        pools.append(pool)
    found = {buffer.data_ptr(): buffer for pool in pools for buffer in buffers_of(pool)}
    rows = {len(buffer) for buffer in found.values()}
    if len(rows) > 1:
        raise DefragError(f"{VARIABLE} can't be served: target and draft pools have {sorted(rows)} rows; expected one")
    return list(found.values())


def _draft_runners(scheduler) -> list[Any]:
    worker = scheduler.draft_worker
    if worker is None or scheduler.spec_algorithm.is_ngram():
        return []
    if hasattr(worker, "_draft_model_runners"):
        return list(worker._draft_model_runners())
    if hasattr(worker, "draft_model_runner"):  # DFLASH
        return [worker.draft_model_runner]
    return list(worker.draft_worker.draft_runners)


def _metrics_enabled() -> bool:
    from sglang.srt.runtime_context import get_observability

    return bool(get_observability().enable_metrics)


class _Metrics:
    """Beside SGLang's own at /metrics: the same registry, the multiprocess directory that the server has set."""

    def __init__(self, scheduler) -> None:
        from prometheus_client import Counter, Gauge
        from sglang.srt.runtime_context import get_serving

        names = {"model_name": str(get_serving().served_model_name), "tp_rank": _tp_rank(scheduler)}

        def gauge(name: str, text: str):
            made = Gauge(f"mla_verify:{name}", text, list(names), multiprocess_mode="mostrecent")
            return made.labels(**names)

        def counter(name: str, text: str):
            return Counter(f"mla_verify:{name}", text, list(names)).labels(**names)

        self.gauges = {
            "runs_per_1000": gauge("kv_runs_per_1000_tokens", "Runs of neighbouring slots for each 1,000 tokens held"),
            "long_share": gauge("kv_long_run_share", "Share of held tokens in runs of 64 or more"),
            "largest_free": gauge("kv_largest_free_run_tokens", "Tokens in the largest run of free slots"),
        }
        self.counters = {
            "runs": counter("defrag_runs", "Rearrangements that moved something"),
            "moved_tokens": counter("defrag_moved_tokens", "Tokens moved"),
            "moved_bytes": counter("defrag_moved_bytes", "Bytes of K/V moved, all layers"),
            "seconds": counter("defrag_seconds", "Time the scheduler spent on rearrangements"),
            "postponed": counter("defrag_postponed", "Safe points at which nothing could be moved"),
            "failed": counter("defrag_failed", "Rearrangements that were undone"),
        }
        self.told = dict.fromkeys(self.counters, 0.0)

    def update(self, defragmenter) -> None:
        for name, value in asdict(defragmenter.counters).items():
            self.counters[name].inc(value - self.told[name])
            self.told[name] = value
        if defragmenter.latest is not None:
            for name, gauge in self.gauges.items():
                gauge.set(getattr(defragmenter.latest, name))


def _tp_rank(scheduler) -> int:
    parallel = getattr(scheduler, "ps", None)
    return int(getattr(parallel, "tp_rank", getattr(scheduler, "tp_rank", 0)))


# Hooks. SGLang lets what they raise through; the scheduler then ends, and with it the server


def _expect(allocator, reqs, counts) -> None:
    policy = getattr(allocator, "mla_verify_policy", None)
    if policy is not None:
        policy.expect([(req.rid, int(count)) for req, count in zip(reqs, counts, strict=True)])


def _before_extend(batch, *args, **kwargs) -> None:
    _expect(batch.token_to_kv_pool_allocator, batch.reqs, batch.extend_lens)


def _before_decode(batch, token_per_req, *args, **kwargs) -> None:
    _expect(batch.token_to_kv_pool_allocator, batch.reqs, [token_per_req] * len(batch.reqs))


def _before_spec_decode(tree_cache, *args, reqs, cur_kv_lens_cpu, nxt_kv_lens_cpu, **kwargs) -> None:
    _expect(tree_cache.token_to_kv_pool_allocator, reqs, (nxt_kv_lens_cpu - cur_kv_lens_cpu).clamp(min=0).tolist())


def _after_init(result, scheduler, *args, **kwargs) -> None:
    mode = wanted()
    require_installed()
    scheduler.mla_verify_defrag = Service(scheduler, mode) if mode is not None else None


def _before_next_batch(scheduler, *args, **kwargs) -> None:
    service = getattr(scheduler, "mla_verify_defrag", None)
    if service is not None:
        service.safe_point(kwargs["last_batch"] if "last_batch" in kwargs else args[1])


def _after_get_internal_state(result, scheduler, *args, **kwargs) -> None:
    service = getattr(scheduler, "mla_verify_defrag", None)
    if service is not None:
        result.internal_state[KEY] = service.report()


def _around_set_internal_state(original, scheduler, request):
    service = getattr(scheduler, "mla_verify_defrag", None)
    if service is None or KEY not in request.server_args:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    service.demanded = service.demanded or bool(request.server_args.pop(KEY))
    return original(scheduler, request) if request.server_args else SetInternalStateReqOutput(updated=True)


_HOOKS = (
    (f"{SCHEDULER}.__init__", _after_init, "AFTER"),
    (f"{SCHEDULER}.get_next_batch_to_run", _before_next_batch, "BEFORE"),
    (f"{SCHEDULER}.get_internal_state", _after_get_internal_state, "AFTER"),
    (f"{SCHEDULER}.set_internal_state", _around_set_internal_state, "AROUND"),
    (f"{ALLOCATION}.alloc_for_extend", _before_extend, "BEFORE"),
    (f"{ALLOCATION}.alloc_for_decode", _before_decode, "BEFORE"),
    (f"{ALLOCATION}.alloc_for_spec_decode", _before_spec_decode, "BEFORE"),
)
