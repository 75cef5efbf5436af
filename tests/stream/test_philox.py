"""Random numbers are a pure function, and a good one."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.stream.philox import Stream, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: int, expected: list[int]) -> None:
    """Guards against a generator that only looks like Philox4x32-10 (known answers: the Random123 distribution)."""
    assert philox4x32(np.array(counter, dtype=np.uint64), key).tolist() == expected


def test_numbers_depend_on_every_argument_and_on_nothing_else() -> None:
    """Guards against two samples, epochs, seeds or uses that share their random numbers, and against batch effects."""
    one = uniforms(Stream.CROP_AND_FLIP, 5, np.array([2]), np.array([7]), 23)
    batch = uniforms(Stream.CROP_AND_FLIP, 5, np.full(100, 2), np.arange(100), 23)
    assert np.array_equal(batch[7:8], one)
    others = [
        uniforms(Stream.STOCHASTIC_DEPTH, 5, np.array([2]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 6, np.array([2]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 5, np.array([3]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 5, np.array([2]), np.array([7 + 2**32]), 23),
    ]
    assert not any(np.isin(other, one).any() for other in others)
    assert 0 <= batch.min() and batch.max() < 1 and abs(batch.mean() - 0.5) < 0.02
