"""A compressor as its user writes it: this one file, nothing else anywhere."""

from dataclasses import dataclass

import numpy as np

from hansa.compress import Coder


@dataclass(frozen=True, slots=True)
class ternary(Coder):
    """C(x) = s t with t = sign(x) where |x| > threshold * mean |x|, else 0, and s the mean magnitude kept."""

    threshold: float = 0.7

    def payload(self, x, key):
        size = np.abs(x)
        kept = size > self.threshold * size.mean()
        scale = size[kept].mean() if kept.any() else x.dtype.type(0)
        return [scale.astype(x.dtype).tobytes(), np.packbits(kept), np.packbits(kept & (x < 0))]

    def read(self, payload, dim, dtype):
        scale = np.frombuffer(payload, dtype, 1)[0]
        bits = np.frombuffer(payload[dtype.itemsize :], np.uint8).reshape(2, -(-dim // 8))
        kept, negative = np.unpackbits(bits, axis=1, count=dim)
        return scale * (kept.astype(dtype) - 2 * negative.astype(dtype))

    def max_payload(self, dim, itemsize):
        return itemsize + 2 * -(-dim // 8)
