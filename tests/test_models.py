"""The recipe of the small models, on a toy: it trains, resumes, and exports what transformers reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent / "models"))

import corpus  # noqa: E402
import train  # noqa: E402
from network import Drafter, Target, TargetConfig  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(out, steps=4):
    return train.train(out, train.SMOKE, 1, 0.4, "cpu", steps)


def test_a_stopped_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    record = small(tmp_path / "whole")
    real = train.windows

    def interrupted(tokens, count, length, step, seed, device):
        if step == 2 and seed == 0:
            raise KeyboardInterrupt
        return real(tokens, count, length, step, seed, device)

    monkeypatch.setattr(train, "windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "stopped")
    monkeypatch.setattr(train, "windows", real)
    again = small(tmp_path / "stopped")
    assert again["steps"] == record["steps"] == {"target": 4, "drafter": 4}
    for name in ("target", "drafter"):
        one, other = (load_file(tmp_path / run / name / "model.safetensors") for run in ("whole", "stopped"))
        assert all(torch.equal(one[k], other[k]) for k in one), name
    assert again["held_out"] == record["held_out"] and again["corpus"]["digest"] == record["corpus"]["digest"]
    card = (tmp_path / "whole" / "target" / "README.md").read_text()
    assert record["corpus"]["digest"][:16] in card and "PSF-2.0" in card
    with pytest.raises(ValueError, match="another recipe"):
        train.train(tmp_path / "whole", dataclasses.replace(train.SMOKE, seed=1), 1, 0.4, "cpu", 4)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_logits_are_those_of_transformers(tmp_path):
    holds, figures = train.same_logits(tmp_path, train.recipe_of(small(tmp_path)))
    assert holds, figures


def test_the_corpus_is_the_same_each_time():
    one, other = corpus.collect(0.3), corpus.collect(0.3)
    assert one.digest == other.digest and one.train == other.train
    assert not set(one.train) & set(one.held_out)
    assert all(source["licence"] and source["bytes"] for source in one.sources)
    with pytest.raises(ValueError, match="too little text"):
        corpus.collect(0.0)


def test_sizes_fit():
    """The real recipe's weights are within 16 MB in bfloat16, and a cached token has the real geometry."""
    c = TargetConfig()
    with torch.device("meta"):
        target, drafter = Target(c), Drafter(train.DrafterConfig(), c)
    for model in (target, drafter):
        assert sum(p.numel() for p in model.parameters()) * 2 < 16e6
    assert c.hf()["kv_lora_rank"] + c.hf()["qk_rope_head_dim"] == 576


def test_greedy_text_with_kept_keys_is_that_without():
    torch.manual_seed(0)
    target = Target(train.SMOKE.target)
    x = torch.randint(4, train.SMOKE.target.vocab, (2, 9))
    want = x
    for _ in range(12):
        want = torch.cat([want, target(want)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(target.greedy(x, 12), want)


def test_repeats():
    said = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 9], [5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8]])
    assert train.repeats(said, 3).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]


def test_the_drafter_sees_no_future():
    """A block's logits depend on the context before it and on its bonus token, on nothing else."""
    r = train.SMOKE
    torch.manual_seed(0)
    target, drafter = Target(r.target).eval(), Drafter(r.drafter, r.target).eval()
    x = torch.randint(4, r.target.vocab, (1, 40))
    states = target(x, r.drafter.target_layers)[1]
    starts = torch.tensor([[10, 25]])
    block = torch.full((1, 2, r.drafter.block), r.drafter.mask_token)
    embedded = target.model["embed_tokens"](block)
    out = drafter(embedded, starts, states)
    changed = states.clone()
    changed[:, 10:] += 1
    again = drafter(embedded, starts, changed)
    assert torch.allclose(out[:, 0], again[:, 0], atol=1e-6) and not torch.allclose(out[:, 1], again[:, 1], atol=1e-3)
    alone = drafter(embedded[:, :1], starts[:, :1], states[:, :10])
    assert torch.allclose(out[:, :1], alone, atol=1e-5)
    assert json.dumps(r.drafter.hf(r.target))
