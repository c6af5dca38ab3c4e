"""Models built on echo_jax; used from a checkout, not part of the wheel."""
