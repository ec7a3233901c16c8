"""Decode speed of a running server by context depth: ``mla-verify bench longctx``.

| module | in -> out |
|---|---|
| prompts | seed, depth -> a prompt that no server has seen |
| client | prompt -> one streamed reply with the server's own token counts |
| cells | replies -> one cell: its figures, and why it can't be trusted where it can't |
| run | grid -> cells.jsonl, resumable |
| server | flags -> a real SGLang on 127.0.0.1, stopped again |
| report | cells -> table, plot, comparison |
"""
