"""How far two colours are apart for eyes that miss a kind of cones.

Without a cone: Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of color vision
deficiency" (IEEE TVCG 15(6), 2009), table 1, severity 1.0, on linear RGB. Apart: CIEDE2000 (Sharma, Wu,
Dalal, "The CIEDE2000 color-difference formula", Color Research and Application 30(1), 2005).
"""

from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

import numpy as np
from numpy.typing import NDArray

__all__ = ["EYES", "lightness", "seen_apart"]

Matrix = NDArray[np.float64]
EYES: dict[str, Matrix] = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
"""Of linear sRGB."""


def _lab(colour: str, eyes: str) -> tuple[float, float, float]:
    shown = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    xyz = _XYZ @ np.clip(EYES[eyes] @ linear, 0, 1) / (_XYZ @ np.ones(3))
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return float(116 * y - 16), float(500 * (x - y)), float(200 * (y - z))


def lightness(colour: str, eyes: str) -> float:
    """0 to 100."""
    return _lab(colour, eyes)[0]


def seen_apart(one: str, other: str, eyes: str) -> float:
    """CIEDE2000; some two are just seen to differ."""
    (l1, a1, b1), (l2, a2, b2) = _lab(one, eyes), _lab(other, eyes)
    mean = ((hypot(a1, b1) + hypot(a2, b2)) / 2) ** 7
    grey = 1.5 - 0.5 * sqrt(mean / (mean + 25**7))
    c1, c2 = hypot(grey * a1, b1), hypot(grey * a2, b2)
    h1, h2 = (degrees(atan2(b, grey * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    light, c = (l1 + l2) / 2, (c1 + c2) / 2
    t = 1 - 0.17 * cos(radians(hue - 30)) + 0.24 * cos(radians(2 * hue))
    t += 0.32 * cos(radians(3 * hue + 6)) - 0.2 * cos(radians(4 * hue - 63))
    of_l = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / sqrt(20 + (light - 50) ** 2))
    of_c = (c2 - c1) / (1 + 0.045 * c)
    of_h = 2 * sqrt(c1 * c2) * sin(radians(turn / 2)) / (1 + 0.015 * c * t)
    blue = 60 * exp(-(((hue - 275) / 25) ** 2))
    return sqrt(
        of_l**2 + of_c**2 + of_h**2 - 2 * sqrt(c**7 / (c**7 + 25**7)) * sin(radians(blue)) * of_c * of_h
    )
