"""The weights at an image's borders, against sums over every tap of the filter."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.augment.crop import border_weights


def triangle(x: float) -> float:
    """Linear interpolation."""
    return max(0.0, 1 - abs(x))


def keys(x: float) -> float:
    """The cubic kernel as Keys (1981) writes it, a = -1/2."""
    x, a = abs(x), -0.5
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [(500, 224), (230, 224), (224, 224), (86, 224), (10, 224), (1, 8), (3, 2), (4001, 17)]
)
def test_factors_are_the_weights_beyond_the_border(before: int, after: int, bilinear: bool) -> None:
    """Guards against factors at the wrong pixels, without antialiasing's wider filter, or for one border only."""
    stretch = max(before / after, 1)
    reach = int(2 * stretch) + 2
    factors, kernel = border_weights(before, after, bilinear), triangle if bilinear else keys
    assert factors.shape == (2, after) and factors.dtype == np.float32
    for i in sorted({*range(min(after, 40)), *range(max(0, after - 40), after)}):
        centre = (i + 0.5) * before / after
        taps = range(int(centre) - reach, int(centre) + reach + 1)
        weight = {tap: kernel((tap + 0.5 - centre) / stretch) for tap in taps}
        inside = sum(weight[tap] for tap in taps if 0 <= tap < before)
        beyond = [sum(weight[tap] for tap in taps if tap < 0), sum(weight[tap] for tap in taps if tap >= before)]
        np.testing.assert_allclose(factors[:, i], np.divide(beyond, inside), rtol=1e-5, atol=1e-6, err_msg=f"pixel {i}")
    assert after < 100 or not factors[:, 95:129].any()
