"""Moves programs from Orbax to Treering: their imports to the adapter, or their calls to Treering's own."""

from .migration import Finding, Migration, migrate

__all__ = ["Finding", "Migration", "migrate"]
