"""A small DFlash drafter with random weights for the tiny MLA model, in the format of SGLang's DFLASH."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mla_verify_bench.tiny_model import TinyModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))


def write(path: Path, model: TinyModel, *, block: int = 8, window: int | None = None, seed: int = 0) -> Path:
    """Write config and weights to the folder ``path``. ``window``: its layers attend that many tokens, causally."""
    import torch
    from network import Drafter, DrafterConfig, TargetConfig
    from safetensors.torch import save_file

    target = TargetConfig(vocab=model.vocab, hidden=model.hidden, layers=model.layers, context=model.context)
    sizes = DrafterConfig(layers=1, heads=4, kv_heads=2, intermediate=256, block=block, target_layers=(0,))
    config = sizes.hf(target) | {"torch_dtype": model.dtype}
    if window:
        config |= {"layer_types": ["sliding_attention"] * sizes.layers, "sliding_window": window}
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    torch.manual_seed(seed)
    tensors = {
        k: v.to(getattr(torch, model.dtype)).contiguous() for k, v in Drafter(sizes, target).state_dict().items()
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path
