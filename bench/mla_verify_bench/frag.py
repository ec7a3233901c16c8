"""``mla-verify frag``: how scattered the K/V pool of a running server is, and what its defragmenter has done.

The server is SGLang with this project's plugin and MLA_VERIFY_DEFRAG set; the figures come with /server_info. What it
answers is not trusted: types, ranges and lengths are checked.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Annotated, Any

import httpx
from pydantic import BaseModel, Field, ValidationError, model_validator

from .longctx.client import MAX_BODY, printable

KEY = "mla_verify_defrag"  # among the internal states of /server_info, and of what /set_internal_state takes
RANKS, CELLS = 1024, 4096  # a server reports fewer
DEFAULT_URL = "http://127.0.0.1:30000"
SHADES = " ░▒▓█"

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Cells = Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=CELLS)]


class Counters(BaseModel):
    """Since the server started."""

    runs: Count
    moved_tokens: Count
    moved_bytes: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    postponed: Count
    failed: Count


class Fragmentation(BaseModel):
    """Of the pool as it is; long runs are of 64 tokens or more."""

    tokens: Count
    runs: Count
    long_tokens: Count
    free_tokens: Count
    free_runs: Count
    largest_free: Count

    @property
    def runs_per_1000(self) -> float:
        return 1000 * self.runs / self.tokens if self.tokens else 0.0

    @property
    def long_share(self) -> float:
        return self.long_tokens / self.tokens if self.tokens else 1.0


class Picture(BaseModel):
    """The pool in cells of ``units`` slots or pages: how many are held, and how many runs begin there."""

    units: Annotated[int, Field(ge=1, le=1 << 40)]
    held: Cells
    runs: Cells

    @model_validator(mode="after")
    def _same_cells(self) -> Picture:
        if len(self.held) != len(self.runs):
            raise ValueError(f"held has {len(self.held)} cells and runs {len(self.runs)}; expected as many")
        return self


class Report(BaseModel):
    """What one data-parallel rank says."""

    counters: Counters
    fragmentation: Fragmentation | None = None
    picture: Picture | None = None
    off: bool = False
    not_now: Annotated[str, Field(max_length=2000)] = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "start the server with MLA_VERIFY_DEFRAG=demand; then mla-verify frag --run --picture pool.svg"
    parser.add_argument("--base-url", metavar="URL", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", default="", help="bearer token (default: $MLA_VERIFY_API_KEY)")
    parser.add_argument("--run", action="store_true", help="have the pool rearranged now; show it before and after")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the pool, with --run before and after")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """0; 1 where --run was asked for and a rank could not rearrange its pool."""
    key = args.api_key or os.environ.get("MLA_VERIFY_API_KEY", "")
    shown = {"before" if args.run else "now": fetch(args.base_url, key)}
    if args.run:
        rearrange(args.base_url, key)
        shown["after"] = fetch(args.base_url, key)
    if args.picture:
        draw(shown, args.picture)
    if args.json:
        print(json.dumps({name: [rank.model_dump() for rank in ranks] for name, ranks in shown.items()}))
    else:
        for name, ranks in shown.items():
            _show(name, ranks)
    could = map(_could, shown["before"], shown["after"]) if args.run else ()
    return 0 if all(could) else 1


def fetch(base_url: str, api_key: str = "") -> list[Report]:
    """A report from each data-parallel rank. Raises ValueError, RuntimeError for what is not such a server."""
    return parse(_answer(base_url, api_key, "/server_info"))


def rearrange(base_url: str, api_key: str = "") -> None:
    """Have the server rearrange its pool before its next step."""
    told = _answer(base_url, api_key, "/set_internal_state", {"server_args": {KEY: 1}})
    if not isinstance(told, list) or not all(one is True for one in told):
        raise RuntimeError(f"{base_url} did not take the request to rearrange its pool: {printable(str(told))}")


def parse(info: Any) -> list[Report]:
    """Reports out of a reply of /server_info. Raises RuntimeError."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    if not isinstance(states, list):
        raise RuntimeError("/server_info has no internal_states; expected an SGLang server")
    found = [state[KEY] for state in states if isinstance(state, dict) and KEY in state]
    if not found:
        raise RuntimeError(
            "the server says nothing of K/V defragmentation; start it with this project installed and "
            "MLA_VERIFY_DEFRAG=demand (or idle, or budget:BYTES)"
        )
    try:
        return [Report.model_validate(report) for report in found[:RANKS]]
    except ValidationError as problem:
        where = ", ".join(sorted({".".join(map(str, e["loc"][:2])) or "all of it" for e in problem.errors()}))
        raise RuntimeError(f"the server's report is not as this version expects: {printable(where)}") from None


