"""The small target and its drafter, as they are trained: plain torch, the mathematics of the classes that serve them.

Target: ``DeepseekV2ForCausalLM``, dense layers, MLA with the real geometry of a cached token (512 latent + 64 rope) and
8 heads; rope in neighbouring pairs, YaRN. Drafter: SGLang's ``DFlashDraftModel``, Qwen3-like layers whose keys and
values of the context come from the target's hidden states; a block attends to the context and to all of itself.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LATENT, ROPE = 512, 64


@dataclass(frozen=True)
class TargetConfig:
    """Sizes. The defaults give 7.1 million parameters, 14.3 MB in bfloat16."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    nope: int = 64
    value: int = 64
    intermediate: int = 768
    context: int = 8192
    original_context: int = 2048  # YaRN stretches from here
    theta: float = 10_000.0
    eps: float = 1e-6

    def hf(self) -> dict:
        """``config.json``. mscale 0 and attention_factor 1: transformers and SGLang then scale attention alike."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "kv_lora_rank": LATENT,
            "q_lora_rank": None,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "head_dim": ROPE,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "moe_layer_freq": 1,
            "first_k_dense_replace": self.layers,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": self.context / self.original_context,
                "original_max_position_embeddings": self.original_context,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.0,
                "mscale_all_dim": 0.0,
                "attention_factor": 1.0,
            },
            "attention_bias": False,
            "mlp_bias": False,
            "use_cache": True,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes. Hidden size, vocabulary and context are the target's."""

    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64  # the least that FlashInfer's prefill takes
    intermediate: int = 1024
    block: int = 8
    target_layers: tuple[int, ...] = (0, 1, 2)  # whose output is read: SGLang reads it where the next layer begins
    mask_token: int = 3

    def hf(self, target: TargetConfig) -> dict:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.vocab,
            "hidden_size": target.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": target.eps,
            "rope_theta": target.theta,
            "max_position_embeddings": target.context,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "block_size": self.block,
            "num_target_layers": target.layers,
            "dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": list(self.target_layers)},
            "torch_dtype": "bfloat16",
        }


