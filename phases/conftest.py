"""On a machine with no GPU, Triton kernels run in its interpreter; that is decided before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
