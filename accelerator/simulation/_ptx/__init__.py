"""Translates PTX to C, for kernels that are not torch's own."""
