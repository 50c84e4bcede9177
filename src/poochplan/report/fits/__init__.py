"""What ``pooch fit`` found, as a table, a frame and a picture; matplotlib is loaded when the picture is drawn."""

from __future__ import annotations

from .fit_picture import draw_fit
from .fit_table import fit_data, fit_frame, fit_lines, fit_table, write_fit

__all__ = ["draw_fit", "fit_data", "fit_frame", "fit_lines", "fit_table", "write_fit"]
