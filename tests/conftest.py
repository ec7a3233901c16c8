"""On a machine with no GPU, Triton kernels run in its interpreter; that is decided before they are imported."""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A job in a shell's background starts with Ctrl-C ignored, and so would what the tests of Ctrl-C start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
