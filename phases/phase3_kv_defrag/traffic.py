"""An engine under traffic, in a process of its own: ``traffic.py JOB.json RESULT.json``.

JOB: ``engine`` (options), ``requests`` (prompt, max_new_tokens, abort_after or 0), ``at_once``. RESULT: ``tokens``
of each request (of an aborted one those that came) and their ``top2`` (logprob gap, first, second), ``cached_tokens``
of all prompts, and the defragmenter's reports from before and, the cache flushed, after.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

KEY = "mla_verify_defrag"


def main(job: dict, result: Path) -> None:
    import sglang

    engine = sglang.Engine(**job["engine"])
    before = _report(engine)
    sent = engine.loop.run_until_complete(_send(engine, job["requests"], job["at_once"]))
    for _ in range(50):  # a flush is refused until the scheduler has seen the last request end
        if engine.flush_cache().success:
            break
    after = _report(engine)
    result.write_text(json.dumps(sent | {"before": before, "after": after}))
    engine.shutdown()


def _report(engine) -> dict:
    return engine.get_server_info()["internal_states"][0].get(KEY, {})


async def _send(engine, requests: list[dict], at_once: int) -> dict:
    free = asyncio.Semaphore(at_once)
    tokens: list[list[int]] = [[] for _ in requests]
    top2: list[list] = [[] for _ in requests]
    cached = [0] * len(requests)

    async def one(number: int, request: dict) -> None:
        sampling = {"temperature": 0, "max_new_tokens": request["max_new_tokens"], "ignore_eos": True}
        rid = f"request-{number}"
        async with free:
            replies = await engine.async_generate(
                input_ids=request["prompt"], sampling_params=sampling, stream=True, rid=rid, return_logprob=True,
                top_logprobs_num=2,
            )  # fmt: skip
            async for reply in replies:
                meta, got = reply["meta_info"], tokens[number]
                whole = len(reply["output_ids"]) >= len(got)
                tokens[number] = reply["output_ids"] if whole else got + reply["output_ids"]
                pairs = [(x[0] - y[0], x[1], y[1]) for x, y in meta.get("output_top_logprobs") or []]
                top2[number] = pairs if len(pairs) >= len(top2[number]) else top2[number] + pairs
                cached[number] = meta.get("cached_tokens", 0)
                if request["abort_after"] and len(tokens[number]) >= request["abort_after"]:
                    engine.tokenizer_manager.abort_request(rid)

    await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))
    return {"tokens": tokens, "top2": top2, "cached_tokens": sum(cached)}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
