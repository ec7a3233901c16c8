"""Gates of phase 2 on a machine with no GPU: real SGLang, a tiny MLA model, float32.

Run by the interpreter of an environment that tests/sglang_cpu/install.py made. Every engine runs in a process
of its own. The built-in ``triton`` backend without speculation says what the tokens are.
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mla_verify_bench import tiny_model

pytest.importorskip("sglang", reason="this gate runs in an environment made by tests/sglang_cpu/install.py")

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "sglang_cpu"
sys.path.insert(0, str(SUPPORT))

import drafter  # noqa: E402
import engine  # noqa: E402

MODEL = tiny_model.TinyModel(context=512)
RANDOM_PROMPTS = 16  # unequal lengths, nothing to guess from
REHEARSED = 4  # short, and full of what comes next
TURNS = (24, 12)  # tokens of each turn
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model.write(tmp_path_factory.mktemp("model"), MODEL))


@pytest.fixture(scope="module")
def conversations() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of the first turn, and what each user adds in the second."""
    prompts = tiny_model.prompts(RANDOM_PROMPTS + REHEARSED, shortest=8, longest=120, seed=2, model=MODEL)
    prompts.sort(key=len)
    for i in range(REHEARSED):
        prompts[i] = prompts[i][: 6 + 3 * i] + tiny_model.rehearsal(100 * i, MODEL)
    random.Random(2).shuffle(prompts)
    suffixes = tiny_model.prompts(len(prompts), shortest=3, longest=9, seed=3, model=MODEL)
    return prompts, suffixes


