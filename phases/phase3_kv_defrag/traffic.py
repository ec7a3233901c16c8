"""An engine under traffic, in a process of its own: ``traffic.py JOB.json RESULT.json``.

JOB: ``engine`` (options), ``requests`` (prompt, max_new_tokens, abort_after or 0), ``at_once``. RESULT: ``tokens``
of each request (of an aborted one those that came), ``cached_tokens`` of all prompts, and the defragmenter's reports
from before and, the cache flushed, after.
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
    tokens, cached = engine.loop.run_until_complete(_send(engine, job["requests"], job["at_once"]))
    for _ in range(50):  # a flush is refused until the scheduler has seen the last request end
        if engine.flush_cache().success:
            break
    after = _report(engine)
    result.write_text(json.dumps({"tokens": tokens, "cached_tokens": cached, "before": before, "after": after}))
    engine.shutdown()


def _report(engine) -> dict:
    return engine.get_server_info()["internal_states"][0].get(KEY, {})


async def _send(engine, requests: list[dict], at_once: int) -> tuple[list[list[int]], int]:
    free, cached = asyncio.Semaphore(at_once), [0] * len(requests)

    async def one(number: int, request: dict) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": request["max_new_tokens"], "ignore_eos": True}
        rid, got = f"request-{number}", []
        async with free:
            replies = await engine.async_generate(
                input_ids=request["prompt"], sampling_params=sampling, stream=True, rid=rid
            )
            async for reply in replies:
                got = reply["output_ids"] if len(reply["output_ids"]) >= len(got) else got + reply["output_ids"]
                cached[number] = reply["meta_info"].get("cached_tokens", 0)
                if request["abort_after"] and len(got) >= request["abort_after"]:
                    engine.tokenizer_manager.abort_request(rid)
        return got

    tokens = await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))
    return tokens, sum(cached)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
