"""``mla-verify plan``: how SGLang divides a card's memory at start-up, and which settings serve a context.

model.py    what a config.json says of a model and of a draft
memory.py   every term, the pool, the feasible ``--mem-fraction-static``, the smallest change where there is none
log.py      the same numbers out of a start-up log
picture.py  one card's memory, drawn
cli.py      the command
"""
