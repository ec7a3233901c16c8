"""What a person reads of a run: a table, the decode curve, and one server against another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cells import FLAGS, Cell
from .run import best

OURS = "mla_verify"
_COLORS = {OURS: "#1f6feb"}
_OTHERS = ("#c4521a", "#6e7781", "#8250df", "#1a7f37", "#9a6700")
_STYLES = {"predictable": "-", "natural": (0, (5, 2))}


def show(found: Sequence[Cell], console: Console) -> None:
    """One table per server: a row for each depth, concurrency and text."""
    groups: dict[str, list[Cell]] = {}
    for (label, *_), cell in best(found).items():
        groups.setdefault(label, []).append(cell)
    for label, group in groups.items():
        _show_one(label, group, console)
    flags = {flag.name for cell in found for flag in cell.flags}
    for name in FLAGS:
        if name in flags:
            console.print(f"  {name}: {FLAGS[name]}", highlight=False, style="dim")


_COLUMNS = (
    ("TTFT\ns", "ttft_s"),
    ("prefill\ntok/s", "prefill_tok_s"),
    ("decode\ntok/s", "decode_tok_s"),
    ("all\ntok/s", "total_tok_s"),
    ("accept\nlength", "accept_length"),
    ("verify\nsteps", "verify_steps"),
    ("ms per\nstep", "ms_per_step"),
    ("K/V\nGB/s", "kv_read_gb_s"),
    ("cached\ntokens", "cached_tokens"),
)


def _show_one(label: str, group: Sequence[Cell], console: Console) -> None:
    run = group[-1].run
    server = run.server
    what = " ".join(filter(None, (server.name, server.version, server.speculative_algorithm)))
    table = _table(f"{label} ({what or run.base_url})", console)
    many = any(cell.key.concurrency > 1 for cell in group)
    columns = [
        (name, field)
        for name, field in _COLUMNS
        # A column that says nothing is left out; a hit in the cache is told by its flag too.
        if any(getattr(cell.figures, field) for cell in group) and (many or field != "total_tok_s")
    ]
    table.add_column("depth", justify="right", no_wrap=True)
    if many:
        table.add_column("x", justify="right")
    table.add_column("text")
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("valid")
    for cell in sorted(group, key=lambda c: (c.key.text, c.key.concurrency, c.key.depth)):
        key = cell.key
        table.add_row(
            f"{key.depth:,}",
            *([str(key.concurrency)] if many else []),
            key.text,
            *(number(getattr(cell.figures, field)) for _, field in columns),
            Text("yes", "green") if cell.valid else Text("no", "yellow"),
            style="" if cell.valid else "dim",
        )
    console.print(table)
    for cell in group:
        if not cell.valid:
            where = f"{cell.key.depth:,} x{cell.key.concurrency} {cell.key.text}"
            console.print(Text(f"  {where} is not valid: {cell.reasons}", "dim"))


def _table(title: str, console: Console) -> Table:
    return Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1 if console.width >= 96 else 0),
    )


def number(value: float | None) -> str:
    """Three digits that mean something; "-" where there is nothing."""
    if value is None:
        return "-"
    if value == 0 or isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def pairs(found: Sequence[Cell], base: str, other: str) -> list[dict[str, Any]]:
    """Cells that both servers have, and how many times faster ``other`` is; valid if both cells are."""
    shown = best(found)
    rows = []
    for (label, text, concurrency, depth), theirs in shown.items():
        ours = shown.get((other, text, concurrency, depth)) if label == base else None
        if ours is None:
            continue
        a, b = theirs.figures, ours.figures
        rows.append(
            {
                "text": text,
                "concurrency": concurrency,
                "depth": depth,
                "base_ms_per_step": a.ms_per_step,
                "other_ms_per_step": b.ms_per_step,
                "step_ratio": _ratio(a.ms_per_step, b.ms_per_step),
                "base_decode_tok_s": a.decode_tok_s,
                "other_decode_tok_s": b.decode_tok_s,
                "decode_ratio": _ratio(b.decode_tok_s, a.decode_tok_s),
                "base_accept_length": a.accept_length,
                "other_accept_length": b.accept_length,
                "valid": theirs.valid and ours.valid,
            }
        )
    return sorted(rows, key=lambda r: (r["text"], r["concurrency"], r["depth"]))


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def labels(found: Sequence[Cell]) -> list[str]:
    """Servers in the order measured, ours last."""
    names = dict.fromkeys(cell.key.label for cell in found)
    return sorted(names, key=lambda name: name == OURS)


def compare(found: Sequence[Cell], base: str, other: str, console: Console) -> None:
    """``other`` against ``base``, by depth."""
    rows = pairs(found, base, other)
    if not rows:
        console.print(f"{base} and {other} have no cell in common: nothing to compare")
        return
    table = _table(f"{other} against {base}", console)
    for name, justify in (("depth", "right"), ("x", "right"), ("text", "left")):
        table.add_column(name, justify=justify)
    for name in (
        f"{base}\nms/step",
        f"{other}\nms/step",
        "step\nratio",
        f"{base}\ntok/s",
        f"{other}\ntok/s",
        "decode\nratio",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accept", justify="right", no_wrap=True)
    for row in rows:
        accept = f"{number(row['base_accept_length'])} / {number(row['other_accept_length'])}"
        table.add_row(
            f"{row['depth']:,}", str(row["concurrency"]), row["text"],
            number(row["base_ms_per_step"]), number(row["other_ms_per_step"]), _times(row["step_ratio"]),
            number(row["base_decode_tok_s"]), number(row["other_decode_tok_s"]), _times(row["decode_ratio"]),
            accept,
            style="" if row["valid"] else "dim",
        )  # fmt: skip
    console.print(table)
    if not all(row["valid"] for row in rows):
        console.print("  Dim rows hold a cell that is not valid; their ratios are no result.", style="dim")
    if any(row["decode_ratio"] and not _near(row["base_accept_length"], row["other_accept_length"]) for row in rows):
        console.print(
            "  Where accept lengths differ, tok/s compares drafts as well as attention; ms/step does not.",
            style="dim",
        )


def _near(a: float | None, b: float | None) -> bool:
    return a is None or b is None or abs(a - b) <= 0.05 * max(a, b)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{number(value)} x"


def summary(found: Sequence[Cell]) -> dict[str, Any]:
    """For ``--json``: the cells without their raw requests, and every pair of servers compared."""
    names = labels(found)
    return {
        "cells": [
            {
                **cell.key.model_dump(),
                **cell.figures.model_dump(),
                "valid": cell.valid,
                "flags": [flag.model_dump() for flag in cell.flags],
                "run": cell.run.id,
            }
            for cell in found
        ],
        "comparisons": [
            {"base": a, "other": b, "rows": pairs(found, a, b)} for i, a in enumerate(names) for b in names[i + 1 :]
        ],
    }


def plot(found: Sequence[Cell], folder: Path, title: str = "") -> list[Path]:
    """``decode.svg`` and ``decode.png``: by depth, ms per verify step and decode tok/s, and where they are known the
    accept length and the K/V bandwidth that a step implies. [] = nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = best(found)
    drawn = {key: cell for key, cell in shown.items() if cell.figures.decode_tok_s}
    if not drawn:
        return []
    names = [name for name in labels(found) if any(key[0] == name for key in drawn)]
    others = iter(_OTHERS * 4)
    colors = {name: _COLORS[name] if name in _COLORS else next(others) for name in names}
    style = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longctx",
        "axes.edgecolor": "#57606a", "xtick.color": "#57606a", "ytick.color": "#57606a",
        "text.color": "#24292f",
        "svg.fonttype": "none",
    }  # fmt: skip
    with plt.rc_context(style):
        panels = [
            ("ms_per_step", "ms per verify step (lower is better)"),
            ("decode_tok_s", "decode tok/s of one request (higher is better)"),
            ("accept_length", "accept length, tokens a verify step"),
            ("kv_read_gb_s", "K/V read in a step, GB/s"),
        ]
        if not all(any(getattr(c.figures, field) for c in drawn.values()) for field, _ in panels[2:]):
            panels = panels[:2]
        rows = len(panels) // 2
        figure, axes = plt.subplots(rows, 2, figsize=(11, 4.4 * rows), layout="constrained", squeeze=False)
        for axis, (field, caption) in zip(axes.flat, panels, strict=True):
            _panel(axis, drawn, field, caption, names, colors)
        figure.suptitle(title or _title(found), fontsize=11, x=0.01, ha="left")
        handles = _legend(drawn, names, colors)
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "decode.svg", folder / "decode.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=144, metadata={"Software": None})
        plt.close(figure)
    return paths


