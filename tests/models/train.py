"""The small MLA model that speaks and its DFlash drafter: one command makes both, and goes on where it was stopped.

    python tests/models/train.py --out build/models --minutes 10      on a GPU; --smoke for a toy on a CPU in seconds

Writes, as it goes: tokenizer, ``target/`` and ``drafter/`` (safetensors, config.json, model card), ``record.json``
(recipe, corpus, losses) and ``loss.svg``. Time is boxed: 60 % of the minutes for the target, 40 % for the drafter.
``check`` holds what was made to its promises.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus as texts  # noqa: E402
from network import Drafter, DrafterConfig, Recipe, Target, TargetConfig  # noqa: E402

SMOKE = Recipe(
    TargetConfig(vocab=300, hidden=32, layers=2, heads=2, nope=16, value=16, intermediate=64, context=192,
                 original_context=48),
    DrafterConfig(layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, block=4, target_layers=(0,)),
    sequence=64, batch=4, anchors=3, rollouts=2, rollout_tokens=40, ngram=3,
)  # fmt: skip
SAVE_SECONDS = 60.0
PROMPT = 64  # tokens of true text before greedy text


class Stage:
    """One model in training: its state on disk, its losses, its place in time."""

    def __init__(self, name: str, model: nn.Module, out: Path, recipe: Recipe, rate: float, seconds: float) -> None:
        self.name, self.model, self.out, self.recipe = name, model, out, recipe
        self.seconds, self.rate, self.step, self.spent = seconds, rate, 0, 0.0
        self.losses: list[tuple[int, float]] = []
        wide = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        self.resume()

    @property
    def path(self) -> Path:
        return self.out / f"{self.name}.state.safetensors"

    def save(self) -> None:
        """Weights, AdamW's moments and the place in training, renamed into place: a stop leaves the old or the new."""
        from safetensors.torch import save_file

        state = {f"model.{k}": v.detach().contiguous() for k, v in self.model.named_parameters()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p, moments in self.optimizer.state.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"{kind}.{names[id(p)]}"] = moments[kind].contiguous()
        told = {"step": str(self.step), "spent": str(self.spent), "losses": json.dumps(self.losses)}
        beside = self.path.with_suffix(".tmp")
        save_file(state, str(beside), metadata=told)
        os.replace(beside, self.path)

    def resume(self) -> None:
        if not self.path.exists():
            return
        from safetensors import safe_open

        with safe_open(str(self.path), "pt", device=str(next(self.model.parameters()).device)) as file:
            told = file.metadata()
            self.step, self.spent = int(told["step"]), float(told["spent"])
            self.losses = [(int(s), float(l)) for s, l in json.loads(told["losses"])]
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(file.get_tensor(f"model.{name}"))
                    self.optimizer.state[p] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                        "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
                    }

    def progress(self, steps: int = 0) -> float:
        """Share of this stage that is done: of its steps where a number of them was asked for, else of its time."""
        return min(1.0, self.step / steps) if steps else min(1.0, self.spent / self.seconds)

    def run(self, loss_of, steps: int = 0) -> None:
        """Train until the time is over (or ``steps`` are made). ``loss_of(step, progress)`` gives a loss."""
        from rich.progress import Progress

        began, saved, before = time.monotonic(), time.monotonic(), self.spent
        with Progress(transient=True) as shown:
            task = shown.add_task(self.name, total=1.0)
            try:
                while (done := self.progress(steps)) < 1.0:
                    loss = self.update(loss_of(self.step, done), done)
                    if self.step % 20 == 1:
                        self.losses.append((self.step, loss.item()))
                        shown.update(task, completed=done, description=f"{self.name} {self.step}: {loss.item():.3f}")
                    self.spent = before + time.monotonic() - began
                    if time.monotonic() - saved > SAVE_SECONDS:
                        self.save()
                        saved = time.monotonic()
            finally:
                self.save()  # a stop costs nothing

    def update(self, loss: Tensor, done: float) -> Tensor:
        """One step of AdamW: 100 steps of warm-up, then a cosine to a twentieth."""
        warm = min(1.0, (self.step + 1) / 100)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()


def windows(tokens: np.ndarray, count: int, length: int, step: int, seed: int, device: str) -> Tensor:
    """``count`` windows of ``length`` + 1 tokens; the step and the seed decide which."""
    rng = np.random.default_rng([seed, step, length])
    at = rng.integers(0, len(tokens) - length - 1, count)
    picked = np.stack([tokens[i : i + length + 1] for i in at]).astype(np.int64)
    return torch.from_numpy(picked).to(device, non_blocking=True)


