"""A run as one HTML page that opens without a network: how it went, what it holds, how its leaves changed."""

from .gather import gather
from .page import check_replaceable, page

__all__ = ["check_replaceable", "gather", "page"]
