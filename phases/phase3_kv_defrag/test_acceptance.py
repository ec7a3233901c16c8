"""Gates of phase 3 on any machine: the same bits, whole moves or none, ranks alike, refusals, faults that are seen.

All but the first test need SGLang: they run in environments that tests/sglang_cpu/install.py made.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from mla_verify.slots import Slots
from mla_verify.testing import Case
from mla_verify_bench import tiny_model
from mla_verify_sglang.defrag import plan
from mla_verify_sglang.defrag.move import RowMover

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "sglang_cpu"))


@pytest.fixture
def world():
    """The module, with SGLang's configuration published; skips where SGLang is not installed.

    And on a GPU, where SGLang's allocators launch kernels on what this world keeps on the CPU.
    """
    if torch.cuda.is_available():
        pytest.skip("SGLang without an engine, as this file drives it, is for a machine with no GPU")
    pytest.importorskip("sglang", reason="this gate runs in an environment made by tests/sglang_cpu/install.py")
    import world

    world.publish_server_args()
    return world


CASES = [
    Case((37, 0, -1), (5, 1, 4), heads=2, seed=1),
    Case((90, 3), (8, 3), heads=2, q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, seed=2),
    Case((40, 64), (6, 2), heads=2, q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, kv_scale=0.5, seed=3),
]


def test_permutation_bits(gate_metrics):
    """Slots shuffled, and rows moved by the defragmenter's own plan and mover: every implementation gives its bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    impls = ["reference", "triton"] + ["cuda"] * torch.cuda.is_available()
    compared = 0
    for case in CASES:
        before = case.build(device)
        for impl in impls:
            if impl == "cuda" and case.q_dtype == torch.float32:
                continue  # not compiled, and refused
            out, lse = before.run(impl)
            for after in (before.moved(11), _defragmented(before)):
                moved_out, moved_lse = after.run(impl)
                assert torch.equal(out, moved_out) and torch.equal(lse, moved_lse), (case, impl)
                compared += 1
    gate_metrics["compared"] = compared


def _defragmented(problem):
    """The problem after a whole defragmentation of its pool; slot 0 is held here, so units are one more."""
    from dataclasses import replace

    lists, size = problem.lists(), len(problem.kv)
    chains = tuple(np.array(x, dtype=np.int64) + 1 for x in lists if x)
    layout = plan.Layout(size, chains, (0,) * len(chains), plan.free_units(size, chains))
    moves = plan.plan(layout, 10**6)
    assert len(moves), "nothing to move: the slots were in order"
    kv = problem.kv.clone()
    rows = plan.moves_of(moves.src - 1, moves.dst - 1)
    with ExitStack() as undo:
        RowMover([kv]).move(rows, undo)
        undo.pop_all()
    where = plan.where_to(moves, size) - 1
    slots = Slots.from_lists([[int(where[s + 1]) for s in own] for own in lists], kv.device)
    assert plan.measure(plan.moved(layout, moves)).runs < plan.measure(layout).runs
    return replace(problem, kv=kv, slots=slots)


