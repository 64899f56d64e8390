"""No training, and more than the target's refit: the logits of all classes, fitted in the last layer, in seconds.

The fit is :mod:`holdfast.candidates.last_layer`: labelled images of protected classes raise these classes a little,
near the old model, and make room for the target. Candidates are interpolations from the old weights to the fit, and
the target's refit (:mod:`holdfast.methods.refit`) beside them. `holdfast develop --quick` is this method.
"""

from __future__ import annotations

from holdfast.methods.refit import Refit, RefitConfig
from holdfast.methods.registry import register


class LastLayerConfig(RefitConfig):
    """method.name = "last_layer": all logits are fitted anew in the last layer; nothing is trained."""

    def fits_last_layer(self) -> bool:
        """That is the method."""
        return True


@register("last_layer", settings=LastLayerConfig)
class LastLayer(Refit):
    """Has no steps; the round's candidates are all there is."""
