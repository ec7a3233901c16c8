"""How SGLang divides a card at start-up, and which ``--mem-fraction-static`` serves a context.

    free before load                                        what the card has after the process and NCCL took theirs
      - weights, draft weights
      - free before load x (1 - fraction)                   the slack, for all that is not listed here
      - 100 MiB for a multimodal model (0.5.23)
      = the pool; tokens = pool // cell, down to a page

Read off SGLang 0.5.17 (``mem_cache/kv_cache_configurator.py``, ``model_executor/pool_configurator.py``,
``server_args.py``) and 0.5.23 (the same, and ``arg_groups/memory_hook.py``). What must fit the slack is listed by
``slack_terms``: sizes of buffers are SGLang's own, activations are an estimate and say so. GiB throughout, as SGLang's
log lines are, though they print "GB".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .model import Draft, Model

GIB = 1 << 30
MIB = 1 << 20
SPECULATIVE_REQUESTS = 48  # --max-running-requests that SGLang sets for speculation where none is given
DEFAULT_REQUESTS = 2048  # rows of req_to_token where --max-running-requests is not set
MULTIMODAL_RESERVE = 100 * MIB  # 0.5.23: SGLANG_VLM_CACHE_SIZE_MB
MLA_PREFILL_GRAPH = 1.5 * GIB  # reserve_for_graph_mb of a prefill graph with MLA
OUR_WORKSPACE = 256 * MIB  # partial results of mla_verify's kernels, whatever the context and batch
DSA_FP8_ROW = 656  # bytes: 512 e4m3, 4 float32 scales, 64 rope in bf16
KV_DTYPES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
ALGORITHMS = ("none", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")
RELEASES = ("0.5.17", "0.5.23")


@dataclass(frozen=True)
class Setup:
    """All that decides the division. Tokens, requests, GiB."""

    model: Model
    total_gib: float  # of the card, as nvidia-smi says
    free_before_gib: float  # "Load weight begin. avail mem"
    weights_gib: float  # "Load weight end … mem usage", one rank
    tp_size: int = 1
    dp_size: int = 1
    sm_count: int = 0
    kv_cache_dtype: str = "auto"
    context: int = 0  # --context-length; 0: the model's own
    max_running_requests: int = 0  # 0: not set
    chunked_prefill_size: int = 8192
    page_size: int = 1
    cuda_graph_max_bs: int = 0  # 0: SGLang's default
    prefill_graph: bool | None = None  # None: as the release decides
    algorithm: str = "none"
    draft_tokens: int = 0
    draft: Draft | None = None
    draft_weights_gib: float = 0.0
    attention_backend: str = "mla_verify"
    release: str = "0.5.23"
    capability: str = ""  # of the GPU, e.g. "12.0"; "" = not told
    margin_gib: float = 1.0  # for what is not known: allocator rounding, libraries, NCCL's growth

    def __post_init__(self) -> None:
        for name, low, high in (
            ("total_gib", 1, 4096), ("free_before_gib", 0.1, 4096), ("weights_gib", 0, 4096), ("tp_size", 1, 1024),
            ("dp_size", 1, 1024), ("context", 0, 1 << 28), ("max_running_requests", 0, 1 << 20),
            ("chunked_prefill_size", 1, 1 << 24), ("page_size", 1, 4096), ("cuda_graph_max_bs", 0, 1 << 16),
            ("draft_tokens", 0, 4096), ("draft_weights_gib", 0, 4096), ("margin_gib", 0, 1024),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected {low} to {high}")
        for name, known in (("kv_cache_dtype", KV_DTYPES), ("algorithm", ALGORITHMS), ("release", RELEASES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.context_length <= 0:
            raise ValueError(f"{self.model.name}: the config names no longest context; give --context-length")
        if self.algorithm in ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH") and self.draft is None:
            raise ValueError(
                f"algorithm is {self.algorithm}, which has a draft model; give --speculative-draft-model-path"
            )

    @property
    def context_length(self) -> int:
        return self.context or self.model.context

    @property
    def heads(self) -> int:
        """Query heads of one rank: DP attention keeps all of them."""
        return max(1, self.model.heads // max(1, self.tp_size // self.dp_size))

    @property
    def nodes(self) -> int:
        """Tokens of a request in a decode or verify step."""
        return max(1, self.draft_tokens) if self.algorithm != "none" else 1

    @property
    def requests(self) -> int:
        """Rows of ``req_to_token``: as given; 48 with speculation; else SGLang's least (more beyond 4 contexts)."""
        unset = DEFAULT_REQUESTS if self.algorithm == "none" else SPECULATIVE_REQUESTS
        return max(1, (self.max_running_requests or unset * self.dp_size) // self.dp_size)

    @property
    def page(self) -> int:
        return 64 if self.model.has_indexer else self.page_size  # an indexer's pool takes no other

    @property
    def captures_prefill(self) -> bool:
        """Whether a prefill graph is captured, where nothing is said: 0.5.17 leaves MLA without an indexer out."""
        if self.prefill_graph is not None:
            return self.prefill_graph
        if self.model.vision:
            return self.model.architecture == "KimiK25ForConditionalGeneration"
        return self.release != "0.5.17" or self.model.has_indexer

    @property
    def graph_requests(self) -> int:
        """Requests of the largest captured decode graph."""
        wanted = self.cuda_graph_max_bs or _default_graph_bs(self.total_gib * 1024, self.tp_size)
        return min(wanted, self.requests)


def _default_graph_bs(gpu_mib: float, tp_size: int) -> int:
    for limit, small, large in ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512)):
        if gpu_mib < limit * 1024:
            return small if tp_size < 4 else large
    return 512


