"""Runs NCCL and the CUDA runtime under ThreadSanitizer. Not a pytest test: it needs its own build and takes minutes."""
