"""Drafters of the tests: random ones for the tiny MLA model (DFlash, EAGLE, EAGLE3), the trained DFlash, its target.

The trained pair lies in tests/models/weights, where it has been made; its text is what it was not trained on.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mla_verify_bench import tiny_model
from mla_verify_bench.tiny_model import TinyModel

MODELS = Path(__file__).resolve().parents[1] / "models"
sys.path.insert(0, str(MODELS))
# The trained model that speaks, its drafter and record.json.
WEIGHTS = Path(os.environ.get("MLA_VERIFY_SMALL_MODEL") or MODELS / "weights")
MISSING = "tests/models/weights has no target and drafter; tests/models/train.py makes them"
LARGEST_LOGIT = 32.0  # those of the trained model are below


def write(path: Path, model: TinyModel, *, block: int = 8, window: int | None = None, seed: int = 0) -> Path:
    """Write config and weights to the folder ``path``. ``window``: its layers attend that many tokens, causally."""
    import torch
    from network import Drafter, DrafterConfig, TargetConfig

    target = TargetConfig(vocab=model.vocab, hidden=model.hidden, layers=model.layers, context=model.context)
    sizes = DrafterConfig(layers=1, heads=4, kv_heads=2, intermediate=256, block=block, target_layers=(0,))
    config = sizes.hf(target) | {"torch_dtype": model.dtype}
    if window:
        config |= {"layer_types": ["sliding_attention"] * sizes.layers, "sliding_window": window}
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    torch.manual_seed(seed)
    return _save(path, model, config, Drafter(sizes, target).state_dict())


def write_eagle(path: Path, model: TinyModel, *, three: bool = False, seed: int = 0) -> Path:
    """Write an EAGLE drafter of one Llama layer of random weights; words and their scores are the target's.

    ``three``: EAGLE3, which reads hidden states of several target layers and scores half the words, by a head of its
    own. That is made to be right at times: a walk's next word but one, of the word that the target last saw.
    """
    import torch

    wide, narrow, heads = model.hidden, 256, 4
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": wide,
        "intermediate_size": narrow,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": model.dtype,
    }
    seen = 2 * wide if three else wide  # by attention: a word beside the hidden state, or the two in one
    shapes = {
        **{f"self_attn.{one}_proj": (heads * 64, seen) for one in "qkv"}, "self_attn.o_proj": (wide, heads * 64),
        "mlp.gate_proj": (narrow, wide), "mlp.up_proj": (narrow, wide), "mlp.down_proj": (wide, narrow),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layers.0.{k}.weight": torch.randn(s, generator=generator) * s[1] ** -0.5 for k, s in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(wide)
    if three:
        # The inputs of these layers; SGLang takes a list that begins with 1 for one of outputs.
        layers = sorted({0, model.layers // 2, model.layers - 1})
        config |= {"draft_vocab_size": model.vocab // 2}
        config |= {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}}
        words = torch.randperm(model.vocab, generator=generator)[: model.vocab // 2].sort().values
        before, order = torch.arange(model.vocab), torch.tensor(tiny_model.cycle(model))
        before[order] = order.roll(1)
        mixed = torch.randn(wide, len(layers) * wide, generator=generator) * 0.1 * wide**-0.5
        mixed[:, :wide] += torch.eye(wide)  # the first layer's input is the word
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"layers.0.{name}.weight"] *= 0.1
        for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"):
            tensors[f"{name}.weight"] = torch.ones(wide)
        tensors |= {
            "fc.weight": mixed,
            "lm_head.weight": tiny_model.weights(model)["lm_head.weight"][before[words]],
            "d2t": words - torch.arange(len(words)),
            "t2d": torch.isin(torch.arange(model.vocab), words),
        }
    else:
        tensors["fc.weight"] = torch.randn(wide, 2 * wide, generator=generator) * (2 * wide) ** -0.5
        tensors["fc.bias"] = torch.zeros(wide)
    return _save(path, model, config, tensors)


def _save(path: Path, model: TinyModel, config: dict, tensors: dict) -> Path:
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    dtype = getattr(torch, model.dtype)
    made = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    save_file(made, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class Trained:
    """The small model that speaks and its drafter: folders in HF format, each with its tokenizer."""

    target: Path
    drafter: Path

    @cached_property
    def text(self) -> list[int]:
        """Held-out text as token ids: files that training leaves out, of the packages that are installed here."""
        import corpus

        held_out = corpus.collect(40.0).held_out
        return [int(t) for t in corpus.encode(held_out, self.target / "tokenizer.json")]

    def prompts(self, lengths: list[int], seed: int) -> list[list[int]]:
        """A piece of held-out text of each length."""
        rng = random.Random(f"held-out {seed}")
        starts = [rng.randrange(len(self.text) - length) for length in lengths]
        return [self.text[at : at + length] for at, length in zip(starts, lengths, strict=True)]


def trained() -> Trained | None:
    """None where the weights are not there."""
    found = Trained(WEIGHTS / "target", WEIGHTS / "drafter")
    return found if all((f / "model.safetensors").exists() for f in (found.target, found.drafter)) else None
