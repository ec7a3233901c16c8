"""What a config.json says that SGLang's memory depends on. The file is untrusted: bounded, typed, never guessed at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_CONFIG_BYTES = 1 << 22

MLA = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, Kimi-K2",
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GlmMoeDsaForCausalLM": "GLM-5",
    "KimiK25ForConditionalGeneration": "Kimi-K2.5",
    "KimiVLForConditionalGeneration": "Kimi-VL",
}
"""Architectures whose memory is followed here. SGLang serves more; their pools are built by other rules."""

DSA = {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
"""Of these, the ones that SGLang gives an indexer when their config has ``index_topk``."""

MULTIMODAL = {"KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"}

_Size = Field(ge=1, le=1 << 20)
_Layers = Field(ge=1, le=1024)


class _Attention(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    num_hidden_layers: int = _Layers
    hidden_size: int = _Size
    num_attention_heads: int = Field(ge=1, le=4096)
    vocab_size: int = Field(ge=1, le=1 << 24)
    max_position_embeddings: int = Field(default=0, ge=0, le=1 << 28)
    intermediate_size: int = Field(default=0, ge=0, le=1 << 20)
    moe_intermediate_size: int | None = Field(default=None, ge=0, le=1 << 20)
    num_experts_per_tok: int | None = Field(default=None, ge=0, le=1024)
    num_nextn_predict_layers: int | None = Field(default=None, ge=0, le=64)
    kv_lora_rank: int | None = Field(default=None, ge=1, le=1 << 16)
    qk_rope_head_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    qk_nope_head_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    v_head_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    head_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    num_key_value_heads: int | None = Field(default=None, ge=1, le=4096)
    index_topk: int | None = Field(default=None, ge=1, le=1 << 20)
    index_head_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    index_topk_freq: int | None = Field(default=None, ge=1, le=1024)
    index_skip_topk_offset: int | None = Field(default=None, ge=1, le=1024)
    index_topk_pattern: str | list[str] | None = Field(default=None, max_length=1024)
    indexer_types: list[str] | None = Field(default=None, max_length=1024)


class _Vision(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    num_hidden_layers: int | None = Field(default=None, ge=1, le=1024)
    hidden_size: int | None = Field(default=None, ge=1, le=1 << 20)


@dataclass(frozen=True)
class Model:
    """A target model. Sizes are elements, of the whole model and not of a rank."""

    name: str
    path: str  # for --model-path
    architecture: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int  # the longest that the config allows; 0 = not told
    intermediate: int
    moe_intermediate: int
    experts_per_token: int
    nextn_layers: int | None
    latent: int
    rope: int
    nope: int
    value: int
    dtype_bytes: int
    auto_kv_fp8: bool  # kv_cache_dtype auto means one byte: the checkpoint brings scales for it
    index_head_dim: int = 0  # 0 = no indexer
    index_layers: int = 0  # layers that keep index keys of their own; the others share (SGLang 0.5.23)
    vision: tuple[int, int] | None = None  # layers and hidden size of the tower

    @property
    def family(self) -> str:
        return MLA[self.architecture]

    @property
    def has_indexer(self) -> bool:
        return self.index_head_dim > 0


@dataclass(frozen=True)
class Draft:
    """A draft model with K/V of its own."""

    name: str
    path: str  # for --speculative-draft-model-path; "" = the target's own NextN layers
    layers: int
    heads: int
    kv_heads: int = 0  # 0 = MLA
    head_dim: int = 0  # K and V of one head together
    latent: int = 0
    rope: int = 0


@cache
def presets() -> dict[str, Any]:
    """Models and GPUs that come with the project."""
    return json.loads(resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))


def read_model(given: str) -> Model:
    """The model named ``given``: a preset, a config.json, or a folder that holds one.

    Raises ValueError, in one sentence, where the file isn't a config, a needed size is missing or absurd, or the
    architecture is one whose memory isn't known here.
    """
    known = presets()["models"]
    if given in known:
        return _model(known[given]["config"], given, known[given]["path"])
    path = Path(given)
    if not path.exists():
        raise ValueError(f"--model is {given!r}: neither a file nor a preset; the presets are {', '.join(known)}")
    return _model(read_config(path), path.name if path.is_dir() else path.parent.name or str(path), str(path))


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or in its config.json where it is a folder."""
    if path.is_dir():
        path = path / "config.json"
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"{path} can't be read: {error.strerror}; give a config.json or a folder that holds one"
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is over {MAX_CONFIG_BYTES >> 20} MiB; a config.json is a few kilobytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; give the model's config.json") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected an object: the model's config.json")
    return found


def _architecture(config: dict[str, Any], name: str) -> str:
    told = config.get("architectures")
    if not (isinstance(told, list) and told and isinstance(told[0], str)):
        raise ValueError(f"{name}: architectures is {str(told)[:60]!r}, expected a list with one name")
    return told[0][:80]


