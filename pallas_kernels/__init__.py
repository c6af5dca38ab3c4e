"""GPU kernels for the local stages of a compensated sum. None has landed yet: `EchoConfig` refuses `backend="pallas"`."""
