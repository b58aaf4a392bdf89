"""Moves programs from Orbax to Treering: their imports to the adapter, or their calls to Treering's own."""

from .migration import Migration, Remainder, migrate

__all__ = ["Migration", "Remainder", "migrate"]
