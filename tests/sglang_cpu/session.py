"""SGLang engines that stay up and are given one job after another, several at once where there is a GPU.

A ``Session`` is an engine in a process of its own: this file, run with a JSON file of its options. It reads a job
per line and appends a reply per line to ``replies.jsonl``, so what was finished is on disk. The same code serves
a GPU and the CPU engine; ``device_options`` is where they differ.

``first_differences`` says what two runs have in common: the rule of all gates that compare tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import engine  # noqa: E402
from session_plugin import ABRIDGE  # noqa: E402

PERIOD_S = 0.02
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}  # half a unit in the last place, relative
Job = dict[str, Any]
Reply = dict[str, Any]


def device_options(gpu: bool, dtype: str) -> dict[str, Any]:
    """Options that every engine of these tests gets."""
    shared = {
        "dtype": dtype,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "skip_server_warmup": True,
        "log_level": "info",
        "decode_log_interval": 1,
        "watchdog_timeout": 3600,
        "random_seed": 0,
    }
    if gpu:
        return shared
    return shared | {"device": "cpu", "disable_cuda_graph": True, "sleep_on_idle": True}


class Session:
    """An engine that is starting or up. ``ask`` waits for it."""

    def __init__(self, folder: Path, options: dict[str, Any], *, gpu: bool, abridged_prefill: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._replies = folder / "replies.jsonl"
        self._log, self._read = folder / "log.txt", 0
        self._replies.unlink(missing_ok=True)
        (folder / "options.json").write_text(json.dumps({"nccl_port": _free_port()} | options))
        plugin = engine.write_plugin(folder / "plugin", HERE / "session_plugin.py")
        paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), ABRIDGE: "1" if abridged_prefill else ""}
        environ = {**os.environ, **more}
        if not gpu:
            environ = engine.environment(Path(sys.executable), MLA_VERIFY_IMPL="reference", **more)
        words = [HERE / "session.py", folder / "options.json", self._replies]
        self._process = engine.start(words, folder, self._log, environ, stdin=subprocess.PIPE, text=True)
        self.started: Reply | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float = 900) -> Reply:
        """Wait until the engine is up; what it says of itself."""
        if self.started is None:
            self.started = self._next(timeout)
        return self.started

    def ask(self, job: Job, timeout: float = 1800) -> Reply:
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._next(timeout)

    def _next(self, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            if self._replies.exists() and self._replies.stat().st_size > self._read:
                with self._replies.open() as file:
                    file.seek(self._read)
                    line = file.readline()
                if line.endswith("\n"):
                    self._read += len(line)
                    return json.loads(line)
            if ended:
                raise RuntimeError(f"the engine {self.folder.name} ended; {self._last_words()}")
            time.sleep(PERIOD_S)
        raise RuntimeError(f"the engine {self.folder.name} said nothing for {timeout:.0f} s; {self._last_words()}")

    def _last_words(self) -> str:
        """The last error of the log, for a record; the log's end goes to stderr, for a person."""
        log = self.log
        print(f"--- log of the engine {self.folder.name} ends:\n{log[-5000:]}", file=sys.stderr)
        errors = [line.strip() for line in log.splitlines() if "Error" in line]
        return f"its log says: {errors[-1][:300]}" if errors else "its log names no error"

    def stop(self) -> None:
        """End the engine and all its children."""
        engine.stop(self._process)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Plan:
    """An engine's options and the jobs it is given, by name and in order."""

    options: dict[str, Any]
    jobs: dict[str, Job]


