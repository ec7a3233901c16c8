"""A hypothesis state machine over SGLang's real allocator and prefix tree: whatever is done between, a defragmenter
at any moment leaves every token's rows, the tree's locks and the free list as the model says.

``run`` is what test_state_machine.py (5,000 steps) and test_nightly.py (100,000) call.
"""

from __future__ import annotations

import os
from collections import Counter

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from hypothesis import HealthCheck, Phase, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from world import VERSION, World, publish_server_args  # noqa: E402

FAMILIES = [[(7 * f + i * i) % 5 for i in range(28)] for f in range(3)]  # prompts share their beginnings
tokens = st.builds(
    lambda family, shared, own: FAMILIES[family][:shared] + own,
    st.integers(0, 2), st.integers(0, 28), st.lists(st.integers(0, 2), min_size=1, max_size=12),
)  # fmt: skip
rarely = st.integers(0, 15).map(lambda x: x == 15)


class DefragMachine(RuleBasedStateMachine):
    """``config`` is (page, core); ``counts`` says how often what was done."""

    config: tuple[int, str | None] = (1, None)
    counts: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        page, core = self.config
        self.world = World(slots=96 if page == 1 else 160, page=page, core=core)

    @initialize(
        prompts=st.lists(tokens, min_size=2, max_size=5),
        order=st.randoms(use_true_random=False),
        lane=st.sampled_from((0, 4, 16)),
    )
    def traffic(self, prompts, order, lane):
        if lane:
            self.world.use_policy(lane)
        self.world.churn(order)
        for i, prompt in enumerate(prompts):
            self.world.start(prompt, 5 if i % 2 else None)

    def pick(self, which: int):
        return self.world.live[which % len(self.world.live)]

    def count(self, what: str) -> None:
        self.counts["steps"] += 1
        self.counts[what] += 1

    @rule(prompt=tokens, chunk=st.sampled_from((3, None, 7)))
    def start(self, prompt, chunk):
        self.count("start" if self.world.start(prompt, chunk) else "full")

    @precondition(lambda self: self.world.waiting)
    @rule(which=st.integers(0, 7))
    def come_back(self, which):
        request = self.world.waiting[which % len(self.world.waiting)]
        self.count("come_back" if self.world.start((), request=request) else "full")

    @precondition(lambda self: any(self.world.unfinished(r) for r in self.world.live))
    @rule(chunk=st.sampled_from((4, 1, None)))
    def next_chunk(self, chunk):
        request = next(r for r in self.world.live if self.world.unfinished(r))
        if self.world.resume(request, chunk):
            self.count("next_chunk")
        else:
            self.world.abort(request)
            self.count("full")

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 7))
    def share(self, which):
        self.world.checkpoint(self.pick(which))
        self.count("share")

    @precondition(lambda self: any(not self.world.unfinished(r) for r in self.world.live))
    @rule(
        token=st.integers(0, 4), accepted=st.integers(1, 4), reserve=st.sampled_from((1, 4, 8)), again=st.integers(1, 3)
    )
    def extend(self, token, accepted, reserve, again):
        """Decode steps of the whole batch: requests take slots in turn."""
        for _ in range(again):
            for request in self.world.live:
                if not self.world.unfinished(request):
                    done = self.world.decode(request, token, accepted, reserve)
                    self.count("extend" if done else "full")

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 7))
    def finish(self, which):
        self.world.finish(self.pick(which))
        self.count("finish")

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 7))
    def abort(self, which):
        if len(self.world.live) > 1:
            self.world.abort(self.pick(which))
            self.count("abort")

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 7))
    def retract(self, which):
        self.world.retract(self.pick(which))
        self.count("retract")

    @rule(count=st.integers(1, 40))
    def evict(self, count):
        self.world.evict(count)
        self.count("evict")

    @rule(prompt=tokens)
    def look_up(self, prompt):
        """Looking a prefix up splits nodes."""
        self.world.match(prompt)
        self.count("look_up")

    @precondition(lambda self: not self.world.live)
    @rule(really=rarely)
    def flush(self, really):
        if really:
            self.world.flush()
            self.count("flush")

    @rule(order=st.randoms(use_true_random=False))
    def churn(self, order):
        self.world.churn(order)
        self.count("churn")

    @rule(budget=st.none() | st.integers(2, 60))
    def defrag(self, budget):
        world = self.world
        unit = world.defragmenter.mover.row_bytes * world.page
        done = world.defragmenter.run(None if budget is None else budget * unit)
        self.count("defrag")
        if done:
            self.counts["moved"] += 1
            assert done.after.runs < done.before.runs
            assert budget is None or done.bytes <= budget * unit

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 7))
    def defrag_inside_a_free_group(self, which):
        """Frees that the allocator has put off are in no list: nothing may move."""
        self.world.allocator.free_group_begin()
        self.world.abort(self.pick(which))
        assert self.world.defragmenter.run() is None
        self.world.allocator.free_group_end()
        self.count("free_group")

    @invariant()
    def holds(self):
        self.world.check_holders()
        self.world.check_contents()
        assert self.world.defragmenter.counters.failed == 0


def run(steps: int, *, page: int, core: str | None, number: int, examples: int) -> Counter[str]:
    """At least ``steps`` steps in batches of ``examples`` sequences; seeds are printed."""
    publish_server_args()
    machine = type("Machine", (DefragMachine,), {"config": (page, core), "counts": Counter()})
    rounds = 0
    while machine.counts["steps"] < steps:
        use = number + 1000 * rounds
        print(f"SGLang {VERSION}, page {page}, core {core}: seed {use}")
        run_state_machine_as_test(
            seed(use)(machine),
            settings=settings(
                max_examples=examples, stateful_step_count=40, deadline=None, database=None, derandomize=False,
                suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
            ),
        )  # fmt: skip
        rounds += 1
    return machine.counts
