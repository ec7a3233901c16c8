"""Gates of the small trained model (tests/models): it agrees with transformers, speaks, and is served.

Its weights lie in tests/models/weights; $MLA_VERIFY_SMALL_MODEL names another folder. Texts are those of
tests/models/prompts.txt, documents of this project as they once were, which it has not been trained on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="this gate runs where SGLang is installed")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "sglang_cpu"), str(ROOT / "tests" / "models")]

import drafter  # noqa: E402
import session  # noqa: E402
import train  # noqa: E402
from network import Target  # noqa: E402

WEIGHTS = drafter.WEIGHTS
GPU = torch.cuda.is_available()
DTYPE = "float16" if GPU else "float32"
PROMPTS, TOKENS, NODES = 6, 48, 8
SHARE = 0.1  # of 512 greedy tokens that are distinct ones, at least

pytestmark = pytest.mark.skipif(drafter.trained() is None, reason=drafter.MISSING)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((WEIGHTS / "record.json").read_text())


@pytest.fixture(scope="module")
def target(record) -> Target:
    return train.exported_target(WEIGHTS, train.recipe_of(record))


@pytest.fixture(scope="module")
def text() -> list[int]:
    """More than 8,192 tokens."""
    from tokenizers import Tokenizer

    whole = (ROOT / "tests" / "models" / "prompts.txt").read_text(encoding="utf-8")
    return Tokenizer.from_file(str(WEIGHTS / "target" / "tokenizer.json")).encode(whole).ids


def natural(text: list[int]) -> list[list[int]]:
    """Prompts of 40 to 200 tokens from all over the text."""
    return [text[i * len(text) // PROMPTS :][: 40 + 32 * i] for i in range(PROMPTS)]


def test_same_logits(record, gate_metrics):
    same, figures = train.same_logits(WEIGHTS, train.recipe_of(record))
    assert same, figures


def test_speaks(record, target, text, gate_metrics):
    """Held-out loss as the record has it; distinct tokens of greedy text anew."""
    held = record["held_out"]
    gate_metrics["loss"], gate_metrics["trigram_loss"] = held["loss"], held["trigram"]
    assert held["loss"] < held["trigram"], "a trigram of the same text is better"
    prompts = torch.tensor([p[:40] for p in natural(text)])
    said = target.greedy(prompts, 512)[:, 40:].tolist()
    gate_metrics["distinct_share"] = share = sum(len(set(s)) for s in said) / sum(map(len, said))
    assert share > SHARE, f"{share:.1%} of the greedy tokens are distinct: loops"
    for name in ("target", "drafter"):
        size = (WEIGHTS / name / "model.safetensors").stat().st_size
        assert size <= 16 << 20, f"{name} has {size / 2**20:.1f} MiB"


def test_long_context(target, text, gate_metrics):
    """The end of 8,192 tokens is as plausible to it as their beginning."""
    losses = positions_loss(target, torch.tensor(text[: target.c.context]))
    early, late = losses[1024:2048].mean().item(), losses[6144:].mean().item()
    gate_metrics["loss_early"], gate_metrics["loss_late"] = early, late
    assert late < early + 0.3, f"loss {late:.2f} at 6k to 8k, {early:.2f} at 1k to 2k"


@torch.no_grad()
def positions_loss(target: Target, tokens: Tensor) -> Tensor:
    logits, _ = target(tokens[None, :-1])
    return torch.nn.functional.cross_entropy(logits[0], tokens[1:], reduction="none")


def test_served(record, target, text, tmp_path, gate_metrics):
    """In SGLang on mla_verify: the network's own greedy tokens, with NGRAM and without; NGRAM's accept length.

    What was asked before is predictable: n-grams have seen the answers. A prompt said three times over is not, for
    the model has learned not to go on with that; its tokens are compared alone.
    """
    options = session.device_options(GPU, DTYPE) | {
        "model_path": str(WEIGHTS / "target"), "attention_backend": "mla_verify", "max_running_requests": 4,
        "max_total_tokens": 8192, "chunked_prefill_size": 4096,
    }  # fmt: skip
    prompts = natural(text)
    texts = {"natural": prompts, "predictable": prompts, "repeated": [p * 3 for p in prompts]}
    jobs = {name: {"name": name, "prompts": asked, "tokens": TOKENS} for name, asked in texts.items()}
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": NODES}
    plans = {"plain": session.Plan(options, jobs), "ngram": session.Plan(options | ngram, jobs)}
    replies = session.run_all(tmp_path, plans, gpu=GPU, at_once=2 if GPU else 1)
    for reply in replies.values():
        if isinstance(reply, Exception):
            raise reply
    for name in jobs:
        plain, spoken = (replies[engine][name] for engine in ("plain", "ngram"))
        found = session.first_differences(spoken, plain, dtype=DTYPE, largest_logit=drafter.LARGEST_LOGIT)
        session.require_near_ties(found, f"NGRAM, {name} text")
        if not GPU:
            own = [target.greedy(torch.tensor([p]), TOKENS)[0, len(p) :].tolist() for p in texts[name][:2]]
            assert own == plain["tokens"][:2], f"{name} text: SGLang and the network part"
        gate_metrics[f"accept_length {name}"] = session.accept_length(spoken)
    assert gate_metrics["accept_length predictable"] > gate_metrics["accept_length natural"] > 1
