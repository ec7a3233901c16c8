"""A stand-in for sgl_kernel on a machine with no GPU: what SGLang's CPU engine imports, in plain torch.

PyPI has sgl_kernel for CUDA alone. Written from SGLang's call sites; it registers no
``torch.ops.sgl_kernel``, so SGLang finds no AMX kernels and stays on torch. Slots and lengths are small here,
hence loops over requests.
"""

import torch


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, width):
    """Write ``slots``, request after request, to columns starts:ends of each request's row of ``table``."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, width):
    """The reverse: read those columns into ``slots``."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[done : done + end - start] = table[row, start:end].to(slots.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(rows, table, lens, slots, width, topk, steps):
    """The ``topk * steps`` slots behind each request's tokens."""
    count = topk * steps
    for i, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        slots[i * count : (i + 1) * count] = table[row, length : length + count].to(slots.dtype)


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    """Copy K/V rows in every layer; the pools are given as addresses. All reads come first."""
    import ctypes

    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for base, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted):
    """The slots of the accepted nodes; -1 in ``accept_index`` is no node."""
    nodes = accept_index.flatten()
    nodes = nodes[nodes >= 0].long()
    accepted[: nodes.numel()] = slots[nodes]


def fill_bonus_tokens_cpu(tokens, counts, bonus, stride):
    """The last accepted token of each request."""
    last = torch.arange(counts.numel()) * stride + counts.long() - 1
    bonus.copy_(tokens.flatten()[last].to(bonus.dtype))


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,  # SGLang calls by these names, spelt like this
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from its root along the children that the target's argmax agrees with."""
    target = target_predict.flatten()
    for b in range(accept_index.shape[0]):
        node, steps = 0, 0
        accept_index[b, 0] = here = int(retrive_index[b, 0])
        while steps + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[b, node])
            while child != -1 and int(candidates[b, child]) != int(target[here]):
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[here] = target[here]
            node, steps, here = child, steps + 1, int(retrive_index[b, child])
            accept_index[b, steps] = here
        accept_token_num[b] = steps
        predicts[here] = target[here]


def build_tree_kernel_efficient_cpu(
    parents, selected, lens, mask, positions, index, next_token, next_sibling, topk, depth, nodes, mode
):
    """EAGLE's trees from its candidates: ``selected`` [requests, nodes - 1], ``topk`` of them a row of ``parents``.

    The mask is QLEN_ONLY, [requests, nodes, nodes].
    """
    assert int(mode) == 1, f"tree_mask_mode is {mode}; the stand-in writes QLEN_ONLY alone"
    seen = mask[: len(lens) * nodes * nodes].view(len(lens), nodes, nodes)
    seen.zero_()
    for b, (chosen, above) in enumerate(zip(selected.tolist(), parents.tolist(), strict=True)):
        parent = [-1]
        for candidate in chosen[: nodes - 1]:
            row = candidate // topk
            parent.append(0 if row == 0 else chosen.index(above[row]) + 1)
        for node in range(nodes):
            here, steps = node, 0
            while here != -1:
                seen[b, node, here] = True
                here, steps = parent[here], steps + 1
            positions[b * nodes + node] = lens[b] + steps - 1
            index[b, node] = b * nodes + node
        for node in range(nodes - 1, 0, -1):
            next_sibling[b, node] = next_token[b, parent[node]]
            next_token[b, parent[node]] = node


def _missing(name):
    def call(*args, **kwargs):
        raise NotImplementedError(f"the sgl_kernel stand-in has no {name}; multi-layer EAGLE needs a GPU")

    return call


rotate_input_ids_cpu = _missing("rotate_input_ids_cpu")
