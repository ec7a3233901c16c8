"""mla-verify frag: what it shows, what it asks a server to do, and what it says of servers that are something else."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mla_verify_bench import cli, frag
from mla_verify_bench.longctx.misbehaving import MisbehavingServer

REPORT = {
    "mode": {"idle": False, "budget": 0, "steps": 256},
    "off": False,
    "counters": {"runs": 0, "moved_tokens": 0, "moved_bytes": 0, "seconds": 0.0, "postponed": 2, "failed": 0},
    "fragmentation": {
        "tokens": 600, "runs": 300, "long_tokens": 0, "free_tokens": 400, "free_runs": 299, "largest_free": 90,
        "runs_per_1000": 500.0, "long_share": 0.0,
    },
    "picture": {"units": 10, "held": [6] * 100, "runs": [3] * 100},
    "row_bytes": 1152,
}  # fmt: skip


def changed(**values) -> dict:
    """The report with some fields of its parts replaced: ``counters__runs=1``; ``part=None`` drops the part."""
    report = copy.deepcopy(REPORT)
    for name, value in values.items():
        part, _, field = name.partition("__")
        if field:
            report[part][field] = value
        elif value is None:
            del report[part]
        else:
            report[part] = value
    return report


AFTER = changed(
    counters__runs=1, counters__moved_tokens=600, counters__moved_bytes=691_200,
    fragmentation__runs=2, fragmentation__long_tokens=600, fragmentation__free_runs=1, fragmentation__largest_free=400,
)  # fmt: skip


class Server:
    """``with Server(before, after) as url``: /server_info says ``before`` until it is told to rearrange. A string is
    sent as it is, a number as a status."""

    def __init__(self, before, after=None, takes=(True,), key: str = "") -> None:
        self.says, self.after, self.takes, self.key = before, after, list(takes), key
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                says = owner.says
                if isinstance(says, dict):
                    says = {"version": "0.5.17", "internal_states": [{"max_total_num_tokens": 1000, frag.KEY: says}]}
                self.send(says if self.path == "/server_info" else 404)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert (self.path, asked) == ("/set_internal_state", {"server_args": {frag.KEY: 1}})
                owner.says = owner.after or owner.says
                self.send(owner.takes)

            def send(self, what) -> None:
                if owner.key and self.headers.get("authorization") != f"Bearer {owner.key}":
                    what = 401
                body = what if isinstance(what, str) else json.dumps(what)
                self.send_response(what if isinstance(what, int) else 200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.http.server_port}"

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()


def test_before_and_after(capsys, tmp_path):
    with Server(REPORT, AFTER) as url:
        assert cli.main(["frag", "--base-url", url]) == 0
        shown = capsys.readouterr().out
        assert "600 tokens in 300 runs: 500 runs per 1,000 tokens" in shown and "now, rank 0" in shown
        assert cli.main(["frag", "--base-url", url, "--run", "--picture", str(tmp_path / "pool.svg")]) == 0
        shown = capsys.readouterr().out
        before, after = shown.split("after, rank 0")
        assert "300 runs" in before and "100 % of tokens in runs of 64 or more" in after and "0.7 MB" in after
        assert "</svg>" in (tmp_path / "pool.svg").read_text()


def test_json(capsys):
    with Server(REPORT, AFTER) as url:
        assert cli.main(["frag", "--base-url", url + "/", "--run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told[when][0]["fragmentation"]["runs"] for when in ("before", "after")] == [300, 2]


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (changed(), 0),  # there was nothing to move
        (changed(counters__postponed=3), 1),
        (changed(counters__failed=1, off=True), 1),
        (changed(counters__postponed=3, fragmentation=None, not_now="3 pages belong to no known holder"), 1),
    ],
)
def test_a_pool_that_was_not_rearranged(after, code, capsys):
    with Server(REPORT, after) as url:
        assert cli.main(["frag", "--base-url", url, "--run"]) == code
    assert after.get("not_now", "") in capsys.readouterr().out


def test_api_key(monkeypatch):
    with Server(REPORT, key="abc") as url:
        with pytest.raises(RuntimeError, match="--api-key"):
            frag.fetch(url)
        assert frag.fetch(url, "abc")
        monkeypatch.setenv("MLA_VERIFY_API_KEY", "abc")
        assert cli.main(["frag", "--base-url", url, "--json"]) == 0


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (404, "HTTP 404; expected an SGLang server"),
        ("<html>", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no internal_states"),
        ('{"internal_states": [{"max_total_num_tokens": 5}, 3]}', "MLA_VERIFY_DEFRAG=demand"),
        (changed(counters=None), "counters"),
        (changed(counters__runs=-1), "counters.runs"),
        (changed(counters__seconds="NaN"), "counters.seconds"),
        (changed(fragmentation__tokens=1 << 70), "fragmentation.tokens"),
        (changed(picture__held=[1] * 5000), "picture.held"),
        (changed(picture__held=[1] * 5), "picture"),
        (changed(picture__units=0), "picture.units"),
        ('{"a": "' + "x" * (9 << 20) + '"}', "more than"),
    ],
)  # fmt: skip
def test_another_kind_of_server(says, sentence, capsys):
    with Server(says) as url:
        assert cli.main(["frag", "--base-url", url]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and len(error) < 500


def test_no_server_and_one_that_does_not_defragment(capsys):
    with Server(REPORT) as url:
        pass
    assert cli.main(["frag", "--base-url", url]) == 2
    assert "is the server up?" in capsys.readouterr().err
    assert cli.main(["frag", "--base-url", "localhost:30000"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err
    with MisbehavingServer() as server:
        assert cli.main(["frag", "--base-url", server.url]) == 2
    assert "no internal_states" in capsys.readouterr().err
    with Server(REPORT, takes=(False,)) as url:
        assert cli.main(["frag", "--base-url", url, "--run"]) == 2
    assert "did not take the request" in capsys.readouterr().err


def test_an_empty_pool_and_a_server_without_a_picture(capsys, tmp_path):
    empty = changed(fragmentation__tokens=0, fragmentation__runs=0, picture={"units": 1, "held": [], "runs": []})
    with Server(empty) as url:
        assert cli.main(["frag", "--base-url", url]) == 0
    assert "0 tokens in 0 runs: 0 runs per 1,000 tokens" in capsys.readouterr().out
    with Server(changed(picture=None)) as url:
        assert cli.main(["frag", "--base-url", url, "--picture", str(tmp_path / "pool.svg")]) == 2
    assert "nothing to draw" in capsys.readouterr().err
