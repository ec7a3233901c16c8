"""A real SGLang server on 127.0.0.1 for as long as a benchmark needs it.

The benchmark never imports SGLang: it starts ``sglang.launch_server`` with an interpreter that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEALTH_PERIOD_S = 0.5
STOP_S = 20.0
LOG_TAIL = 8192

# By these SGLang runs without a GPU. The child process gets them, the caller's environment is left alone.
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def sglang_python(asked: str = "") -> str:
    """An interpreter with SGLang: the one asked for, this one, or one that MLA_VERIFY_ENV_SGLANG_* names."""
    named = [os.environ.get(f"MLA_VERIFY_ENV_SGLANG_{v}", "") for v in ("0_5_17", "0_5_23")]
    for python in [asked] if asked else [sys.executable, *filter(None, named)]:
        if sglang_version(python):
            return os.path.abspath(python)
    raise ValueError(
        f"--sglang-python is {asked!r}, which has no SGLang; give an interpreter that has it" if asked else
        "no SGLang in this Python and none named by MLA_VERIFY_ENV_SGLANG_0_5_17; install sglang, "
        "give --sglang-python PATH, or measure a running server with --base-url URL"
    )  # fmt: skip


def sglang_version(python: str) -> str:
    """Version of SGLang that ``python`` would import, or ""."""
    program = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class Launch:
    """What to serve and how."""

    python: str
    model_path: str
    attention_backend: str
    cpu: bool
    context_length: int
    pool_tokens: int = 0  # 0 = SGLang decides
    max_running_requests: int = 4
    speculative_algorithm: str = "NGRAM"
    speculative_num_draft_tokens: int = 8
    dummy_weights: bool = False
    other_prefill: str = ""  # a backend that prefills; attention_backend then decodes and verifies
    seed: int = 0
    extra: Sequence[str] = ()

    def command(self, port: int) -> list[str]:
        """The command line, as one would type it."""
        told = {
            "--model-path": self.model_path,
            "--host": "127.0.0.1",
            "--port": port,
            "--context-length": self.context_length,
            "--attention-backend": self.attention_backend,
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--max-running-requests": self.max_running_requests,
            "--random-seed": self.seed,
        }
        if self.other_prefill:
            told["--attention-backend"] = self.other_prefill
            told["--prefill-attention-backend"] = self.other_prefill
            told["--decode-attention-backend"] = self.attention_backend
            told["--speculative-attention-mode"] = "decode"
        if self.pool_tokens:
            told["--max-total-tokens"] = self.pool_tokens
        if self.cpu:
            told |= {"--device": "cpu", "--dtype": "float32", "--chunked-prefill-size": 2048}
        if self.dummy_weights:
            told["--load-format"] = "dummy"
        if self.speculative_algorithm:
            told["--speculative-algorithm"] = self.speculative_algorithm
            told["--speculative-num-draft-tokens"] = self.speculative_num_draft_tokens
            if self.speculative_algorithm == "STANDALONE":  # the target drafts for itself: no trained drafter needed
                told |= {
                    "--speculative-draft-model-path": self.model_path,
                    "--speculative-num-steps": 4,
                    "--speculative-eagle-topk": 4,
                    "--speculative-draft-attention-backend": "triton",
                }
        words = [str(word) for pair in told.items() for word in pair]
        if self.dummy_weights:
            words.append("--skip-tokenizer-init")
        return [self.python, "-m", "sglang.launch_server", *words, *self.extra]

    def environment(self) -> dict[str, str]:
        """Of the server's process."""
        env = dict(os.environ)
        if self.cpu:
            env |= CPU_ENVIRONMENT
            if "CXX" not in env and (wrapper := _cxx_wrapper()):
                env["CXX"] = wrapper
        return env


def _cxx_wrapper() -> str:
    """SGLang 0.5.17's n-gram matcher forgets an include that gcc 12 wants; a compiler that adds it builds it.

    The path is the same each time, so that the build is cached.
    """
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return ""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-verify"
    path = cache / "g++-with-cstddef"
    script = f'#!/bin/sh\nexec "{compiler}" -include cstddef "$@"\n'
    if not path.exists() or path.read_text() != script:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(script)
        temporary.chmod(0o755)
        os.replace(temporary, path)
    return str(path)


@dataclass
class Server:
    """``with Server(launch, log) as server: … server.base_url``. Leaving the block stops it all."""

    launch: Launch
    log: Path
    start_timeout_s: float = 900.0
    on_wait: Callable[[float], None] | None = None
    base_url: str = ""
    command: list[str] = field(default_factory=list)
    _process: subprocess.Popen | None = None

    def __enter__(self) -> Server:
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self.command = self.launch.command(port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.launch.environment(),
                start_new_session=True,  # Ctrl-C is ours to handle: the server stops after the cells are safe
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self) -> None:
        import httpx

        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < self.start_timeout_s:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the server ended with {code} while starting; {self._last_words()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=30, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if self.on_wait:
                self.on_wait(waited)
            time.sleep(HEALTH_PERIOD_S)
        raise RuntimeError(f"the server was not healthy after {self.start_timeout_s:.0f} s; {self._last_words()}")

    def _last_words(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
            lines = file.read(LOG_TAIL).decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if "Error" in line or "error:" in line]
        return f"its log {self.log} ends: {(errors or said or ['(empty)'])[-1][:300]}"

    def stop(self) -> None:
        """Ask the server's process group to end, then make it."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline:
                process.poll()  # reap, or the group seems alive
                try:
                    os.killpg(process.pid, 0)
                except (ProcessLookupError, PermissionError):
                    break
                time.sleep(0.1)
        process.wait(timeout=STOP_S)


def _die_with_parent() -> None:
    """Linux: the server ends when the benchmark is killed, however rudely."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_random_model(path: Path, *, layers: int, heads: int, context: int) -> Path:
    """A config.json of one tensor-parallel rank of a Kimi-K2-class model; SGLang fills in random weights.

    Attention is the real thing (512 latent + 64 rope, ``heads`` heads, ``layers`` layers); the dense MLP is
    small, so that the time of a step is mostly attention's.
    """
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": layers,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (path / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}\n')
    return path
