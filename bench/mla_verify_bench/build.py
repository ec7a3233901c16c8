"""``mla-verify build``: the CUDA kernels compiled ahead of time, so that no server waits for a compiler."""

from __future__ import annotations

import argparse
import json
import re
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="sm_120",
        default=[],
        help="architecture to compile for; may be repeated (default: this machine's GPU)",
    )
    parser.add_argument("--json", action="store_true", help="print what was built as JSON")


def run(args: argparse.Namespace) -> int:
    """Compile every variant that each architecture can serve into the cache; 0 when all are there."""
    import torch
    from mla_verify import cuda_kernels
    from rich.console import Console
    from rich.progress import track

    architectures = args.arch
    if not architectures and torch.cuda.is_available():
        architectures = ["sm_{}{}".format(*torch.cuda.get_device_capability())]
    if not architectures:
        raise ValueError("--arch is not given and this machine has no GPU; name one, for example --arch sm_120")
    for name in architectures:
        if not re.fullmatch(r"sm_\d{2,3}", name):
            raise ValueError(f"--arch is {name!r}; expected sm_ and a number, for example sm_120")
    wanted = [
        (name, variant)
        for name in dict.fromkeys(architectures)
        for variant in cuda_kernels.VARIANTS
        if not cuda_kernels.unsupported(variant.q, variant.kv, divmod(int(name[3:]), 10))
    ]
    try:
        built = [
            {
                "arch": name,
                "q": str(v.q),
                "kv": str(v.kv),
                "index": str(v.index),
                "bytes": len(cuda_kernels.build(name, v)),
            }
            for name, v in track(wanted, description="compiling", console=Console(stderr=True))
        ]
    except ImportError as error:
        raise ValueError(f"the compiler is missing: {error}; pip install 'mla-verify[cuda]'") from None
    if args.json:
        json.dump({"folder": str(cuda_kernels.cache_folder()), "built": built}, sys.stdout, indent=1)
        print()
    else:
        print(f"{len(built)} cubins for {', '.join(dict.fromkeys(architectures))} in {cuda_kernels.cache_folder()}")
    return 0