def html(found: Sequence[Cell], folder: Path) -> Path:
    """``report.html``: tables, comparisons and the picture in one file that loads nothing else.

    What a server said is shown as text: the console escapes it, and so does the picture.
    """
    import io

    console = Console(record=True, file=io.StringIO(), width=150)
    show(found, console)
    names = labels(found)
    for i, base in enumerate(names):
        for other in names[i + 1 :]:
            compare(found, base, other, console)
    page = console.export_html(inline_styles=True)
    svg = folder / "decode.svg"
    if svg.exists():
        picture = svg.read_text(encoding="utf-8")
        page = page.replace("</body>", picture[picture.index("<svg") :] + "\n</body>", 1)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _panel(axis: Any, drawn: dict, field: str, caption: str, names: Sequence[str], colors: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    depths = sorted({key[3] for key in drawn})
    lines = {}
    for name in names:
        for text, concurrency in sorted({key[1:3] for key in drawn if key[0] == name}):
            points = sorted(
                (key[3], value, cell.valid)
                for key, cell in drawn.items()
                if key[:3] == (name, text, concurrency) and (value := getattr(cell.figures, field)) is not None
            )
            if not points:
                continue
            width = 1.2 + 0.8 * sorted({key[2] for key in drawn}).index(concurrency)
            xs, ys, _ = zip(*points, strict=True)
            axis.plot(
                xs,
                ys,
                color=colors[name],
                linestyle=_STYLES.get(text, ":"),
                linewidth=width,
                alpha=0.9,
                zorder=2,
            )
            for x, y, valid in points:
                axis.plot(
                    x, y, marker="o", markersize=6, color=colors[name], zorder=3,
                    markerfacecolor=colors[name] if valid else "white", markeredgewidth=1.4,
                )  # fmt: skip
            lines[name, text, concurrency] = {x: (y, valid) for x, y, valid in points}
    axis.set(xscale="log", yscale="log", xlabel="context depth, tokens")
    axis.set_title(caption, loc="left", fontsize=10)
    axis.set_xticks(depths, [_short(d) for d in depths])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="y", color="#d0d7de", linewidth=0.6, zorder=0)
    axis.margins(x=0.12, y=0.12)
    if len(names) == 2 and field in ("ms_per_step", "decode_tok_s"):
        _gap(axis, lines, names, field)


