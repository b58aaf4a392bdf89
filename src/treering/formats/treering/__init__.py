"""The native format; `docs/format.md` specifies it."""
