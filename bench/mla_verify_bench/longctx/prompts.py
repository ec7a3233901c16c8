"""Prompts of a given depth that no server has seen: seeded, with a first token of their own.

Two kinds of text, kept apart so that text and kernel are not confused: ``predictable`` repeats a pattern of
64 tokens, which any drafter guesses; ``natural`` is the Python documentation that ships with the interpreter,
its topics in seeded order, or random words where the server's tokenizer doesn't know English.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TEXTS = ("predictable", "natural")
HEAD = 16  # tokens or words that are a prompt's own
PATTERN = 64  # period of predictable text
NATURAL_WORDS = 100  # fewer distinct tokens than this: the tokenizer doesn't know English


def topics() -> list[str]:
    """English prose that every Python ships: about 700 kB of language reference, one string per topic."""
    from pydoc_data.topics import topics as found

    return [text for _, text in sorted(found.items())]


@dataclass
class Prompts:
    """Makes prompts: token ids of exact length where there is an ``alphabet``, else text of about the length.

    alphabet: token ids that may be sent. blocks: the topics as token ids. nonce: makes this run's heads
    differ from any other run's with the same seed.
    """

    seed: int
    nonce: str
    alphabet: Sequence[int] = ()
    blocks: Sequence[Sequence[int]] = ()
    tokens_per_word: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TEXTS, 1.4))

    def __post_init__(self) -> None:
        self._count = 0
        self._first = list(self.alphabet)
        random.Random(f"first {self.seed} {self.nonce}").shuffle(self._first)
        if not self.as_text and len(self._first) < 16:
            raise ValueError(f"the alphabet has {len(self._first)} token ids; give --vocab-size of the served model")

    @property
    def as_text(self) -> bool:
        return not self.alphabet

    def source(self, text: str) -> str:
        """Where the tokens of this kind of text come from, for the record."""
        if text == "natural":
            return "python-docs" if self.as_text or self.blocks else "random-ids"
        return "repeated-words" if self.as_text else "repeated-ids"

    def make(self, text: str, depth: int) -> list[int] | str:
        """A new prompt of ``depth`` tokens. Each call gives another one."""
        rng = random.Random(f"{self.seed} {text} {depth} {self._count}")
        head = random.Random(f"head {self.seed} {self.nonce} {self._count}")
        self._count += 1
        if self.as_text:
            return self._words(text, depth, rng, head)
        first = self._first[(self._count - 1) % len(self._first)]  # no two prompts share even one token
        ids = [first, *head.choices(self.alphabet, k=HEAD - 1)]
        if text == "predictable":
            pattern = rng.choices(self.alphabet, k=PATTERN)
            ids += pattern * (depth // PATTERN + 1)
        elif self.blocks:
            _fill(ids, self.blocks, depth, rng)
        else:
            ids += rng.choices(self.alphabet, k=depth)
        return ids[:depth]

    def learn(self, text: str, prompt: list[int] | str, prompt_tokens: int | None) -> None:
        """Let a server's own count of a prompt correct the length of later ones."""
        if isinstance(prompt, str) and prompt_tokens:
            self.tokens_per_word[text] = min(20.0, max(0.2, prompt_tokens / max(1, len(prompt.split(" ")))))

    def _words(self, text: str, depth: int, rng: random.Random, head: random.Random) -> str:
        blocks = [topic.split(" ") for topic in topics()]
        vocabulary = sorted({w for block in blocks for w in block if w.isalpha() and 3 <= len(w) <= 7 and w.islower()})
        count = max(HEAD + 1, round(depth / self.tokens_per_word[text]))
        words = [f"{head.randrange(10**6):06d}", *head.choices(vocabulary, k=HEAD - 1)]
        if text == "predictable":
            pattern = rng.choices(vocabulary, k=PATTERN)
            words += pattern * (count // PATTERN + 1)
        else:
            _fill(words, blocks, count, rng)
        return " ".join(words[:count])


def _fill(into: list, blocks: Sequence[Sequence], length: int, rng: random.Random) -> None:
    order = [block for block in blocks if block]
    while len(into) < length:
        rng.shuffle(order)
        for block in order:
            into += block
            if len(into) >= length:
                return


async def for_tokenizer(
    tokenize: Callable, *, seed: int, nonce: str, vocab_size: int, special: Sequence[int], longest: int
) -> Prompts:
    """Prompts as token ids for a server that takes them.

    tokenize: async, text -> ids or None. vocab_size: of the model, 0 if not known. special: ids never sent.
    """
    blocks: list[list[int]] = []
    for topic in topics():
        ids = await tokenize(topic)
        if not ids:
            break
        blocks.append(ids)
        if len(blocks) >= 4 and len({i for b in blocks for i in b}) < NATURAL_WORDS:
            break
        if sum(map(len, blocks)) > 2 * longest + 4096:
            break
    english = sorted({i for block in blocks for i in block} - set(special))
    if len(english) < NATURAL_WORDS:
        blocks = []
        english = []
    alphabet = english or [i for i in range(3, vocab_size or 1000) if i not in set(special)]
    return Prompts(seed=seed, nonce=nonce, alphabet=alphabet, blocks=blocks)
