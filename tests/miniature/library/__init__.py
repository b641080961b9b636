"""Somebody's library in miniature, as those that this package is for: set-up, data, training on as many GPUs as there are."""
