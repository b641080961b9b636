"""Starts simulated machines and waits for them: what runs in a process outside of the machine."""
