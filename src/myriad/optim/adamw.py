"""AdamW (Loshchilov & Hutter 2019). Every element moves by itself, so sharding changes nothing."""

from myriad.optim.moments import Moments

__all__ = ["AdamW"]


class AdamW(Moments):
    """One fused kernel over the regions that decay, one over the others."""

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        """Gradients count ``gradient_scale`` times; their memory is overwritten."""
        divisor = self.divisor(gradient_scale)
        self.move_in_place(learning_rate, divisor, decays=True)
        self.move_in_place(learning_rate, divisor, decays=False)
        self.steps_done += 1
