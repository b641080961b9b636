"""What queries use: parsers, NVML, probes and the discovery result, without importing torch or initializing the driver."""
