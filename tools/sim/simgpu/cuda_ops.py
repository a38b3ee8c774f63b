"""Operators that torch has for GPUs alone, with the shapes that they have there, made of the CPU's operators."""

import torch
from torch.nn import functional as F

aten = torch.ops.aten


def efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """The logsumexp is padded to a multiple of 32 queries, as CUDA's."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    seed = torch.zeros((), dtype=torch.long, device=query.device)
    if not compute_log_sumexp:
        return out, lse.new_empty((*lse.shape[:2], 0)), seed, seed.clone()
    return out, F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf")).contiguous(), seed, seed.clone()


def efficient_attention_backward(
    grad, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    if logsumexp.shape[2] % 32 or not logsumexp.is_contiguous():
        raise RuntimeError("the logsumexp must be contiguous and padded to a multiple of 32 queries")
    lse = logsumexp[:, :, : query.shape[2]]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    return (*grads, torch.Tensor())


def lstm_cell(input_gates, hidden_gates, cell, input_bias=None, hidden_bias=None):
    """Returns the new hidden state, the new cell, and the gates, which the backward needs."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * cell + i * g
    return o * new_cell.tanh(), new_cell, torch.cat([i, f, g, o], dim=1)


def lstm_cell_backward(grad_hidden, grad_cell, cell, new_cell, gates, has_bias):
    """Returns the gradients of the gates, of the cell and of the bias."""
    i, f, g, o = gates.chunk(4, dim=1)
    tanh = new_cell.tanh()
    through_cell = torch.zeros_like(cell) if grad_cell is None else grad_cell
    grad_o = torch.zeros_like(o)
    if grad_hidden is not None:
        through_cell = through_cell + grad_hidden * o * (1 - tanh**2)
        grad_o = grad_hidden * tanh * o * (1 - o)
    grad_i = through_cell * g * i * (1 - i)
    grad_f = through_cell * cell * f * (1 - f)
    grad_g = through_cell * i * (1 - g**2)
    grad_gates = torch.cat([grad_i, grad_f, grad_g, grad_o], dim=1)
    return grad_gates, through_cell * f, grad_gates.sum(0) if has_bias else torch.Tensor()


library = torch.library.Library("aten", "IMPL")
for name, function in {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
}.items():
    library.impl(name, function, "PrivateUse1")
