"""The sections of a page about a run, in their order."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.html.document import Section
from holdfast.report.sections.advice import advice_section
from holdfast.report.sections.candidates import candidates_section
from holdfast.report.sections.classes import classes_section
from holdfast.report.sections.confusion import confusion_section
from holdfast.report.sections.gallery import gallery
from holdfast.report.sections.record import record_section
from holdfast.report.sections.training import training_section


def run_sections(content: RunContent) -> list[Section]:
    """All sections of a run, those without anything to say left out."""
    no_steps = ("Trade-off", "What candidates gain and lose")
    way = ("Training", "The way through training") if content.trained else no_steps
    made = [
        Section("advice", "Advice", "What would help", advice_section(content)),
        Section("tasks", "Classes", "Every class, worst first", classes_section(content)),
        Section("images", "Images", "Images that changed", gallery(content)),
        Section("confusion", "Confusion", "What is mixed up", confusion_section(content)),
        Section("training", *way, training_section(content)),
        Section("candidates", "Candidates", "Candidates and their test", candidates_section(content)),
        Section("record", "Record", "Record", record_section(content)),
    ]
    return [item for item in made if item.body]
