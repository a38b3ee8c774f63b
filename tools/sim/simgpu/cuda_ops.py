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


library = torch.library.Library("aten", "IMPL")
for name, function in {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
}.items():
    library.impl(name, function, "PrivateUse1")
