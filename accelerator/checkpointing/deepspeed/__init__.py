"""DeepSpeed's functions beside checkpoints: helpers, offload engines, and the seeds of model parallelism."""
