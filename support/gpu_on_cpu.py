"""
What a GPU would do, done by tensors that say they are on a CPU: torch without CUDA runs no backward pass for
others. For memory estimates only.
"""

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# What CUDA's autocast computes in float32 and the CPU's does not:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32; square() is made of
# pow()
FLOAT32 = set('''__pow__ __rpow__ __rdiv__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh
cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm
hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp
margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm normalize pdist
poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax
softmin softplus square sum tan triplet_margin_loss vector_norm'''.split())


class GPUFunctions(TorchFunctionMode):

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, '__name__', ''), kwargs or {}
        if name in FLOAT32 and torch.is_autocast_enabled('cpu'):
            args = [to_float32(value) for value in args]
            kwargs = {key: to_float32(value) for key, value in kwargs.items()}
        if name == 'backward':
            return self.backward(*args)
        func = KEEPS_OTHER_THINGS.get(name, func)
        return func(*args, **kwargs)

    def backward(self, loss, *options):
        """loss.backward() with this mode on, as checkpointing computes the forward pass once more in there. A
        mode is off while it handles a function, so the engine is called itself."""
        with self:
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def to_float32(value):
    is_low = torch.is_tensor(value) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_low else value


def dropout(x, p=0.5, training=True, inplace=False):
    """With a mask of bools."""
    return torch.native_dropout(x, p, training)[0] if p > 0 else x


def rms_norm(x, shape, weight=None, eps=None):
    """In one kernel, which keeps its input, as layer_norm does."""
    return F.layer_norm(x, shape, weight)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
              enable_gqa=False):
    """Its dropout keeps a seed, so nothing."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale,
                                          enable_gqa=enable_gqa)


KEEPS_OTHER_THINGS = {'dropout': dropout, 'rms_norm': rms_norm, 'scaled_dot_product_attention': attention}
