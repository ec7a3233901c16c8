"""One card's memory, drawn: weights, the pool, and what the slack is for."""

from __future__ import annotations

from pathlib import Path

from .memory import Plan, pool_gib, static_gib


def draw(made: Plan, path: Path) -> None:
    """Write the picture; the file's name says the format (.svg, .png, .pdf)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    setup = made.setup
    fraction = made.fraction if made.fraction is not None else made.high
    parts = [("taken before load", setup.total_gib - setup.free_before_gib), ("weights", static_gib(setup))]
    pool = max(0.0, pool_gib(setup, fraction))
    parts.append((f"K/V pool: {made.tokens:,} tokens", pool))
    parts += [(term.name, term.gib) for term in made.terms]
    left = setup.total_gib - sum(size for _, size in parts)
    parts.append(("free", left) if left >= 0 else ("missing", left))
    figure, axis = pyplot.subplots(figsize=(9, 3), layout="constrained")
    colors = pyplot.get_cmap("tab20").colors
    at = 0.0
    for i, (name, size) in enumerate(parts):
        if size <= 0:
            continue
        axis.barh(0, size, left=at, color="white" if name == "free" else colors[i % 20], edgecolor="black", lw=0.5,
                  label=f"{name}, {size:.2f} GiB")  # fmt: skip
        at += size
    axis.axvline(setup.total_gib, color="black", lw=1.5)
    axis.set_xlim(0, max(at, setup.total_gib) * 1.01)
    axis.set_yticks([])
    axis.set_xlabel(f"GiB of one card's {setup.total_gib:.1f}")
    says = (
        f"--mem-fraction-static {fraction:g}" if made.feasible else f"does not fit: {made.missing_gib:.2f} GiB missing"
    )
    axis.set_title(f"{setup.model.name}, context {setup.context_length:,}, TP {setup.tp_size}: {says}", fontsize=10)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
