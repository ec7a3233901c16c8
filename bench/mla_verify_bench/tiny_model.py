"""A tiny MLA model whose greedy text is a walk, not a loop.

The real attention geometry of DeepSeek-V2 (512 latent + 64 rope) with everything else as small as serves: a
machine with no GPU runs it in SGLang in seconds. Random weights alone fall into loops of a few tokens, and a
loop hides a wrong mask: whatever the attention says, the loop goes on. So the weights are shaped:

- the vocabulary is laid on one long cycle, and the output layer prefers the next word of it, then the one
  after, then the third, by small margins. A greedy walk moves on by one, two or three words and comes round
  only after at least a third of the cycle;
- attention is sharp (a few keys of the whole context carry most of its weight) and its output is as large as
  those margins. So which of the three is taken depends on far context, and a wrong mask or a shifted slot
  shows.

A walk over a cycle is what n-gram speculation guesses well: two requests that pass the same words mostly
agree, and where they do not, its trees branch.

Where engines of 16-bit weights are compared, every choice is a chance for rounding to decide. ``forks`` makes
choices rare: elsewhere the next word leads by a wide margin. ``predictable`` sets words apart on a cycle of
their own, without forks: a text that n-grams guess entirely once they have seen it, beside one that they don't.
``width`` gives a wide model, for timing, the text of a narrow one: over many columns attention averages out.

Everything is drawn from ``TinyModel.seed``; torch, safetensors and tokenizers load when a function needs
them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LATENT_DIM, ROPE_DIM = 512, 64  # the geometry that the kernel serves
NOPE_DIM, VALUE_DIM = 128, 128  # per head, before absorption
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class TinyModel:
    """Sizes and seed. ``context`` is the longest sequence, prompt and output together (up to 262,144)."""

    context: int = 2048
    vocab: int = 512
    hidden: int = 256
    width: int = 0  # columns of the hidden state that carry anything, the rest are 0; 0 = all
    layers: int = 2
    heads: int = 4
    seed: int = 0
    dtype: str = "float32"
    sharpness: float = 2.0  # standard deviation of the attention scores: neff keys of n carry weight, n / e**4
    attention_gain: float = 1.0  # standard deviation of a layer's attention output where a single key carries it all
    preference: tuple[float, ...] = (1.0, 0.93, 0.87)  # of the next words on the cycle, where attention chooses
    forks: float = 1.0  # share of the words after which attention chooses
    predictable: int = 0  # words of a second cycle, on which it never does

    def __post_init__(self) -> None:
        if not 16 <= self.context <= 262_144:
            raise ValueError(f"context is {self.context}; the tiny model serves 16 to 262144 tokens")
        if self.vocab < 64:
            raise ValueError(f"vocab is {self.vocab}; a cycle worth walking needs at least 64 words")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected float32, bfloat16 or float16")
        if not 0 <= self.width <= self.hidden:
            raise ValueError(f"width is {self.width}; expected 0 to hidden, {self.hidden}")
        if not 0 <= self.forks <= 1:
            raise ValueError(f"forks is {self.forks}; expected a share from 0 to 1")
        if not 0 <= self.predictable <= self.vocab - len(SPECIAL) - 16:
            raise ValueError(f"predictable is {self.predictable}; at least 16 of {self.vocab} words stay on the cycle")


def config(model: TinyModel) -> dict:
    """``config.json`` of the model, as transformers and SGLang read it."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.hidden,
        "moe_intermediate_size": 64,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "kv_lora_rank": LATENT_DIM,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": NOPE_DIM,
        "v_head_dim": VALUE_DIM,
        # The expert fields are required by the class; every layer is dense.
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": model.layers,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        # SGLang's CPU engine takes YaRN alone
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": model.context // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "attention_bias": False,
        "use_cache": True,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": model.dtype,
        "initializer_range": 0.02,
    }


CERTAIN = (1.0, 0.3, 0.1)  # preferences where attention has no choice
LOGIT_SCALE = 16  # the largest logit is near it


def cycle(model: TinyModel) -> list[int]:
    """The token ids in the order of the walk. Special tokens and predictable words are not on it."""
    words = list(range(len(SPECIAL), model.vocab - model.predictable))
    random.Random(f"cycle {model.seed}").shuffle(words)
    return words


def predictable_cycle(model: TinyModel) -> list[int]:
    """The token ids of the cycle on which attention never chooses, in the order of the walk."""
    words = list(range(model.vocab - model.predictable, model.vocab))
    random.Random(f"predictable cycle {model.seed}").shuffle(words)
    return words


