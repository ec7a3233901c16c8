"""NGRAM's helper: positions and tree links from the draft trees' masks."""

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask, seq_lens, positions, retrieve_index, next_token, next_sibling, batch, nodes
):
    """Fill the outputs from ``tree_mask`` [batch, nodes, nodes]; a node's parent is its latest ancestor."""
    order = torch.arange(nodes)
    ancestors = tree_mask.view(batch, nodes, nodes).bool() & (order[None] < order[:, None])
    positions.view(batch, nodes).copy_(ancestors.sum(-1) + seq_lens[:, None])
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    parents = torch.where(ancestors, order, -1).amax(-1).tolist()
    for b, parent in enumerate(parents):
        first_child, sibling = [-1] * nodes, [-1] * nodes
        for node in reversed(range(nodes)):
            if parent[node] >= 0:
                sibling[node] = first_child[parent[node]]
                first_child[parent[node]] = node
        next_token[b] = torch.tensor(first_child)
        next_sibling[b] = torch.tensor(sibling)
