"""Pictures of a step's memory and of decisions, as matplotlib figures; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from .decision_strip import draw_decisions
from .palette import write_picture
from .peak_layers import draw_peak
from .step_memory import StepMemory, draw_step_memory, step_memory_of

__all__ = ["StepMemory", "draw_decisions", "draw_peak", "draw_step_memory", "step_memory_of", "write_picture"]