def weights(model: TinyModel, device: str = "cpu") -> dict:
    """Every tensor of the checkpoint, by name. Each device draws weights of its own from the seed."""
    import torch

    dtype = getattr(torch, model.dtype)
    generator = torch.Generator(device).manual_seed(model.seed)

    def normal(rows: int, columns: int, gain: float = 1.0):
        # An input of unit variance gives an output of standard deviation ``gain``.
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * gain / columns**0.5).to(dtype)

    hidden, heads, width = model.hidden, model.heads, model.width or model.hidden

    def written(weight):
        # What is added to the hidden state: to its first columns alone, so that much more to each.
        weight[width:] = 0
        return weight * (hidden / width) ** 0.5

    # Unit rows times sqrt(hidden): RMSNorm leaves an embedding as it is.
    drawn = torch.randn(model.vocab, hidden, generator=generator, device=device)
    drawn[:, width:] = 0
    embedding = torch.nn.functional.normalize(drawn) * hidden**0.5
    head = torch.zeros(model.vocab, hidden, device=device)
    for words, forks in ((cycle(model), model.forks), (predictable_cycle(model), 0.0)):
        order = torch.tensor(words, dtype=torch.int64, device=device)
        draw = random.Random(f"forks {model.seed}").random
        forked = torch.tensor([draw() < forks for _ in words], dtype=torch.bool, device=device)[:, None]
        for step in range(1, 1 + max(len(model.preference), len(CERTAIN))):
            chosen, sure = (p[step - 1] if step <= len(p) else 0.0 for p in (model.preference, CERTAIN))
            head[order.roll(-step)] += torch.where(forked, chosen, sure) * embedding[order] / hidden
    # What all layers add to an embedding does not grow with their number.
    share = (2 / model.layers) ** 0.5
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head * LOGIT_SCALE,
    }
    for i in range(model.layers):
        p = f"model.layers.{i}."
        tensors |= {
            p + "input_layernorm.weight": torch.ones(hidden),
            p + "post_attention_layernorm.weight": torch.ones(hidden),
            p + "self_attn.q_proj.weight": normal(heads * (NOPE_DIM + ROPE_DIM), hidden, model.sharpness),
            p + "self_attn.kv_a_proj_with_mqa.weight": normal(LATENT_DIM + ROPE_DIM, hidden),
            p + "self_attn.kv_a_layernorm.weight": torch.ones(LATENT_DIM),
            p + "self_attn.kv_b_proj.weight": normal(heads * (NOPE_DIM + VALUE_DIM), LATENT_DIM),
            p + "self_attn.o_proj.weight": written(normal(hidden, heads * VALUE_DIM, model.attention_gain * share)),
            p + "mlp.gate_proj.weight": normal(hidden, hidden),
            p + "mlp.up_proj.weight": normal(hidden, hidden),
            p + "mlp.down_proj.weight": written(normal(hidden, hidden, 0.3 * share)),
        }
    return {name: t.to(dtype).contiguous() for name, t in tensors.items()}


def write_config(path: str | Path, model: TinyModel) -> Path:
    """Write ``config.json`` alone to the folder ``path`` and return it: for SGLang's ``load_format="dummy"``."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config(model))
    return path


def write(path: str | Path, model: TinyModel | None = None, device: str = "cpu") -> Path:
    """Write the checkpoint folder (config, weights, word-level tokenizer) to ``path`` and return it.

    ``device`` draws the weights: a GPU draws 10 GB in a second.
    """
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = model or TinyModel()
    path = write_config(path, model)
    tokenizer = Tokenizer(models.WordLevel({word(i): i for i in range(model.vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": model.context,
        },
    )
    save_file(weights(model, device), str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def word(token: int) -> str:
    """The word of a token id."""
    return SPECIAL[token] if token < len(SPECIAL) else f"w{token}"


def text(tokens: Sequence[int]) -> str:
    """Token ids as text that the tokenizer gives back."""
    return " ".join(word(t) for t in tokens)


def prompts(
    count: int, *, shortest: int = 20, longest: int = 200, seed: int = 0, model: TinyModel | None = None
) -> list[list[int]]:
    """``count`` prompts of random words: unequal lengths, and no two share even their first word.

    So a server's prefix cache cannot serve one from another. Lengths are spread evenly from ``shortest`` to
    ``longest`` and shuffled.
    """
    model = model or TinyModel()
    words = model.vocab - len(SPECIAL)
    if not 1 <= count <= words:
        raise ValueError(f"count is {count}; {words} words give at most that many unique first words")
    if not 1 <= shortest <= longest < model.context:
        raise ValueError(
            f"shortest {shortest} and longest {longest} must be 1 to {model.context - 1} in order; "
            "raise TinyModel.context for longer prompts"
        )
    rng = random.Random(f"prompts {seed}")
    lengths = [shortest + (longest - shortest) * i // max(count - 1, 1) for i in range(count)]
    rng.shuffle(lengths)
    first = rng.sample(range(len(SPECIAL), model.vocab), count)
    return [
        [f] + [rng.randrange(len(SPECIAL), model.vocab) for _ in range(n - 1)]
        for f, n in zip(first, lengths, strict=True)
    ]


def rehearsal(start: int, model: TinyModel | None = None) -> list[int]:
    """The end of a prompt that lets n-gram speculation guess, and guess several ways, from the first step on.

    It walks from the word at ``start`` on the cycle three times, each time skipping another word, and comes
    back.
    """
    order = cycle(model or TinyModel())
    return [order[(start + step) % len(order)] for step in (0, 1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 3, 4, 0)]


def distinct_ratio(tokens: Sequence[int]) -> float:
    """Distinct tokens over tokens: 1.0 is a walk that never comes back, near 0 a loop of few tokens."""
    return len(set(tokens)) / len(tokens) if tokens else 0.0


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
