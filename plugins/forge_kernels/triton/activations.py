"""Activations and their derivatives."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return the activation of x and its derivative, in float32."""
    if KIND == "gelu":  # x · sigmoid(2 · 0.79788 (x + 0.044715 x³)), with log2(e) in the constants
        square = x * x
        exponent = x * (-2.3022081983379436 - 0.10294324084050272 * square)
        root = tl.rsqrt(1 + tl.exp2(exponent))  # squaring it is cheaper than a division
        share = root * root
        value = x * share
        slope = share + value * (1 - share) * (1.5957691216057308 + 0.2140644488178007 * square)
    elif KIND == "gelu_erf":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    elif KIND == "relu":  # NaN stays NaN
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share * (1 + x * (1 - share))
    else:
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return value, slope
