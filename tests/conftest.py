"""Tests run on eight virtual CPU devices, in every process that pytest starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.pop("ECHO_JAX_ALGORITHM", None)
