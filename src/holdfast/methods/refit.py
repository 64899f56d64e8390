"""No training at all: the target's logit is fitted on the images there are, in seconds. What training has to beat.

The fit is that of every candidate (:mod:`holdfast.candidates.refit`), on the old weights: one direction of the image
tower's last layer, or the target's head where that tower is frozen. Predictions among protected classes stay as they
are; a protected class can lose images to the target alone.
"""

from __future__ import annotations

from holdfast.config.method import MethodConfig
from holdfast.data.round import Batch
from holdfast.methods.base import Method, StepOutput
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier


class RefitConfig(MethodConfig):
    """method.name = "refit": the target's logit alone is fitted anew; nothing is trained."""

    def trains(self) -> bool:
        """No step is made: the round goes on with its candidates at once."""
        return False


@register("refit", settings=RefitConfig)
class Refit(Method):
    """Has no steps; the round's candidates are all there is."""

    def __init__(self, model: Classifier, config: RefitConfig, steps: int) -> None:
        super().__init__(model)

    def check_trainable(self) -> None:
        """Nothing has to be."""

    def forward(self, batch: Batch) -> StepOutput:
        """Never called: see :meth:`RefitConfig.trains`."""
        raise NotImplementedError("the method refit makes no steps")