def kv_bytes(setup: Setup) -> int:
    """Bytes of one element of K/V: ``auto`` is the model's dtype, or one byte where the checkpoint brings scales."""
    told = KV_DTYPES[setup.kv_cache_dtype]
    if not told and setup.model.has_indexer:  # by the device: fp8 on Blackwell, else bf16
        return 1 if _major(setup) >= 10 else 2
    return told or (1 if setup.model.auto_kv_fp8 else setup.model.dtype_bytes)


def _major(setup: Setup) -> int:
    return int(setup.capability.partition(".")[0] or 0)


def _raw_fp8_rows(setup: Setup) -> bool:
    """Whether an indexer model's fp8 rows have no scales: trtllm, the default on Blackwell but for GLM on sm_12x."""
    glm_12 = setup.model.architecture == "GlmMoeDsaForCausalLM" and _major(setup) == 12
    return _major(setup) >= 10 and not glm_12


def cell(setup: Setup) -> int:
    """K/V bytes of a token on one rank: all layers, whole on every rank of TP, indexer and draft included."""
    model, size = setup.model, kv_bytes(setup)
    row = (model.latent + model.rope) * size
    if model.has_indexer and size == 1 and not _raw_fp8_rows(setup):
        row = DSA_FP8_ROW
    latent = row * model.layers
    indexer = 0
    per_index = model.index_head_dim + model.index_head_dim // 128 * 4
    if model.has_indexer:
        layers = model.layers if setup.release == "0.5.17" else model.index_layers
        indexer = per_index * layers
    total = latent + indexer
    draft = setup.draft
    if draft is None or setup.algorithm in ("none", "NGRAM"):
        return total
    if setup.algorithm == "DFLASH":
        if setup.release == "0.5.17":  # by the ratio of layers, whatever the draft's heads are
            return -(-total * (model.layers + draft.layers) // model.layers)
        if draft.kv_heads:
            heads = max(1, draft.kv_heads // setup.tp_size)
            return total + heads * draft.head_dim * draft.layers * size
        return total + (draft.latent + draft.rope) * draft.layers * size
    if setup.release == "0.5.17":
        return int(total * (1 + draft.layers / model.layers))
    if not model.has_indexer:
        return total + int(total * draft.layers / model.layers)
    return total + row * draft.layers + per_index * draft.layers


def default_fraction(
    total_mib: float, chunk: int, graph_bs: int, tp_size: int, *, prefill_graph: bool = True,
    vision: tuple[int, int] | None = None,
) -> float:  # fmt: skip
    """``--mem-fraction-static`` where none is given (MLA, no PD, no DP attention), both releases."""
    reserved = 512 + max(chunk, 2048) * 1.5 + tp_size / 8 * 1024 + graph_bs * 2 + (1536 if prefill_graph else 0)
    if total_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((total_mib - reserved) / total_mib, 3)
    return fraction * vision_factor(*vision) if vision else fraction


def vision_factor(layers: int, hidden: int) -> float:
    """What a vision tower multiplies the default fraction by (``adjust_mem_fraction_for_vlm``)."""
    ratio = layers * hidden**2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))


def static_gib(setup: Setup) -> float:
    """What lies on the card before the pool: weights, and the release's own reserve."""
    reserve = MULTIMODAL_RESERVE / GIB if setup.model.vision and setup.release != "0.5.17" else 0.0
    return setup.weights_gib + setup.draft_weights_gib + reserve