@pytest.fixture(scope="module")
def builtin(model, conversations, tmp_path_factory) -> list[dict]:
    """Both turns on SGLang's own ``triton`` backend without speculation."""
    prompts, suffixes = conversations
    options = {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
    job = engine.Job(model, prompts, suffixes, TURNS, engine=options)
    return _served(engine.run_engine(job, tmp_path_factory.mktemp("builtin")))[0]


def _served(outcome: engine.Outcome) -> list[list[dict]]:
    assert outcome.returncode == 0 and outcome.rounds, (
        f"the engine ended with {outcome.returncode} after {outcome.seconds:.0f} s; its log ends:\n"
        + outcome.log[-6000:]
    )
    return outcome.rounds


def _engine(model: str, prompts, suffixes, folder: Path, *, turns=TURNS, modes=("",), full_mask=False,
            impl="reference", timeout=500, environ=(), **options) -> tuple[engine.Outcome, dict]:  # fmt: skip
    """Run mla_verify with the probe in; returns what came of it and what the probe counted."""
    record, mode_file = folder / "counts.json", folder / "mode.txt"
    job = engine.Job(
        model, prompts, suffixes, turns, modes, str(mode_file), {"attention_backend": "mla_verify"} | options
    )
    mode_file.write_text("")
    wanted = {"record": str(record), "full_mask": full_mask, "mode_file": str(mode_file)}
    outcome = engine.run_engine(
        job, folder, timeout, MLA_VERIFY_IMPL=impl, MLA_VERIFY_PROBE=json.dumps(wanted),
        PYTHONPATH=str(engine.write_plugin(folder / "probe", SUPPORT / "probe.py")), **dict(environ),
    )  # fmt: skip
    return outcome, json.loads(record.read_text()) if record.exists() else {}


def _ours(model: str, prompts, suffixes, folder: Path, **options) -> tuple[list[list[dict]], dict]:
    """Rounds of a run that went well, and the probe's counts."""
    outcome, counts = _engine(model, prompts, suffixes, folder, **options)
    return _served(outcome), counts


def _differing(ours: list[dict], theirs: list[dict], keep: int | None = None) -> list[str]:
    """Each request whose tokens differ, with the place; ``keep`` compares the first tokens only."""
    found = []
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for request, (mine, other) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            mine, other = mine[:keep], other[:keep]
            if mine != other:
                at = next(
                    (i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y),
                    min(len(mine), len(other)),
                )
                found.append(f"turn {turn + 1}, request {request}, token {at}: {mine[at:][:3]} not {other[at:][:3]}")
    return found


def _accept_length(turns: list[dict]) -> float:
    """Tokens per verify step; the first token of each answer is the prefill's."""
    tokens = sum(len(t) - 1 for turn in turns for t in turn["tokens"])
    return tokens / sum(n for turn in turns for n in turn["verify_steps"])


def _require_walks(turns: list[dict]) -> float:
    """Loops of few tokens would pass whatever the attention does."""
    least = min(tiny_model.distinct_ratio(t) for turn in turns for t in turn["tokens"])
    assert least >= 0.8, f"an answer has only {least:.0%} distinct tokens: a loop shows nothing"
    return least


def _require_radix_hits(turns: list[dict]) -> None:
    for turn in turns[1:]:
        assert min(turn["cached"]) > 0, f"a request of a later turn hit nothing in the radix cache: {turn['cached']}"


def test_no_speculation_equals_builtin(model, conversations, builtin, tmp_path, gate_metrics):
    """Decode and prefill, eager and on the buffers of a captured graph."""
    rounds, counts = _ours(model, *conversations, tmp_path, modes=("", "graph"))
    assert counts.get("graph_steps", 0) > 0
    for mode, turns in zip(("eager", "graph"), rounds, strict=True):
        assert not (wrong := _differing(turns, builtin)), f"{mode}: {wrong}"
        _require_radix_hits(turns)
    gate_metrics["requests"] = len(conversations[0])


def test_ngram_equals_builtin_reference(model, conversations, builtin, tmp_path, gate_metrics):
    """Trees with several branches, batch 4, two turns with radix hits, eager and on graph buffers."""
    assert len(conversations[0]) >= 20 and len({len(p) for p in conversations[0]}) >= 15
    rounds, counts = _ours(model, *conversations, tmp_path, modes=("", "graph"), **NGRAM)
    for mode, turns in zip(("eager", "graph"), rounds, strict=True):
        assert not (wrong := _differing(turns, builtin)), f"{mode}: {wrong}"
        _require_radix_hits(turns)
    _require_radix_hits(builtin)
    accept, distinct = _accept_length(rounds[0]), _require_walks(builtin)
    assert accept > 1, f"accept length {accept:.2f}: speculation never helped, so it was hardly tested"
    assert counts["branching_trees"] > 0, f"no draft tree had a node with two children: {counts}"
    assert counts["largest_batch"] == 4 and counts["graph_steps"] > 0, counts
    assert counts["qlen_only"] == counts["verify_steps"], counts
    gate_metrics["requests"] = len(conversations[0])
    gate_metrics["differing"] = 0
    gate_metrics["accept_length"] = accept
    gate_metrics["distinct_ratio"] = distinct
    gate_metrics["branching_trees"] = counts["branching_trees"]
    gate_metrics["verify_steps"] = counts["verify_steps"]


def test_ngram_equals_builtin_triton_interpreted(model, conversations, builtin, tmp_path, gate_metrics):
    """The Triton kernel under its interpreter, which is slow: the short prompts, a few tokens."""
    few = 6
    chosen = sorted(range(len(conversations[0])), key=lambda i: len(conversations[0][i]))[:REHEARSED]
    prompts = [conversations[0][i] for i in chosen]
    options = NGRAM | {"speculative_num_draft_tokens": 6}
    rounds, counts = _ours(model, prompts, [], tmp_path, turns=(few,), impl="triton", timeout=500, **options)
    expected = [{"tokens": [builtin[0]["tokens"][i] for i in chosen]}]
    assert not (wrong := _differing(rounds[0], expected, keep=few)), wrong
    accept = _accept_length(rounds[0])
    assert accept > 1 and counts["branching_trees"] > 0, (accept, counts)
    gate_metrics["requests"] = len(prompts)
    gate_metrics["accept_length"] = accept
    gate_metrics["branching_trees"] = counts["branching_trees"]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_drafted_trees_equal_builtin(algorithm, model, conversations, builtin, tmp_path, gate_metrics):
    """Trees of drafters: the target itself, whose guesses are right, an EAGLE layer, whose guesses are not, and an
    EAGLE3 layer, whose guesses are at times.

    Drafters run on SGLang's Triton backend under its interpreter, which is slow: the short prompts, a few tokens.
    """
    few = 8
    chosen = sorted(range(len(conversations[0])), key=lambda i: len(conversations[0][i]))[:4]
    draft = model
    if algorithm != "STANDALONE":
        draft = str(drafter.write_eagle(tmp_path / "drafter", MODEL, three=algorithm == "EAGLE3"))
    rounds, counts = _ours(
        model, [conversations[0][i] for i in chosen], [], tmp_path, turns=(few,), speculative_algorithm=algorithm,
        speculative_num_steps=3, speculative_eagle_topk=3, speculative_num_draft_tokens=8,
        speculative_draft_model_path=draft, speculative_draft_attention_backend="triton",
        triton_attention_num_kv_splits=1,
    )  # fmt: skip
    expected = [{"tokens": [builtin[0]["tokens"][i] for i in chosen]}]
    assert not (wrong := _differing(rounds[0], expected, keep=few)), wrong
    gate_metrics["accept_length"] = accept = _accept_length(rounds[0])
    assert counts["branching_trees"] > 0, counts
    least = {"STANDALONE": accept > 2, "EAGLE": accept >= 1, "EAGLE3": accept > 1}
    assert least[algorithm], accept


def test_full_mask_layout(model, conversations, builtin, tmp_path, gate_metrics):
    """The mask of the CUDA engine: NGRAM's worker passes FULL_MASK, eager and on the buffers of a graph."""
    rounds, counts = _ours(model, *conversations, tmp_path, modes=("graph", ""), full_mask=True, **NGRAM)
    assert counts["full_mask"] == counts["verify_steps"] > 0, counts
    assert counts["branching_trees"] > 0 and counts["graph_steps"] > 0, counts
    for mode, turns in zip(("graph", "eager"), rounds, strict=True):
        assert not (wrong := _differing(turns, builtin)), f"{mode}: {wrong}"
    gate_metrics["accept_length"] = _accept_length(rounds[0])
    gate_metrics["verify_steps"] = counts["verify_steps"]


def test_tp2_equals_tp1(model, conversations, builtin, tmp_path, gate_metrics):
    """Two ranks: heads are split, K/V is on both. Greedy NGRAM tokens equal those of one rank."""
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    rounds, counts = _ours(model, *conversations, tmp_path, environ=cores, tp_size=2, **NGRAM)
    assert not (wrong := _differing(rounds[0], builtin)), wrong
    _require_radix_hits(rounds[0])
    assert counts["branching_trees"] > 0, counts
    gate_metrics["requests"] = len(conversations[0])
    gate_metrics["accept_length"] = _accept_length(rounds[0])


def test_retraction(model, conversations, builtin, tmp_path, gate_metrics):
    """A pool too small for the batch: requests are thrown out and come back, and every slot is found again.

    An idle scheduler of SGLang counts its slots and dies of a leak.
    """
    small = {"max_total_tokens": 360, "log_level": "info"}
    outcome, counts = _engine(model, *conversations, tmp_path, **small, **NGRAM)
    rounds = _served(outcome)
    retracted = outcome.log.count("Retract requests")
    assert retracted > 0, "nothing was retracted: the pool was large enough"
    assert not (wrong := _differing(rounds[0], builtin)), wrong
    assert "leak" not in outcome.log
    gate_metrics["retractions"] = retracted
    gate_metrics["requests"] = len(conversations[0])


class Counted(array):
    """Token ids that count how many of them are looked at one by one."""

    looked_at = 0

    def __iter__(self):
        for token in super().__iter__():
            Counted.looked_at += 1
            yield token


@pytest.mark.parametrize("method", ["_prepare_draft_tokens", "_update_ngram_corpus"])
def test_ngram_host_work_is_flat(method, gate_metrics):
    """SGLang's own NGRAM worker, on a prompt of 100,000 tokens: it asks for the same, and walks over its end alone."""
    from mla_verify_sglang import compat
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    compat.keep_ngram_flat()
    asked = []
    corpus = SimpleNamespace(
        synchronize=lambda: None,
        batch_get=lambda ids, tokens, lens: asked.append((ids, tokens, lens)) or (np.zeros(16), np.zeros(0)),
        batch_put=asked.append,
    )
    worker = SimpleNamespace(
        max_trie_depth=18, draft_token_num=8, enable_overlap=True, ngram_corpus=corpus,
        prev_token_ids=list(range(16)), prev_accept_lens=[2, 1],
    )  # fmt: skip
    worker._efficient_concat_last_n = NGRAMWorker._efficient_concat_last_n.__get__(worker)
    prompts = [Counted("q", range(7, 100_007)), Counted("q", range(5))]
    reqs = [
        SimpleNamespace(rid=str(i), origin_input_ids=p, origin_input_ids_unpadded=p, output_ids=array("q", [1, 2]))
        for i, p in enumerate(prompts)
    ]
    last = SimpleNamespace(accept_tokens=torch.arange(16), accept_lens=torch.tensor([2, 1]))
    batch = SimpleNamespace(reqs=reqs, spec_info=last, grammar_needs_sync=lambda: False)
    Counted.looked_at = 0
    getattr(NGRAMWorker, method)(worker, batch)
    gate_metrics["tokens_walked_over"] = Counted.looked_at
    assert Counted.looked_at <= 2 * worker.max_trie_depth and batch.reqs is reqs
    ends = [[*range(99_993, 100_007), 1, 2, 0, 1], [*range(5), 1, 2, 8]]
    whole = (["0", "1"], ends, [100_004, 8]) if method == "_prepare_draft_tokens" else ends
    assert asked == [whole]
    original = getattr(getattr(NGRAMWorker, method), "__wrapped__", None)
    if original is not None:  # negative control: without the change this release walks over everything
        original(worker, batch)
        assert Counted.looked_at > 100_000


def test_negative_controls(model, conversations, builtin, tmp_path, gate_metrics):
    """The comparison can fail: one wrong mask bit, slots shifted by one, a dropped piece of the prefix."""
    modes = ("", "mask", "slot", "prefix", "")
    rounds, _ = _ours(model, conversations[0], [], tmp_path, turns=TURNS[:1], modes=modes, **NGRAM)
    differing = [_differing(turns, builtin[:1]) for turns in rounds]
    assert not differing[0] and not differing[-1], (differing[0], differing[-1])
    for mode, wrong in zip(modes[1:-1], differing[1:-1], strict=True):
        assert wrong, f"the fault {mode!r} changed no token: the gate would not see it"
        gate_metrics[f"differing_{mode}"] = len(wrong)


def test_refusals(tmp_path, gate_metrics):
    """What cannot be served is refused at start, in words that name the flag."""
    llama = tmp_path / "llama"
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps(_LLAMA))
    job = engine.Job(
        str(llama), [[1, 2, 3]],
        engine={"attention_backend": "mla_verify", "load_format": "dummy", "skip_tokenizer_init": True},
    )  # fmt: skip
    outcome = engine.run_engine(job, tmp_path / "not-mla", timeout=300)
    assert outcome.returncode != 0 and not outcome.rounds
    assert "LlamaForCausalLM has no multi-head latent attention (MLA); use --attention-backend triton" in outcome.log
    gate_metrics["refused"] = 1


def test_plugin_failure_is_loud(model, tmp_path, gate_metrics):
    """A plugin that failed to load stops the server; SGLang alone would log it and go on."""
    broken, future = tmp_path / "broken", tmp_path / "future"
    (broken / "mla_verify").mkdir(parents=True)
    (broken / "mla_verify" / "__init__.py").write_text("raise ImportError('half an installation')\n")
    info = future / "sglang-0.99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.99.0\n")
    say = "--attention-backend mla_verify cannot serve: its plugin failed to load: "
    for path, reason in (
        (broken, "ImportError: half an installation"),
        (future, "RuntimeError: SGLang 0.99.0 is outside the tested range 0.5.17 to 0.5.23"),
    ):
        job = engine.Job(model, [[5, 6, 7]], engine={"attention_backend": "mla_verify"})
        outcome = engine.run_engine(job, tmp_path / f"run-{path.name}", timeout=300, PYTHONPATH=str(path))
        assert outcome.returncode != 0 and not outcome.rounds, "the server started on some backend"
        assert say + reason in outcome.log, outcome.log[-3000:]
    gate_metrics["stopped"] = 2


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