def _model(config: dict[str, Any], name: str, path: str) -> Model:
    architecture = _architecture(config, name)
    if architecture not in MLA:
        raise ValueError(
            f"{name}: the memory of {architecture!r} is not known here and is not guessed; known are {', '.join(MLA)}"
        )
    text = config.get("text_config", config)
    told = _validated(_Attention, text, name)
    for field in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        if getattr(told, field) is None:
            raise ValueError(f"{name}: {field} is missing; an MLA model's config.json has it")
    index_head_dim = 0
    if told.index_topk is not None and architecture in DSA:
        if told.index_head_dim is None:
            raise ValueError(f"{name}: index_head_dim is missing, but index_topk is {told.index_topk}")
        index_head_dim = told.index_head_dim
    return Model(
        name=name,
        path=path,
        architecture=architecture,
        layers=told.num_hidden_layers,
        hidden=told.hidden_size,
        heads=told.num_attention_heads,
        vocab=told.vocab_size,
        context=told.max_position_embeddings,
        intermediate=told.intermediate_size,
        moe_intermediate=told.moe_intermediate_size or 0,
        experts_per_token=told.num_experts_per_tok or 0,
        nextn_layers=told.num_nextn_predict_layers,
        latent=told.kv_lora_rank,
        rope=told.qk_rope_head_dim,
        nope=told.qk_nope_head_dim,
        value=told.v_head_dim,
        dtype_bytes=_dtype_bytes(text, config, name),
        auto_kv_fp8=_auto_kv_fp8(text.get("quantization_config", config.get("quantization_config"))),
        index_head_dim=index_head_dim,
        index_layers=sum(not _shares_index(told, i) for i in range(told.num_hidden_layers)) if index_head_dim else 0,
        vision=_vision(config, architecture, name),
    )


def _validated(kind: type[BaseModel], value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: text_config or vision_config is a {type(value).__name__}, expected an object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field, said = first["loc"][0], first["msg"].lower()
        got = "missing" if first["type"] == "missing" else f"{str(first['input'])[:60]!r}: {said}"
        raise ValueError(f"{name}: {field} is {got}; correct the config.json") from None


def _dtype_bytes(text: dict[str, Any], config: dict[str, Any], name: str) -> int:
    told = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16")
    sizes = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
    if not isinstance(told, str) or told.removeprefix("torch.") not in sizes:
        raise ValueError(f"{name}: torch_dtype is {str(told)[:40]!r}, expected one of {', '.join(sizes)}")
    return sizes[told.removeprefix("torch.")]


def _auto_kv_fp8(quantization: Any) -> bool:
    """Whether SGLang takes "auto" for fp8: only ModelOpt's configs tell it (``kv_cache_quant_algo``), both releases."""
    if not isinstance(quantization, dict):
        return False
    if "modelopt" not in str(quantization.get("quant_method", "")).lower() and "quant_algo" not in quantization:
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8"


def _shares_index(told: _Attention, layer: int) -> bool:
    """``dsa_layer_skips_topk`` of SGLang 0.5.23: the layer takes over the picks of the one before."""
    if told.indexer_types is not None:
        return layer < len(told.indexer_types) and told.indexer_types[layer] == "shared"
    if told.index_topk_pattern is not None:
        return layer < len(told.index_topk_pattern) and told.index_topk_pattern[layer] == "S"
    every = told.index_topk_freq or 1
    if told.index_skip_topk_offset is not None:
        return max(layer - told.index_skip_topk_offset + 1, 0) % every != 0
    return max(layer - 1, 0) % every != 0


def _vision(config: dict[str, Any], architecture: str, name: str) -> tuple[int, int] | None:
    """Layers and width as SGLang's config class has them: Kimi-K2.5's takes no ``vt_`` names, so its defaults hold."""
    if architecture not in MULTIMODAL:
        return None
    told = _validated(_Vision, config.get("vision_config", {}), name)
    layers, hidden = (27, 1152) if architecture == "KimiK25ForConditionalGeneration" else (24, 1024)
    return told.num_hidden_layers or layers, told.hidden_size or hidden


def nextn_draft(model: Model) -> Draft | None:
    """The target's own NextN layers as a draft; None where it has none."""
    if not model.nextn_layers:
        return None
    return Draft(f"{model.name} NextN", "", model.nextn_layers, model.heads, latent=model.latent, rope=model.rope)


def read_draft(given: str, target: Model) -> Draft:
    """The draft model in the folder or config.json ``given``; a preset's name also does (STANDALONE)."""
    known = presets()["models"]
    if given in known:
        config, path = known[given]["config"], known[given]["path"]
    else:
        config, path = read_config(Path(given)), given
    told = _validated(_Attention, config.get("text_config", config), given)
    # As SGLang counts a draft: its NextN layers where the config has them, else its layers.
    layers = told.num_hidden_layers if told.num_nextn_predict_layers is None else told.num_nextn_predict_layers
    if given in known and given != target.name:
        layers = told.num_hidden_layers
    if told.kv_lora_rank is not None and told.qk_rope_head_dim is not None:
        return Draft(
            given, path, layers, told.num_attention_heads, latent=told.kv_lora_rank, rope=told.qk_rope_head_dim
        )
    size = told.head_dim or told.hidden_size // told.num_attention_heads
    kv_heads = told.num_key_value_heads or told.num_attention_heads
    return Draft(
        given, path, layers, told.num_attention_heads, kv_heads=kv_heads, head_dim=size + (told.v_head_dim or size)
    )