def pool_gib(setup: Setup, fraction: float) -> float:
    """GiB left for K/V at a fraction; negative where the weights alone go over it."""
    return setup.free_before_gib - static_gib(setup) - setup.free_before_gib * (1 - fraction)


def pool_tokens(setup: Setup, fraction: float) -> int:
    """``max_total_num_tokens``. 0 where SGLang would not start."""
    budget = int(pool_gib(setup, fraction) * GIB)
    return max(0, budget // cell(setup)) // setup.page * setup.page


def fraction_for(setup: Setup, tokens: int) -> float:
    """The smallest fraction whose pool holds ``tokens``."""
    pages = -(-tokens // setup.page) * setup.page
    need = pages * cell(setup) / GIB
    return 1 - (setup.free_before_gib - static_gib(setup) - need) / setup.free_before_gib


@dataclass(frozen=True)
class Term:
    """One thing on the card. ``exact``: SGLang's own arithmetic; else an estimate of ours."""

    name: str
    gib: float
    why: str
    exact: bool = True


def slack_terms(setup: Setup) -> Iterator[Term]:
    """What is allocated beside weights and pool, and so must fit what the fraction leaves free."""
    model, context, nodes = setup.model, setup.context_length, setup.nodes
    rows = setup.requests + 1
    extra = 4 + (nodes if nodes > 1 else 0)
    if nodes > 1 and setup.page > 1:
        extra = max(extra, 2 * nodes + setup.page - 1)
    width = context + extra
    unset = (
        "" if setup.max_running_requests else f"; --max-running-requests is not set: SGLang makes {setup.requests:,}"
    )
    yield Term("req_to_token", rows * width * 4 / GIB, f"{rows:,} rows x {width:,} slots x 4 B{unset}")
    requests = setup.graph_requests
    tokens = requests * nodes
    if setup.attention_backend == "mla_verify":
        yield Term("attention state", OUR_WORKSPACE / GIB, "mla_verify: partial results, whatever context and batch")
    else:
        splits = _kv_splits(setup.sm_count, context)
        logits = tokens * setup.heads * splits * (model.latent + 1) * 4
        yield Term(
            "attention state",
            (logits + tokens * context * 8) / GIB,
            f"triton's graph buffers: {tokens:,} tokens x {setup.heads} heads x {splits} splits x 512 x 4 B, "
            f"and {tokens:,} x {context:,} slot ids of 8 B",
        )
    if nodes > 1 and (setup.algorithm == "NGRAM" or setup.attention_backend != "mla_verify"):
        mask = requests * nodes * (context + nodes)
        yield Term("verify mask", mask / GIB, f"{requests} requests x {nodes} x {context + nodes:,} B (FULL_MASK)")
    yield Term("logits", tokens * model.vocab * 4 / GIB, f"{tokens:,} rows x {model.vocab:,} words x 4 B")
    graphs = requests * 2 * MIB + (MLA_PREFILL_GRAPH if setup.captures_prefill else 0)
    yield Term(
        "graphs", graphs / GIB, "2 MiB a captured request, 1.5 GiB for MLA's prefill graph: SGLang's rule", False
    )
    yield Term(
        "activations", _activations(setup) / GIB, f"a prefill chunk of {setup.chunked_prefill_size:,} tokens", False
    )
    yield Term("margin", setup.margin_gib, "for what is not known; --margin-gib", False)


def _kv_splits(sm_count: int, context: int) -> int:
    """``_mla_decode_kv_splits_cap`` of the Triton backend."""

    def up(x: int) -> int:
        return 1 << max(0, x - 1).bit_length()

    return max(8, min(up(sm_count), up(-(-context // 32)))) if sm_count else 8


def _activations(setup: Setup) -> float:
    """Largest set of tensors alive in a layer's prefill: attention of a chunk, or its experts. An estimate."""
    model, chunk = setup.model, min(setup.chunked_prefill_size, setup.context_length)
    stream = 4 * model.hidden
    heads = setup.heads * (2 * (model.latent + model.rope) + model.nope + model.rope + model.value)
    experts = model.experts_per_token * (2 * model.moe_intermediate // setup.tp_size + 2 * model.hidden)
    dense = 3 * model.intermediate // setup.tp_size
    per_token = 2 * (stream + max(heads, experts, dense))
    # Slot ids of a prefix, and where K and V are projected back up (backends other than ours) the prefix itself
    per_context = 8.0
    if setup.attention_backend != "mla_verify":
        per_context += setup.heads * (model.nope + model.rope + model.value) * 2
    return chunk * per_token + setup.context_length * per_context


@dataclass(frozen=True)
class Plan:
    """``low`` to ``high`` is the feasible interval of the fraction; None where there is none."""

    setup: Setup
    target_tokens: int
    cell_bytes: int
    low: float
    high: float
    terms: list[Term]
    fraction: float | None  # recommended
    tokens: int  # at the recommended fraction, else at ``high``
    missing_gib: float  # 0 where feasible
    change: str  # the smallest change that would make it fit, "" where it fits

    @property
    def feasible(self) -> bool:
        return self.fraction is not None


def plan(setup: Setup, target_tokens: int = 0, *, suggest: bool = True) -> Plan:
    """Feasible interval and every term. ``target_tokens``: what the pool must hold; at least one whole context.

    A pool smaller than the context is never a plan: SGLang would shorten requests without a word.
    """
    target = max(target_tokens, setup.context_length + setup.nodes)
    terms = list(slack_terms(setup))
    low = fraction_for(setup, target)
    high = 1 - sum(t.gib for t in terms) / setup.free_before_gib
    high = math.floor(high * 1000) / 1000
    first = math.ceil(max(low, 0.0) * 1000) / 1000
    missing = max(0.0, (low - high) * setup.free_before_gib)
    feasible = first <= high and high > 0
    if not feasible:
        missing = max(missing, (first - high) * setup.free_before_gib)
    fraction = round((first + high) / 2, 3) if feasible else None
    change = "" if feasible or not suggest else _smallest_change(setup, target, missing)
    return Plan(
        setup, target, cell(setup), low, high, terms, fraction,
        pool_tokens(setup, fraction if fraction is not None else high), 0.0 if feasible else missing, change,
    )  # fmt: skip


def _smallest_change(setup: Setup, target: int, missing: float) -> str:
    """The first single change of a flag that makes it fit, from the least felt to the most; else what is missing."""
    tried: list[tuple[str, Setup, int]] = []
    for requests in (64, 32, 16, 8, 4, 2, 1):
        if requests < setup.requests:
            tried.append((f"--max-running-requests {requests}", replace(setup, max_running_requests=requests), target))
    if setup.attention_backend != "mla_verify":
        tried.append(("--attention-backend mla_verify", replace(setup, attention_backend="mla_verify"), target))
    for chunk in (4096, 2048, 1024):
        if chunk < setup.chunked_prefill_size:
            tried.append((f"--chunked-prefill-size {chunk}", replace(setup, chunked_prefill_size=chunk), target))
    if kv_bytes(setup) > 1:
        tried.append(("--kv-cache-dtype fp8_e4m3", replace(setup, kv_cache_dtype="fp8_e4m3"), target))
    if setup.algorithm not in ("none", "NGRAM"):
        free = replace(setup, algorithm="none", draft=None, draft_weights_gib=0.0, draft_tokens=0)
        tried.append(("no draft model", free, target))
    for words, changed, wanted in tried:
        if plan(changed, wanted, suggest=False).feasible:
            return words
    shorter = _longest_context(setup)
    if shorter:
        return f"--context-length {shorter}"
    return f"{missing:.1f} GiB a card: more cards (--tp-size) or smaller weights; no single flag makes room"


def _longest_context(setup: Setup) -> int:
    """The longest context that fits, whole thousands; 0 where none does."""
    low, high = 0, setup.context_length // 1000
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan(replace(setup, context=middle * 1000), suggest=False).feasible
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * 1000


def command(made: Plan) -> list[str]:
    """The launch command, one word an element."""
    s = made.setup
    words = ["python", "-m", "sglang.launch_server", "--model-path", s.model.path, "--tp-size", str(s.tp_size)]
    if s.dp_size > 1:
        words += ["--dp-size", str(s.dp_size), "--enable-dp-attention"]
    words += ["--context-length", str(s.context_length), "--chunked-prefill-size", str(s.chunked_prefill_size)]
    words += ["--kv-cache-dtype", s.kv_cache_dtype, "--attention-backend", s.attention_backend]
    if s.max_running_requests:
        words += ["--max-running-requests", str(s.max_running_requests)]
    if s.page_size > 1:
        words += ["--page-size", str(s.page_size)]
    if s.cuda_graph_max_bs:
        words += ["--cuda-graph-max-bs-decode", str(s.cuda_graph_max_bs)]
    if s.algorithm != "none":
        words += ["--speculative-algorithm", s.algorithm]
        if s.draft_tokens:
            words += ["--speculative-num-draft-tokens", str(s.draft_tokens)]
        if s.draft and s.draft.path:
            words += ["--speculative-draft-model-path", s.draft.path]
    if made.fraction is not None:
        words += ["--mem-fraction-static", f"{made.fraction:g}"]
    return words