def run_all(folder: Path, plans: dict[str, Plan], *, gpu: bool, at_once: int) -> dict[str, Reply | Exception]:
    """Run each plan on an engine of its own, ``at_once`` of them together.

    By plan: its replies by job, ``log`` and ``start`` (what the engine said of itself when it was up); an exception
    where it failed, so that one engine's end costs only the gates that need it.
    """

    sessions: list[Session] = []

    def run(name: str) -> Reply | Exception:
        try:
            with Session(folder / name, plans[name].options, gpu=gpu) as session:
                sessions.append(session)
                replies = {"start": session.wait()}
                for job, what in plans[name].jobs.items():
                    replies[job] = session.ask(what)
                return replies | {"log": session.log}
        except Exception as error:  # noqa: BLE001 - raised by the tests that need this engine
            return error

    with ThreadPoolExecutor(max(1, at_once)) as pool:
        try:
            return dict(zip(plans, pool.map(run, plans), strict=True))
        except BaseException:  # Ctrl-C: the threads end when their engines do
            pool.shutdown(wait=False, cancel_futures=True)
            for session in sessions:
                session.stop()
            raise


def run_needed(
    request, needs: Mapping[str, Sequence[str]], folder: Path, plans: Mapping[str, Plan], *, gpu: bool, at_once: int
) -> Callable[[str], Reply]:
    """Run the engines that the selected tests of a file need; what came of one, by its name.

    ``request`` is that of the file's fixture, ``needs`` names engines by test. A test that asks for one that failed
    gets its error.
    """
    names = [item.originalname for item in request.session.items if item.path == request.path]
    wanted = {engine for name in names for engine in needs.get(name, ())}
    found = run_all(folder, {n: plan for n, plan in plans.items() if n in wanted}, gpu=gpu, at_once=at_once)

    def get(name: str) -> Reply:
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    return get


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- what a run came to ----


def accept_length(reply: Reply) -> float:
    """Tokens per verify step; the first token of an answer is the prefill's."""
    return sum(len(t) - 1 for t in reply["tokens"]) / max(1, sum(reply["verify_steps"]))


def graph_share(log: str) -> float:
    """The share of an engine's decode batches that ran in a CUDA graph."""
    logged = re.findall(r"Decode batch.*cuda graph: (True|False)", log)
    assert logged, "the log names no decode batch"
    return logged.count("True") / len(logged)


# ---- comparing tokens ----


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one prompt differ; what follows is of no account."""

    request: int
    token: int
    pair: tuple[int, int]
    gap: float | None  # the larger of the two engines' top-2 logprob gaps there; None where one has another runner-up
    near_tie: bool

    def __str__(self) -> str:
        gap = "not between the top two" if self.gap is None else f"gap {self.gap:.4g}"
        return f"request {self.request}, token {self.token}: {self.pair[0]} and {self.pair[1]}, {gap}"


def first_differences(a: Reply, b: Reply, *, dtype: str, largest_logit: float) -> list[Difference]:
    """First differences between two replies to the same prompts, one for each request that has one.

    A near tie: in both engines the two tokens are the top two, and no further apart than rounding the two logits to
    ``dtype`` can put them, in each of the two engines: four times half a unit in the last place.
    """
    limit = 4 * ROUNDING[dtype] * largest_logit
    found = []
    for i, (mine, theirs) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
        at = next((k for k, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y), None)
        if at is None:
            continue
        pair = mine[at], theirs[at]
        gaps = [side["top2"][i][at] for side in (a, b)]
        among = all({first, second} == set(pair) for _, first, second in gaps)
        gap = max(g for g, _, _ in gaps) if among else None
        found.append(Difference(i, at, pair, gap, gap is not None and gap <= limit))
    return found


def require_near_ties(differences: Sequence[Difference], what: str) -> None:
    wrong = [str(d) for d in differences if not d.near_tie]
    assert not wrong, f"{what}: {len(wrong)} differences that rounding does not explain: {'; '.join(wrong[:5])}"


# ---- timing steps ----


def step_times(marks: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(ms, tokens) of each step of a streamed answer but the first, which the end of the prefill overlaps.

    ``marks`` as in a reply. SGLang counts verify steps only at an answer's end. Each is an arrival of its own, or else
    some came together: then there is one sample, the mean of them all.
    """
    found = [(1e3 * (b[0] - a[0]), b[1] - a[1]) for a, b in zip(marks, marks[1:], strict=False)]
    verified = marks[-1][2] if marks else 0
    if not verified:  # no speculation: a token is a step
        return [(ms / tokens, 1) for ms, tokens in found[1:] if tokens]
    if len(found) != verified:
        return [(sum(ms for ms, _ in found) / verified, sum(tokens for _, tokens in found) / verified)]
    return found[1:]


