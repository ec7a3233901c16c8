"""Openly licensed text that this Python and its packages ship, in a fixed order, split by file; a tokenizer from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Packages with permissive licences. Those that are not installed are left out, and the record says what was used.
PACKAGES = {
    "torch": "BSD-3-Clause", "numpy": "BSD-3-Clause", "scipy": "BSD-3-Clause", "matplotlib": "PSF-based",
    "sympy": "BSD-3-Clause", "networkx": "BSD-3-Clause", "pydantic": "MIT", "rich": "MIT", "hypothesis": "MPL-2.0",
    "httpx": "BSD-3-Clause", "pytest": "MIT", "jinja2": "BSD-3-Clause", "triton": "MIT", "pip": "MIT",
    "setuptools": "MIT", "fsspec": "BSD-3-Clause", "transformers": "Apache-2.0",
}  # fmt: skip
STDLIB_LICENCE = "PSF-2.0"
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
MAX_FILE = 400_000  # bytes; a longer file is a table
HELD_OUT = 50  # one file of so many, and the first of each source, is never trained on
SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")


@dataclass(frozen=True)
class Corpus:
    """Texts of files, in order. ``digest`` is of both parts; ``sources`` names package, version, licence and bytes."""

    train: list[str]
    held_out: list[str]
    digest: str
    sources: list[dict]


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE:
            if not {"__pycache__", "site-packages", "idlelib", "_vendor"} & set(path.parts[len(root.parts) :]):
                yield path


def collect(limit_mb: float, packages: tuple[str, ...] = tuple(PACKAGES)) -> Corpus:
    """The standard library and ``packages``, up to ``limit_mb`` of text. The same files give the same corpus."""
    train, held_out, sources, total = [], [], [], 0
    sha = hashlib.sha256()
    roots = [("python", sysconfig.get_python_version(), STDLIB_LICENCE, Path(sysconfig.get_paths()["stdlib"]))]
    for name in packages:
        try:
            spec = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        root = Path(str(spec.locate_file(name)))
        if root.is_dir():
            roots.append((name, spec.version, PACKAGES[name], root))
    share = limit_mb * 1e6 / len(roots)
    for name, version, licence, root in roots:
        taken = 0
        for path in _files(root):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if taken >= share or len(text) < 200:
                continue
            relative = path.relative_to(root).as_posix()
            number = int(hashlib.sha256(f"{name}/{relative}".encode()).hexdigest(), 16)
            (held_out if number % HELD_OUT == 0 or not taken else train).append(text)
            sha.update(text.encode())
            taken += len(text)
        total += taken
        if taken:
            sources.append({"name": name, "version": version, "licence": licence, "bytes": taken})
    if not train or not held_out:
        raise ValueError(f"limit_mb is {limit_mb}: too little text for a corpus; allow more")
    return Corpus(train, held_out, sha.hexdigest(), sources)


def make_tokenizer(corpus: Corpus, vocab: int, folder: Path) -> Path:
    """A byte-level BPE tokenizer of ``vocab`` words in ``folder``/tokenizer.json, unless it is there."""
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    sample = corpus.train[:: max(1, len(corpus.train) // 4000)]
    tokenizer.train_from_iterator(sample, vocab_size=vocab, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.save(str(path))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[0], "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2], "mask_token": SPECIAL[3],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n")
    return path


def encode(texts: list[str], tokenizer: Path):
    """All texts as one int16 or int32 array, each ended by the end token."""
    import numpy as np
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer))
    kind = np.int16 if made.get_vocab_size() < 2**15 else np.int32
    parts = []
    for i in range(0, len(texts), 512):
        for one in made.encode_batch(texts[i : i + 512]):
            parts.append(np.asarray([*one.ids, 2], dtype=kind))
    return np.concatenate(parts)


def trigram_loss(train, held_out, vocab: int) -> float:
    """Nats a token of a backed-off trigram on the held-out part: what a model of this size has to beat."""
    import numpy as np

    a, b, c = train[:-2].astype(np.int64), train[1:-1].astype(np.int64), train[2:].astype(np.int64)
    one = np.bincount(c, minlength=vocab) + 0.1
    pair, pair_n = np.unique(b * vocab + c, return_counts=True)
    left_n = np.bincount(b, minlength=vocab)
    triple, triple_n = np.unique((a * vocab + b) * vocab + c, return_counts=True)
    left2, left2_n = np.unique(a * vocab + b, return_counts=True)

    def look(keys, counts, wanted):
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where(keys[at] == wanted, counts[at], 0)

    x, y, z = (held_out[i : len(held_out) - 2 + i].astype(np.int64) for i in range(3))
    p1 = one[z] / one.sum()
    p2 = (look(pair, pair_n, y * vocab + z) + 2 * p1) / (left_n[y] + 2)
    p3 = (look(triple, triple_n, (x * vocab + y) * vocab + z) + 2 * p2) / (look(left2, left2_n, x * vocab + y) + 2)
    return float(-np.log(p3).mean())