def test_move_kernel(gate_metrics):
    """The fused Triton kernel moves what torch moves, paths and rings, rows of several widths; its undo puts back."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = rings = 0
    for seed, fill in ((1, 0.6), (2, 1.0), (3, 0.95)):
        order = np.random.default_rng(seed)
        size = 60
        units = order.permutation(np.arange(1, size + 1))
        chains = tuple(np.array(c) for c in np.split(units[: int(size * fill)], [17, 30]))
        moves = plan.plan(plan.Layout(size, chains, (0, 0, 0), plan.free_units(size, chains)), 10**6)
        g = torch.Generator().manual_seed(seed)
        # More layers than one program takes, and not twice as many; odd widths; addresses that divide by 4 or 8 alone.
        made = [(576, torch.bfloat16, 0)] * 9 + [(576, torch.float8_e4m3fn, 0), (8, torch.float32, 0)]
        made += [(70, torch.float32, 0), (70, torch.float32, 2), (36, torch.float32, 1), (7, torch.float32, 0)]
        buffers = [
            torch.randn((size + 1) * width + skip, generator=g).to(dtype).to(device)[skip:].view(size + 1, 1, width)
            for width, dtype, skip in made
        ]
        before = [b.view(torch.uint8).clone() for b in buffers]
        want = [b.clone() for b in before]
        src, dst = torch.from_numpy(moves.src).to(device), torch.from_numpy(moves.dst).to(device)
        for rows in want:
            rows[dst] = rows[src]
        RowMover(buffers).launch(moves)
        for got, expected in zip(buffers, want, strict=True):
            assert torch.equal(got.view(torch.uint8), expected), seed
        RowMover(buffers).launch(moves.back())
        for got, old in zip(buffers, before, strict=True):
            assert torch.equal(got.view(torch.uint8)[src], old[src]), seed
        _require_put_back(RowMover(buffers), buffers, moves, src)
        moved += len(moves)
        ends = moves.starts[1:] - 1
        rings += int((moves.src[ends] == moves.dst[moves.starts[:-1]]).sum())
    assert rings > 0, "no ring among the paths: half of the kernel was not tested"
    gate_metrics["moved"] = moved
    gate_metrics["rings"] = rings


def _require_put_back(mover: RowMover, buffers: list[torch.Tensor], moves: plan.Moves, src: torch.Tensor) -> None:
    """Whoever fails after the kernel has moved everything finds the rows where they were."""
    before = [b.view(torch.uint8).clone() for b in buffers]

    def crash(name: str) -> None:
        if name == "after the rows":
            assert not all(torch.equal(b.view(torch.uint8), old) for b, old in zip(buffers, before, strict=True))
            raise Crash

    with pytest.raises(Crash), ExitStack() as undo:
        mover._fused(moves, undo, crash)
    for got, old in zip(buffers, before, strict=True):
        assert torch.equal(got.view(torch.uint8)[src], old[src])


class Crash(BaseException):
    """Not an Exception: whoever catches those must not swallow it."""


def _state(world) -> list[torch.Tensor]:
    """Everything that names slots, as it is; the free list without its order."""
    nodes = sorted((value.clone() for _, _, value in world.holders._nodes()), key=lambda v: v.tolist())
    prefixes = [r.prefix_indices.clone() for r in world.requests() if hasattr(r, "prefix_indices")]
    from mla_verify_sglang.defrag.holders import _free_pages

    return [world.rows.req_to_token.clone(), torch.sort(_free_pages(world.allocator))[0], *nodes, *prefixes]


def test_crash_points(world, gate_metrics):
    """An exception at each point of a move, and a second one right after: the old state, and the next move works."""
    points = 0
    for core in world.CORES:
        for page, lane in ((1, 0), (4, 0), (1, 6)):
            one = world.busy_world(5, page, core, lane)
            names: list[str] = []
            probe = world.busy_world(5, page, core, lane)
            assert probe.defragmenter.run(point=names.append) is not None
            assert len(set(names)) > 8 and len(names) > 10, names
            old = _state(one)
            for at, name in enumerate(names):
                seen = 0

                def crash(_, at=at):
                    nonlocal seen
                    seen += 1
                    if seen > at:
                        raise Crash

                with pytest.raises(Crash):
                    one.defragmenter.run(point=crash)
                assert all(torch.equal(a, b) for a, b in zip(old, _state(one), strict=True)), f"{name} left a mixture"
                one.check_contents()
                one.check_holders()
                points += 1
            assert one.defragmenter.counters.failed == len(names)
            _require_loud(world.busy_world(5, page, core, lane))
            done = one.defragmenter.run()
            assert done is not None and done.after.runs < done.before.runs
            one.check_contents()
            one.check_holders()
            assert not all(torch.equal(a, b) for a, b in zip(old, _state(one), strict=True))
    gate_metrics["points"] = points


def _require_loud(one) -> None:
    """Where putting back fails as well, that is said: a server must not go on."""
    from mla_verify_sglang.defrag.defragmenter import UndoFailedError

    def crash_and_lose_a_buffer(name):
        if name == "after the holders":
            one.defragmenter.mover.rows[0].resize_(0)
            raise Crash

    with pytest.raises(UndoFailedError, match="can't be put back"):
        one.defragmenter.run(point=crash_and_lose_a_buffer)


def test_tp_ranks_alike(world, gate_metrics, tmp_path):
    """Two ranks do the same; the second in a process with other hash seeds, node ids and orders of requests."""
    number = random.randrange(1000)
    ranks = []
    for rank in range(2):
        env = os.environ | {
            "PYTHONHASHSEED": str(rank * 77 + 1),
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        }
        code = f"import test_acceptance as t; print('DIGEST', t.rank_digest({number}, {rank}))"
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), [errors[-2000:] for _, errors in said]
    digests = [out.split("DIGEST")[-1].strip() for out, _ in said]
    print(f"seed {number}: {digests}")
    assert len(set(digests)) == 1, digests
    assert digests[0].split()[0] != "0", "no rank moved anything"
    gate_metrics["moves"] = int(digests[0].split()[0])


def rank_digest(number: int, rank: int) -> str:
    """How many moves a rank made, and a digest of its rows after each; ``rank`` changes what must not matter."""
    import world

    world.publish_server_args()
    for _ in range(rank * 5):  # nodes of other trees, so that ids differ
        world.busy_world(1, 1, world.CORES[0])
    digest, moves = hashlib.sha256(), 0
    for core in world.CORES:
        one = world.busy_world(number, 1, core)
        order, requests, mine = random.Random(number), one.holders.requests, random.Random(rank)

        def shuffled(requests=requests, mine=mine):
            found = [*requests(), *requests()]
            mine.shuffle(found)
            return found

        one.holders.requests = shuffled
        for _ in range(25):
            outcome = one.defragmenter.run(order.choice((20, 60, 10**6)) * one.defragmenter.mover.row_bytes)
            moves += outcome.tokens if outcome else 0
            digest.update(one.rows.req_to_token.numpy().tobytes())
            one.churn(order)
            for request in list(one.live):
                if one.unfinished(request) or not one.decode(request, order.randrange(5), 1, 4):
                    one.finish(request)
            one.start([order.randrange(2) for _ in range(20)])
    return f"{moves} {digest.hexdigest()}"


def test_refusals(world, gate_metrics, tmp_path):
    """Beside whatever holds slot ids of its own it does not start, and says which flag to change."""
    from types import SimpleNamespace

    from mla_verify_sglang.defrag import serving
    from sglang.srt.runtime_context import get_server_args

    one, args = world.World(core=world.CORES[-1]), get_server_args()
    cases = [
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("disaggregation_mode", "decode", "--disaggregation-mode decode"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("enable_session_radix_cache", True, "--enable-session-radix-cache"),
        ("enable_return_routed_experts", True, "--enable-return-routed-experts"),
        ("kv_canary", "log", "--kv-canary log"),
        ("pp_size", 2, "--pp-size 2"),
        ("dcp_size", 2, "--dcp-size 2"),
    ]
    known = {name: getattr(args, name) for name, _, _ in cases}  # so a field that a release renames is noticed

    def reasons(**changed) -> str:
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(**known | changed), tree_cache=one.tree,
            token_to_kv_pool_allocator=one.allocator,
        )  # fmt: skip
        return "; ".join(serving.refusals(scheduler))

    assert reasons() == ""
    refused = 0
    for name, value, flag in cases:
        said = reasons(**{name: value})
        assert flag in said, f"{name}={value}: {said!r}"
        refused += 1
    one.tree.supports_mamba = lambda: True
    assert "mamba" in reasons()
    del one.tree.supports_mamba
    one.tree.cache_controller = object()
    assert "--enable-hierarchical-cache" in reasons()
    del one.tree.cache_controller
    with pytest.MonkeyPatch.context() as patch:
        for text in ("on", "budget:", "budget:0", "budget:5:0", "budget:-5", "idle,demand", "budget:" + "9" * 40):
            patch.setenv(serving.VARIABLE, text)
            with pytest.raises(serving.DefragError, match="expected off, idle, demand"):
                serving.wanted()
            refused += 1
        patch.setenv(serving.VARIABLE, "idle")
        with pytest.raises(serving.DefragError, match="did not apply the hooks"):
            serving.require_installed()  # nobody has registered them in this process
    outcome, _ = serve(tmp_path, "idle", [[5, 6, 7]], enable_streaming_session=True)
    assert outcome.returncode != 0 and not outcome.rounds, "the server started"
    assert "MLA_VERIFY_DEFRAG can't be served: sessions hold slots between turns" in outcome.log, outcome.log[-3000:]
    gate_metrics["refused"] = refused + 4


def test_negative_controls(world, gate_metrics):
    """Each fault turns the checks of the state machine and of the crash points red; without one they are green."""
    import defrag_probe
    from mla_verify_sglang.defrag import holders, move

    def left_out(kind: str):
        """A holder whose turn in the rewrite is skipped."""
        write, put, free = holders._overwrite, holders._assign, holders._set_free_pages

        def overwrite(kept, where, undo):
            if not kept or (kept[0].dtype == torch.int32) != (kind == "rows"):
                write(kept, where, undo)

        def assign(thing, name, value, undo):
            if not (kind == "prefixes" and name == "prefix_indices"):
                put(thing, name, value, undo)

        if kind in ("rows", "nodes"):
            holders._overwrite = overwrite
        holders._assign = assign
        holders._set_free_pages = (lambda *_: None) if kind == "free" else free

    def forget_draft():
        move_rows = move.RowMover._layer_by_layer

        def without_last(self, *args):
            kept = self.rows.pop()
            move_rows(self, *args)
            self.rows.append(kept)

        move.RowMover._layer_by_layer = without_last

    def keep_a_row():
        """Of a draft reserve nobody would notice: a row that holds a token."""
        whole = move.RowMover.move

        def one_less(self, moves, *args):
            held = [i for i, slot in enumerate(moves.src) if not one.buffers[0][slot].isnan().any()]
            keep = np.arange(len(moves)) != held[-1]
            whole(self, plan.moves_of(moves.src[keep], moves.dst[keep]), *args)

        move.RowMover.move = one_less

    faults = {
        "none": lambda: None,
        "request rows left out": lambda: left_out("rows"),
        "tree nodes left out": lambda: left_out("nodes"),
        "free list left out": lambda: left_out("free"),
        "draft pool left out": forget_draft,
        "a row not moved": keep_a_row,
        "wrong order of copies": defrag_probe.wrong_order,
    }
    if world.CORES == (None,):
        faults["request prefixes left out"] = lambda: left_out("prefixes")
    wrong: dict[str, int] = {}
    for name, fault in faults.items():
        for seed in range(6):
            with pytest.MonkeyPatch.context() as patch:
                for thing, names in (
                    (holders, ("_overwrite", "_assign", "_set_free_pages")),
                    (move.RowMover, ("move", "_layer_by_layer")),
                    (holders.Holders, ("rewrite",)),
                ):
                    for attribute in names:
                        patch.setattr(thing, attribute, getattr(thing, attribute))  # put back at the end
                one = world.busy_world(seed, 1, world.CORES[0])
                for request in one.live:
                    if one.unfinished(request):
                        one.checkpoint(request)
                fault()
                try:
                    assert one.defragmenter.run() is not None
                    one.check_holders()
                    one.check_contents()
                    for request in list(one.live):
                        if one.unfinished(request):
                            one.resume(request)
                    one.check_holders()
                    one.check_contents()
                except (AssertionError, holders.NotNow, IndexError):
                    wrong[name] = wrong.get(name, 0) + 1
    print(wrong)
    assert "none" not in wrong, "the checks fail without a fault"
    for name in faults:
        if name != "none":
            assert wrong.get(name, 0) == 6, f"{name}: seen in {wrong.get(name, 0)} of 6 pools"
    gate_metrics["faults"] = len(faults) - 1


MODEL = tiny_model.TinyModel(context=512)
TURNS = (20, 10)
SMALL = {"attention_backend": "mla_verify", "max_total_tokens": 400}  # so that it evicts and retracts


def serve(folder: Path, mode: str, prompts, suffixes=(), *, fault="", timeout=400, environ=(), **options):
    """An engine with MLA_VERIFY_DEFRAG=``mode``; what came of it, and the counters of its defragmenter."""
    import engine

    folder = folder / (mode.replace(":", "-") + fault)
    model = tiny_model.write(folder.parent / "model", MODEL)
    job = engine.Job(str(model), prompts, list(suffixes), TURNS, engine=SMALL | options)
    record = folder / "counters.json"
    outcome = engine.run_engine(
        job, folder, timeout, MLA_VERIFY_IMPL="reference", MLA_VERIFY_DEFRAG=mode,
        MLA_VERIFY_DEFRAG_PROBE=json.dumps({"record": str(record), "fault": fault}),
        PYTHONPATH=str(engine.write_plugin(folder / "probe", HERE / "defrag_probe.py")), **dict(environ),
    )  # fmt: skip
    return outcome, json.loads(record.read_text()) if record.exists() else {}