# ---- the engine's own process ----


async def _generate(served, job: Job) -> Reply:
    """Jobs: ``name``; ``prompts``; ``tokens``, a number or one each; ``abort_after``, tokens or 0 each; ``at_once``;
    ``stream``; ``logprobs``; ``flush``, the cache before all else. A job without prompts asks for the engine's state.

    Replies, by request: ``tokens``, ``top2`` (logprob gap, first, second) of each token, ``cached``, ``verify_steps``,
    ``finish``; of streamed ones ``marks``, (seconds, tokens, verify steps) at each arrival. And ``seconds`` of the job.
    """
    prompts = job["prompts"]
    count = job["tokens"] if isinstance(job["tokens"], list) else [job["tokens"]] * len(prompts)
    aborts = job.get("abort_after") or [0] * len(prompts)
    free = asyncio.Semaphore(job.get("at_once") or len(prompts))
    logprobs = job.get("logprobs", True)

    async def one(i: int) -> dict[str, Any]:
        stream = bool(aborts[i] or job.get("stream"))
        options = {"return_logprob": True, "top_logprobs_num": 2} if logprobs else {}
        # An abort takes every request whose id begins like the one that is named.
        rid, marks = f"{job['name']}-{i}.", []
        async with free:
            began = time.perf_counter()
            answer = await served.async_generate(
                input_ids=prompts[i], stream=stream, rid=rid, **options,
                sampling_params={"temperature": 0, "max_new_tokens": count[i], "ignore_eos": True},
            )  # fmt: skip
            if not stream:
                return {"last": answer, "marks": marks}
            last = None
            async for last in answer:
                done = len(last["output_ids"])
                marks.append((time.perf_counter() - began, done, last["meta_info"].get("spec_verify_ct", 0)))
                if aborts[i] and done >= aborts[i]:
                    served.tokenizer_manager.abort_request(rid)
        return {"last": last, "marks": marks}

    replies = await asyncio.gather(*map(one, range(len(prompts))))
    metas = [r["last"]["meta_info"] for r in replies]
    return {
        "tokens": [r["last"]["output_ids"] for r in replies],
        "top2": [[(x[0] - y[0], x[1], y[1]) for x, y in meta.get("output_top_logprobs") or []] for meta in metas],
        "cached": [meta.get("cached_tokens", 0) for meta in metas],
        "verify_steps": [meta.get("spec_verify_ct", 0) for meta in metas],
        "finish": [(meta.get("finish_reason") or {}).get("type", "") for meta in metas],
        "marks": [r["marks"] for r in replies],
    }


def _flush(served) -> None:
    for _ in range(100):  # refused until the scheduler has seen the last request end
        if served.flush_cache().success:
            return
        time.sleep(0.05)
    raise RuntimeError("the cache could not be flushed: some request is still running")


def _state(served) -> Reply:
    """The first scheduler's internal state: numbers and flags."""
    state = served.get_server_info()["internal_states"][0]
    return {k: v for k, v in state.items() if isinstance(v, (int, float, str, bool)) or k == "memory_usage"}


def main(options: Path, replies: Path) -> None:
    import sglang

    def say(reply: Reply) -> None:
        with replies.open("a") as file:
            file.write(json.dumps(reply) + "\n")

    began = time.monotonic()
    served = sglang.Engine(**json.loads(options.read_text()))
    say(_state(served) | {"seconds": time.monotonic() - began})
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        if job.get("flush"):
            _flush(served)
        reply = served.loop.run_until_complete(_generate(served, job)) if "prompts" in job else _state(served)
        say(reply | {"seconds": time.monotonic() - began})
    served.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