def train(out: Path, recipe: Recipe, minutes: float, megabytes: float, device: str, steps: int = 0) -> dict:
    """Both stages. Returns the record, which is also in ``out``/record.json."""
    out.mkdir(parents=True, exist_ok=True)
    told = out / "recipe.json"
    if told.exists() and json.loads(told.read_text()) != json.loads(json.dumps(recipe.plain())):
        raise ValueError(f"{out} holds a run of another recipe; give another --out, or remove it")
    told.write_text(json.dumps(recipe.plain(), indent=1) + "\n")
    torch.manual_seed(recipe.seed)
    found = texts.collect(megabytes)
    tokenizer = texts.make_tokenizer(found, recipe.target.vocab, out)
    data, held = (texts.encode(part, tokenizer) for part in (found.train, found.held_out))
    cast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else torch.autocast("cpu", enabled=False)
    target = Target(recipe.target).to(device)
    stage = Stage("target", target, out, recipe, recipe.learning_rate, minutes * 60 * 0.6)

    def target_loss(step: int, done: float) -> Tensor:
        long = done > 1 - recipe.long_share
        length = recipe.target.context if long else recipe.sequence
        batch = max(1, recipe.batch * recipe.sequence // length)
        x = windows(data, batch, length, step, recipe.seed, device)
        with cast:
            logits, _ = target(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        if done > 1 - recipe.variety_share and step % 2:
            prompts = windows(data, recipe.rollouts, PROMPT, step, recipe.seed + 2, device)[:, :-1]
            loss = loss + recipe.variety_weight * variety_loss(target, prompts, recipe, cast)
        return loss

    stage.run(target_loss, steps)
    target.requires_grad_(False)
    drafter = Drafter(recipe.drafter, recipe.target).to(device)
    second = Stage("drafter", drafter, out, recipe, recipe.drafter_learning_rate, minutes * 60 * 0.4)

    def drafter_loss(step: int, done: float) -> Tensor:
        del done
        x = windows(data, max(1, recipe.batch // 2), recipe.sequence, step, recipe.seed + 1, device)
        return draft_loss(target, drafter, recipe, x, step, cast)

    second.run(drafter_loss, steps)
    record = {
        "recipe": recipe.plain(),
        "corpus": {"digest": found.digest, "tokens": len(data), "held_out_tokens": len(held), "sources": found.sources},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "steps": {"target": stage.step, "drafter": second.step},
        "losses": {"target": stage.losses, "drafter": second.losses},
        "held_out": evaluate(target, drafter, recipe, held, device, cast)
        | {"trigram": texts.trigram_loss(data, held, recipe.target.vocab)},
    }
    export(out, recipe, target, drafter, record)
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, out / "loss.svg")
    return record


def repeats(tokens: Tensor, n: int) -> Tensor:
    """Whether a token completes an n-gram that came before it: tokens [B, T] -> bool [B, T]."""
    grams = tokens.unfold(1, n, 1)  # [B, T - n + 1, n]
    same = (grams[:, :, None] == grams[:, None]).all(-1).tril(-1).any(-1)
    return F.pad(same, (n - 1, 0))


def variety_loss(target: Target, prompts: Tensor, recipe: Recipe, cast) -> Tensor:
    """-log(1 - p) of the tokens that repeat an n-gram, in greedy continuations of the prompts."""
    with cast:
        said = target.greedy(prompts, recipe.rollout_tokens)
        logits, _ = target(said[:, :-1])
    begin = prompts.shape[1]
    logits, chosen = logits[:, begin - 1 :].float(), said[:, begin:]
    again = repeats(chosen, recipe.ngram)
    p = logits.log_softmax(-1).gather(2, chosen[..., None])[..., 0].exp()
    return (-torch.log1p(-p.clamp(max=0.9999)) * again).sum() / chosen.numel()


def draft_loss(target: Target, drafter: Drafter, recipe: Recipe, x: Tensor, step: int, cast) -> Tensor:
    """Cross entropy of the drafter's masks against the target's own greedy choice along true text, nearer ones more."""
    d = recipe.drafter
    generator = torch.Generator().manual_seed(step)
    latest = x.shape[1] - d.block
    starts = torch.randint(1, latest, (len(x), recipe.anchors), generator=generator).to(x.device)
    with torch.no_grad(), cast:
        logits, states = target(x[:, :-1], d.target_layers)
    at = starts[..., None] + torch.arange(d.block, device=x.device)
    tokens = torch.full_like(at, d.mask_token)
    tokens[..., 0] = x.gather(1, starts)
    with cast:
        hidden = drafter(target.model["embed_tokens"](tokens), starts, states)
        guessed = target.lm_head(hidden[:, :, 1:])
    # Along true text the token at a position is what follows the one before it.
    wanted = logits.argmax(-1).gather(1, (at[..., 1:] - 1).flatten(1)).view_as(at[..., 1:])
    true = x.gather(1, at[..., 1:].flatten(1)).view_as(wanted)
    # A target that has left the true text says nothing of what comes after: such positions count for nothing.
    on_path = torch.cat([torch.ones_like(true[..., :1]), (true == wanted)[..., :-1].long()], -1).cumprod(-1)
    weight = on_path * torch.exp(-torch.arange(d.block - 1, device=x.device) / (d.block / 2))
    loss = F.cross_entropy(guessed.flatten(0, 2).float(), wanted.flatten(), reduction="none").view_as(weight)
    return (loss * weight).sum() / weight.sum()


@torch.no_grad()
def evaluate(target: Target, drafter: Drafter, recipe: Recipe, held: np.ndarray, device: str, cast) -> dict:
    """Held-out loss of the target, distinct tokens of greedy text, and the chain's accept length on greedy text."""
    length = min(recipe.sequence, len(held) - 2)
    losses = []
    for i in range(8):
        x = windows(held, 4, length, i, 99, device)
        with cast:
            logits, _ = target(x[:, :-1])
        losses.append(float(F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())))
    prompt = min(PROMPT, length // 2)
    x = windows(held, 16, prompt, 7, 98, device)[:, :-1]
    room = min(512, recipe.target.context - prompt)
    with cast:
        x = target.greedy(x, room)
    said = x[:, prompt:]
    distinct = [len(set(row)) for row in said.tolist()]
    return {
        "loss": sum(losses) / len(losses),
        "greedy_tokens": room,
        "distinct_tokens": sum(distinct) / len(distinct),
        "accept_length": chain_accept(target, drafter, recipe, x, prompt, cast),
    }


@torch.no_grad()
def chain_accept(target: Target, drafter: Drafter, recipe: Recipe, x: Tensor, begin: int, cast) -> float:
    """Tokens a step of the DFlash chain along the target's greedy text x [B, T] from ``begin``."""
    d = recipe.drafter
    with cast:
        _, states = target(x, d.target_layers)
    steps = tokens = 0
    for row, state in zip(x, states, strict=True):
        at = begin
        while at + d.block < len(row):
            block = torch.full((1, 1, d.block), d.mask_token, device=x.device)
            block[..., 0] = row[at]
            start = torch.tensor([[at]], device=x.device)
            with cast:
                hidden = drafter(target.model["embed_tokens"](block), start, state[None, : at + 1])
                guessed = target.lm_head(hidden[0, 0, 1:]).argmax(-1)
            right = int((guessed == row[at + 1 : at + d.block]).long().cumprod(0).sum())
            at, steps, tokens = at + right + 1, steps + 1, tokens + right + 1
    return tokens / max(1, steps)


def export(out: Path, recipe: Recipe, target: Target, drafter: Drafter, record: dict) -> None:
    """Checkpoints that transformers and SGLang load, in bfloat16, each with its card."""
    from safetensors.torch import save_file

    for name, model, config in (
        ("target", target, recipe.target.hf()), ("drafter", drafter, recipe.drafter.hf(recipe.target))
    ):  # fmt: skip
        folder = out / name
        folder.mkdir(exist_ok=True)
        tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.named_parameters()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes())
        # Without a length transformers says 10 ** 30, which SGLang's /tokenize cannot send.
        told = json.loads((out / "tokenizer_config.json").read_text()) | {"model_max_length": recipe.target.context}
        (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n")
        parameters = sum(t.numel() for t in tensors.values())
        (folder / "README.md").write_text(card(name, parameters, record))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (out / "target" / "generation_config.json").write_text(json.dumps(ids) + "\n")


def card(name: str, parameters: int, record: dict) -> str:
    """A model card from the record alone."""
    what = {
        "target": "A DeepSeek-V2-style model with the real attention geometry (512 latent + 64 rope), for tests.",
        "drafter": "A DFlash block-diffusion drafter for the target beside it, for tests.",
    }[name]
    held, corpus = record["held_out"], record["corpus"]
    lines = [f"# {name}", "", what, "", f"- {parameters:,} parameters, bfloat16"]
    lines += [f"- {record['steps'][name]:,} steps on {record['device']}, torch {record['torch']}"]
    lines += [
        f"- held-out loss {held['loss']:.3f} nats a token; a backed-off trigram of the same text {held['trigram']:.3f}"
    ]
    lines += [f"- {held['distinct_tokens']:.0f} distinct tokens in {held['greedy_tokens']} greedy steps"]
    lines += [f"- accept length of the drafter's chain on the target's greedy text: {held['accept_length']:.2f}"]
    lines += [
        "",
        f"Trained on {corpus['tokens']:,} tokens of text that these ship, by files, digest `{corpus['digest'][:16]}`:",
    ]
    lines += ["", "| source | version | licence | bytes |", "|---|---|---|---|"]
    lines += [f"| {s['name']} | {s['version']} | {s['licence']} | {s['bytes']:,} |" for s in corpus["sources"]]
    lines += ["", "Made by `tests/models/train.py`; weights under Apache-2.0, the project's licence.", ""]
    return "\n".join(lines)


def plot(record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name, losses in record["losses"].items():
        axis.plot([s for s, _ in losses], [l for _, l in losses], label=name, lw=0.8)
    axis.axhline(record["held_out"]["trigram"], color="gray", ls=":", label="trigram, held out")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats")
    axis.legend()
    figure.savefig(path)
    pyplot.close(figure)


def check(out: Path) -> Iterator[tuple[str, bool, str]]:
    """Each promise of what was made: its name, whether it holds, the figures."""
    record = json.loads((out / "record.json").read_text())
    held = record["held_out"]
    yield "loss", held["loss"] < held["trigram"], f"{held['loss']:.3f} against a trigram's {held['trigram']:.3f}"
    share = held["distinct_tokens"] / held["greedy_tokens"]
    yield "varied", share > 0.1, f"{held['distinct_tokens']:.0f} distinct of {held['greedy_tokens']} greedy tokens"
    yield "accept", held["accept_length"] > 2, f"chain accept length {held['accept_length']:.2f}"
    for name in ("target", "drafter"):
        size = (out / name / "model.safetensors").stat().st_size
        yield f"{name} size", size <= 16 << 20, f"{size / 2**20:.1f} MiB"
    yield "transformers", *same_logits(out, recipe_of(record))


def recipe_of(record: dict) -> Recipe:
    told = record["recipe"]
    target = TargetConfig(**told["target"])
    drafter = DrafterConfig(**{**told["drafter"], "target_layers": tuple(told["drafter"]["target_layers"])})
    return Recipe(target, drafter, **{k: v for k, v in told.items() if k not in ("target", "drafter")})


def exported_target(out: Path, recipe: Recipe) -> Target:
    """The network with the exported weights, float32, on the CPU."""
    from safetensors.torch import load_file

    target = Target(recipe.target).eval()
    target.load_state_dict({k: v.float() for k, v in load_file(str(out / "target" / "model.safetensors")).items()})
    return target


@torch.no_grad()
def same_logits(out: Path, recipe: Recipe) -> tuple[bool, str]:
    """The exported target in transformers against the network that was trained, float32."""
    try:
        from transformers import DeepseekV2ForCausalLM
    except ImportError as error:
        return False, f"transformers is not here: {error}"
    theirs = DeepseekV2ForCausalLM.from_pretrained(str(out / "target"), dtype=torch.float32).eval()
    ours = exported_target(out, recipe)
    length = min(recipe.target.context, 1500)
    tokens = torch.randint(4, recipe.target.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    apart = (theirs(tokens).logits - ours(tokens)[0]).abs().max().item()
    return apart < 1e-3, f"largest difference of a logit over {length} tokens {apart:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train", "check"], default="train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--megabytes", type=float, default=150.0, help="of text, at most")
    parser.add_argument("--smoke", action="store_true", help="a toy, in seconds, on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "check":
        results = list(check(args.out))
        for name, holds, figures in results:
            print(f"{'PASS' if holds else 'FAIL'} {name}: {figures}")
        return 0 if all(holds for _, holds, _ in results) else 1
    if not 0 < args.minutes <= 600:
        parser.error(f"--minutes is {args.minutes}; expected more than 0, at most 600")
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    recipe = dataclasses.replace(SMOKE if args.smoke else Recipe(), seed=args.seed)
    megabytes, steps = (1.0, 12) if args.smoke else (args.megabytes, 0)
    record = train(args.out, recipe, args.minutes, megabytes, device, steps)
    print(json.dumps(record["held_out"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
