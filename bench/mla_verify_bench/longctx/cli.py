"""``mla-verify bench longctx``: arguments, the servers it starts, and what it prints."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .cells import Cell
    from .run import Job

BUILT_IN, OURS = "triton", "mla_verify"
CPU_DEPTHS, GPU_DEPTHS = (256, 1024, 4096), (1024, 16384, 65536, 131072, 185000)
CPU_TOKENS, GPU_TOKENS = 12, 128
CPU_CONTEXT = 8192  # of the small model
SMALL_MODEL = Path(__file__).resolve().parents[3] / "tests" / "models" / "weights" / "target"  # in a checkout
GPU_RESERVE = 2048  # tokens of context beyond the deepest cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments in SGLang's style. Light: nothing is imported here."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "With --base-url a running server is measured. Without, a real SGLang is started on 127.0.0.1, once\n"
        "per attention backend: with --model-path's model, else on a GPU with random weights and Kimi-K2's\n"
        "attention, else on the CPU with a small model of ours. Cells are written as they finish; Ctrl-C keeps\n"
        "them and --resume goes on."
    )
    what = parser.add_argument_group("server")
    what.add_argument("--base-url", metavar="URL", help="measure this running server")
    what.add_argument(
        "--api",
        choices=("auto", "generate", "completions", "chat"),
        default="auto",
        help="SGLang's /generate, OpenAI's /v1/completions or /v1/chat/completions (default: ask the server)",
    )
    what.add_argument("--model", default="", help="model name to send (default: the first that /v1/models lists)")
    what.add_argument("--api-key", default="", help="bearer token (default: $MLA_VERIFY_API_KEY); never recorded")
    what.add_argument(
        "--label", default="", help="name of the server in tables and plots (default: its attention backend)"
    )
    what.add_argument("--model-path", help="model to serve")
    what.add_argument(
        "--attention-backends",
        "--attention-backend",
        metavar="NAME[,NAME]",
        default=f"{BUILT_IN},{OURS}",
        help="serve with each of these in turn (default: %(default)s)",
    )
    what.add_argument(
        "--prefill-attention-backend",
        metavar="NAME",
        help="prefill by this one in every server, so that only decode and verify differ (default: "
        f"{OURS} on the CPU, where the built-in one takes long; on a GPU each its own, which 'own' asks for)",
    )
    what.add_argument(
        "--speculative-algorithm",
        metavar="NAME",
        default="NGRAM",
        help="NGRAM, STANDALONE or none (default: NGRAM)",
    )
    what.add_argument(
        "--speculative-num-draft-tokens",
        type=_positive,
        metavar="N",
        help="default: 8 on the CPU, 16 on a GPU",
    )
    what.add_argument("--sglang-python", metavar="PATH", default="", help="interpreter that has SGLang")
    what.add_argument(
        "--server-args", metavar="WORDS", default="", help="more flags for the server, quoted as one argument"
    )
    what.add_argument("--layers", type=_positive, default=61, help="of the random-weight model on a GPU (default: 61)")
    what.add_argument(
        "--heads",
        type=_positive,
        default=8,
        help="of the random-weight model on a GPU (default: 8, one rank of 8)",
    )
    what.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to serve (default: a GPU if there is one)",
    )

    grid = parser.add_argument_group("cells")
    grid.add_argument(
        "--depths",
        metavar="N[,N]",
        type=_numbers,
        help=f"context depths in tokens (default: {_join(CPU_DEPTHS)}; on a GPU {_join(GPU_DEPTHS)})",
    )
    grid.add_argument(
        "--concurrency", metavar="N[,N]", type=_numbers, default=[1], help="requests at a time (default: 1)"
    )
    grid.add_argument(
        "--text",
        choices=("predictable", "natural", "both"),
        help="what prompts are made of (default: natural where the benchmark serves on the CPU, else both)",
    )
    grid.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        help=f"tokens to decode in each cell (default: {CPU_TOKENS} on the CPU, else {GPU_TOKENS})",
    )
    grid.add_argument("--repeats", type=_positive, default=1, help="of each cell (default: 1)")
    grid.add_argument("--seed", type=int, default=0, help="of prompts and weights (default: 0)")
    grid.add_argument("--no-warmup", action="store_true", help="measure at once; the first cell is then flagged cold")
    grid.add_argument(
        "--vocab-size", type=int, default=0, metavar="N", help="of the served model, where it can't be told"
    )
    grid.add_argument(
        "--model-config", type=Path, metavar="PATH", help="config.json, to imply K/V GB/s on a remote server"
    )
    grid.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="longest silence of a server (default: 1800)",
    )

    out = parser.add_argument_group("results")
    out.add_argument("--output-dir", type=Path, metavar="DIR", help="default: longctx-results/<time>")
    out.add_argument(
        "--resume", action="store_true", help="go on with --output-dir: finished cells are not measured again"
    )
    out.add_argument("--json", action="store_true", help="print the summary as JSON on stdout; tables go to stderr")
    out.add_argument("--report", type=Path, metavar="DIR", help="measure nothing: show a finished run again")
    out.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="measure nothing: compare two runs")


def run(args: argparse.Namespace) -> int:
    """Measure and report. 0; 1 = no valid cell or a server died; 130 = interrupted."""
    from rich.console import Console

    console = Console(stderr=args.json)
    if args.compare:
        return _compare(args, console)
    if args.report:
        return _report(_load(args.report), args.report, console, args.json)
    _check(args)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us, servers stop and cells stay
    folder = args.output_dir or Path("longctx-results") / time.strftime("%Y%m%d-%H%M%S")
    file = folder / "cells.jsonl"
    done = _resumable(args, file)
    folder.mkdir(parents=True, exist_ok=True)
    problem, interrupted = "", False
    try:
        problem = _measure(args, folder, file, done)
    except KeyboardInterrupt:
        interrupted = True
    found = _load(folder) if file.exists() else []
    code = _report(found, folder, console, args.json) if found else 1
    if problem:
        console.print(problem, style="red", markup=False, highlight=False)
        code = 1
    if interrupted:
        console.print(
            f"interrupted; {len(found)} cells are in {file}; go on with --output-dir {folder} --resume",
            markup=False,
        )
        return 130
    return code


def _check(args: argparse.Namespace) -> None:
    if args.base_url:
        if not args.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url is {args.base_url!r}; expected http://HOST:PORT")
        if args.model_path:
            raise ValueError("--base-url measures a running server and --model-path serves one; give one of them")
    if args.resume and not args.output_dir:
        raise ValueError("--resume needs --output-dir, the folder of the run to go on with")
    if args.max_new_tokens is not None and args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; a decode rate needs at least 2")


def _resumable(args: argparse.Namespace, file: Path) -> list[Cell]:
    from . import cells

    if not file.exists():
        return []
    if not args.resume:
        raise ValueError(f"--output-dir is {file.parent}, which holds a run; add --resume to go on with it")
    done = cells.load(file, repair=True)
    if done and done[-1].run.seed != args.seed:
        raise ValueError(
            f"--seed is {args.seed}; the run in {file.parent} has {done[-1].run.seed}: resume with the same"
        )
    return done


def _measure(args: argparse.Namespace, folder: Path, file: Path, done: Sequence[Cell]) -> str:
    """Every server in turn. Returns what went wrong, or "". KeyboardInterrupt passes through."""
    hardware = _hardware()
    if args.base_url:
        job = _job(args, file, args.base_url, args.label, hardware, cpu=False)
        return _run_job(job, done, args)
    import shlex

    from . import server

    cpu = _on_cpu(args, hardware)
    python = server.sglang_python(args.sglang_python)
    problems = []
    with tempfile.TemporaryDirectory(prefix="mla-verify-longctx-") as scratch:
        depths = args.depths or (CPU_DEPTHS if cpu else GPU_DEPTHS)
        tokens = args.max_new_tokens or (CPU_TOKENS if cpu else GPU_TOKENS)
        draft = args.speculative_num_draft_tokens or (8 if cpu else 16)
        need = max(depths) + tokens + 2 * draft
        if args.model_path:
            model, context = args.model_path, need + GPU_RESERVE
        elif cpu:
            if need > CPU_CONTEXT:
                raise ValueError(
                    f"--depths reaches {max(depths)}; with {tokens} new tokens the small model holds "
                    f"{CPU_CONTEXT - tokens - 2 * draft}; ask for less, or give --model-path"
                )
            model, context = str(_small_model(Path(scratch), args.seed)), CPU_CONTEXT
        else:
            context = need + GPU_RESERVE
            model = str(
                server.write_random_model(
                    Path(scratch) / "model", layers=args.layers, heads=args.heads, context=context
                )
            )
        for backend in dict.fromkeys(args.attention_backends.split(",")):
            prefill = args.prefill_attention_backend or (OURS if cpu and OURS in args.attention_backends else "own")
            launch = server.Launch(
                python=python,
                model_path=model,
                attention_backend=backend,
                cpu=cpu,
                context_length=context,
                pool_tokens=max(args.concurrency) * need + 4096,
                max_running_requests=max(2, *args.concurrency),
                speculative_algorithm=""
                if args.speculative_algorithm.lower() == "none"
                else args.speculative_algorithm.upper(),
                speculative_num_draft_tokens=draft,
                dummy_weights=not cpu and not args.model_path,
                other_prefill="" if prefill in ("own", backend) else prefill,
                seed=args.seed,
                extra=shlex.split(args.server_args),
            )
            if _all_done(args, backend, depths, tokens, cpu, done):
                continue
            try:
                problem = _serve(args, launch, folder / f"server-{backend}.log", file, done, hardware, cpu)
            except RuntimeError as error:
                problem = f"{backend}: {error}"
            if problem:
                problems.append(problem)
    return "\n".join(problems)


def _serve(
    args: argparse.Namespace,
    launch: Any,
    log: Path,
    file: Path,
    done: Sequence[Cell],
    hardware: dict,
    cpu: bool,
) -> str:
    from rich.console import Console

    from .server import Server

    console = Console(stderr=True)
    with console.status(f"starting SGLang with {launch.attention_backend}", spinner="dots") as status:

        def wait(seconds: float) -> None:
            status.update(f"starting SGLang with {launch.attention_backend}: {seconds:.0f} s, log in {log}")

        server = Server(launch, log, on_wait=wait)
        server.__enter__()
    try:
        job = _job(args, file, server.base_url, launch.attention_backend, hardware, cpu=cpu)
        job.embedded, job.server_command = True, server.command
        job.model_config = Path(launch.model_path) if Path(launch.model_path).is_dir() else None
        job.versions["sglang"] = _version_of(launch.python)
        return _run_job(job, done, args)
    finally:
        server.stop()


def _version_of(python: str) -> str:
    from .server import sglang_version

    return sglang_version(python)


def _grid(args: argparse.Namespace, cpu: bool) -> Any:
    from .prompts import TEXTS
    from .run import Grid

    small = cpu and not args.base_url
    text = args.text or ("natural" if small else "both")
    return Grid(
        depths=args.depths or (CPU_DEPTHS if small else GPU_DEPTHS),
        concurrency=args.concurrency,
        texts=TEXTS if text == "both" else (text,),
        max_new_tokens=args.max_new_tokens or (CPU_TOKENS if small else GPU_TOKENS),
        repeats=args.repeats,
    )


def _all_done(args: argparse.Namespace, label: str, depths: Any, tokens: int, cpu: bool, done: Sequence[Cell]) -> bool:
    """Nothing of this server is left to measure, so it need not be started."""
    from .cells import RETRY

    finished = {c.key for c in done if not RETRY & {f.name for f in c.flags}}
    return all(key in finished for key in _grid(args, cpu).keys(label))


def _job(args: argparse.Namespace, file: Path, base_url: str, label: str, hardware: dict, *, cpu: bool) -> Job:
    from .run import Job

    return Job(
        base_url=base_url,
        label=label,
        grid=_grid(args, cpu),
        output=file,
        seed=args.seed,
        api=args.api,
        model=args.model,
        api_key=args.api_key or os.environ.get("MLA_VERIFY_API_KEY", ""),
        vocab_size=args.vocab_size,
        model_config=args.model_config,
        warm_up=not args.no_warmup,
        silence_s=args.timeout,
        command=_command_without_secrets(),
        hardware={k: v for k, v in hardware.items() if k != "versions"},
        versions=dict(hardware.get("versions") or {}),
    )


def _run_job(job: Job, done: Sequence[Cell], args: argparse.Namespace) -> str:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .report import number
    from .run import Measurement, ServerGone, Watch

    if done and (bad := [c for c in done if c.run.max_new_tokens != job.grid.max_new_tokens]):
        raise ValueError(
            f"--max-new-tokens is {job.grid.max_new_tokens}; "
            f"the run to resume has {bad[0].run.max_new_tokens}: use the same"
        )
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("asking the server", total=None)

        def begin(label: str, total: int, skipped: int) -> None:
            progress.update(task, description=label, total=total, completed=skipped)
            if skipped:
                progress.print(f"{label}: {skipped} of {total} cells are there already", highlight=False)

        def finished(cell: Cell) -> None:
            f = cell.figures
            words = f"{number(f.ms_per_step)} ms/step, {number(f.decode_tok_s)} tok/s" if f.decode_tok_s else "no rate"
            verdict = "" if cell.valid else f" (not valid: {', '.join(flag.name for flag in cell.flags)})"
            key = cell.key
            what = f"{key.label} {key.depth:,} x{key.concurrency} {key.text}"
            progress.console.print(f"{what}: {words}{verdict}, {cell.seconds:.1f} s", markup=False, highlight=False)
            progress.advance(task)

        watch = Watch(begin, lambda words: progress.update(task, description=words), finished)
        try:
            asyncio.run(Measurement(job, done, watch).measure())
        except ServerGone as gone:
            return str(gone)
    return ""


def _report(found: Sequence[Cell], folder: Path, console: Console, as_json: bool) -> int:
    from . import report

    report.show(found, console)
    names = report.labels(found)
    for i, base in enumerate(names):
        for other in names[i + 1 :]:
            report.compare(found, base, other, console)
    paths = [*report.plot(found, folder), report.html(found, folder)]
    valid = sum(cell.valid for cell in found)
    written = ", ".join(str(path) for path in (folder / "cells.jsonl", *paths))
    console.print(f"{valid} of {len(found)} cells valid; {written}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"output_dir": str(folder), **report.summary(found)}, indent=2))
    return 0 if valid else 1


def _compare(args: argparse.Namespace, console: Console) -> int:
    from . import report

    runs = [_load(path) for path in args.compare]
    mixed = [
        cell.model_copy(update={"key": cell.key.model_copy(update={"label": f"{path.name or path}: {cell.key.label}"})})
        for path, found in zip(args.compare, runs, strict=True)
        for cell in found
    ]
    first, second = (
        [f"{path.name or path}: {name}" for name in report.labels(r)]
        for path, r in zip(args.compare, runs, strict=True)
    )
    report.show(mixed, console)
    for base in first:
        # A backend is compared with itself in the other run; where names differ, everything with everything.
        same = [other for other in second if other.split(": ", 1)[1] == base.split(": ", 1)[1]]
        for other in same or second:
            report.compare(mixed, base, other, console)
    if args.output_dir:
        for path in report.plot(mixed, args.output_dir):
            console.print(f"{path}", markup=False)
    if args.json:
        print(json.dumps(report.summary(mixed), indent=2))
    return 0


def _load(path: Path) -> list[Cell]:
    from . import cells

    file = path / "cells.jsonl" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path} holds no cells.jsonl; give the --output-dir of a run")
    return cells.load(file)


def _small_model(scratch: Path, seed: int) -> Path:
    """The trained one of tests/models, whose text is text; outside a checkout one of random weights."""
    from .. import tiny_model

    if (SMALL_MODEL / "model.safetensors").exists():
        return SMALL_MODEL
    return tiny_model.write(scratch / "tiny", tiny_model.TinyModel(context=CPU_CONTEXT, seed=seed))


def _hardware() -> dict[str, Any]:
    """Asked in a process of its own, which leaves no CUDA context beside the server."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla_verify_bench.machine"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        told = json.loads(done.stdout[: 1 << 20])
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _on_cpu(args: argparse.Namespace, hardware: dict[str, Any]) -> bool:
    if args.device == "cuda" and not hardware.get("gpu"):
        raise ValueError(f"--device is cuda; {hardware.get('no_gpu_because') or 'this machine has no GPU'}")
    return args.device == "cpu" or (args.device == "auto" and not hardware.get("gpu"))


def _command_without_secrets() -> list[str]:
    words = list(sys.argv)
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=…"
        elif word == "--api-key" and i + 1 < len(words):
            words[i + 1] = "…"
    return words


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _numbers(text: str) -> list[int]:
    return list(dict.fromkeys(_positive(word.strip().replace("_", "")) for word in text.split(",")))


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
