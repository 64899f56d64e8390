"""The candidates of a round: models between the old weights and what was found, and what dev images say of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.artifacts import write_predictions
from holdfast.candidates.crossfit import Folds, counted_images, make_folds
from holdfast.candidates.generate import CandidateModels
from holdfast.candidates.last_layer_models import LastLayerFits, LastLayerModels
from holdfast.candidates.select import (
    AS_TRAINED,
    LAST_LAYER,
    LAST_LAYER_CONSTRAINED,
    LAST_LAYER_REFIT,
    ON_CHECKPOINT,
    UNTRAINED,
    Candidate,
)
from holdfast.data.round import LabelledSet
from holdfast.model.classifier import Classifier
from holdfast.model.feature_store import MemoryStore
from holdfast.rounds.prepare import view_settings
from holdfast.shared import is_sharing
from holdfast.stages import stage

if TYPE_CHECKING:
    from holdfast.rounds.round import Round


class CandidateMaker:
    """Makes a round's candidates and their weights. Those of one lambda share a tower, and one pass of it."""

    def __init__(self, round_: Round) -> None:
        self._round, self._config, self._data = round_, round_.config, round_.data
        self.folds = self._deal()  # images that teach a refit and are counted out of fold; None where none are
        self._models: dict[str, CandidateModels] = {}  # by checkpoint: the last one that was asked for
        self._untrained: CandidateModels | None = None
        self._last_layer: LastLayerFits | None = None
        self._fitted: dict[str, LastLayerModels] = {}
        self._on_checkpoint: dict[str, LastLayerModels] = {}  # as _models
        self._without_training: dict[str, list[Candidate]] = {}  # scored once, by what they are called

    def refits(self, step: str) -> list[Candidate]:
        """Candidates at lambda 0, the target refitted: the same for every checkpoint, and listed under ``step``."""
        if 0.0 not in self._config.lambdas:
            return []
        if "refit" not in self._without_training:
            stage("refitting the target")
            self._without_training["refit"] = self._scored(step, 0.0, self.refitted())
        return [replace(candidate, step=step) for candidate in self._without_training["refit"]]

    def of_last_layer(self) -> list[Candidate]:
        """Interpolations towards the fit of all logits in the last layer."""
        if "last layer" not in self._without_training:
            self._without_training["last layer"] = self._fit_last_layer()
        return self._without_training["last layer"]

    def from_checkpoint(self, step: str) -> list[Candidate]:
        """Interpolations of the old weights with a checkpoint, without those at lambda 0, and the checkpoint itself: as
        it was trained and, where its image tower moved, with all logits fitted anew on top."""
        stage(f"making candidates from {step}")
        config = self._config.candidates
        kept = MemoryStore()  # one pass of the checkpoint's tower serves them all
        lambdas = [lam for lam in self._config.lambdas if lam > 0]
        made: list[Candidate] = []
        for lam in lambdas:
            made += self._scored(step, lam, self.towards(step), kept=kept if lam == 1 else MemoryStore())
        if config.as_trained:
            made += self._scored(step, 1.0, self.as_trained(step), variant=AS_TRAINED, kept=kept)
        if self._fits_on_checkpoints():
            stage(f"fitting the last layer of {step}")
            for lam in lambdas:
                made += self._scored(step, lam, self.on_checkpoint(step), variant=ON_CHECKPOINT, kept=kept)
        return made

    def model(self, candidate: Candidate) -> Classifier:
        """The weights of a candidate."""
        with self._round.keeping(still=not candidate.is_trained):
            if candidate.step in UNTRAINED:
                return self._of_fits(candidate.step).model(candidate.lam, candidate.bias)
            if candidate.variant == AS_TRAINED:
                return self.as_trained(candidate.step).model(candidate.lam, candidate.bias)
            if candidate.variant == ON_CHECKPOINT:
                return self.on_checkpoint(candidate.step).model(candidate.lam, candidate.bias)
            models = self.towards(candidate.step) if candidate.lam > 0 else self.refitted()
            return models.model(candidate.lam, candidate.bias)

    def refitted(self) -> CandidateModels:
        """Models at lambda 0."""
        if self._untrained is None:
            self._untrained = self._models_towards(None)
        return self._untrained

    def _fit_last_layer(self) -> list[Candidate]:
        config = self._config
        lambdas = [lam for lam in config.candidates.lambdas if lam > 0]
        if not (lambdas and config.fits_last_layer and self._fits().possible()):
            return []
        stage("fitting the last layer")
        made: list[Candidate] = []
        for step in (LAST_LAYER_CONSTRAINED,) if self._fits().constrained else (LAST_LAYER, LAST_LAYER_REFIT):
            for lam in lambdas:
                made += self._scored(step, lam, self._of_fits(step))
        return made

    def _scored(
        self,
        step: str,
        lam: float,
        models: CandidateModels | LastLayerModels,
        *,
        variant: str = "",
        kept: MemoryStore | None = None,
    ) -> list[Candidate]:
        """The candidates of one lambda."""
        stage(f"scoring candidates at lambda {lam:g} on dev images")
        round_, trained = self._round, lam > 0 and step not in UNTRAINED
        with round_.keeping(still=not trained, moved=kept):
            examples, old = self._counted(trained)
            tables = models.predictions(lam, examples, self._config.evaluate.batch)
        made: list[Candidate] = []
        for bias, table in zip(models.biases, tables, strict=True):
            candidate = Candidate(step, lam, round_.compare(old, table), bias, variant=variant)
            if round_.runtime.is_main:
                dev = table.slice(0, len(self._data.dev))
                write_predictions(round_.folder.predictions(candidate.name, "dev"), dev)
            made.append(candidate)
        return made

    def _deal(self) -> Folds | None:
        candidates, prepared = self._config.candidates, self._round.prepared
        if not candidates.refit_target:
            return None
        return make_folds(self._data, prepared.assembled.roles, prepared.trained_on, candidates.folds)

    def _counted(self, trained: bool) -> tuple[LabelledSet, pa.Table]:
        """The images that candidates are counted on, dev images first, and the old model's predictions.

        Weights that were trained in this round have seen its training images.
        """
        data, old_dev = self._data, self._round.old_dev
        if self.folds is None or trained:
            return data.dev, old_dev
        examples = counted_images(data, self.folds)
        return examples, old_dev if len(examples) == len(data.dev) else self._round.predict_old(examples)

    def towards(self, step: str) -> CandidateModels:
        """Models between the old weights and a checkpoint; the refit of the old weights is shared by all."""
        if step not in self._models:
            self._models = {step: self._models_towards(self._round.checkpoint(step))}
            self._models[step].refits |= self.refitted().refits
        return self._models[step]

    def as_trained(self, step: str) -> CandidateModels:
        """A checkpoint whose target is not refitted: it has seen no dev image."""
        return self._models_towards(self._round.checkpoint(step), refit=False)

    def on_checkpoint(self, step: str) -> LastLayerModels:
        """From a checkpoint, its target not refitted, to the fit of all logits that starts there."""
        if step not in self._on_checkpoint:
            fits = LastLayerFits(
                self._round.checkpoint(step),
                self._data,
                view_settings(self._config.train, self._config.method),
                in_tower=self._in_tower,
                folds=None if self.folds is None else self.folds.only(self._data.dev.ids),
            )
            models = LastLayerModels(self._config.candidates, fits, self._round.runtime, refit=False)
            self._on_checkpoint = {step: models}
        return self._on_checkpoint[step]

    def _fits_on_checkpoints(self) -> bool:
        """Where the image tower stayed as it was, the fit that starts from the old model sees the same pictures."""
        config = self._config
        return config.fits_last_layer and not self._round.still and self._fits().possible()

    def _models_towards(self, checkpoint: Classifier | None, *, refit: bool = True) -> CandidateModels:
        return CandidateModels(
            self._config.candidates,
            self._round.prepared.old,
            checkpoint,
            self._data,
            view_settings(self._config.train, self._config.method),
            self._round.runtime,
            in_tower=self._in_tower,
            folds=self.folds if refit else None,
            refit_key=self._key(),
            refit=refit,
        )

    def _fits(self) -> LastLayerFits:
        if self._last_layer is None:
            self._last_layer = LastLayerFits(
                self._round.prepared.old,
                self._data,
                view_settings(self._config.train, self._config.method),
                in_tower=self._in_tower,
                folds=self.folds,
                constrained=self._config.candidates.last_layer_constraints,
            )
        return self._last_layer

    def _of_fits(self, step: str) -> LastLayerModels:
        if step not in self._fitted:
            refit = step == LAST_LAYER_REFIT
            self._fitted[step] = LastLayerModels(
                self._config.candidates, self._fits(), self._round.runtime, refit=refit, key=self._key()
            )
        return self._fitted[step]

    @property
    def _in_tower(self) -> bool:
        return self._config.model.freeze not in ("image", "towers")

    def _key(self) -> Hashable:
        """What models without training depend on, where jobs of a study share them: also the images that teach."""
        if not is_sharing():
            return None
        views = view_settings(self._config.train, self._config.method)
        taught = self._round.prepared.assembled.fingerprint, views.crop_scale, views.flip
        return self._round.old_key(), self._config.candidates.model_dump_json(), taught
