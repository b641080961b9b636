"""Compiles the simulated libraries and the engine of ops, and keeps what is compiled."""
