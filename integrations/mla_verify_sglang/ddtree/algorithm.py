"""``--speculative-algorithm DDTREE``: how SGLang learns of it, its flags, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from .. import BACKEND_NAME
from ..refusals import UnsupportedError
from .budget import ladder
from .build import MAX_BUDGET, MAX_DEPTH

NAME = "DDTREE"
FLAG = "--speculative-ddtree-budget"
VARIABLE = "MLA_VERIFY_DDTREE_BUDGET"
AUTO = "auto"
# The widest pass of an automatic budget. The window of a request, the graphs' logits and the mask's words are for it,
# whatever is chosen; a mask of 32 nodes is one word a row.
AUTO_NODES = 32


class DdtreeAlgorithm(CustomSpecAlgo):
    """Whatever SGLang asks about an algorithm is answered as for DFLASH, whose pools and graphs this one uses."""

    block: int | None = None  # the drafter's, once its worker is there

    def handle_server_args(self, server_args) -> None:
        """Fill in what follows from the drafter and the budget. Raises UnsupportedError for what can't be served."""
        if reasons := list(_refusals(server_args)):
            raise UnsupportedError(f"--speculative-algorithm {NAME} cannot serve this: " + "; ".join(reasons))
        block = _drafter_block(server_args)
        window = getattr(server_args, "speculative_draft_window_size", None)
        if window is not None and int(window) < block:
            raise UnsupportedError(
                f"--speculative-draft-window-size {window} is less than the drafter's block of {block}; set it to "
                f"{block} or more"
            )
        server_args.speculative_num_draft_tokens = _nodes(block, server_args.speculative_num_draft_tokens)
        server_args.speculative_dflash_block_size = block
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        on_gpu = server_args.device.startswith("cuda")
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = "flashinfer" if on_gpu else "triton"
        if not on_gpu:
            server_args.disable_overlap_schedule = True  # its relay between steps needs streams
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48  # as for SGLang's own algorithms

    def create_worker(self, server_args) -> type:
        return self.factory(server_args)

    def create_future_map(self, *arguments, **options):
        return SpeculativeAlgorithm.create_future_map(self, *arguments, **options)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        return self.block if is_draft_worker and self.block else num_draft_tokens


def _answer_as_dflash() -> None:
    dflash = SpeculativeAlgorithm.DFLASH
    questions = ("is_", "supports_", "has_", "need_", "carries_")
    for name in vars(SpeculativeAlgorithm):
        if name.startswith(questions):
            answer = getattr(dflash, name)()
            setattr(DdtreeAlgorithm, name, lambda self, answer=answer: answer)


