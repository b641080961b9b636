"""What ``python -m accelerator`` does."""
