"""An SGLang plugin of the tests alone: writes what the defragmenter did to a file, breaks it on demand.

``$MLA_VERIFY_DEFRAG_PROBE`` (JSON): ``record``, a path for the counters; ``fault``, "" or a key of FAULTS.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path


def register() -> None:
    wanted = json.loads(os.environ["MLA_VERIFY_DEFRAG_PROBE"])
    if wanted.get("fault"):
        FAULTS[wanted["fault"]]()
    from mla_verify_sglang.defrag.defragmenter import Defragmenter

    run = Defragmenter.run

    def recorded(self, *args, **kwargs):
        outcome = run(self, *args, **kwargs)
        fresh = Path(wanted["record"] + f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(self.counters)))
        fresh.replace(wanted["record"])  # the process may be killed at any time
        return outcome

    Defragmenter.run = recorded


def forget_rows() -> None:
    """A holder left out: request rows keep the old slots."""
    from mla_verify_sglang.defrag.holders import Holders

    rewrite = Holders.rewrite

    def without_rows(self, *args, **kwargs):
        table = self.req_to_token_pool.req_to_token.clone()
        rewrite(self, *args, **kwargs)
        self.req_to_token_pool.req_to_token.copy_(table)

    Holders.rewrite = without_rows


def wrong_order() -> None:
    """Rows are copied one after the other from the wrong end of each path."""
    from mla_verify_sglang.defrag.move import RowMover

    def move(self, moves, undo, point=None):
        for rows in self.rows:
            for source, target in zip(moves.src[::-1].tolist(), moves.dst[::-1].tolist(), strict=True):
                rows[target] = rows[source]

    RowMover.move = move


FAULTS = {"rows": forget_rows, "order": wrong_order}
