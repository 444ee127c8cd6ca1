"""Rotary frequencies for sequences longer than those a model was trained on. No torch here.

    linear     all frequencies divided by the factor            Chen et al., arXiv 2306.15595
    dynamic    a larger base, once a sequence is longer         "NTK-aware", Peng et al., arXiv 2309.00071,
               than the original                                section 3.1 and appendix
    yarn       high frequencies kept, low ones divided,         Peng et al., arXiv 2309.00071, section 3.2
               a ramp in between; scores are scaled
    longrope   a divisor for each frequency, one list for       Ding et al., arXiv 2402.13753
               short and one for long sequences
    llama3     as yarn, with the ramp over wavelengths          Grattafiori et al., arXiv 2407.21783

Frequencies are in radians per position. The computations are those of the models' reference
implementations, so that imported weights give their logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field

from myriad.config import Config

__all__ = ["Rotary", "RotaryScaling"]

_Divisor = Annotated[float, Gt(0), Le(1e6)]


class RotaryScaling(Config):
    """Scaling of the rotary frequencies."""

    kind: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = "none"
    """How the rotary frequencies are scaled for sequences longer than rotary_scaling.original_sequence."""
    factor: float = Field(1.0, ge=1, le=2**20)
    """Ratio of the new to the original length (all kinds)."""
    original_sequence: int | None = Field(None, ge=2, le=2**30)
    """Sequence length before scaling; off: none, for linear only."""
    attention_factor: float | None = Field(None, gt=0, le=100)
    """Factor of rotated queries and of rotated keys (yarn, longrope). off: 0.1 ln(factor) + 1 for yarn,
    sqrt(1 + ln(factor) / ln(original_sequence)) for longrope."""
    mscale: float | None = Field(None, gt=0, le=100)
    """yarn, with mscale_all_dim, for attention_factor = off: the factor is (0.1 mscale ln(factor) + 1) /
    (0.1 mscale_all_dim ln(factor) + 1) (DeepSeek)."""
    mscale_all_dim: float | None = Field(None, gt=0, le=100)
    """yarn, with model.kv_lora_rank: attention scores are multiplied by (0.1 mscale_all_dim ln(factor) +
    1)^2 (DeepSeek). off: by 1."""
    beta_fast: float = Field(32.0, gt=0, le=1e6)
    """yarn: a frequency with more rotations than this in the original sequence is kept."""
    beta_slow: float = Field(1.0, gt=0, le=1e6)
    """yarn: a frequency with fewer rotations than this in the original sequence is divided by the factor."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole frequencies."""
    low_frequency_factor: float = Field(1.0, gt=0, le=1e6)
    """llama3: frequencies with fewer rotations in the original sequence are divided by the factor."""
    high_frequency_factor: float = Field(4.0, gt=0, le=1e6)
    """llama3: frequencies with more rotations in the original sequence are kept."""
    short_factors: tuple[_Divisor, ...] = ()
    """longrope: divisors of the frequencies, one for each pair of a head, up to original_sequence."""
    long_factors: tuple[_Divisor, ...] = ()
    """longrope: divisors of the frequencies for longer sequences."""

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and of rotated keys; 1.0 for most kinds."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.kind == "yarn" and self.mscale is not None and self.mscale_all_dim is not None:
            return self._yarn_magnitude(self.mscale) / self._yarn_magnitude(self.mscale_all_dim)
        if self.kind == "yarn":
            return self._yarn_magnitude(1.0)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_sequence or 2))

    @property
    def score_factor(self) -> float:
        """Factor of attention scores beyond that of queries and keys, in models with latent attention."""
        if self.kind != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return self._yarn_magnitude(self.mscale_all_dim) ** 2

    def _yarn_magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def decisive_length(self, length: int) -> int:
        """Return a length that stands for all with the same frequencies as ``length``."""
        original = self.original_sequence or length
        if self.kind not in ("dynamic", "longrope") or length <= original:
            return 0
        return length if self.kind == "dynamic" else original + 1

    def scaled(self, frequencies: Sequence[float], base: float, length: int) -> list[float]:
        """Return the scaled frequencies of the pairs of a head, for a sequence of ``length`` positions.
        ``frequencies``: ``base ** (-2 i / D)`` for pair ``i`` of ``D / 2``."""
        if self.kind == "linear":
            return [each / self.factor for each in frequencies]
        if self.kind == "dynamic":
            return self._dynamic(frequencies, base, length)
        if self.kind == "yarn":
            return self._yarn(frequencies, base)
        if self.kind == "longrope":
            long = self.original_sequence is not None and length > self.original_sequence
            divisors = self.long_factors if long else self.short_factors
            return [each / divisor for each, divisor in zip(frequencies, divisors, strict=True)]
        return [self._llama3(each) for each in frequencies] if self.kind == "llama3" else [*frequencies]

    def _dynamic(self, frequencies: Sequence[float], base: float, length: int) -> list[float]:
        original, width = self.original_sequence or length, 2 * len(frequencies)
        stretch = self.factor * max(length, original) / original - (self.factor - 1)
        larger = base * stretch ** (width / (width - 2)) if width > 2 else base
        return [larger ** -(2 * pair / width) for pair in range(len(frequencies))]

    def _yarn(self, frequencies: Sequence[float], base: float) -> list[float]:
        low, high = self._yarn_bounds(base, len(frequencies))
        scaled = []
        for pair, each in enumerate(frequencies):
            ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
            scaled.append(each / self.factor * ramp + each * (1 - ramp))
        return scaled

    def _yarn_bounds(self, base: float, pairs: int) -> tuple[float, float]:
        """Return the indices of the rotary pairs between which scaling sets in: frequencies of pairs below
        the first are kept, those above the second are divided by the factor."""
        original = self.original_sequence or 2

        def pair_with(rotations: float) -> float:
            return pairs * math.log(original / (rotations * 2 * math.pi)) / math.log(base)

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        return low, high + 0.001 if low == high else high

    def _llama3(self, frequency: float) -> float:
        rotations = (self.original_sequence or 2) * frequency / (2 * math.pi)
        if rotations > self.high_frequency_factor:
            return frequency
        if rotations < self.low_frequency_factor:
            return frequency / self.factor
        width = self.high_frequency_factor - self.low_frequency_factor
        kept = (rotations - self.low_frequency_factor) / width
        return (1 - kept) * frequency / self.factor + kept * frequency


_UNSCALED = RotaryScaling()


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary positions of a layer's heads."""

    base: float
    width: int
    """Head size in values."""
    rotated: int | None = None
    """Number of leading values of a head that are rotated, an even number; ``None``: all."""
    scaling: RotaryScaling = _UNSCALED
