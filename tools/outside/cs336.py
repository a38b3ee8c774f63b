"""Functions of the project in $PROJECT under the names that the tests of a course's systems assignment call.

Put it in the place of tests/adapters.py, in the release of 2026 (9d95f3b) or of 2025 (e495ed7) of
https://github.com/stanford-cs336/assignment2-systems. The tests need einops, einx and jaxtyping. They use a fixed port,
so run one at a time. Choices are environment variables:

    DDP=torch    distributed.prepare_ddp_model           DDP=scratch     min_DDP_scratch.Reducer
    FSDP=helper  distributed.prepare_fsdp_model          FSDP=scratch    min_FSDP_scratch.ZeRO3 (float32 only)
                                                         FSDP=tree       the same, with the sums of min_Bitwise.py
    The sharded optimizer is min_ZeRO.ZeRO, and attention is that of one block of min_CP_ring.py.
"""

import math
import os
import sys

sys.path.insert(0, os.environ["PROJECT"])

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as helper

DDP = os.environ.get("DDP", "scratch")
FSDP = os.environ.get("FSDP", "scratch")


# ---- attention in blocks: the two functions that ring attention calls for each block -----------------------------


def get_flashattention_autograd_function_pytorch():
    from min_CP_ring import attend_to_block, gradients_of_block

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False):
            out, lse = attend_to_block(q[:, None], k[:, None], v[:, None], is_causal)  # one head
            ctx.causal = is_causal
            ctx.save_for_backward(q, k, v, out[:, 0], lse[:, 0])
            return out[:, 0].clone()

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, lse = (tensor[:, None] for tensor in ctx.saved_tensors)
            grads = gradients_of_block(grad[:, None].contiguous(), q, k, v, out, lse, ctx.causal)
            return *(each[:, 0] for each in grads), None

    return Attention


def get_flashattention_autograd_function_triton():
    raise NotImplementedError("needs a GPU")


# ---- DDP ----------------------------------------------------------------------------------------------------------


def make_ddp(module, bucket_mb):
    if DDP == "torch":
        return helper.prepare_ddp_model(module, bucket_cap_mb=max(bucket_mb, 1e-4))
    from min_DDP_scratch import Reducer

    return Reduced(module, Reducer(module, bucket_mb * 1e6))


class Reduced(nn.Module):
    """The tests want one module, whose gradients are averaged."""

    def __init__(self, module, reducer):
        super().__init__()
        self.module = module
        self.__dict__["reducer"] = reducer

    def forward(self, *inputs):
        return self.module(*inputs)


def after_backward(ddp_model, optimizer):
    if DDP == "scratch":
        ddp_model.reducer.wait()


def get_ddp(module):  # release of 2026: each gradient by itself
    return make_ddp(module, 0)


def get_ddp_individual_parameters(module):  # release of 2025
    return make_ddp(module, 0)


def get_ddp_bucketed(module, bucket_size_mb):  # release of 2025
    return make_ddp(module, bucket_size_mb)


def ddp_on_after_backward(*args, **kwargs):  # its arguments' names differ between the releases
    after_backward(*args, *kwargs.values())


ddp_individual_parameters_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    pass


# ---- ZeRO-1 -------------------------------------------------------------------------------------------------------


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from min_ZeRO import ZeRO

    return ZeRO(params, optimizer_cls, **kwargs)


# ---- FSDP ---------------------------------------------------------------------------------------------------------


class Whole:
    """What the tests see as `.module`: names, and parameters whose values and gradients are whole."""

    def __init__(self, plain, gather):
        self.plain = plain
        self.gather = gather

    def named_parameters(self):
        for name, (value, grad) in self.gather().items():  # all ranks call it in the same order
            param = nn.Parameter(value)
            param.grad = grad
            yield name, param

    def named_modules(self):
        return self.plain.named_modules()


class Helper(nn.Module):
    def __init__(self, module, compute_dtype):
        super().__init__()
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
        layers = tuple({type(child) for child in module.children() if type(child).__name__ in ("Linear", "Embedding")})
        self.sharded = helper.prepare_fsdp_model(module, blocks=layers, mp_policy=policy)
        self.__dict__["module"] = Whole(module, self.gather)

    def forward(self, x):
        return self.sharded(x)

    def finish(self):
        pass

    def gather(self):
        whole = {}
        for name, param in self.sharded.named_parameters():
            grad = None if param.grad is None else param.grad.full_tensor()
            whole[name] = (param.full_tensor().detach().clone(), grad)
        return whole


class InBlocks(nn.Module):
    """The assignment's toy model, with its layers in `blocks`, as ZeRO3 wants them."""

    def __init__(self, toy):
        super().__init__()
        self.embedding = toy.embedding
        first = nn.Sequential(toy.norm1, toy.linear1, nn.ReLU())
        self.blocks = nn.ModuleList([first, nn.Sequential(toy.norm2, toy.linear2)])
        self.lm_head = toy.lm_head

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class Scratch(nn.Module):
    def __init__(self, module, compute_dtype):
        super().__init__()
        import min_Bitwise
        import min_FSDP_scratch

        if FSDP == "tree":
            tree = min_Bitwise.reduce_scatter_by_halves
            min_FSDP_scratch.reduce_scatter_single = lambda part, vector, async_op: tree(part, vector)
        if compute_dtype is not None:
            import pytest

            pytest.skip("ZeRO3 has no mixed precision")
        self.names = {param: name for name, param in module.named_parameters()}
        self.__dict__["zero"] = min_FSDP_scratch.ZeRO3(InBlocks(module))
        self.__dict__["module"] = Whole(module, self.gather)

    def forward(self, x):
        return self.zero(x)

    def parameters(self, recurse=True):
        return iter(self.zero.pieces())

    def finish(self):
        self.zero.finish_backward()

    def gather(self):
        whole = {}
        n_ranks = torch_dist.get_world_size()
        for unit in self.zero.units:
            values, grads = [unit.own.new_empty(n_ranks * len(unit.own)) for _ in range(2)]
            torch_dist.all_gather(list(values.chunk(n_ranks)), unit.own)
            torch_dist.all_gather(list(grads.chunk(n_ranks)), unit.own_grad)
            start = 0
            for param in unit.params:
                shape = self._shapes[self.names[param]]  # the parameter itself is Freed
                stop = start + math.prod(shape)
                whole[self.names[param]] = (values[start:stop].view(shape), grads[start:stop].view(shape))
                start = stop
        return whole


def get_fsdp(module, compute_dtype=None):
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    model = (Helper if FSDP == "helper" else Scratch)(module, compute_dtype)
    model.__dict__["_shapes"] = shapes
    return model


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()


def fsdp_gather_full_params(fsdp_model):
    return {name: value for name, (value, grad) in fsdp_model.gather().items()}
