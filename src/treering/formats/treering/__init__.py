"""The native format: a manifest beside safetensors files. `docs/format.md` specifies it."""
