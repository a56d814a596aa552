"""What people look at: tables for the terminal, plots, and one HTML page that needs nothing beside it."""

from .page import findings, write_page
from .tables import comparison_table

__all__ = ["comparison_table", "findings", "write_page"]
