"""GPU kernels for the local stages of a compensated sum. None is here yet: `EchoConfig` refuses `backend="pallas"`."""
