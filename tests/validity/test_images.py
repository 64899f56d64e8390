"""With images counted as images, false certificates stay at or below δ; without, they do not.

Reduced draws here; with all figures by `python benchmarks/images.py`.
"""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as the script itself finds `validity`

from benchmarks import images

DRAWS = 600


def allowed(draws: int) -> float:
    """δ plus four binomial standard deviations."""
    return images.DELTA + 4 * math.sqrt(images.DELTA * (1 - images.DELTA) / draws)


@pytest.mark.parametrize("simulated", [images.memorised, images.copies, images.new_sets])
def test_false_certificates_without_and_with_the_rule(simulated: object) -> None:
    found = simulated(DRAWS)  # type: ignore[operator]
    without = found.pop("without the rule")
    assert without > images.DELTA + 2 * math.sqrt(images.DELTA * (1 - images.DELTA) / DRAWS)
    assert all(rate <= allowed(DRAWS) for rate in found.values()), found


def test_a_limit_on_the_queries_of_each_image_is_not_enough() -> None:
    found = images.pooled(60)
    assert found["a limit for each image"] > 0.2
    assert found["with the rule"] <= images.DELTA