def _gap(axis: Any, lines: dict, names: Sequence[str], field: str) -> None:
    """How far the two servers are apart at the deepest context where both cells are valid."""
    found = []
    for (name, *rest), points in lines.items():
        theirs = lines.get((names[1], *rest)) if name == names[0] else None
        both = [x for x in points if theirs and x in theirs and points[x][1] and theirs[x][1]]
        if both:
            x = max(both)
            found.append((x, points[x][0], theirs[x][0]))
    if not found:
        return
    x, a, b = max(found)
    faster = a / b if field == "ms_per_step" else b / a
    axis.plot([x, x], [a, b], color="#8c959f", linewidth=1, linestyle=":", zorder=1)
    axis.annotate(
        f"{number(faster)} x", (x, (a * b) ** 0.5), xytext=(-6, 0), textcoords="offset points",
        ha="right", va="center", fontsize=11, fontweight="bold",
    )  # fmt: skip


def _legend(drawn: dict, names: Sequence[str], colors: dict[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colors[name], linewidth=2.5, label=name) for name in names]
    texts = sorted({key[1] for key in drawn})
    if len(texts) > 1:
        handles += [Line2D([], [], color="#57606a", linestyle=_STYLES.get(t, ":"), label=f"{t} text") for t in texts]
    many = sorted({key[2] for key in drawn})
    if len(many) > 1:
        handles += [
            Line2D([], [], color="#57606a", linewidth=1.2 + 0.8 * i, label=f"{c} at a time") for i, c in enumerate(many)
        ]
    if not all(cell.valid for cell in drawn.values()):
        hollow = {"marker": "o", "markerfacecolor": "white", "linestyle": "", "markeredgewidth": 1.4}
        handles.append(Line2D([], [], color="#57606a", label="not a valid cell", **hollow))
    return handles


def _title(found: Sequence[Cell]) -> str:
    run = found[-1].run
    server, gpu = run.server, (run.hardware or {}).get("gpu") or {}
    where = gpu.get("name") if gpu else "CPU, no GPU" if run.embedded or server.device == "cpu" else ""
    words = (
        f"SGLang {server.version}" if server.name == "sglang" else server.model,
        f"{server.speculative_algorithm}, {server.speculative_num_draft_tokens} draft tokens"
        if server.speculative_algorithm else "",
        where,
    )  # fmt: skip
    return " · ".join(str(w) for w in words if w)


def _short(depth: int) -> str:
    if depth >= 1024 and depth % 1024 == 0:
        return f"{depth // 1024}k"
    return f"{depth / 1000:.0f}k" if depth >= 10000 else f"{depth:,}"
