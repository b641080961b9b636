"""What the questions stand on: the machine's devices, found without importing torch and without starting the driver."""