def register() -> None:
    """Make the algorithm and its flag known to this process; once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(NAME) is not None:
        return
    _answer_as_dflash()
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DdtreeAlgorithm)(_worker)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _add_flag, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _report, HookType.AFTER)


def _worker(server_args) -> type:
    from .worker import DdtreeWorker

    return DdtreeWorker


def _report(result, scheduler, *args, **kwargs) -> None:
    if isinstance(scheduler.spec_algorithm, DdtreeAlgorithm):
        result.internal_state.update(scheduler.draft_worker.report())


# ---- the budget ----


def parse_budget(text: str) -> int | None:
    """Nodes beside the root; None for auto. Raises ValueError in words."""
    if text == AUTO:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_BUDGET:
        raise ValueError(f"{FLAG} (or {VARIABLE}) is {text!r}; expected {AUTO} or a number of nodes, 1 to {MAX_BUDGET}")
    return value


def _asked() -> str:
    return os.environ.get(VARIABLE, "").strip()


def budget(nodes: int) -> int:
    """What the trees of a server that verifies at most ``nodes`` nodes may hold beside their root."""
    fixed = parse_budget(_asked()) if _asked() else None
    return nodes - 1 if fixed is None else fixed


def widths(nodes: int, block: int) -> tuple[int, ...]:
    """The numbers of nodes that a verify pass may have: ``nodes`` alone where the budget is fixed."""
    return ladder(block, nodes) if _asked() == AUTO else (nodes,)


class _SetBudget(argparse.Action):
    """Schedulers are processes of their own and SGLang hands them known fields alone: the environment carries it."""

    def __call__(self, parser, namespace, value, option=None) -> None:
        try:
            os.environ[VARIABLE] = str(parse_budget(value) or AUTO)
        except ValueError as error:
            parser.error(str(error))


def _add_flag(original, parser) -> None:
    original(parser)
    parser.add_argument(
        FLAG,
        action=_SetBudget,
        default=argparse.SUPPRESS,
        metavar=f"{AUTO}|1..{MAX_BUDGET}",
        help=f"{NAME} only. Nodes of the draft tree beside its root. {AUTO}: chosen at each step by what verifying "
        f"them costs and brings, at most --speculative-num-draft-tokens - 1 (default {AUTO_NODES - 1}). Default: "
        f"--speculative-num-draft-tokens - 1 where that alone is given, else {AUTO}. {VARIABLE} does the same.",
    )


def _nodes(block: int, given: int | None) -> int:
    """The width of a verify pass. Never below the block: its slots are the drafter's as well."""
    if not 2 <= block <= MAX_DEPTH + 1:
        raise UnsupportedError(
            f"the drafter's block is {block} tokens; {NAME} builds trees from blocks of 2 to {MAX_DEPTH + 1}"
        )
    text = _asked()
    if not text and given is None:
        text = os.environ[VARIABLE] = AUTO  # the workers are started with this environment
    fixed = parse_budget(text) if text else None
    if fixed is not None:
        nodes = max(fixed + 1, block)
        if given not in (None, nodes):
            raise UnsupportedError(
                f"--speculative-num-draft-tokens {given} and {FLAG} {text} contradict each other: the budget makes it "
                f"{nodes}; leave the former out"
            )
        return nodes
    if given is None:
        return max(AUTO_NODES, block)
    if not block <= given <= MAX_BUDGET + 1:
        raise UnsupportedError(
            f"--speculative-num-draft-tokens is {given}; {NAME} verifies {block} (the drafter's block) to "
            f"{MAX_BUDGET + 1} nodes. For a smaller tree set {FLAG}"
        )
    return int(given)


# ---- what is refused ----


def _refusals(args) -> Iterator[str]:
    if args.speculative_draft_model_path is None:
        yield "it drafts with a DFlash model; name it with --speculative-draft-model-path"
    prefill = args.prefill_attention_backend or args.attention_backend
    decode = args.decode_attention_backend or args.attention_backend
    verifies = decode if getattr(args, "speculative_attention_mode", "prefill") == "decode" else prefill
    if verifies != BACKEND_NAME:
        yield (
            f"trees are verified by {BACKEND_NAME} alone, and {verifies or 'SGLang’s choice'} would get them; set "
            f"--attention-backend {BACKEND_NAME}"
        )
    if args.speculative_draft_attention_backend == BACKEND_NAME:
        yield (
            f"a DFlash drafter attends both ways within its block, {BACKEND_NAME} does not; set "
            "--speculative-draft-attention-backend flashinfer"
        )
    if args.pp_size != 1:
        yield f"--pp-size {args.pp_size}: pipeline parallelism is not supported; set it to 1"
    for field, unset, remedy in (
        ("enable_dp_attention", False, "leave it out"),
        ("enable_lora", False, "leave it out"),
        ("enable_deterministic_inference", False, "leave it out"),
        ("enable_mixed_chunk", False, "leave it out"),
        ("speculative_adaptive", False, "leave it out"),
        ("watermark_config", None, "leave it out"),
        ("disaggregation_mode", "null", "serve prefill and decode in one server"),
    ):
        value = getattr(args, field, unset)
        if value not in (None, unset):
            yield f"--{field.replace('_', '-')} is not supported with it; {remedy}"


def _drafter_block(args) -> int:
    """The tokens that the drafter fills at once: --speculative-dflash-block-size, else what its config says."""
    if args.speculative_dflash_block_size is not None:
        return int(args.speculative_dflash_block_size)
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    if block is None:
        raise UnsupportedError(
            f"the drafter {args.speculative_draft_model_path} does not say its block size; set "
            "--speculative-dflash-block-size"
        )
    return int(block)
