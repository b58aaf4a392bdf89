"""The options of XLA with which tests compile."""

import importlib.metadata

# Compiling takes much of the time of tests that use JAX. Without these optimizations it takes a third of that.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if [int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]] < [0, 11]:
    _QUICK += " --xla_cpu_use_fusion_emitters=false"  # Later releases do not know it, and an unknown flag is fatal.


def xla_flags(devices: int) -> str:
    """Returns the value of the variable XLA_FLAGS for a process with so many CPU devices."""
    return f"{_QUICK} --xla_force_host_platform_device_count={devices}"
