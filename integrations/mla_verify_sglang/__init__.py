"""mla_verify as an attention backend of SGLang: ``--attention-backend mla_verify``.

``plugin`` is the entry point that SGLang loads, ``backend`` the attention backend, ``refusals`` what it
cannot serve and says so at start, ``compat`` where SGLang releases differ. Importing this package loads none
of them.
"""

BACKEND_NAME = "mla_verify"
