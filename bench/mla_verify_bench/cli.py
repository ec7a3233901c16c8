"""The ``mla-verify`` command. Each part loads when its command is called, so ``--help`` needs the standard library."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


class UsageError(Exception):
    """What the user asked for can't be done; the message is one sentence that says what to do instead."""


@dataclass(frozen=True)
class Command:
    """Name on the command line, one line of help, and where its arguments and its code come from."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, 1 (a gate or a check failed), 2 (wrong use), 130 (interrupted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for command in COMMANDS:
        words = command.name.split()
        if argv[: len(words)] == words:
            return _run(command, argv[len(words) :])
    parser = argparse.ArgumentParser(
        prog="mla-verify",
        description="MLA verify attention for SGLang: its gates, its benchmarks, its diagnosis.",
        usage="mla-verify COMMAND …",
        epilog="\n".join(["commands:", *(f"  {c.name:<16}{c.help}" for c in COMMANDS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"mla-verify {version('mla-verify')}")
        return 0
    if not args.command:
        parser.print_help()
        return 0
    asked, names = " ".join(args.command), ", ".join(c.name for c in COMMANDS)
    return _fail(f"command is {asked!r}; expected one of {names}")


def _run(command: Command, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"mla-verify {command.name}", description=command.help)
    try:
        command.add_arguments(parser)
        return command.run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, ValueError, RuntimeError, OSError) as error:
        if os.environ.get("MLA_VERIFY_TRACEBACK"):
            raise
        return _fail(str(error) or type(error).__name__)


def _fail(sentence: str) -> int:
    print(f"mla-verify: error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


# gates run


def _gates_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("phase", help="phase1, phase2, …: an id from phases/*/phase.yaml")
    _checkout_arguments(parser)
    parser.add_argument(
        "--only",
        metavar="GATE",
        action="append",
        default=[],
        help="run this gate alone; may be repeated. A ratio or bound brings the exactness gates that it needs along",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="run up to N tests at once (pytest-xdist) where nothing is timed and no engine runs (default: 1)",
    )
    parser.add_argument("--strict", action="store_true", help="also fail on what is STALE or NOT MEASURED afterwards")
    parser.add_argument("--json", action="store_true", help="print the record's outcome as JSON on stdout")
    parser.add_argument(
        "--python",
        metavar="ENV=PATH",
        action="append",
        default=[],
        help="interpreter of an environment, e.g. sglang-0.5.17=/path/to/python; may be repeated",
    )


def _checkout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, metavar="DIR", help="the checkout (default: found from here)")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="where records are (default: results/ of the checkout, beside which STATUS.md is kept; "
        "for another folder it is DIR/STATUS.md)",
    )


def _checkout(args: argparse.Namespace) -> tuple[Path, Path, Path]:
    """The checkout, the folder of records, and the STATUS.md that belongs to it."""
    from . import gates

    root = gates.find_root(args.root)
    if args.results is None:
        return root, root / "results", root / "STATUS.md"
    results = args.results.resolve()
    return root, results, root / "STATUS.md" if results == root / "results" else results / "STATUS.md"


def _run_gates(args: argparse.Namespace) -> int:
    import json
    import signal

    from rich.console import Console

    from . import gates, records, status

    root, results, status_file = _checkout(args)
    pythons = {}
    for given in args.python:
        env, equals, path = given.partition("=")
        if not equals or not path:
            raise UsageError(f"--python is {given!r}; expected ENV=PATH, e.g. sglang-0.5.17=/path/to/python")
        pythons[env] = os.path.abspath(path)
    if not 1 <= args.jobs <= 256:
        raise UsageError(f"--jobs is {args.jobs}; expected 1 to 256, e.g. the number of cores")
    console = Console(stderr=True)
    phase = gates.find_phase(gates.load_phases(root), args.phase)
    records.read_all(results)  # a record that can't be read is said before an hour of gates, not after it
    runner = gates.Runner(root, phase, only=args.only, pythons=pythons, jobs=args.jobs, console=console)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # whoever ends us, the finished gates are kept
    record = runner.run()
    written = records.write(record, results) if record.results else None

    statuses, found = status.compute(root, results)
    status_file.parent.mkdir(parents=True, exist_ok=True)
    _write_text(status_file, status.render(statuses, found))
    mine = [s for s in statuses if s.phase.id == phase.id]
    passed = sum(r.status == "PASS" for r in record.results)
    failed = len(record.results) - passed
    if line := gates.explain_not_run(record):
        console.print(line, highlight=False, soft_wrap=True)
    where = written or "nowhere, for nothing was measured"
    console.print(
        f"{phase.id}: {passed} passed, {failed} failed, {len(record.not_run)} not measured here; record {where}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip
    if args.json:
        outcome = {
            "phase": phase.id,
            "record": str(written) if written else "",
            "interrupted": record.interrupted,
            "results": [r.model_dump(mode="json", exclude={"samples"}) for r in record.results],
            "not_run": record.not_run,
        }
        print(json.dumps(outcome, indent=2))
    if record.interrupted:
        return 130
    if failed:
        return 1
    if args.strict and (problem := status.strict_problem(mine)):
        console.print(f"--strict: {problem}", highlight=False)
        return 1
    return 0


# status


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    _checkout_arguments(parser)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if STATUS.md is not as computed")
    parser.add_argument("--strict", action="store_true", help="also fail on FAIL, STALE and NOT MEASURED")
    parser.add_argument("--summary", action="store_true", help="print one line of counts per phase; write nothing")
    parser.add_argument("--json", action="store_true", help="print every cell as JSON; write nothing")


def _run_status(args: argparse.Namespace) -> int:
    from . import status

    root, results, status_file = _checkout(args)
    statuses, found = status.compute(root, results)
    text = status.render(statuses, found)
    code = 0
    if args.check:
        written = status_file.read_text(encoding="utf-8") if status_file.exists() else ""
        if difference := status.difference(written, text):
            print(difference)
            print(f"{status_file} is not what the records say; run `nox -s status`", file=sys.stderr)
            code = 1
    if args.json:
        import json

        print(json.dumps(status.to_json(statuses), indent=2))
    elif args.summary:
        for s in statuses:
            print(f"{s.phase.id}: {s.summary}")
    elif not args.check:
        _write_text(status_file, text)
        print(f"wrote {status_file}")
    if args.strict and (problem := status.strict_problem(statuses)):
        print(f"--strict: {problem}", file=sys.stderr)
        code = 1
    return code


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


# parts that live in modules of their own


def _elsewhere(module: str, function: str) -> Callable:
    """``function`` of ``module``, imported when it is called; a missing library becomes one clear sentence."""

    def call(argument):
        try:
            found = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        except ImportError as error:
            raise UsageError(f"this command can't load: {error}; pip install mla-verify brings what it needs") from None
        return found(argument)

    return call


COMMANDS = (
    Command("gates run", "run a phase's gates on this machine and write a record", _gates_arguments, _run_gates),
    Command("status", "regenerate STATUS.md from phase.yaml and the records", _status_arguments, _run_status),
    Command(
        "bench longctx",
        "decode speed of a server by context depth",
        _elsewhere("longctx.cli", "add_arguments"),
        _elsewhere("longctx.cli", "run"),
    ),
    Command(
        "plan",
        "the memory of a server: feasible fraction, pool tokens, launch command",
        _elsewhere("plan.cli", "add_arguments"),
        _elsewhere("plan.cli", "run"),
    ),
    Command(
        "diagnose",
        "where the time of a decode step goes, by depth, and what to change",
        _elsewhere("diagnose", "add_arguments"),
        _elsewhere("diagnose", "run"),
    ),
    Command(
        "frag",
        "how scattered a running server's K/V pool is; rearrange it",
        _elsewhere("frag", "add_arguments"),
        _elsewhere("frag", "run"),
    ),
    Command(
        "doctor",
        "what this machine has, which implementation would serve it, and a short self-test",
        _elsewhere("doctor", "add_arguments"),
        _elsewhere("doctor", "run"),
    ),
    Command(
        "build",
        "compile the CUDA kernels ahead of time, for this GPU or another",
        _elsewhere("build", "add_arguments"),
        _elsewhere("build", "run"),
    ),
)

if __name__ == "__main__":
    sys.exit(main())
