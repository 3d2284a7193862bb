"""Problems with known answers: files and data sets in, uniform rows and their order out."""

from shared.data.errors import DataError
from shared.data.order import draw_order
from shared.data.rows import Row, load_rows

__all__ = ["DataError", "Row", "draw_order", "load_rows"]