def yarn_frequencies(c: TargetConfig) -> Tensor:
    """Inverse frequencies [32] of YaRN (arXiv 2309.00071): stretched where a turn is longer than the old context."""
    powers = torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE
    plain, factor = c.theta**-powers, c.context / c.original_context

    def dimension(turns: float) -> float:
        return ROPE * math.log(c.original_context / (turns * 2 * math.pi)) / (2 * math.log(c.theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), ROPE - 1)
    ramp = ((torch.arange(ROPE // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain / factor * ramp + plain * (1 - ramp)).float()


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def turn_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rope on neighbouring pairs. x [..., T, 64], angle [T, 32]."""
    pair = x.float().unflatten(-1, (-1, 2))
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack([pair[..., 0] * cos - pair[..., 1] * sin, pair[..., 0] * sin + pair[..., 1] * cos], -1)
    return turned.flatten(-2).to(x.dtype)


def turn_halves(x: Tensor, angle: Tensor) -> Tensor:
    """Rope on the two halves of a head, as Qwen3 has it. x [..., T, D], angle [..., T, D / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Past:
    """K and V of the tokens so far, of each layer, in buffers of ``length`` tokens; ``at`` [1] says how many they are.

    Nothing has a size that grows, and ``at`` is on the device: so a step is the same launches each time.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.positions = torch.arange(length, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, *new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``new`` K and V [B, heads, T, D] behind those of the layer: all of them, and what each new token sees."""
        if layer not in self._rows:
            self._rows[layer] = tuple(x.new_zeros(*x.shape[:2], len(self.positions), x.shape[3]) for x in new)
        where = self.at + self.positions[: new[0].shape[2]]
        for rows, x in zip(self._rows[layer], new, strict=True):
            rows.index_copy_(2, where, x)
        return *self._rows[layer], self.positions <= where[:, None]


class Mla(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden, c.heads * (c.nope + ROPE))
        self.kv_a_proj_with_mqa = linear(c.hidden, LATENT + ROPE)
        self.kv_a_layernorm = Norm(LATENT, c.eps)
        self.kv_b_proj = linear(LATENT, c.heads * (c.nope + c.value))
        self.o_proj = linear(c.heads * c.value, c.hidden)

    def forward(self, x: Tensor, angle: Tensor, past: Past | None = None) -> Tensor:
        c, (batch, length) = self.c, x.shape[:2]
        q = self.q_proj(x).view(batch, length, c.heads, -1).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, c.heads, -1).transpose(1, 2)
        k, v = kv.split([c.nope, c.value], -1)
        q = torch.cat([q[..., : c.nope], turn_pairs(q[..., c.nope :], angle)], -1)
        k = torch.cat([k, turn_pairs(k_rope[:, None], angle).expand(-1, c.heads, -1, -1)], -1)
        mask = None
        if past is not None:
            k, v, mask = past.extend(self, k, v)
        scale = (c.nope + ROPE) ** -0.5
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past is None, scale=scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class TargetLayer(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.self_attn, self.mlp = Mla(c), Mlp(c.hidden, c.intermediate)

    def forward(self, x: Tensor, angle: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angle, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Names of the parameters are those of the checkpoint."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab, c.hidden),
                "layers": nn.ModuleList(TargetLayer(c) for _ in range(c.layers)),
                "norm": Norm(c.hidden, c.eps),
            }
        )
        self.lm_head = linear(c.hidden, c.vocab)
        self.register_buffer("frequencies", yarn_frequencies(c), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers) if last else 0.02)

    def forward(
        self, tokens: Tensor, keep: tuple[int, ...] = (), past: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> logits [B, T, V], and the outputs of layers ``keep`` side by side [B, T, K hidden].

        ``past`` takes these tokens' K and V, behind those of earlier calls.
        """
        x = self.model["embed_tokens"](tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angle = (positions if past is None else past.at + positions)[:, None] * self.frequencies
        kept = []
        for i, layer in enumerate(self.model["layers"]):
            x = layer(x, angle, past)
            if i in keep:
                kept.append(x)
        if past is not None:
            past.at += tokens.shape[1]
        return self.lm_head(self.model["norm"](x)), torch.cat(kept, -1) if kept else None

    @torch.no_grad()
    def greedy(self, tokens: Tensor, count: int) -> Tensor:
        """tokens [B, T] and the ``count`` that follow, each the most probable one: [B, T + count].

        On a GPU a step is a graph's replay: launched one by one, its kernels would take several times as long.
        """
        said = F.pad(tokens, (0, count))
        past = Past(said.shape[1], tokens.device)
        logits, _ = self(tokens, past=past)
        chosen = logits[:, -1:].argmax(-1)

        def step() -> None:
            said.index_copy_(1, past.at, chosen)
            # Weights cast once and kept would be the graph's memory, which ends with it.
            with torch.autocast(said.device.type, torch.bfloat16, torch.is_autocast_enabled(said.device.type), False):
                following, _ = self(chosen, past=past)
            chosen.copy_(following.argmax(-1))

        if said.is_cuda and count > 1:
            from mla_verify_bench.timing import graph

            step, count = graph(step), count - 1  # which makes the first step
        for _ in range(count):
            step()
        return said


class DrafterAttention(nn.Module):
    def __init__(self, d: DrafterConfig, hidden: int, eps: float) -> None:
        super().__init__()
        self.d = d
        self.q_proj = linear(hidden, d.heads * d.head_dim)
        self.k_proj, self.v_proj = (linear(hidden, d.kv_heads * d.head_dim) for _ in range(2))
        self.o_proj = linear(d.heads * d.head_dim, hidden)
        self.q_norm, self.k_norm = Norm(d.head_dim, eps), Norm(d.head_dim, eps)

    def keys(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, kv heads, T, D] of block tokens or of projected target states."""
        k, v = (p(x).unflatten(-1, (self.d.kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return turn_halves(self.k_norm(k), angle), v

    def forward(self, x: Tensor, angle: Tensor, context: Tensor, context_angle: Tensor, mask: Tensor) -> Tensor:
        d = self.d
        q = self.q_proj(x).unflatten(-1, (d.heads, -1)).transpose(1, 2)
        q = turn_halves(self.q_norm(q), angle)
        own, before = self.keys(x, angle), self.keys(context, context_angle)
        k, v = (
            torch.cat([b, o], 2).repeat_interleave(d.heads // d.kv_heads, 1) for b, o in zip(before, own, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=d.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    def __init__(self, d: DrafterConfig, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn, self.mlp = DrafterAttention(d, hidden, eps), Mlp(hidden, d.intermediate)


class Drafter(nn.Module):
    """Blocks of [bonus token, masks]; each mask is to become the token at its own position."""

    def __init__(self, d: DrafterConfig, c: TargetConfig) -> None:
        super().__init__()
        self.d = d
        self.fc = linear(len(d.target_layers) * c.hidden, c.hidden)
        self.hidden_norm, self.norm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.layers = nn.ModuleList(DrafterLayer(d, c.hidden, c.eps) for _ in range(d.layers))
        powers = torch.arange(0, d.head_dim, 2, dtype=torch.float64) / d.head_dim
        self.register_buffer("frequencies", (c.theta**-powers).float(), persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, embedded: Tensor, starts: Tensor, states: Tensor) -> Tensor:
        """embedded [B, A, block, hidden] of A blocks that begin at ``starts`` [B, A], states [B, T, K hidden] of the
        target; returns hidden states [B, A, block, hidden] for the target's lm_head."""
        batch, blocks, size, _ = embedded.shape
        length = states.shape[1]
        context = self.hidden_norm(self.fc(states))
        positions = (starts[..., None] + torch.arange(size, device=starts.device)).flatten(1)
        angle = (positions[..., None] * self.frequencies)[:, None]
        context_angle = torch.arange(length, device=starts.device)[:, None] * self.frequencies
        block_of = torch.arange(blocks, device=starts.device).repeat_interleave(size)
        before = torch.arange(length, device=starts.device) < starts.repeat_interleave(size, 1)[..., None]
        own = (block_of[:, None] == block_of).expand(batch, -1, -1)
        mask = torch.cat([before, own], -1)[:, None]
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), angle, context, context_angle, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (blocks, size))


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the corpus."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    seed: int = 0
    sequence: int = 1024
    batch: int = 64
    long_share: float = 0.15  # of the target's time, at the end, on sequences of the whole context
    # Greedy text of a small model falls into loops. In this share of the target's time, at the end, every second step
    # also takes ``rollouts`` greedy continuations and makes their tokens that complete an n-gram said before less
    # likely (unlikelihood training, arXiv 1908.04319).
    variety_share: float = 0.4
    variety_weight: float = 2.0
    rollouts: int = 384
    rollout_tokens: int = 192
    ngram: int = 5
    learning_rate: float = 3e-3
    drafter_learning_rate: float = 2e-3
    anchors: int = 24  # blocks of a sequence that the drafter learns from at a time

    def plain(self) -> dict:
        return asdict(self)
