"""MLA verify attention: many draft-tree nodes of a request against one long, shared latent prefix.

``verify`` is the one call; ``Slots`` says where a request's tokens lie in the K/V pool, ``Tree`` which draft
nodes see which. Plain decode is a tree of one node, a chain of speculated tokens is a tree without branches.
Implementations load when they are used: importing this package needs torch alone.
"""

from .op import HEAD_DIM, LATENT_DIM, ROPE_DIM, choose, implementations, verify
from .slots import Slots
from .tree import MAX_NODES, Tree

__all__ = [
    "HEAD_DIM",
    "LATENT_DIM",
    "MAX_NODES",
    "ROPE_DIM",
    "Slots",
    "Tree",
    "choose",
    "implementations",
    "verify",
]