def _answer(base_url: str, api_key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """JSON of a page of the server. Raises ValueError, RuntimeError."""
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url is {base_url!r}; expected http://HOST:PORT")
    url = base_url.rstrip("/") + path
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    content = b""
    try:
        with (
            httpx.Client(trust_env=False, timeout=30, headers=headers) as http,
            http.stream("GET" if body is None else "POST", url, json=body) as reply,
        ):
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > MAX_BODY:
                    raise RuntimeError(f"{url} answers with more than {MAX_BODY:,} bytes; expected an SGLang server")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
        reason = printable(str(problem)) or type(problem).__name__
        raise RuntimeError(f"no answer from {url}: {reason}; is the server up?") from None
    if reply.status_code in (401, 403):
        raise RuntimeError(f"{url} answers HTTP {reply.status_code}; give the server's (admin) key with --api-key")
    if reply.status_code != 200:
        raise RuntimeError(f"{url} answers HTTP {reply.status_code}; expected an SGLang server")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RuntimeError(f"{url} answers with something that is not JSON; expected an SGLang server") from None


def _could(before: Report, after: Report) -> bool:
    """Whether a rank could do what it was told, also where there was nothing to do."""
    was, done = before.counters, after.counters
    return not after.off and done.failed == was.failed and (done.runs > was.runs or done.postponed == was.postponed)


def draw(shown: dict[str, list[Report]], path: Path) -> None:
    """Each pool from its first slot to its last: how full it is, and how many runs begin where."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pools = [
        (name, rank, report)
        for name, ranks in shown.items()
        for rank, report in enumerate(ranks)
        if report.picture is not None and report.fragmentation is not None
    ]
    if not pools:
        raise RuntimeError("there is nothing to draw: the server could not read its pool just now")
    figure, axes = pyplot.subplots(
        len(pools), 1, figsize=(9, 1.2 + 1.3 * len(pools)), layout="constrained", squeeze=False
    )
    for axis, (name, rank, report) in zip(axes[:, 0], pools, strict=True):
        units, held, runs = report.picture.units, report.picture.held, report.picture.runs
        at = [units * i for i in range(len(held))]
        axis.bar(at, held, width=units, align="edge", color="#9ecae1", label="slots held")
        axis.bar(at, runs, width=units, align="edge", color="#d94801", label="runs that begin here")
        axis.set_xlim(0, max(1, units * len(held)))
        axis.set_ylim(0, units)
        axis.set_ylabel("slots")
        now = report.fragmentation
        axis.set_title(
            f"{name}, rank {rank}: {now.tokens:,} tokens in {now.runs:,} runs, "
            f"{100 * now.long_share:.0f} % in runs of 64 or more",
            fontsize=9,
        )
    axes[-1, 0].set_xlabel("slot (pages, where a page has several)")
    axes[0, 0].legend(fontsize=8, loc="upper right")
    figure.savefig(path)
    pyplot.close(figure)


def _show(name: str, reports: list[Report]) -> None:
    for rank, report in enumerate(reports):
        print(f"{name}, rank {rank}:")
        now, done = report.fragmentation, report.counters
        if now is None:
            print(f"  the pool can't be read just now: {printable(report.not_now)}")
        else:
            print(
                f"  held   {now.tokens:,} tokens in {now.runs:,} runs: {now.runs_per_1000:.0f} runs per 1,000 tokens,"
            )
            print(f"         {100 * now.long_share:.0f} % of tokens in runs of 64 or more")
            print(f"  free   {now.free_tokens:,} tokens in {now.free_runs:,} runs, the largest {now.largest_free:,}")
        if report.off:
            print("  off    after a failure, which the server's log tells")
        if report.picture is not None:
            print(f"  pool   |{_strip(report.picture)}|")
        print(
            f"  moved  {done.moved_tokens:,} tokens ({done.moved_bytes / 1e6:,.1f} MB) in {done.runs:,} "
            f"rearrangements, {done.seconds:.3f} s; {done.postponed:,} postponed, {done.failed:,} undone"
        )


def _strip(picture: Picture, width: int = 64) -> str:
    """Held slots from the pool's first to its last, in ``width`` characters."""
    cells = picture.held
    text = ""
    for i in range(min(width, len(cells))):
        part = cells[i * len(cells) // width : (i + 1) * len(cells) // width] if len(cells) > width else [cells[i]]
        share = sum(part) / max(1, len(part) * picture.units)
        text += SHADES[min(len(SHADES) - 1, round(share * (len(SHADES) - 1) + 0.49 * (share > 0)))]
    return text
