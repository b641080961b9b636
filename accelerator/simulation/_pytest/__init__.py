"""Implementation of the pytest plug-in, imported only if an option or mark uses it."""
